"""The command `compare`: kernels and layers of two profiles, and the shares of transposes, copies and seeds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from lt_runtime.cli.output import print_lines
from lt_runtime.profiling.layers import Kernel, Layer, label_of
from lt_runtime.profiling.report import Report, load, short, table

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
"""A change must exceed this many standard errors of the difference, and the share `_LEAST` of the time before."""
_LEAST: Final = 0.02
_Row = TypeVar("_Row", Kernel, Layer)


@dataclass(frozen=True, slots=True)
class Change:
    """One kernel of one layer, before and after; figures are None where the kernel did not run.

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


@dataclass(frozen=True, slots=True)
class LayerChange:
    """One layer, before and after: median and interquartile range of its time in a step; None where it did not run."""

    name: str
    phase: str
    before_us: float | None
    before_spread_us: float | None
    after_us: float | None
    after_spread_us: float | None


def run(arguments: argparse.Namespace) -> int:
    """Prints the comparison."""
    before, after = load(arguments.before), load(arguments.after)
    changes, layers, shares = list(changes_of(before, after)), layers_of(before, after), shares_of(before, after)
    if arguments.json:
        steps = [report.totals.step_us for report in (before, after)]
        rows = {"layers": [asdict(each) for each in layers], "changes": [asdict(each) for each in changes]}
        print(json.dumps({"step_us": steps, **rows, "shares": shares}, indent=2))
    else:
        print_lines(_lines(before, after, changes, layers, shares))
    return 0


def changes_of(before: Report, after: Report) -> Iterator[Change]:
    """All kernels of both profiles, the largest change of a step's time first."""
    pairs = _paired(before.kernels, after.kernels, lambda each: (each.name, each.layer, each.phase))
    found = [_change(first, second, before, after) for first, second in pairs]
    yield from sorted(found, key=lambda each: -abs((each.after_us or 0.0) - (each.before_us or 0.0)))


def layers_of(before: Report, after: Report) -> list[LayerChange]:
    """All layers of both profiles, in the order of the first."""
    found = []
    for first, second in _paired(before.layers, after.layers, lambda each: (each.name, each.phase)):
        known = first or second
        assert known is not None
        times = [(None, None) if each is None else (each.us, each.spread_us) for each in (first, second)]
        found.append(LayerChange(known.name, known.phase, *times[0], *times[1]))
    return found


def shares_of(before: Report, after: Report) -> dict[str, tuple[float, float]]:
    """The share of kernel time of each family, before and after."""

    def share(report: Report, family: str) -> float:
        return sum(each.share for each in report.kernels if family_of(each) == family)

    return {family: (share(before, family), share(after, family)) for family in (*_FAMILIES, _PLANNED)}


def family_of(kernel: Kernel) -> str:
    """The family that a kernel belongs to by its name; "" for none."""
    if kernel.is_planned_copy:
        return _PLANNED
    name = kernel.name.lower()
    return next((family for family, words in _FAMILIES.items() if any(word in name for word in words)), "")


def _paired(
    before: Iterable[_Row], after: Iterable[_Row], key: Callable[[_Row], tuple[str, ...]]
) -> Iterator[tuple[_Row | None, _Row | None]]:
    """Entries of two tables that have the same key; None where one of the tables has no such entry."""
    first, second = ({key(each): each for each in rows} for rows in (before, after))
    return ((first.get(each), second.get(each)) for each in {**first, **second})


def _change(first: Kernel | None, second: Kernel | None, before: Report, after: Report) -> Change:
    known = first or second
    assert known is not None
    noise = (_variance(first, before) + _variance(second, after)) ** 0.5
    us_before, us_after = (None if each is None else each.total_us for each in (first, second))
    share_before, share_after = (None if each is None else each.share for each in (first, second))
    verdict = _verdict(us_before, us_after, noise)
    place = known.name, known.layer, known.phase
    return Change(*place, verdict, us_before, us_after, share_before, share_after, noise)


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
    before: Report,
    after: Report,
    changes: Sequence[Change],
    layers: Sequence[LayerChange],
    shares: Mapping[str, tuple[float, float]],
) -> Iterator[str | Table]:
    if before.kernels and after.kernels:
        yield from _kernel_lines(changes, shares)
    else:
        yield "One of the profiles has no kernels, so that only layers can be compared."
    rows = []
    for layer in layers:
        us, later = layer.before_us, layer.after_us
        cells = [_text(us, ".1f"), _text(layer.before_spread_us, ".1f")]
        cells += [_text(later, ".1f"), _text(layer.after_spread_us, ".1f")]
        change = f"{later / us - 1.0:+.1%}" if us and later is not None else ""
        rows.append([label_of(layer.name, layer.phase), layer.phase, *cells, change])
    headings = ["layer", "phase", "before µs", "±", "after µs", "± after", "change"]
    yield table("Layers", headings, rows, texts={"layer", "phase"})
    yield f"A step took {before.totals.step_us:.1f} µs before, {after.totals.step_us:.1f} µs after."


def _kernel_lines(changes: Sequence[Change], shares: Mapping[str, tuple[float, float]]) -> Iterator[str | Table]:
    rows = [[family, *(f"{share:.2%}" for share in pair)] for family, pair in shares.items()]
    yield table("Share of kernel time", ["", "before", "after"], rows, texts={""})
    changed = [each for each in changes if each.verdict != "same"]
    headings = ["", "before µs", "after µs", "± µs", "share", "share after", "layer", "phase", "kernel"]
    rows = []
    for each in changed:
        cells = [each.verdict, _text(each.before_us), _text(each.after_us), f"{each.noise_us:.2f}"]
        cells += [_text(each.before_share, ".2%"), _text(each.after_share, ".2%")]
        rows.append([*cells, each.layer, each.phase, short(each.name)])
    yield table("Kernels of a step", headings, rows, texts={"", "layer", "phase", "kernel"})
    yield f"{len(changes) - len(changed)} kernels took as long as before."


def _text(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)
