"""Fits the priors to measured times: `python -m benchmarks derive-priors [FILE...] [--out FILE]`.

The priors are the table by which layers that were not measured choose their strategy.

Each FILE is a result file of the suite `untuned`; only its blocks of `FIT` are read. Their rows hold the untuned time
of each forward and backward pass by each strategy. For each type and activation a small decision tree is fitted, whose
inner nodes compare a size with a limit, and whose leaves are strategies. The backward trees are fitted first. The
forward trees are fitted to the time of forward plus that of the backward pass to which the saved tensor leads.

The times in `strategies.json`, the default, are of 336 blocks of GELU and ReLU, with the algorithms that were chosen
untuned at commit 81d33d4, and of 197 blocks of all activations and types at commit 0ecd227: forward as the tuner timed
it, backward with the order of launches that followed that commit.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import lt_runtime
from benchmarks import report
from benchmarks.wide import FIT
from lt_runtime.kernels.tile_matmul import is_preferred
from lt_runtime.layout import packed
from lt_runtime.plans import priors
from lt_runtime.problem import DType, Spec

_DTYPES: Final = {"bf16": DType.BFLOAT16, "tf32": DType.FLOAT32, "fp32": DType.FLOAT32}
# The shapes for fitting were shared out among six parts, and trees fitted to five parts were judged on the sixth, each
# in turn: neither deeper trees nor a gain of 0.1 or 0.2 did better.
_DEPTH: Final = 2
_LEAST_GAIN: Final = 0.05  # A further branch must reduce the sum of all samples' losses by at least this.
_LEAST_SAMPLES: Final = 4  # Each side of a branch has at least this many samples.
_LEAST_PROBLEMS: Final = 20  # An activation with fewer samples uses the tree fitted to all activations.
_MOST_LOSS: Final = 0.3  # A sample's loss is cut off here, because longer times were often disturbed.
# A measured time was disturbed if it is this multiple of the time of the same kernels, launched in the other order.
_DISTURBED: Final = 2.5
_EPILOGUES: Final = ("none", "relu", "gelu")
"""Activations whose epilogue cuBLASLt has, and "none", which needs no epilogue."""
_FORWARD: Final = ("epilogue", "saved")
_BACKWARD: Final = ("db", "derivative", "db_below", "dw_concurrent")

Row = Mapping[str, Any]


class Sample(NamedTuple):
    """One sample to fit, a problem: its sizes by name, and microseconds by strategy, of at least one.

    A strategy without a time was refused by the library; the most similar strategy takes its place.
    """

    features: Mapping[str, int]
    times: Mapping[str, float]

    def loss(self, strategy: str) -> float:
        """Loss of a strategy: the logarithm of its time as a multiple of the best time."""
        return math.log(self._us(strategy) / min(self.times.values()))

    def _us(self, strategy: str) -> float:
        if strategy in self.times:
            return self.times[strategy]
        return self.times[min(self.times, key=lambda each: _unlike(each, strategy))]


Samples = dict[str, list[Sample]]
"""Maps the name of a tree in the package's table to samples, or to the fitted tree."""


def _unlike(strategy: str, other: str) -> tuple[int, int, bool]:
    """How much a strategy differs from a refused one; measured as in `lt_runtime.plans.priors`."""
    parts = strategy.split()
    differing = sum(part != wanted for part, wanted in zip(parts, other.split(), strict=True))
    return differing, parts.count("epilogue") + ("aux" in strategy), "none" in parts


class Fitted(NamedTuple):
    """A tree whose leaves are strategy names, and the sum of the losses of the strategies that it chooses."""

    tree: Any
    loss: float


def fit(samples: Sequence[Sample], depth: int = _DEPTH) -> Fitted:
    """Fits the tree of least loss whose limits are powers of two, without branches that hardly reduce the loss."""
    names = [*dict.fromkeys(name for sample in samples for name in sample.times)]
    losses = np.array([[min(sample.loss(name), _MOST_LOSS) for name in names] for sample in samples])
    sizes = {name: np.array([sample.features[name] for sample in samples]) for name in samples[0].features}

    def grow(some: NDArray[np.intp], depth: int) -> Fitted:
        of_each = losses[some].sum(axis=0)
        best = Fitted(names[of_each.argmin()], float(of_each.min()))
        if depth == 0 or best.loss < _LEAST_GAIN:
            return best
        for feature, limit in _limits({name: values[some] for name, values in sizes.items()}):
            is_small = sizes[feature][some] < limit
            if min(is_small.sum(), (~is_small).sum()) < _LEAST_SAMPLES:
                continue
            then, otherwise = grow(some[is_small], depth - 1), grow(some[~is_small], depth - 1)
            loss = then.loss + otherwise.loss + _LEAST_GAIN
            if loss < best.loss and then.tree != otherwise.tree:
                tree = {"feature": feature, "below": limit, "then": then.tree, "otherwise": otherwise.tree}
                best = Fitted(tree, loss)
        return best

    return grow(np.arange(len(samples)), depth)


def _limits(sizes: Mapping[str, NDArray[np.int64]]) -> Iterable[tuple[str, int]]:
    """Yields candidate limits for a tree: for each size, the powers of two between its least and greatest values."""
    for feature, values in sizes.items():
        bits = range(int(values.min()).bit_length(), int(values.max()).bit_length())
        yield from ((feature, 1 << each) for each in bits)


def decide(tree: Any, sizes: Mapping[str, int]) -> Any:
    """The strategy that a tree chooses for given sizes."""
    while isinstance(tree, Mapping) and "feature" in tree:
        tree = tree["then"] if sizes[tree["feature"]] < tree["below"] else tree["otherwise"]
    return tree


def features(row: Row, layer: int, *, backward: bool) -> dict[str, int]:
    """Returns the named sizes that `priors` decides by, for a pass of the block's first (0) or second (1) layer."""
    m, n, k = row["layer"]
    outputs, inputs = (n, k) if layer == 0 else (k, n)
    cols, inner = (inputs, outputs) if backward else (outputs, inputs)
    return priors.features_of(packed(m, cols), inner, _DTYPES[row["type"]])


def backward_samples(rows: Iterable[Row]) -> Samples:
    """Maps the name of each decision tree to the samples for fitting it.

    A sample is a backward pass's sizes and the time of each of its strategies. Samples come from both
    layers. The second layer's passes have a tree for each activation and kind of tensor that the first layer saves.

    Strategies in which our kernel computes the derivative also count for the tree of activations without an epilogue.
    """
    made: Samples = {}
    for row in rows:
        sizes, kind = features(row, 1, backward=True), _kind(row)
        if products := row["strategies"].get("last backward"):
            sample = Sample(features(row, 0, backward=True), products)
            made.setdefault(f"{kind} products", []).append(sample)
        for role, times in row["strategies"].items():
            if role.startswith("backward"):
                times = _undisturbed(times)
                by_kernel = {name: us for name, us in times.items() if name.split()[1] == "kernel"}
                by_tree = {priors.OTHER: by_kernel, "none nothing": _without_layer_below(times)}
                if row["activation"] in _EPILOGUES:
                    by_tree[f"{row['activation']} {role.removeprefix('backward ')}"] = times
                for name, some in by_tree.items():
                    if some:
                        made.setdefault(f"{kind} {name}", []).append(Sample(sizes, some))
    return made


def _kind(row: Row) -> str:
    """Returns the prefix of the names of the decision trees for a measured layer: its type.

    Layers for which our ragged kernel is preferred have decision trees of their own, with another prefix.
    """
    m, n, k = row["layer"]
    dy, w, x = (Spec(packed(*shape)) for shape in ((m, k), (k, n), (m, n)))
    return f"{priors.RAGGED} {row['type']}" if is_preferred(_DTYPES[row["type"]], dy, w, x) else str(row["type"])


def _undisturbed(times: Mapping[str, float]) -> dict[str, float]:
    """Leaves out times that are much longer than the time of the same kernels in another order."""
    by_kernels: dict[str, list[float]] = {}
    for name, us in times.items():
        by_kernels.setdefault(name.rpartition(" ")[0], []).append(us)
    return {name: us for name, us in times.items() if us < _DISTURBED * min(by_kernels[name.rpartition(" ")[0]])}


def _without_layer_below(times: Mapping[str, float]) -> dict[str, float]:
    """The strategies that differ only in who computes the layer's bias gradient and in the order of dx and dw."""
    ways = itertools.product(("kernel", "epilogue"), ("after", "beside"))
    found = {f"{db} nobody nobody {when}": times.get(f"{db} kernel kernel {when}") for db, when in ways}
    return {name: us for name, us in found.items() if us is not None}


def forward_samples(rows: Iterable[Row], backward: Mapping[str, Fitted]) -> Samples:
    """Returns the samples to which the trees of forward strategies are fitted.

    A time of a block's first layer includes the backward pass that the fitted trees choose for the saved tensor. A time
    of the second layer includes only its forward pass.
    """
    made: Samples = {}
    for row in rows:
        if row["activation"] not in _EPILOGUES:
            continue
        joint = {}
        for strategy, us in row["strategies"].get("forward", {}).items():
            after = _backward_us(row, strategy.split()[1], backward)
            if after is not None:
                joint[strategy] = us + after
        alone = row["strategies"].get("last forward", {})
        for name, layer, times in ((row["activation"], 0, joint), ("none", 1, alone)):
            if times:
                sample = Sample(features(row, layer, backward=False), times)
                made.setdefault(f"{_kind(row)} {name}", []).append(sample)
    return made


def _backward_us(row: Row, saved: str, fitted: Mapping[str, Fitted]) -> float | None:
    """The time of the backward pass that the fitted trees choose, in microseconds; None if it was not measured."""
    tree = fitted.get(f"{_kind(row)} {row['activation']} {saved}")
    times = row["strategies"].get(f"backward {saved}")
    if tree is None or not times:
        return None
    sample = Sample(features(row, 1, backward=True), times)
    return min(times.values()) * math.exp(sample.loss(decide(tree.tree, sample.features)))


def _as_entry(strategy: str, names: Sequence[str]) -> dict[str, Any]:
    """Parses a strategy's name, which has the form that the plan cache stores."""
    values = dict(zip(names, strategy.split(), strict=True))
    return values | ({"dw_concurrent": values["dw_concurrent"] == "beside"} if "dw_concurrent" in values else {})


def _with_leaves(tree: Any, make: Callable[[str], Any]) -> Any:
    """Copies a tree, with each leaf replaced by `make(leaf)`."""
    if isinstance(tree, str):
        return make(tree)
    return tree | {branch: _with_leaves(tree[branch], make) for branch in ("then", "otherwise")}


def fitting(rows: Iterable[Row]) -> list[Row]:
    """The rows of the blocks that are meant for fitting."""
    return [row for row in rows if "strategies" in row and row.get("half", FIT) == FIT]


def _enough(samples: Samples) -> Samples:
    return {name: some for name, some in samples.items() if len(some) >= _LEAST_PROBLEMS}


def derive(rows: Sequence[Row]) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[int, float]]]:
    """Fits a decision tree for each kind of forward and backward problem.

    Returns:
        The trees as JSON, as the package's table of priors holds them; and each tree's number of samples and mean loss.

    Args:
        rows: the rows that `fitting` returns.
    """
    of_backward = _enough(backward_samples(rows))
    backward = {name: fit(samples) for name, samples in sorted(of_backward.items())}
    of_forward = _enough(forward_samples(rows, backward))
    forward = {name: fit(samples) for name, samples in sorted(of_forward.items())}
    trees, quality = {}, {}
    every = ("forward", forward, of_forward, _FORWARD), ("backward", backward, of_backward, _BACKWARD)
    for part, fitted, samples, names in every:
        as_entry = partial(_as_entry, names=names)
        trees[part] = {name: _with_leaves(each.tree, as_entry) for name, each in fitted.items()}
        for name, each in fitted.items():
            losses = [sample.loss(decide(each.tree, sample.features)) for sample in samples[name]]
            quality[f"{part} {name}"] = len(losses), math.exp(sum(losses) / len(losses)) - 1
    return trees, quality


def _table_of(capability: int) -> Path:
    """The package's file with the table for a GPU architecture."""
    package = Path(lt_runtime.__file__).parent
    tables = sorted(package.rglob("priors_sm*.json"))
    return (tables[0].parent if tables else package) / f"priors_sm{capability}.json"


def main(argv: Sequence[str]) -> None:
    """Writes the table of the measured architecture, and prints the mean loss of each tree."""
    parser = report.command("derive-priors", __doc__)
    default = [Path(__file__).with_name("strategies.json")]
    told = "default: benchmarks/strategies.json"
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", default=default, help=told)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: the package's table of the architecture")
    arguments = parser.parse_args(argv)
    documents = [json.loads(file.read_text()) for file in arguments.files]
    machine, rows = documents[0]["machine"], fitting(row for document in documents for row in document["rows"])
    trees, quality = derive(rows)
    dates = sorted(row["when"] for row in rows if "when" in row)
    source = {name: machine[name] for name in ("gpu", "driver", "cublaslt")}
    source |= {"commit": ", ".join(dict.fromkeys(each["commit"] for each in documents))}
    source |= {"when": dates[-1] if dates else None, "blocks": len(rows)}
    out = arguments.out or _table_of(machine["capability"])
    report.write_json(out, {"source": source} | trees)
    for name, (count, loss) in quality.items():
        print(f"{name}: {count} problems, {100 * loss:.1f} % slower than the best in the mean")
    print(f"written to {out}")
