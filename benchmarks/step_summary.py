"""What the rows of the steps' suite come to, and what they had to: functions of rows as they stand in the file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from benchmarks.step_cases import cases
from benchmarks.summary import Finding, speedups
from benchmarks.timing import Timing

PREFETCH: Final = "prefetch gpt2-mlp-x2 BF16"
SOAK: Final = "soak mnist BF16"

_MNIST: Final = ("mnist TF32", "mnist BF16")
_WAYS: Final = ("_autocast", "_bf16")
_FORBIDDEN: Final = ("memcpy", "mem_alloc", "mem_free", "host")
_SHOWN: Final = (
    "lt_untuned",
    "lt_master",
    "torch_graph",
    "torch_compile",
    "torch_max_autotune",
    "lt_call",
    "torch_graph_call",
)

Row = Mapping[str, Any]


def with_fastest(timings: Mapping[str, Timing]) -> dict[str, Timing]:
    """The times, and under the name that PyTorch's ways to hold parameters have in common the faster one's."""
    made = dict(timings)
    for name, timing in timings.items():
        base = _base(name)
        made[base] = min(made.get(base, timing), timing)
    return made


def without_any(left_out: Mapping[str, str], timings: Mapping[str, Timing]) -> dict[str, str]:
    """Why there is nothing under a name that two ways have in common, if neither was measured."""
    return {base: reason for name, reason in left_out.items() if (base := _base(name)) not in timings}


def _base(name: str) -> str:
    for way in _WAYS:
        name = name.removesuffix(way)
    return name


def findings(rows: Sequence[Row]) -> list[Finding]:
    """All that the suite has to show."""
    by_name = {row["case"]: row for row in rows}
    return [
        *_peers(rows),
        *(finding for name in _MNIST for finding in _kernels(name, by_name.get(name, {}))),
        _most("nodes in a step that copy, allocate, free or call the host", _forbidden(rows)),
        _most("problems in a step without a measured plan", _unmeasured(rows)),
        *_soak(by_name.get(SOAK, {})),
        _prefetch(by_name.get(PREFETCH, {})),
    ]


def _peers(rows: Sequence[Row]) -> Iterable[Finding]:
    """By case, first against the peer that the target is about; the other is told."""
    for peer, is_judged in (("torch_max_autotune", True), ("torch_graph", False)):
        found = speedups(rows, peer)
        for case in cases():
            target = case.least if is_judged else None
            yield Finding(f"{peer} / lt, {case.name}", found.get(case.name), target, int(case.name in found))


def _kernels(name: str, row: Row) -> Iterable[Finding]:
    count = row.get("nodes", {}).get("lt", {}).get("kernel")
    yield Finding(f"kernels in a step of {name}", count, None, int(count is not None))
    times = row.get("kernel_us", {}).get("lt", {})
    for part, what in (("sum", "sum of kernel times"), ("busy", "time in which any runs")):
        us = times.get(part)
        yield Finding(f"{what} of {name}, µs of {times.get('step', '?')} profiled", us, None, int(us is not None))


def _forbidden(rows: Iterable[Row]) -> dict[str, float]:
    nodes = {row["case"]: row["nodes"]["lt"] for row in rows if "nodes" in row}
    return {case: float(sum(each.get(kind, 0) for kind in _FORBIDDEN)) for case, each in nodes.items()}


def _unmeasured(rows: Iterable[Row]) -> dict[str, float]:
    return {row["case"]: float(row["unmeasured_problems"]) for row in rows if "unmeasured_problems" in row}


def _most(what: str, counts: Mapping[str, float]) -> Finding:
    """There must be none in any row."""
    if not counts:
        return Finding(f"{what}, most", None, 0, 0, at_most=True)
    where = max(counts, key=counts.__getitem__)
    return Finding(f"{what}, most", counts[where], 0, len(counts), where if counts[where] else None, at_most=True)


def _soak(row: Row) -> Iterable[Finding]:
    gained, count = row.get("gained", {}), row.get("replays", "many")
    for kind in ("gpu", "pool"):
        what = f"bytes of memory ({kind}) gained in {count} replays"
        yield Finding(what, gained.get(kind), 0, int(kind in gained), at_most=True)
    finite = float(math.isfinite(row["mean_loss"])) if "mean_loss" in row else None
    yield Finding("their mean loss is finite", finite, 1, int(finite is not None))


def _prefetch(row: Row) -> Finding:
    us = row.get("us", {})
    ratio = us["prefetch"] / us["gpu_batches"] if "prefetch" in us else None
    return Finding("prefetch / batches on the GPU, gpt2-mlp-x2", ratio, 1.03, int(ratio is not None), at_most=True)


def rows_table(rows: Iterable[Row]) -> Table:
    """A line a step: our time, the others' as multiples of it, and our kernels."""
    shown = Table("step", box=None, header_style="bold")
    for heading in ("µs", "±", *(f"× {name}" for name in _SHOWN), "kernels"):
        shown.add_column(heading, justify="right")
    for row in rows:
        shown.add_row(row["case"], *(_cells(row) if "lt" in row["us"] else [_without(row)]))
    return shown


def _cells(row: Row) -> list[str]:
    own, us = row["us"]["lt"], row["us"]
    ratios = [f"{us[name] / own:.3f}" if name in us else "" for name in _SHOWN]
    return [f"{own:.1f}", f"{row['spread']['lt']:.2f}", *ratios, str(row["nodes"]["lt"].get("kernel", 0))]


def _without(row: Row) -> str:
    return "no result" if "error" in row else "see below"
