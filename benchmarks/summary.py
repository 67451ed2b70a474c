"""What the rows of the layers' suite come to, and what they had to: functions of rows as they stand in the file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.table import Table

from benchmarks.timing import Timing

Row = Mapping[str, Any]


def geometric_mean(values: Iterable[float]) -> float:
    """Of at least one value, all above 0."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def speedups(rows: Iterable[Row], contender: str, ours: str = "lt") -> dict[str, float]:
    """By row, a contender's time as a multiple of ours; without the rows where one of them has none."""
    times = {row["case"]: row.get("us", {}) for row in rows}
    return {case: us[contender] / us[ours] for case, us in times.items() if contender in us and ours in us}


def losses(rows: Iterable[Row]) -> dict[str, float]:
    """By row, the time of the chosen plan as a multiple of the best candidate's; 1 where it is the best itself."""
    return {row["case"]: row["chosen_vs_best"] for row in rows if "chosen_vs_best" in row}


def no_loss(timings: Mapping[str, Timing], candidates: Iterable[str]) -> dict[str, Any]:
    """The candidates' times, and the chosen plan's as a multiple of the best of all that are ours."""
    medians = {name: timing.median for name, timing in timings.items() if not name.startswith("torch")}
    loss = {"chosen_vs_best": round(medians["lt"] / min(medians.values()), 4)} if "lt" in medians else {}
    return loss | {"candidates": {name: round(medians[name], 4) for name in candidates if name in medians}}


@dataclass(frozen=True)
class Finding:
    """One figure over many rows, and what it has to be.

    Attributes:
        value: None if no row has what it takes.
        target: None if it is only told.
        rows: how many went into it.
        where: the row that a worst case is from.
        at_most: whether the target is the greatest that will do, and not the least.
    """

    what: str
    value: float | None
    target: float | None
    rows: int
    where: str | None = None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        """Whether it is; None without a value or a target."""
        if self.value is None or self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    @property
    def wanted(self) -> str:
        """The target in words."""
        return "" if self.target is None else f"{'≤' if self.at_most else '≥'} {self.target:g}"

    def as_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        value = None if self.value is None else round(self.value, 4)
        where = {} if self.where is None else {"where": self.where}
        return {"what": self.what, "value": value, "target": self.wanted, "met": self.met, "rows": self.rows, **where}


def mean(what: str, values: Mapping[str, float], target: float | None) -> Finding:
    """The geometric mean."""
    return Finding(f"{what}, geometric mean", geometric_mean(values.values()) if values else None, target, len(values))


def worst(what: str, values: Mapping[str, float], target: float) -> Finding:
    """The least."""
    if not values:
        return Finding(f"{what}, worst", None, target, 0)
    where = min(values, key=values.__getitem__)
    return Finding(f"{what}, worst", values[where], target, len(values), where)


def share(what: str, values: Mapping[str, float], holds: Callable[[float], bool], target: float) -> Finding:
    """The share of rows of which something holds."""
    held = sum(map(holds, values.values())) / len(values) if values else None
    return Finding(f"share of rows {what}", held, target, len(values))


_TORCH: Final = {"bf16": 1.15, "tf32": 1.10}


def findings(rows: Sequence[Row]) -> list[Finding]:
    """All that the suite has to show."""
    fused, of_best = speedups(rows, "lt_fused_top1"), losses(rows)
    made = [
        share("within 3 % of the best candidate", of_best, lambda loss: loss <= 1.03, 0.95),
        share("within 8 % of the best candidate", of_best, lambda loss: loss <= 1.08, 1.0),
        mean("lt_fused_top1 / lt", fused, 1.3),
        worst("lt_fused_top1 / lt", fused, 0.98),
    ]
    for kind, target in _TORCH.items():
        torch = speedups((row for row in rows if row["type"] == kind), "torch_graph")
        made.append(mean(f"torch_graph / lt, {kind.upper()}", torch, target))
        made.append(worst(f"torch_graph / lt, {kind.upper()}", torch, 0.97))
    made.append(mean("torch_max_autotune / lt", speedups(rows, "torch_max_autotune"), 1.08))
    made.append(mean("lt / lt_priors", speedups(rows, "lt", "lt_priors"), 0.90))
    return made


def table(made: Iterable[Finding]) -> Table:
    """A line a figure."""
    shown = Table("over all rows", box=None, header_style="bold")
    for heading in ("figure", "target", "rows"):
        shown.add_column(heading, justify="right")
    shown.add_column("")
    shown.add_column("where")
    for each in made:
        value = "" if each.value is None else f"{each.value:.3f}"
        shown.add_row(each.what, value, each.wanted, str(each.rows), _verdict(each), each.where or "")
    return shown


def _verdict(finding: Finding) -> str:
    if finding.value is None:
        return "[yellow]not measured[/]"
    return {True: "[green]met[/]", False: "[red]MISSED[/]", None: ""}[finding.met]


_SHOWN: Final = ("lt_priors", "lt_fused_top1", "lt_split_top1", "torch_graph", "torch_max_autotune")


def rows_table(rows: Iterable[Row]) -> Table:
    """A line a block: our time, the others' as multiples of it, the loss against the best, and what tuning took."""
    shown = Table("block", box=None, header_style="bold")
    for heading in ("µs", "±", *(f"× {name.removeprefix('lt_')}" for name in _SHOWN), "÷ best", "tuned in"):
        shown.add_column(heading, justify="right")
    for row in rows:
        shown.add_row(row["case"], *(_cells(row) if "lt" in row["us"] else ["no result"]))
    return shown


def _cells(row: Row) -> list[str]:
    own = row["us"]["lt"]
    ratios = [f"{row['us'][name] / own:.3f}" if name in row["us"] else "" for name in _SHOWN]
    return [
        f"{own:.1f}",
        f"{row['spread']['lt']:.2f}",
        *ratios,
        f"{row['chosen_vs_best']:.3f}",
        f"{row['tuning_s']:.2f} s",
    ]
