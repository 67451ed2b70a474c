"""Writes the tables of benchmarks/README.md, and the plots, from the kept results.

`python -m benchmarks report` does it. A table stands between `<!-- benchmarks:NAME -->` and
`<!-- /benchmarks:NAME -->`, where NAME is one of `TABLES`. Ratios are a peer's time by ours, so more than 1 is faster;
those in which we lose are set in bold.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import plots
from benchmarks.fastest import COMPARED, Comparison, against, comparisons, label, result, rows_of
from benchmarks.report import COPY_FLOOR, PEAK_FLOOR, Json, geometric_mean, speedups

ROOT: Final = Path(__file__).parents[1]
FILES: Final = (ROOT / "benchmarks" / "README.md",)
_BLOCK: Final = re.compile(r"(?<=<!-- benchmarks:)([\w-]+) -->\n.*?(?=<!-- /benchmarks:\1 -->)", re.DOTALL)

Table = Sequence[Sequence[str]]


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


def peer(found: Comparison | None) -> str:
    """The fastest peer: its time, who it is, and the ratio; empty for None."""
    return "" if found is None else f"{us(found.theirs)} {label(found.peer)}, {times(found.ratio)}"


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
        *([f"JAX {found['jax']}"] if "jax" in found else []),
        f"CuPy {found['cupy']} and nvmath-python {found['nvmath']}",
    ]
    told = "; ".join(f"{', '.join(suites)} at commit {commit}" for commit, suites in commits.items())
    return f"{', '.join(parts)}; {told}."


def kernels() -> str:
    """Every kernel against the copy and the fastest peer."""
    lines = []
    for row in rows_of("kernels"):
        if "lt" not in row["us"]:
            continue  # the copies themselves
        less = row["us"].get("torch_without_bias_gradient")
        also = "" if less is None else f" ({us(less)} without the bias gradient)"
        fraction = f"{100 * row['fraction_of_copy']:.0f} %"
        lines.append([row["case"], us(row["us"]["lt"]), fraction, peer(against(row)) + also])
    copy = result("kernels")["copy_gb_s"]
    return markdown(["Kernel", "µs", f"of the copy's {copy:.0f} GB/s", "fastest peer, µs"], lines)


_ACTIVATIONS: Final = {"gelu": "GELU", "relu": "ReLU"}
_PEER: Final = "the fastest peer"
_AGAINST: Final = {
    _PEER: "the fastest peer of each block",
    "torch_graph": "PyTorch's kernels in a graph",
    "torch_max_autotune": "torch.compile, max-autotune",
    "jax": "JAX, jit",
    "lt_fused_top1": "everything fused that cuBLASLt can, first algorithms",
    "lt_split_top1": "nothing fused, first algorithms",
    "lt_priors": "the shipped priors, nothing measured",
}


def layers() -> str:
    """The geometric mean and the worst block against each contender."""
    return _means("layers", lambda row: "")


def wide() -> str:
    """The same of shapes drawn by a seed, by stratum."""
    return _means("wide", lambda row: f" {row['stratum']}")


def _means(suite: str, group: Callable[[Json], str]) -> str:
    lines, rows = [], [_with_fastest(row) for row in rows_of(suite)]
    commit = result(suite)["commit"] if rows else ""
    groups = sorted({(row["type"], group(row)) for row in rows})
    for contender, told_as in _AGAINST.items():
        for kind, of_group in groups:
            some = [row for row in rows if (row["type"], group(row)) == (kind, of_group) and contender in row["us"]]
            if not some:
                continue
            activations = " and ".join(sorted({_ACTIVATIONS[row["activation"]] for row in some}))
            found = speedups(some, contender)
            where = min(found, key=found.__getitem__)
            earlier = sum(row.get("commit", commit) != commit for row in some)
            told = f"{len(some)}{of_group} {kind.upper()} {activations}"
            told += f", {earlier} of them at other commits" if earlier else ""
            lost = sum(value < 1 for value in found.values())
            mean = times(geometric_mean(found.values()))
            lines.append([told_as, told, mean, f"{times(found[where])} ({where})", str(lost)])
    return markdown(["Against", "blocks", "geometric mean", "worst", "lost"], lines)


def _with_fastest(row: dict[str, Any]) -> dict[str, Any]:
    found = against(row)
    return row if found is None else row | {"us": {**row["us"], _PEER: found.theirs}}


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
        masters = ", FP32 masters" if row["type"] == "bf16" and row["master"] else ""
        sizes = "-".join(map(str, row["dims"]))
        of_layers = f"{_ACTIVATIONS[row['activation']]}, {row['loss'].replace('_', '-')}"
        what = f"{sizes}, batch {row['rows']}, {of_layers}, {row['type'].upper()}{masters}"
        memory = row.get("memory_ratio")
        untuned = f"{us(row['us']['lt_untuned'])}, {times(row['us']['lt_untuned'] / row['us']['lt'])}"
        cells = us(row["us"]["lt"]), peer(against(row)), us(row["us"]["lt_call"]), peer(against(row, ours="lt_call"))
        lines.append([what, *cells, untuned, "" if memory is None else f"{memory:.2f}"])
    called = "called", "fastest peer, called"
    headings = "MLP", "lt_runtime", "fastest peer", *called, "lt_runtime untuned", "memory by PyTorch's"
    return markdown(headings, lines)


def sustained() -> str:
    """Blocks and steps in a run of two seconds beside their time in turns."""
    lines = []
    for row in (*rows_of("layers"), *rows_of("steps")):
        long = {name: each["us"] for name, each in row.get("sustained", {}).items()}
        if found := against({"case": row["case"], "us": long}):
            state = row["sustained"]["lt"]
            power = f"{state['sm_mhz']:.0f} MHz, {state['watts']:.0f} W" if "watts" in state else ""
            lines.append([row["case"], us(row["us"]["lt"]), us(found.ours), peer(found), power])
    return markdown(["Row", "lt_runtime in turns", "for two seconds", "fastest peer", "lt_runtime at"], lines)


def narrow() -> str:
    """Training steps of narrow MLPs, beside the least times of moving their bytes and of computing."""
    lines = []
    for each in filter(None, map(against, rows_of("narrow"))):
        floors = (_floor(each, name) for name in (COPY_FLOOR, PEAK_FLOOR))
        lines.append([each.what, us(each.ours), *floors, peer(each)])
    return markdown(["MLP", "lt_runtime", "least by copy", "least by peak", "fastest peer"], lines)


def _floor(found: Comparison, name: str) -> str:
    """A least time, and it as a fraction of ours; empty if the row does not hold it."""
    least = found.row.get("floors_us", {}).get(name)
    return "" if least is None else f"{us(least)}, {100 * least / found.ours:.1f} %"


def host() -> str:
    """The host's time of a call. Autograd's is that of one thread, which is faster than its default."""
    lines = [[each.what, us(each.ours), peer(each)] for each in comparisons("host")]
    return markdown(["Call", "lt_runtime", "fastest peer"], lines)


def lost() -> str:
    """Every row of every suite in which some peer is faster, the worst first."""
    slower = [each for suite in COMPARED for each in comparisons(suite) if each.ratio < 1]
    lines = [[each.suite, each.what, us(each.ours), peer(each)] for each in sorted(slower, key=lambda each: each.ratio)]
    return markdown(["Suite", "row", "lt_runtime", "fastest peer"], lines)


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
    "wide": wide,
    "tuned": tuned,
    "steps": steps,
    "sustained": sustained,
    "narrow": narrow,
    "host": host,
    "lost": lost,
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
    """Writes both files and the plots."""
    for file in FILES:
        file.write_text(rendered(file.read_text()))
    for file in (*FILES, *plots.write()):
        print(f"written to {file}")
