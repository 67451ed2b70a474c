"""Compares two profiles: which kernels came, went, or changed, and how much of each is transposes, copies and seeds."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from lt_runtime.cli.output import print_lines
from lt_runtime.profiling.layers import Kernel, label_of
from lt_runtime.profiling.report import Report, load, short

if TYPE_CHECKING:
    from rich.table import Table

_FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    "transposes": ("transpose", "permute"),
    "seed kernels": ("seed", "curand", "generate_seed", "fill_random"),
    "copies": ("memcpy", "copy", "resize"),
    "pow": ("pow",),
}
"""Kernels that a training step should not have, by words in their names."""
_PLANNED: Final = "copies that a plan chose"
_NOISES: Final = 3.0
"""A change counts if it is larger than so many standard errors of the difference, and than `_LEAST`."""
_LEAST: Final = 0.02


@dataclass(frozen=True, slots=True)
class Change:
    """One kernel of one layer, before and after; None where it is not.

    Attributes:
        us: of a step. noise_us: the standard error of the difference.
        verdict: "appeared", "vanished", "slower", "faster" or "same".
    """

    name: str
    layer: str
    phase: str
    verdict: str
    before_us: float | None
    after_us: float | None
    before_share: float | None
    after_share: float | None
    noise_us: float


def run(arguments: argparse.Namespace) -> int:
    """Prints the comparison."""
    before, after = load(arguments.before), load(arguments.after)
    changes, shares = list(changes_of(before, after)), shares_of(before, after)
    if arguments.json:
        print(json.dumps({"changes": [asdict(each) for each in changes], "shares": shares}, indent=2))
    else:
        print_lines(_lines(before, after, changes, shares))
    return 0


def changes_of(before: Report, after: Report) -> Iterator[Change]:
    """What changed, the largest change of a step's time first."""
    first, second = (_by_place(report.kernels) for report in (before, after))
    found = [_change(key, first.get(key), second.get(key), before, after) for key in {**first, **second}]
    yield from sorted(found, key=lambda each: -abs((each.after_us or 0.0) - (each.before_us or 0.0)))


def shares_of(before: Report, after: Report) -> dict[str, tuple[float, float]]:
    """The shares of kernel time that each family of kernels takes which a step should not have, before and after."""
    return {
        family: (_share(before.kernels, family), _share(after.kernels, family)) for family in (*_FAMILIES, _PLANNED)
    }


def family_of(kernel: Kernel) -> str:
    """The family of a kernel; "" if it has none."""
    if kernel.is_planned_copy:
        return _PLANNED
    name = kernel.name.lower()
    return next((family for family, words in _FAMILIES.items() if any(word in name for word in words)), "")


def _share(kernels: Iterable[Kernel], family: str) -> float:
    return sum(each.share for each in kernels if family_of(each) == family)


def _by_place(kernels: Iterable[Kernel]) -> dict[tuple[str, str, str], Kernel]:
    return {(each.name, each.layer, each.phase): each for each in kernels}


def _change(
    key: tuple[str, str, str], first: Kernel | None, second: Kernel | None, before: Report, after: Report
) -> Change:
    noise = (_variance(first, before) + _variance(second, after)) ** 0.5
    us_before, us_after = (None if each is None else each.total_us for each in (first, second))
    share_before, share_after = (None if each is None else each.share for each in (first, second))
    verdict = _verdict(us_before, us_after, noise)
    return Change(*key, verdict, us_before, us_after, share_before, share_after, noise)


def _verdict(before: float | None, after: float | None, noise: float) -> str:
    if before is None:
        return "appeared"
    if after is None:
        return "vanished"
    if abs(after - before) <= max(_NOISES * noise, _LEAST * before):
        return "same"
    return "slower" if after > before else "faster"


def _variance(kernel: Kernel | None, report: Report) -> float:
    """The variance of a kernel's mean time in a step."""
    if kernel is None or not report.traced_steps:
        return 0.0
    return kernel.count * kernel.std_us**2 / report.traced_steps


def _lines(
    before: Report, after: Report, changes: Iterable[Change], shares: Mapping[str, tuple[float, float]]
) -> Iterator[str | Table]:
    from rich.markup import escape
    from rich.table import Column, Table

    if not before.kernels or not after.kernels:
        yield "A profile without kernels was given: only what its layers took can be compared."
    table = Table("", *(Column(each, justify="right") for each in ("before", "after")), title="Share of kernel time")
    for family, (first, second) in shares.items():
        table.add_row(family, f"{first:.2%}", f"{second:.2%}")
    yield table
    numbers = [Column(each, justify="right") for each in ("before µs", "after µs", "± µs", "share", "share after")]
    table = Table("", *numbers, "layer", "", "kernel", title="Kernels of a step")
    unchanged = defaultdict[str, int](int)
    for each in changes:
        unchanged[each.verdict] += 1
        if each.verdict == "same":
            continue
        cells = [each.verdict, _us(each.before_us), _us(each.after_us), f"{each.noise_us:.2f}"]
        cells += [_percent(each.before_share), _percent(each.after_share)]
        table.add_row(*map(escape, [*cells, each.layer, each.phase, short(each.name)]))
    yield table
    yield f"{unchanged['same']} kernels took as long as before."
    yield from _layer_lines(before, after)


def _layer_lines(before: Report, after: Report) -> Iterator[str | Table]:
    """The layers' times; the interquartile ranges of both say how much of a change is noise."""
    from rich.markup import escape
    from rich.table import Column, Table

    numbers = [Column(each, justify="right") for each in ("before µs", "±", "after µs", "±", "change")]
    table = Table("layer", "", *numbers, title="Layers")
    earlier = {(each.name, each.phase): each for each in before.layers}
    later = {(each.name, each.phase): each for each in after.layers}
    for key in {**earlier, **later}:
        first, second = earlier.get(key), later.get(key)
        cells = [cell for each in (first, second) for cell in _layer_cells(each)]
        change = f"{second.us / first.us - 1.0:+.1%}" if first and second and first.us else ""
        table.add_row(*map(escape, (label_of(*key), key[1])), *cells, change)
    yield table
    yield f"A step took {before.totals.step_us:.1f} µs before, {after.totals.step_us:.1f} µs after."


def _layer_cells(layer: object) -> tuple[str, str]:
    us, spread = getattr(layer, "us", None), getattr(layer, "spread_us", 0.0)
    return ("", "") if us is None else (f"{us:.1f}", f"{spread:.1f}")


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"
