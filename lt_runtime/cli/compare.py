"""The command `compare`: kernels and layers of two profiles, and the shares of transposes, copies and seeds."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from lt_runtime.cli.output import show
from lt_runtime.profiling.layers import Kernel, label_of
from lt_runtime.profiling.report import Report, load, short
from lt_runtime.tables import Line, table

_FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    "transposes": ("transpose", "permute"),
    "seed kernels": ("seed", "curand", "generate_seed", "fill_random"),
    "copies": ("memcpy", "copy", "resize"),
    "pow": ("pow",),
}
"""Families of kernels that slow a training step down, each with words that occur in the kernels' names."""
_PLANNED: Final = "copies that a plan chose"
_NOISES: Final = 3.0
"""A change is reported if it exceeds this many standard errors of the difference, and `_LEAST` times the old time."""
_LEAST: Final = 0.02
_MEDIAN_ERROR: Final = 0.93
"""The standard error of a median of n normal values is their interquartile range times this, divided by √n."""
_Key: TypeAlias = tuple[str, str, str]
"""Key of a row: a kernel's name ("" for a layer's own row), a layer and a phase."""


class Change(NamedTuple):
    """Change in one kernel of a layer, or in a whole layer, between two profiles.

    The figures of a profile that lacks the kernel or layer are None.

    Attributes:
        name: name of the kernel; "" for a whole layer.
        us: time in a step. share: share of the time of all kernels, or of the step. noise_us: standard error of the
            change.
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
    """Compares two profiles, and prints the comparison as text or as one JSON object."""
    reports = before, after = load(arguments.before), load(arguments.after)
    changes = [*_changes(*(dict(_figures(report)) for report in reports))]
    layers, kernels = [each for each in changes if not each.name], [each for each in changes if each.name]
    # Kernels with the largest change in time come first.
    kernels.sort(key=lambda each: -abs((each.after_us or 0.0) - (each.before_us or 0.0)))
    shares = {family: [_share(family, report) for report in reports] for family in (*_FAMILIES, _PLANNED)}
    steps = before.totals.step_us, after.totals.step_us
    found = {"layers": [each._asdict() for each in layers], "changes": [each._asdict() for each in kernels]}
    lines: list[Line] = ["One of the profiles has no kernels, so that only layers can be compared."]
    if before.kernels and after.kernels:
        cells = [[family, *(f"{share:.2%}" for share in pair)] for family, pair in shares.items()]
        changed = [each for each in kernels if each.verdict != "same"]
        lines = [table("Share of kernel time", ["", "before", "after"], cells, texts={""})]
        lines.append(_table("Kernels of a step", changed))
        lines.append(f"{len(kernels) - len(changed)} kernels took as long as before.")
    lines += [_table("Layers of a step", layers), f"A step took {steps[0]:.1f} µs before, {steps[1]:.1f} µs after."]
    return show({"step_us": steps, **found, "shares": shares}, lines, as_json=arguments.json)


class _Figures(NamedTuple):
    """A kernel's or layer's time in a step, its share of the total time, and the variance of its time."""

    us: float
    share: float
    variance: float


def _figures(report: Report) -> Iterator[tuple[_Key, _Figures]]:
    """The figures of each kernel and layer of a report."""
    timed, traced, whole = max(report.timed_steps, 1), max(report.traced_steps, 1), report.totals.step_us
    for each in report.kernels:
        variance = each.count * each.std_us**2 / traced
        yield (each.name, each.layer, each.phase), _Figures(each.total_us, each.share, variance)
    for layer in report.layers:
        variance = (_MEDIAN_ERROR * layer.spread_us) ** 2 / timed
        yield ("", layer.name, layer.phase), _Figures(layer.us, layer.us / whole if whole else 0.0, variance)


def family_of(kernel: Kernel) -> str:
    """The family of a kernel according to its name; "" if it belongs to no family."""
    if kernel.is_planned_copy:
        return _PLANNED
    name = kernel.name.lower()
    return next((family for family, words in _FAMILIES.items() if any(word in name for word in words)), "")


def _share(family: str, report: Report) -> float:
    """The share of a family of kernels in the time of all kernels."""
    return sum(each.share for each in report.kernels if family_of(each) == family)


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


def _table(title: str, changes: Sequence[Change]) -> Line:
    headings = ["", "before µs", "after µs", "± µs", "share", "share after", "layer", "phase", "kernel"]
    cells = []
    for each in changes:
        times = ["" if us is None else f"{us:.2f}" for us in (each.before_us, each.after_us, each.noise_us)]
        shares = ["" if share is None else f"{share:.2%}" for share in (each.before_share, each.after_share)]
        cells.append([each.verdict, *times, *shares, label_of(each.layer, each.phase), each.phase, short(each.name)])
    return table(title, headings, cells, texts={"", "layer", "phase", "kernel"})
