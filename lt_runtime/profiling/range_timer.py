"""Times the ranges of a step inside the process, without an external profiler."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lt_runtime.arrays.libraries import cupy


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Mean time of a layer, of the loss or of the optimizer.

    Attributes:
        name: of the layer, or "loss", "optimizer" or "ema".
        forward_us, backward_us: microseconds a step. The loss and the optimizer have forward time alone.
    """

    name: str
    forward_us: float
    backward_us: float

    @property
    def total_us(self) -> float:
        """Forward and backward together."""
        return self.forward_us + self.backward_us


class RangeTimer:
    """A listener of `lt_runtime.ranges` that records when each range begins and ends.

    Ranges within a captured graph are over before the graph runs; time a step with `graph=False`.

    Args:
        device: ordinal of the GPU whose work on CuPy's current stream is timed; None to time the host.
    """

    def __init__(self, device: int | None = None) -> None:
        self._device = device
        self._open: list[Any] = []
        self._spans: list[tuple[str, Any, Any]] = []

    def enter(self, name: str) -> None:
        """A range begins."""
        self._open.append(self._now())

    def exit(self, name: str) -> None:
        """The range that began last ends."""
        self._spans.append((name, self._open.pop(), self._now()))

    def layers(self) -> list[LayerTime]:
        """Mean times of the layers in order of appearance, then of the loss and the optimizer. Waits for the GPU."""
        durations: dict[str, list[float]] = defaultdict(list)
        for name, start, end in self._spans:
            durations[name].append(self._microseconds(start, end))
        means = {name: sum(values) / len(values) for name, values in durations.items()}
        return list(_rows(means))

    def _now(self) -> Any:
        """The host's time, or an event on CuPy's current stream, which takes the GPU's time when it comes to it."""
        if self._device is None:
            return time.perf_counter()
        with cupy().cuda.Device(self._device):
            event = cupy().cuda.Event()
            event.record()
        return event

    def _microseconds(self, start: Any, end: Any) -> float:
        if self._device is None:
            return float(end - start) * 1e6
        end.synchronize()
        return float(cupy().cuda.get_elapsed_time(start, end)) * 1e3


def _rows(means: dict[str, float]) -> Iterator[LayerTime]:
    for name, mean in means.items():
        phase, _, layer = name.partition("/")
        if phase == "forward" and layer:
            yield LayerTime(layer, mean, means.get(f"backward/{layer}", 0.0))
    for name in ("loss", "optimizer", "ema"):
        if name in means:
            yield LayerTime(name, means[name], 0.0)
