"""The shipped priors, from the measured times of strategies: `python3 -m benchmarks.derive_priors [FILE] [--out FILE]`.

FILE is what `benchmarks.layers` writes. For each type of operands and activation, a tree of few limits is fitted that
chooses the strategy: backward first, then forward together with the backward that follows from what it keeps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from benchmarks import report
from benchmarks.layers import RESULT
from benchmarks.trees import Fitted, Sample, fit
from lt_runtime.plans import priors

_PLANNING: Final = Path(priors.__file__).parent
_ITEMSIZE: Final = {"bf16": 2, "tf32": 4}
_FORWARD: Final = ("epilogue", "saved")
_BACKWARD: Final = ("db", "derivative", "db_below", "beside")

Row = Mapping[str, Any]
Samples = dict[str, list[Sample]]
"""By what a tree is for, as the table names it."""


def features(row: Row, layer: int, *, backward: bool) -> dict[str, int]:
    """Those of `priors.forward_features` and `priors.backward_features`, of the block's first or second layer."""
    m, n, k = row["layer"]
    outputs, inputs = (n, k) if layer == 0 else (k, n)
    cols, inner = (inputs, outputs) if backward else (outputs, inputs)
    return {"output_bytes": m * cols * _ITEMSIZE[row["type"]], "inner": inner, "rows": m}


def backward_samples(rows: Iterable[Row]) -> Samples:
    """Backward of the second layer through the first, by what that keeps, and as if without; and of the first."""
    made: Samples = {}
    for row in rows:
        sizes = features(row, 1, backward=True)
        if products := row["entries"].get("last backward"):
            sample = Sample(features(row, 0, backward=True), products)
            made.setdefault(f"{row['type']} products", []).append(sample)
        for role, times in row["entries"].items():
            if role.startswith("backward"):
                saved = role.removeprefix("backward ")
                made.setdefault(f"{row['type']} {row['activation']} {saved}", []).append(Sample(sizes, times))
                if alone := _without_layer_below(times):
                    made.setdefault(f"{row['type']} none nothing", []).append(Sample(sizes, alone))
    return made


def _without_layer_below(times: Mapping[str, float]) -> dict[str, float]:
    """What differs in nothing but who makes the layer's own bias gradient, and when dw is made."""
    ways = itertools.product(("kernel", "epilogue"), ("after", "beside"))
    found = {f"{db} nobody nobody {when}": times.get(f"{db} kernel kernel {when}") for db, when in ways}
    return {name: us for name, us in found.items() if us is not None}


def forward_samples(rows: Iterable[Row], backward: Mapping[str, Fitted]) -> Samples:
    """Forward of the first layer, with the backward that the priors then take; and of the second, alone."""
    made: Samples = {}
    for row in rows:
        joint = {}
        for strategy, us in row["entries"].get("forward", {}).items():
            after = _backward_us(row, strategy.split()[1], backward)
            if after is not None:
                joint[strategy] = us + after
        alone = row["entries"].get("last forward", {})
        for name, layer, times in ((row["activation"], 0, joint), ("none", 1, alone)):
            if times:
                sample = Sample(features(row, layer, backward=False), times)
                made.setdefault(f"{row['type']} {name}", []).append(sample)
    return made


def _backward_us(row: Row, saved: str, fitted: Mapping[str, Fitted]) -> float | None:
    """Microseconds of what the priors take; None where nothing was measured."""
    tree = fitted.get(f"{row['type']} {row['activation']} {saved}")
    times = row["entries"].get(f"backward {saved}")
    if tree is None or not times:
        return None
    sample = Sample(features(row, 1, backward=True), times)
    return min(times.values()) * math.exp(sample.loss(_leaf_of(tree.tree, sample.features)))


def _as_entry(strategy: str, names: Sequence[str]) -> dict[str, Any]:
    """A strategy by its name, as it stands in the plan cache."""
    values = dict(zip(names, strategy.split(), strict=True))
    return values | ({"beside": values["beside"] == "beside"} if "beside" in values else {})


def _leaf_of(tree: Any, sizes: Mapping[str, int]) -> str:
    named = _with_leaves(tree, lambda name: {"name": name})
    return priors.decide(named, sizes)["name"]


def _with_leaves(tree: Any, make: Callable[[str], Any]) -> Any:
    if isinstance(tree, str):
        return make(tree)
    return tree | {branch: _with_leaves(tree[branch], make) for branch in ("then", "otherwise")}


def derive(rows: Sequence[Row]) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[int, float]]]:
    """The trees of forward and backward as they stand in a table; and, by tree, samples and their mean loss."""
    usable = [row for row in rows if row.get("entries")]
    of_backward = backward_samples(usable)
    backward = {name: fit(samples) for name, samples in sorted(of_backward.items())}
    of_forward = forward_samples(usable, backward)
    forward = {name: fit(samples) for name, samples in sorted(of_forward.items())}
    trees, quality = {}, {}
    for part, fitted, samples, names in (
        ("forward", forward, of_forward, _FORWARD),
        ("backward", backward, of_backward, _BACKWARD),
    ):
        trees[part] = {
            name: _with_leaves(each.tree, lambda leaf, names=names: _as_entry(leaf, names))
            for name, each in fitted.items()
        }
        for name, each in fitted.items():
            losses = [sample.loss(_leaf_of(each.tree, sample.features)) for sample in samples[name]]
            quality[f"{part} {name}"] = len(losses), math.exp(sum(losses) / len(losses)) - 1
    return trees, quality


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the table of the architecture that was measured, and prints what following it costs."""
    parser = argparse.ArgumentParser(prog="benchmarks.derive_priors", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=RESULT, help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default: priors_sm*.json in {_PLANNING}")
    arguments = parser.parse_args(argv)
    measured = json.loads(arguments.file.read_text())
    trees, quality = derive(measured["rows"])
    machine, dates = measured["machine"], sorted(row["when"] for row in measured["rows"] if "when" in row)
    source = {name: machine[name] for name in ("gpu", "driver", "cublaslt")}
    source |= {"commit": measured["commit"], "when": dates[-1] if dates else None, "blocks": len(measured["rows"])}
    out = arguments.out or _PLANNING / f"priors_sm{machine['capability']}.json"
    out.write_text(json.dumps({"source": source} | trees, indent=2) + "\n")
    report.console().print(_table(quality))
    report.console().print(f"written to {out}")


def _table(quality: Mapping[str, tuple[int, float]]) -> Table:
    shown = Table("tree", box=None, header_style="bold")
    for heading in ("problems", "slower than the best, mean"):
        shown.add_column(heading, justify="right")
    for name, (count, loss) in quality.items():
        shown.add_row(name, str(count), f"{100 * loss:.1f} %")
    return shown


if __name__ == "__main__":
    main()
