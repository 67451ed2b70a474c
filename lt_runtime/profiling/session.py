"""Profiles a block of code: its first steps are timed, the next ones are traced by CUPTI."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

from lt_runtime import ranges
from lt_runtime.arguments import integer, shown
from lt_runtime.errors import ArgumentError, KindError, LtError
from lt_runtime.files import file_path
from lt_runtime.gpu import devices
from lt_runtime.gpu.devices import device_info
from lt_runtime.gpu.driver import call
from lt_runtime.profiling.cupti.records import Activity
from lt_runtime.profiling.layers import Kernel, Layer, Totals, kernels_of, layers_of, totals_of, works_of
from lt_runtime.profiling.report import Report, plot, save_trace
from lt_runtime.profiling.timer import Timer
from lt_runtime.profiling.work import ceilings

_WARM_UP: Final = 2
_running = threading.Lock()


class _Thread(threading.local):
    """State of one thread: the names of its open ranges, outermost first."""

    def __init__(self) -> None:
        self.open: list[str] = []


class Profile:
    """The profile of a block of code, made by `lt.profile`.

    `lt.profile()` returns a context manager that measures its block, and `lt.profile(function)` a finished profile. The
    report exists once the block is over. Printing the profile prints the report.

    Attributes:
        report: the whole result, as data.
        is_done: whether all requested steps have been timed and traced.
    """

    def __init__(self, *, skip: int, timed: int, traced: int, device: int | None, marked: bool | None = None) -> None:
        self.report, self.is_done = Report(), False
        self._skip, self._timed, self._traced, self._device = skip, timed, 0 if device is None else traced, device
        self._thread = _Thread()
        # A generator that measures step by step: each `next` ends a step.
        self._steps = self._measure()
        self._lock = threading.Lock()  # several threads may end steps at the same time
        self._seen = self._traced_steps = 0
        # Whether steps end with calls of `step` rather than of a `TrainStep`; None before the first step.
        self._is_marked = marked
        self._timer = Timer(None)  # a timer for the host alone, which is replaced when timing begins
        self._collector: Any = None
        self._notes: list[str] = []
        self._undo, self._has_begun = contextlib.ExitStack(), False

    def __enter__(self) -> Self:
        if self._has_begun:
            raise ArgumentError("this profile has measured a block already; make another one by lt.profile()")
        if not _running.acquire(blocking=False):
            raise ArgumentError("a profile is running already; profiles do not nest, and there is one for all threads")
        with contextlib.ExitStack() as undo:
            undo.callback(_running.release)
            if self._device is not None and self._device == devices.current_device():
                devices.make_context_current()  # events need a CUDA context, and perhaps no library has made one yet
            undo.enter_context(ranges.listening(self))
            self._has_begun = True
            next(self._steps, None)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._undo:
            self._steps.close()
        self._make_report()

    def step(self) -> None:
        """Marks the end of a step, for code whose steps are not calls of an `lt.TrainStep`.

        Raises:
            ArgumentError: calls of an `lt.TrainStep` in the block have been counted as steps; or the profile's `with`
                block has not begun.
        """
        if not self._has_begun:
            raise ArgumentError(
                "prof.step() is for the block of a profile: write `with lt.profile() as prof:` around it"
            )
        if self._is_marked is False:
            raise ArgumentError("prof.step() is for code without lt.TrainStep, whose calls count as steps already")
        self._is_marked = True
        self._end_step()

    def enter(self, name: str) -> None:
        """A range begins; see `Listener`."""
        self._thread.open.append(name)

    def exit(self, name: str) -> None:
        """A range ends; see `Listener`."""
        opened = self._thread.open
        if name not in opened:
            return
        while opened.pop() != name:
            pass
        if name == ranges.STEP and name not in opened and not self._is_marked:
            self._is_marked, self._timer.within = False, ranges.STEP
            self._end_step()

    def layers(self) -> Sequence[Layer]:
        """The layers, sorted by phase."""
        return self.report.layers

    def kernels(self) -> Sequence[Kernel]:
        """The kernels, the longest total first; none without CUPTI."""
        return self.report.kernels

    def totals(self) -> Totals:
        """Times and counts of a whole step."""
        return self.report.totals

    def to_csv(self, directory: str | Path) -> None:
        """Writes `layers.csv` and `kernels.csv`, whose columns are the attributes of `Layer` and `Kernel`."""
        self.report.to_csv(file_path(directory))

    def save(self, file: str | Path) -> None:
        """Writes the report as JSON, which `python -m lt_runtime compare` reads."""
        self.report.save(file_path(file))

    def save_trace(self, file: str | Path) -> None:
        """Writes ranges, kernels and calls on a time axis, as a trace that Perfetto (ui.perfetto.dev) opens."""
        activities = () if self._collector is None else self._collector.activities
        save_trace(file_path(file), [*self._timer.spans, *activities], self.report.device)

    def plot(self, file: str | Path) -> None:
        """Draws the roofline, and each layer's time beside its bytes. Needs the package's extra `plot`.

        Raises:
            ArgumentError: the file's suffix names no format that matplotlib writes.
            MissingLibraryError: matplotlib is not installed.
        """
        plot(self.report, file_path(file))

    def __str__(self) -> str:
        return str(self.report)

    def _end_step(self) -> None:
        self._seen += 1
        with self._lock:
            next(self._steps, None)

    def _measure(self) -> Generator[None, None, None]:
        """Skips steps, times steps and traces steps, with one `yield` in each; `close` ends the measurement early."""
        for _ in range(self._skip):
            yield
        self._tell_profiler("cuProfilerStart")
        try:
            if self._timed:
                self._timer = Timer(self._device)
                with self._phase(self._timer):
                    while self._timer.count < self._timed:
                        yield
                        self._timer.end_step()
            if self._traced:
                yield from self._trace()
        finally:
            self._tell_profiler("cuProfilerStop")
        self.is_done = True

    def _trace(self) -> Iterator[None]:
        try:
            from lt_runtime.profiling.collector import Collector

            with self._phase(Collector()) as self._collector:
                while self._traced_steps < self._traced:
                    yield
                    self._traced_steps += 1
        except (LtError, ImportError) as error:
            self._notes.append(f"no kernel times: {error}")

    @contextlib.contextmanager
    def _phase(self, measuring: Any) -> Iterator[Any]:
        """Runs a timer or a collector during a `with` block; it is first told of the ranges that are already open."""
        measuring.__enter__()
        try:
            for name in self._thread.open:
                measuring.enter(name)
            yield measuring
        finally:
            try:
                measuring.__exit__(None, None, None)
            except LtError as error:
                self._notes.append(f"the profile is not complete ({error})")

    def _tell_profiler(self, name: str) -> None:
        """Starts or stops an external profiler, such as Nsight."""
        if self._device is not None:
            with devices.activated(self._device):
                call(name)

    def _make_report(self) -> None:
        steps = self._timer.steps
        activities: list[Activity] = [] if self._collector is None else self._collector.activities
        works, known = works_of(steps), dict[str, float]()
        if self._device is not None and any(works.values()):
            try:
                known = ceilings(self._device, {work.kind for each in works.values() for work in each if work.kind})
            except LtError as error:
                self._notes.append(f"the ceilings of this GPU could not be measured ({error})")
        kernels = kernels_of(activities, self._traced_steps, works)
        layers = layers_of(steps, works, kernels, known)
        device = "the host" if self._device is None else f"cuda:{self._device} ({device_info(self._device).name})"
        counts = len(steps), self._traced_steps if self._collector is not None else 0
        totals = totals_of(steps, activities, self._traced_steps)
        notes = [*self._notes, *self._missing(is_empty=not layers and not kernels)]
        self.report = Report(device, *counts, layers, kernels, totals, known, notes)

    def _missing(self, *, is_empty: bool) -> Iterator[str]:
        """Yields sentences that say which parts the report lacks, and why."""
        timer = self._timer
        yield from timer.notes
        if timer.discarded:
            yield f"{timer.discarded} steps in which graphs were captured are left out"
        if timer.left_open:
            yield f"{timer.left_open} ranges were left open and end with the range around them"
        if timer.lost:
            yield f"the trace lacks {timer.lost} ranges; the tables have them"
        if not self._seen and is_empty:
            yield 'the code had no step: a call of lt.TrainStep, or a block of `with lt.range("step")`'
        elif self._seen < self._skip:
            yield f"the code ended after {self._seen} steps, before step {self._skip}, where the profile begins"
        elif self._traced and self._collector is None and not self.is_done:
            why = f"tracing begins once {self._timed} steps have been timed, and the code had {self._seen}"
            yield f"no kernel times: {why}; timed=0 traces it from its beginning"
        if self._collector is not None and self._collector.dropped:
            yield f"CUPTI dropped {self._collector.dropped} records"


def profiled_device(device: object) -> int | None:
    """The ordinal of the device that an argument of `profile` names; None for the host. "auto" is the current GPU."""
    return devices.current_device() if device == "auto" and devices.device_count() else devices.parse_device(device)


def profile(
    function: Callable[[], object] | None = None,
    *,
    steps: int = 20,
    skip: int = 0,
    timed: int = 10,
    traced: int = 10,
    device: Any = "auto",
) -> Profile:
    """Measures where the time of a step goes, by layer and by kernel.

    ::

        with lt.profile() as prof:
            for x, labels in batches:
                step(x, labels)
        print(prof)

    A step is a call of an `lt.TrainStep`, or the code between two calls of `prof.step()`. A block with neither counts
    as one step. Ranges that run between calls of a `TrainStep` are in no layer. The first `timed` steps are timed by
    events; a captured training step is launched from a copy of its graph that has events in it. The next `traced` steps
    are traced by CUPTI, which records every kernel, copy and call of all libraries. No step is both timed and traced,
    because tracing makes launches several times slower. Later steps run as they would without a profile. Ranges
    (`lt.range`) name the layers; operations, models and training steps open ranges themselves. On the host nothing is
    traced, and the host's clock times the layers.

    Args:
        function: called `steps` times to be timed and `steps` times to be traced, after two calls that are not
            measured. The returned profile is finished. Without a function the returned profile is a context manager.
        steps: see `function`; a block has `skip`, `timed` and `traced` instead.
        skip: number of steps before the first timed step.
        timed, traced: how many steps to time and to trace; 0 for none.
        device: the GPU to profile, or "cpu"; see `lt.MLP`. "auto" is the current GPU, or the host if there is none.

    Raises:
        ArgumentError: a number is below 0. On entry of a block: another profile is running, or this profile has begun a
            block before.
    """
    for name, value in (("steps", steps), ("skip", skip), ("timed", timed), ("traced", traced)):
        if integer(name, value) < 0:
            raise ArgumentError(f"{name} is {shown(value)}; it must not be negative")
    ordinal = profiled_device(device)
    if function is None:
        return Profile(skip=int(skip), timed=int(timed), traced=int(traced), device=ordinal)
    if not callable(function):
        raise KindError(f"function is {shown(function)}; it must be None or take no arguments")
    timed, traced = int(steps), 0 if ordinal is None else int(steps)
    made = Profile(skip=_WARM_UP, timed=timed, traced=traced, device=ordinal, marked=True)
    with made:
        for _ in range(_WARM_UP + timed + traced):
            function()
            made.step()
    return made
