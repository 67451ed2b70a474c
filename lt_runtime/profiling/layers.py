"""Makes a report's tables of layers, kernels and totals from timed steps and recorded GPU activities."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from lt_runtime.profiling.cupti.records import Activity
from lt_runtime.profiling.timer import Step
from lt_runtime.profiling.work import COPY, Work, work_of
from lt_runtime.ranges import PHASES, Place, place_of

UNATTRIBUTED: Final = "(unattributed)"
_LEAST_GAP_NS: Final = 1000
Works: TypeAlias = dict[Place, list[Work]]
"""FLOPs and bytes of the operations at each place of a step; a place (`Place`) is a layer in a phase."""
_WITH_LAYERS: Final = ("forward", "backward", "")


def label_of(layer: str, phase: str) -> str:
    """The name of a row in tables: the layer's, or "(between)" for the time of a pass outside of its layers."""
    return layer or ("(between)" if phase in _WITH_LAYERS else "")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer in one phase of a step. All figures are for one step.

    Attributes:
        name: the layer's name; "" for the time of a phase outside of its layers.
        phase: "input", "forward", "loss", "backward", "optimizer", or "" if no range names the phase.
        calls: how often the layer's range was entered, on average.
        us: median latency, without the latency of nested layers; timed by events on a GPU, else by the host's clock.
        spread_us: interquartile range of the latency.
        host_us: median time of the host.
        kernels: the number of kernels, copies and memsets, and `kernel_us` the sum of their times; 0 without CUPTI.
        flops: operations of matrix products. bytes: read and written by all kernels of the plans.
        tflops, gbytes: the rates, in TFLOP/s and GB/s.
        bound: "compute" or "memory", the ceiling that limits the layer; "" if the ceilings are not known.
        fraction: the share of that ceiling that was reached, 0 to 1; 0.0 if the ceilings are not known.
        strategy: the plan's strategy, in words.
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
        """The layer's name in tables."""
        return label_of(self.name, self.phase)


@dataclass(frozen=True, slots=True)
class Kernel:
    """All launches of one kernel, copy or memset in one layer and phase.

    Attributes:
        name: demangled, from CUPTI; "memcpy DtoD" and the like.
        layer, phase: see `Layer`; `UNATTRIBUTED` for work outside of all ranges.
        share: the kernel's share of the time of all kernels, 0 to 1.
        count: average number of launches in a step.
        total_us: time in a step. mean_us, median_us, min_us, max_us, std_us: statistics of the time of a launch.
        bytes: bytes that are copied or set in a step.
        is_planned_copy: whether the kernel copies operands to padded buffers because a plan chose to.
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
    """Times and counts of a whole step.

    Attributes:
        step_us: latency of a step. phase_us: latency of each phase; "" holds the time outside of the phases.
        host_us: time of the host.
        kernel_us: the sum of all kernels' times. busy_us: the time in which at least one kernel ran; the difference is
            time in which kernels ran side by side.
        gaps: number of pauses of the GPU of at least a microsecond in a traced step. gap_us: sum of the pauses. Tracing
            makes launches slower, and so the gaps between graphs longer.
        unattributed_us: the part of `kernel_us` that belongs to no range.
        synchronizations, allocations: how many calls of these kinds a step makes.
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


def layers_of(steps: Sequence[Step], works: Works, kernels: list[Kernel], ceilings: dict[str, float]) -> list[Layer]:
    """The table of layers: sorted by phase, and in a phase by first appearance."""
    by_place: dict[Place, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_place[Place(kernel.layer, kernel.phase)].append(kernel)
    places = dict.fromkeys(place for step in steps for place in step)
    in_order = sorted(places, key=lambda place: ((*PHASES, "").index(place.phase), place.layer == ""))
    return [_layer(place, steps, works.get(place, ()), by_place[place], ceilings) for place in in_order]


def works_of(steps: Sequence[Step]) -> Works:
    """FLOPs and bytes of the operations in each layer and phase, in the last step that contains these."""
    return {place: [work_of(ran) for ran in cell.works] for step in steps for place, cell in step.items()}


def _layer(
    place: Place, steps: Sequence[Step], works: Sequence[Work], kernels: Sequence[Kernel], ceilings: Mapping[str, float]
) -> Layer:
    cells = [step[place] for step in steps if place in step]
    times = [cell.us for cell in cells]
    # At least 0: ranges of a graph are timed in different launches, so that nested ranges may seem to take longer.
    us = max(0.0, statistics.median(times))
    flops, moved = sum(work.flops for work in works), sum(work.bytes for work in works)
    kind = next((work.kind for work in works if work.kind), "")
    limits = {"memory": moved / ceilings.get(COPY, math.inf), "compute": flops / ceilings.get(kind, math.inf)}
    bound = max(limits, key=lambda name: limits[name])
    return Layer(
        *place,
        calls=sum(cell.calls for cell in cells) / len(steps),
        us=us,
        spread_us=float(np.ptp(np.percentile(times, (25, 75)))),
        host_us=statistics.median(cell.host_us for cell in cells),
        kernels=sum(kernel.count for kernel in kernels),
        kernel_us=sum(kernel.total_us for kernel in kernels),
        flops=flops,
        bytes=moved,
        tflops=flops / us / 1e6 if us else 0.0,
        gbytes=moved / us / 1e3 if us else 0.0,
        bound=bound if limits[bound] else "",
        fraction=1e6 * limits[bound] / us if us else 0.0,
        strategy="; ".join(dict.fromkeys(work.strategy for work in works if work.strategy)),
    )


def kernels_of(activities: Iterable[Activity], steps: int, works: Works) -> list[Kernel]:
    """The table of kernels, copies and memsets, the longest total first.

    Args:
        steps: number of traced steps.
        works: work by place, which tells where a plan chose to copy operands to padded buffers.
    """
    found: dict[tuple[Place, str], list[Activity]] = defaultdict(list)
    for each in activities:
        if each.is_on_gpu:
            place = place_of(each.range) if each.range else Place(UNATTRIBUTED, "")
            found[place, each.name if each.kind == "kernel" else f"{each.kind} {each.name}".strip()].append(each)
    whole = sum(each.us for launches in found.values() for each in launches)
    copying = {place for place, each in works.items() if any(work.copies for work in each)}
    kernels, steps = [], max(steps, 1)
    for (place, name), launches in found.items():
        times, moved = [each.us for each in launches], sum(each.size for each in launches)
        share = sum(times) / whole if whole else 0.0
        in_step, is_copy = (len(times) / steps, sum(times) / steps), "resize" in name and place in copying
        of_launch = statistics.fmean(times), statistics.median(times), min(times), max(times), statistics.pstdev(times)
        kernels.append(Kernel(name, *place, share, *in_step, *of_launch, moved / steps, is_copy))
    return sorted(kernels, key=lambda each: -each.total_us)


def totals_of(steps: Sequence[Step], activities: Sequence[Activity], traced: int) -> Totals:
    """Times and counts of a step: the median of the timed steps, and the mean of the `traced` steps."""
    traced = max(traced, 1)
    on_gpu = sorted((each for each in activities if each.is_on_gpu), key=lambda each: each.start_ns)
    ends = [*itertools.accumulate((each.end_ns for each in on_gpu), max)]
    idle = [max(0, each.start_ns - end) for each, end in zip(on_gpu[1:], ends, strict=False)]
    gaps = [ns for ns in idle if ns >= _LEAST_GAP_NS]
    busy = ends[-1] - on_gpu[0].start_ns - sum(idle) if ends else 0
    kinds = Counter(each.kind for each in activities)

    def median(sums: Iterable[float]) -> float:
        return statistics.median([*sums] or [0.0])

    phase_us = {}
    for phase in (*PHASES, ""):
        in_phase = [[cell.us for place, cell in step.items() if place.phase == phase] for step in steps]
        if any(in_phase):
            phase_us[phase] = max(0.0, median(sum(times) for times in in_phase if times))
    step_us = median(sum(cell.us for cell in step.values()) for step in steps)
    host_us = median(sum(cell.host_us for cell in step.values()) for step in steps)
    sums = [sum(each.us for each in on_gpu), busy / 1e3, len(gaps), sum(gaps) / 1e3]
    sums += [sum(each.us for each in on_gpu if not each.range), kinds["synchronization"], kinds["allocation"]]
    return Totals(step_us, phase_us, host_us, *(each / traced for each in sums))
