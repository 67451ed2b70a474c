"""The rows of a report, from what was timed and from what the GPU's activities were."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lt_runtime.profiling.ceilings import bound_of
from lt_runtime.profiling.records import Activity
from lt_runtime.profiling.timer import Step
from lt_runtime.profiling.work import Work, work_of
from lt_runtime.ranges import PHASES, Place, place_of

UNATTRIBUTED: Final = "(unattributed)"
_ON_GPU: Final = ("kernel", "memcpy", "memset")
_LEAST_GAP_NS: Final = 1000
_WITH_LAYERS: Final = ("forward", "backward", "")


def label_of(layer: str, phase: str) -> str:
    """How people are shown a layer, or what lies between the layers."""
    return layer or ("(between)" if phase in _WITH_LAYERS else "")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer in one part of a step. All figures are of one step.

    Attributes:
        name: of the layer; "" for what a part of the step does outside of its layers.
        phase: "input", "forward", "loss", "backward", "optimizer", or "" where none is known.
        calls: how often its range was entered, the mean.
        us: its latency without the layers within it, the median; on the GPU from event to event where one is timed.
        spread_us: the interquartile range of that.
        host_us: what the host spent there, the median.
        kernels: kernels, copies and memsets. kernel_us: the sum of their times. 0 where CUPTI did not look.
        flops: of matrix products. bytes: read and written by all kernels of the plans.
        tflops, gbytes: the rates, in TFLOP/s and GB/s.
        bound: "compute" or "memory", whichever ceiling of this GPU is the nearer; "" if it is not known.
        fraction: of that ceiling, reached; 0.0 if it is not known.
        strategy: what the plans chose.
    """

    name: str
    phase: str
    calls: float
    us: float
    spread_us: float
    host_us: float
    kernels: float = 0.0
    kernel_us: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    tflops: float = 0.0
    gbytes: float = 0.0
    bound: str = ""
    fraction: float = 0.0
    strategy: str = ""

    @property
    def label(self) -> str:
        """The name for people."""
        return label_of(self.name, self.phase)


@dataclass(frozen=True, slots=True)
class Kernel:
    """All launches of one kernel, copy or memset at one place.

    Attributes:
        name: as CUPTI has it, demangled; "memcpy DtoD" and the like.
        layer, phase: see `Layer`; `UNATTRIBUTED` where it was in no range.
        share: of the time of all, 0 to 1.
        count: launches in a step, the mean.
        total_us: of a step. mean_us, median_us, min_us, max_us, std_us: of a launch.
        bytes: of a step, copied or set.
        is_planned_copy: whether a plan chose to copy operands, and this kernel does it.
    """

    name: str
    layer: str
    phase: str
    share: float
    count: float
    total_us: float
    mean_us: float
    median_us: float
    min_us: float
    max_us: float
    std_us: float
    bytes: float = 0.0
    is_planned_copy: bool = False


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums of a step.

    Attributes:
        step_us: the latency of a step. phase_us: that of each part; "" is what lies in none.
        host_us: what the host spent.
        kernel_us: the sum of all kernels' times. busy_us: of the time in which at least one ran, so that the
            difference is what ran beside something else.
        gaps: pauses of the GPU of at least a microsecond within the traced steps, and `gap_us` their sum. Tracing makes
            launches slower, so that gaps between graphs are longer than without.
        unattributed_us: of `kernel_us`, what is in no range.
        synchronizations, allocations: how many calls of these kinds were made.
    """

    step_us: float = 0.0
    phase_us: Mapping[str, float] = field(default_factory=dict)
    host_us: float = 0.0
    kernel_us: float = 0.0
    busy_us: float = 0.0
    gaps: float = 0.0
    gap_us: float = 0.0
    unattributed_us: float = 0.0
    synchronizations: float = 0.0
    allocations: float = 0.0


def layers_of(steps: Sequence[Step], kernels: Iterable[Kernel], ceilings: Mapping[str, float]) -> list[Layer]:
    """The rows of all layers, in the order of the step's parts and within them as they came."""
    places = list(dict.fromkeys(place for step in steps for place in step))
    by_place: dict[Place, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_place[Place(kernel.layer, kernel.phase)].append(kernel)
    order = {phase: number for number, phase in enumerate((*PHASES, ""))}
    places.sort(key=lambda place: (order[place.phase], place.layer == ""))
    return [_layer(place, steps, by_place.get(place, ()), ceilings) for place in places]


def _layer(place: Place, steps: Sequence[Step], kernels: Sequence[Kernel], ceilings: Mapping[str, float]) -> Layer:
    cells = [step[place] for step in steps if place in step]
    times = [cell.us for cell in cells]
    # A graph's ranges are timed in several replays, so that what is left between them may come out just below 0.
    us = max(0.0, statistics.median(times))
    works = [work_of(ran) for ran in cells[-1].works]
    flops, moved = sum(work.flops for work in works), sum(work.bytes for work in works)
    kind = next((work.kind for work in works if work.kind), "")
    ceiling = bound_of(flops, moved, kind, ceilings)
    return Layer(
        *place,
        calls=sum(cell.calls for cell in cells) / len(steps),
        us=us,
        spread_us=spread(times),
        host_us=statistics.median(cell.host_us for cell in cells),
        kernels=sum(kernel.count for kernel in kernels),
        kernel_us=sum(kernel.total_us for kernel in kernels),
        flops=flops,
        bytes=moved,
        tflops=flops / us / 1e6 if us > 0 else 0.0,
        gbytes=moved / us / 1e3 if us > 0 else 0.0,
        bound="" if ceiling is None else ceiling.bound,
        fraction=ceiling.us / us if ceiling is not None and us > 0 else 0.0,
        strategy="; ".join(dict.fromkeys(work.strategy for work in works if work.strategy)),
    )


def spread(values: Sequence[float]) -> float:
    """The interquartile range; 0.0 of a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def kernels_of(activities: Iterable[Activity], steps: int, copying: Iterable[Place] = ()) -> list[Kernel]:
    """The rows of all kernels, copies and memsets, the longest total first.

    Args:
        steps: how many were traced.
        copying: places where a plan chose to copy operands.
    """
    found: dict[tuple[Place, str], list[Activity]] = defaultdict(list)
    for each in activities:
        if each.kind in _ON_GPU:
            place = place_of(each.range) if each.range else Place(UNATTRIBUTED, "")
            found[place, each.name if each.kind == "kernel" else f"{each.kind} {each.name}".strip()].append(each)
    whole = sum(_us(each) for launches in found.values() for each in launches)
    planned = set(copying)
    rows = [
        _kernel(place, name, launches, whole, max(steps, 1), is_planned="resize" in name and place in planned)
        for (place, name), launches in found.items()
    ]
    return sorted(rows, key=lambda row: -row.total_us)


def _kernel(
    place: Place, name: str, launches: Sequence[Activity], whole: float, steps: int, *, is_planned: bool
) -> Kernel:
    times = [_us(each) for each in launches]
    return Kernel(
        name,
        *place,
        share=sum(times) / whole if whole else 0.0,
        count=len(times) / steps,
        total_us=sum(times) / steps,
        mean_us=statistics.fmean(times),
        median_us=statistics.median(times),
        min_us=min(times),
        max_us=max(times),
        std_us=statistics.pstdev(times),
        bytes=sum(each.size for each in launches) / steps,
        is_planned_copy=is_planned,
    )


def totals_of(steps: Sequence[Step], activities: Iterable[Activity], traced: int) -> Totals:
    """The sums of a step."""
    activities, traced = list(activities), max(traced, 1)
    on_gpu = sorted((each for each in activities if each.kind in _ON_GPU), key=lambda each: each.start_ns)
    busy, gaps = _union([(each.start_ns, each.end_ns) for each in on_gpu])
    phases: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        sums: dict[str, float] = defaultdict(float)
        for place, cell in step.items():
            sums[place.phase] += cell.us
        for phase, us in sums.items():
            phases[phase].append(us)
    return Totals(
        step_us=_median(sum(cell.us for cell in step.values()) for step in steps),
        phase_us={phase: max(0.0, _median(phases[phase])) for phase in (*PHASES, "") if phase in phases},
        host_us=_median(sum(cell.host_us for cell in step.values()) for step in steps),
        kernel_us=sum(_us(each) for each in on_gpu) / traced,
        busy_us=busy / 1e3 / traced,
        gaps=len(gaps) / traced,
        gap_us=sum(gaps) / 1e3 / traced,
        unattributed_us=sum(_us(each) for each in on_gpu if not each.range) / traced,
        synchronizations=_count(activities, "synchronization") / traced,
        allocations=_count(activities, "allocation") / traced,
    )


def works_at(step: Step) -> dict[Place, list[Work]]:
    """What the operations of a step ran, by place."""
    return {place: [work_of(ran) for ran in cell.works] for place, cell in step.items() if cell.works}


def _union(intervals: Sequence[tuple[int, int]]) -> tuple[int, list[int]]:
    """The length of the union of intervals that are sorted by their starts, and the gaps in it that count."""
    busy, gaps, end = 0, list[int](), intervals[0][0] if intervals else 0
    for start, stop in intervals:
        if start - end >= _LEAST_GAP_NS:
            gaps.append(start - end)
        busy += max(0, stop - max(start, end))
        end = max(end, stop)
    return busy, gaps


def _us(activity: Activity) -> float:
    return (activity.end_ns - activity.start_ns) / 1e3


def _count(activities: Iterable[Activity], kind: str) -> int:
    return sum(each.kind == kind for each in activities)


def _median(values: Iterable[float]) -> float:
    known = list(values)
    return statistics.median(known) if known else 0.0
