"""The command `compare`: kernels and layers of two profiles, and the shares of transposes, copies and seeds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

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
_MEDIAN_ERROR: Final = 0.93
"""The standard error of a median of n normal values is their interquartile range times this, divided by √n."""
_Key: TypeAlias = tuple[str, str, str]
"""A kernel's name, a layer and a phase."""


@dataclass(frozen=True, slots=True)
class Change:
    """One kernel of one layer, or one layer, before and after; figures are None in a profile that lacks it.

    Attributes:
        name: of the kernel; "" for a layer.
        us: time in a step. share: of the time of all kernels, or of the step. noise_us: standard error of the change.
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
    kernels, layers, shares = kernels_of(before, after), layers_of(before, after), shares_of(before, after)
    if arguments.json:
        steps = [report.totals.step_us for report in (before, after)]
        changes = {"layers": [asdict(each) for each in layers], "changes": [asdict(each) for each in kernels]}
        print(json.dumps({"step_us": steps, **changes, "shares": shares}, indent=2))
    else:
        print_lines(_lines(before, after, kernels, layers, shares))
    return 0


def kernels_of(before: Report, after: Report) -> list[Change]:
    """All kernels of both profiles, the largest change of a step's time first."""

    def figures(kernel: Kernel, report: Report) -> _Figures:
        variance = kernel.count * kernel.std_us**2 / report.traced_steps if report.traced_steps else 0.0
        return _Figures(kernel.total_us, kernel.share, variance)

    first, second = (
        {(each.name, each.layer, each.phase): figures(each, report) for each in report.kernels}
        for report in (before, after)
    )
    return sorted(_changes(first, second), key=lambda each: -abs((each.after_us or 0.0) - (each.before_us or 0.0)))


def layers_of(before: Report, after: Report) -> list[Change]:
    """All layers of both profiles, in the order of the first."""

    def figures(layer: Layer, report: Report) -> _Figures:
        variance = (_MEDIAN_ERROR * layer.spread_us) ** 2 / max(report.timed_steps, 1)
        return _Figures(layer.us, layer.us / report.totals.step_us if report.totals.step_us else 0.0, variance)

    first, second = (
        {("", each.name, each.phase): figures(each, report) for each in report.layers} for report in (before, after)
    )
    return list(_changes(first, second))


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


class _Figures(NamedTuple):
    """Time of a step, share, and variance of the time."""

    us: float
    share: float
    variance: float


def _changes(before: Mapping[_Key, _Figures], after: Mapping[_Key, _Figures]) -> Iterator[Change]:
    for key in {**before, **after}:
        first, second = before.get(key), after.get(key)
        noise = sum(each.variance for each in (first, second) if each is not None) ** 0.5
        times = first and first.us, second and second.us
        shares = first and first.share, second and second.share
        yield Change(*key, _verdict(first, second, noise), *times, *shares, noise)


def _verdict(before: _Figures | None, after: _Figures | None, noise: float) -> str:
    if before is None or after is None:
        return "appeared" if before is None else "vanished"
    if abs(after.us - before.us) <= max(_NOISES * noise, _LEAST * before.us):
        return "same"
    return "slower" if after.us > before.us else "faster"


def _lines(
    before: Report,
    after: Report,
    kernels: Sequence[Change],
    layers: Sequence[Change],
    shares: Mapping[str, tuple[float, float]],
) -> Iterator[str | Table]:
    if before.kernels and after.kernels:
        lines = [[family, *(f"{share:.2%}" for share in pair)] for family, pair in shares.items()]
        yield table("Share of kernel time", ["", "before", "after"], lines, texts={""})
        changed = [each for each in kernels if each.verdict != "same"]
        yield _table("Kernels of a step", changed)
        yield f"{len(kernels) - len(changed)} kernels took as long as before."
    else:
        yield "One of the profiles has no kernels, so that only layers can be compared."
    yield _table("Layers of a step", layers)
    yield f"A step took {before.totals.step_us:.1f} µs before, {after.totals.step_us:.1f} µs after."


def _table(title: str, changes: Sequence[Change]) -> Table:
    def text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    headings = ["", "before µs", "after µs", "± µs", "share", "share after", "layer", "phase", "kernel"]
    lines = [
        [
            *(each.verdict, text(each.before_us, ".2f"), text(each.after_us, ".2f"), f"{each.noise_us:.2f}"),
            *(text(each.before_share, ".2%"), text(each.after_share, ".2%")),
            *(label_of(each.layer, each.phase), each.phase, short(each.name)),
        ]
        for each in changes
    ]
    return table(title, headings, lines, texts={"", "layer", "phase", "kernel"})
