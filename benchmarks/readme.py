"""Writes the tables in README.md and benchmarks/README.md from the kept results: `python -m benchmarks readme`.

A table stands between `<!-- benchmarks:NAME -->` and `<!-- /benchmarks:NAME -->`, where NAME is one of `TABLES`. Ratios
are a peer's time by ours, so more than 1 is faster; those in which we lose are set in bold.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.report import RESULTS, Json, geometric_mean, speedups

ROOT: Final = Path(__file__).parents[1]
FILES: Final = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
_BLOCK: Final = re.compile(r"(?<=<!-- benchmarks:)([\w-]+) -->\n.*?(?=<!-- /benchmarks:\1 -->)", re.DOTALL)

Table = Sequence[Sequence[str]]


def result(suite: str) -> dict[str, Any]:
    """The kept results of a suite."""
    found: dict[str, Any] = json.loads((RESULTS / f"{suite}.json").read_text())
    return found


def rows_of(suite: str) -> list[dict[str, Any]]:
    """The rows of a suite that hold times."""
    return [row for row in result(suite)["rows"] if row["us"]]


def us(value: float | None) -> str:
    """Microseconds with three digits; empty for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def times(ratio: float | None) -> str:
    """A ratio, in bold where we lose; empty for None."""
    if ratio is None:
        return ""
    return f"**{ratio:.2f}×**" if ratio < 1 else f"{ratio:.2f}×"


def fastest(row: Json, names: Iterable[str]) -> float | None:
    """The least time of some contenders; None if none was measured."""
    return min((row["us"][name] for name in names if name in row["us"]), default=None)


def ratio_to(row: Json, ours: str, theirs: float | None) -> str:
    """A peer's time as a multiple of ours."""
    return "" if theirs is None else times(theirs / row["us"][ours])


def markdown(headings: Sequence[str], lines: Table) -> str:
    """A table."""
    every = [headings, ["---"] * len(headings), *lines]
    return "\n".join(" ".join(["|", *(f"{cell} |".lstrip() for cell in line)]) for line in every)


# One function for each table.


def machine() -> str:
    """What was measured, and the commit of each suite."""
    commits: dict[str, list[str]] = {}
    for suite in ("kernels", "layers", "steps", "host", "cold", "tuning"):
        kept = result(suite)
        others = sum(row.get("commit", kept["commit"]) != kept["commit"] for row in kept["rows"])
        told_of = f"`{suite}`" + (f" ({others} of {len(kept['rows'])} rows at others)" if others else "")
        commits.setdefault(kept["commit"][:7], []).append(told_of)
    found = result("layers")["machine"]
    cublaslt = f"{found['cublaslt'] // 10000}.{found['cublaslt'] // 100 % 100}"
    parts = [
        f"On an {found['gpu']} with driver {found['driver']}, cuBLASLt {cublaslt}, PyTorch {found['torch']}",
        f"CuPy {found['cupy']} and nvmath-python {found['nvmath']}",
    ]
    told = "; ".join(f"{', '.join(suites)} at commit {commit}" for commit, suites in commits.items())
    return f"{', '.join(parts)}; {told}."


def kernels() -> str:
    """Every kernel against the copy and PyTorch."""
    lines = []
    for row in rows_of("kernels"):
        if "lt" not in row["us"]:
            continue  # the copies themselves
        theirs = fastest(row, ("torch", "torch_log_softmax"))
        less = row["us"].get("torch_without_bias_gradient")
        also = "" if less is None else f" ({us(less)} without the bias gradient)"
        fraction = f"{100 * row['fraction_of_copy']:.0f} %"
        cells = us(row["us"]["lt"]), fraction, us(theirs) + also, ratio_to(row, "lt", theirs)
        lines.append([row["case"], *cells])
    copy = result("kernels")["copy_gb_s"]
    return markdown(["Kernel", "µs", f"of the copy's {copy:.0f} GB/s", "PyTorch's fastest, µs", "ratio"], lines)


_ACTIVATIONS: Final = {"gelu": "GELU", "relu": "ReLU"}
_AGAINST: Final = {
    "torch_graph": "PyTorch's kernels in a graph",
    "torch_max_autotune": "torch.compile, max-autotune",
    "lt_fused_top1": "everything fused that cuBLASLt can, first algorithms",
    "lt_split_top1": "nothing fused, first algorithms",
    "lt_priors": "the shipped priors, nothing measured",
}


def layers() -> str:
    """The geometric mean and the worst block against each contender."""
    rows, commit, lines = rows_of("layers"), result("layers")["commit"], []
    for contender, label in _AGAINST.items():
        for kind in sorted({row["type"] for row in rows}):
            some = [row for row in rows if row["type"] == kind and contender in row["us"]]
            if not some:
                continue
            activations = " and ".join(sorted({_ACTIVATIONS[row["activation"]] for row in some}))
            found = speedups(some, contender)
            where = min(found, key=found.__getitem__)
            earlier = sum(row.get("commit", commit) != commit for row in some)
            told = f"{len(some)} {kind.upper()} {activations}"
            told += f", {earlier} of them at other commits" if earlier else ""
            lost = sum(value < 1 for value in found.values())
            mean = times(geometric_mean(found.values()))
            lines.append([label, told, mean, f"{times(found[where])} ({where})", str(lost)])
    return markdown(["Against", "blocks", "geometric mean", "worst", "lost"], lines)


def tuned() -> str:
    """How near the chosen plans are to the best candidates, and what tuning takes."""
    rows = rows_of("layers")
    losses = [row["chosen_vs_best"] for row in rows if "chosen_vs_best" in row]
    near, most = sum(loss <= 1.03 for loss in losses) / len(losses), max(losses)
    seconds = statistics.median(row["tuning_s"] for row in rows)
    return (
        f"Over all {len(losses)} blocks, the tuned plan is within 3 % of the best candidate in {100 * near:.0f} % of "
        f"them, and at worst {100 * (most - 1):.1f} % behind; tuning a block takes {seconds:.2f} s at the median."
    )


def steps() -> str:
    """Whole training steps."""
    lines = []
    for row in rows_of("steps"):
        if "lt" not in row["us"]:
            continue  # the soak and the prefetched training
        found = row["us"]
        masters = ", FP32 masters" if row["type"] == "bf16" and row["master"] else ""
        sizes = "-".join(map(str, row["dims"]))
        of_layers = f"{_ACTIVATIONS[row['activation']]}, {row['loss'].replace('_', '-')}"
        what = f"{sizes}, batch {row['rows']}, {of_layers}, {row['type'].upper()}{masters}"
        cells = [us(found["lt"]), us(found["lt_call"])]
        for name in ("torch_graph", "torch_max_autotune", "torch_graph_call", "lt_untuned"):
            ours = "lt_call" if name.endswith("_call") else "lt"
            theirs = found.get(name)
            cells.append(", ".join(filter(None, (us(theirs), ratio_to(row, ours, theirs)))))
        lines.append([what, *cells])
    theirs = "PyTorch in a graph", "torch.compile, max-autotune", "PyTorch's graph, called", "lt_runtime untuned"
    headings = ["MLP", "lt_runtime", "called", *theirs]
    return markdown(headings, lines)


_KEEPS: Final = ("torch_eager_recording",)
_PRODUCTS: Final = ("torch_eager", "torch_linear")
_CALLS: Final[Mapping[str, Mapping[str, tuple[str, Sequence[str], bool]]]] = {
    "matmul": {
        "lt": ("matmul{}", _PRODUCTS, True),
        "lt_bound": ("matmul{}, through lt.bind", _PRODUCTS, False),
    },
    "linear_fwd": {
        "lt_inference": ("linear{}, which keeps nothing for backward", ("torch_eager",), True),
        "lt": ("linear_fwd{}", _KEEPS, False),
        "lt_out_z": ("linear_fwd{} out_z=", _KEEPS, False),
        "lt_elsewhere": ("linear_fwd{} out_z=, x at a new address each time", _KEEPS, False),
        "lt_bound": ("linear_fwd{} out_z=, through lt.bind", _KEEPS, False),
    },
    "linear_fwd + linear_bwd": {"lt": ("linear_fwd + linear_bwd{}", ("torch_eager_one_thread",), False)},
    "AdamW": {"lt": ("AdamW{}", ("torch_eager",), False)},
    "TrainStep": {"lt": ("TrainStep{}", ("torch_graph",), False)},
}
"""For each kind of case and contender of ours: the call (without the kind's name in it), PyTorch's contenders for the
same, and whether CuPy and nvmath-python do the same as well."""


def host() -> str:
    """The host's time of a call. Autograd's is that of one thread, which is faster than its default."""
    lines = []
    for row in rows_of("host"):
        kind = max((each for each in _CALLS if row["case"].startswith(each)), key=len)
        for contender, (call, names, has_others) in _CALLS[kind].items():
            theirs = fastest(row, names)
            others = [us(row["us"].get(name)) if has_others else "" for name in ("cupy", "nvmath")]
            what = call.format(row["case"].removeprefix(kind))
            lines.append([what, us(row["us"][contender]), us(theirs), ratio_to(row, contender, theirs), *others])
    return markdown(["Call", "lt_runtime", "PyTorch", "ratio", "CuPy", "nvmath-python"], lines)


def cold() -> str:
    """What a new process needs, in milliseconds."""
    lines = []
    for row in rows_of("cold"):
        found = row["us"]
        lines.append([row["case"], _milliseconds(found["lt"]), _milliseconds(found.get("lt_empty_cache"))])
        if "lt_all_names" in found:
            lines.append([f"{row['case']}, and the use of all its names", _milliseconds(found["lt_all_names"]), ""])
    return markdown(["Process", "ms", "with an empty kernel cache"], lines)


def _milliseconds(microseconds: float | None) -> str:
    return "" if microseconds is None else f"{microseconds / 1e3:.1f}"


def tuning() -> str:
    """The figures over all rows."""
    found = result("tuning")["summary"]
    lines = [[each["what"], f"{each['value']:.3g}", each["target"]] for each in found if each["value"] is not None]
    return markdown(["Figure", "", "target"], lines)


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "machine": machine,
    "kernels": kernels,
    "layers": layers,
    "tuned": tuned,
    "steps": steps,
    "host": host,
    "cold": cold,
    "tuning": tuning,
}


def rendered(text: str) -> str:
    """The text with every table written anew.

    Raises:
        KeyError: a name that is no table's.
    """
    return _BLOCK.sub(lambda block: f"{block[1]} -->\n\n{TABLES[block[1]]()}\n\n", text)


def main(_: Sequence[str]) -> None:
    """Writes both files."""
    for file in FILES:
        file.write_text(rendered(file.read_text()))
        print(f"written to {file}")
