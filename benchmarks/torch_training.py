"""Contenders of the suite `torch`: builds them, keeps their first losses, and times them alternately; needs PyTorch."""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import threading
from functools import partial
from typing import Any, Final, NamedTuple

import torch

import lt_runtime.torch as ltt
from benchmarks import torch_tasks
from benchmarks.report import Row
from benchmarks.steps import timed_calls
from benchmarks.suite import AUTOTUNE, matches
from benchmarks.timing import Call, HostTurn, Turn, built, repeat, take_turns
from benchmarks.torch import TorchCase

_BATCHES: Final = 4
_HOST_CALLS: Final = 100  # Calls in a row; few enough that their launches do not fill the driver's queue.
_TURN_US: Final = 60_000.0  # A turn of one contender takes at least about this long, in microseconds.
_MOST_CALLS: Final = 200
_SUSTAINED_S: Final = 1.0  # length of a turn of sustained steps
_MOST_TURNS: Final = 30
_SETTLED: Final = 3
_MODES: Final = (None, "default")


class Training:
    """A model in training, by one library, eager or compiled.

    Attributes:
        losses: the losses of the steps so far, each before its update.
        memory: peak bytes of an eager step: parameters, optimizer states, gradients, and the tensors that it allocates.
    """

    def __init__(self, case: TorchCase, library: str, mode: str | None) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        self._case, before = case, torch.cuda.memory_allocated()
        torch.manual_seed(0)
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, case.dtype))
        try:
            with torch.device(case.device):
                kit = torch_tasks.KITS[library]()
                self._task = getattr(torch_tasks, case.task)(kit, **case.sizes)
                before -= torch.cuda.memory_allocated()
                self._batches = itertools.cycle([self._task.batch() for _ in range(_BATCHES)])
                # The batches' memory is left out, because a script does not hold several batches.
                before += torch.cuda.memory_allocated()
        finally:
            torch.set_default_dtype(dtype)
        options = {"lr": torch_tasks.LEARNING_RATE, "weight_decay": torch_tasks.WEIGHT_DECAY}
        self._optimizer = kit.optimizer(self._task.parameters, **options) if self._task.trains else None
        self._cost = self._task.cost if mode is None else torch.compile(self._task.cost, mode=mode, dynamic=False)
        # `ltt.capture` captures every library's step, so that captured contenders differ only in their models' work.
        self._captured = ltt.capture(self._step, tune=True)
        self.losses = [self.graph()]  # the first call of a captured step is eager, and tunes the layers
        self._own = torch.cuda.memory_allocated() - before
        self.memory = self._peak_of_next_step()

    def eager(self) -> Any:
        """Makes an eager training step."""
        return self._step(*next(self._batches))

    def graph(self) -> Any:
        """Makes a training step by the graph, or an eager one if there is no graph yet."""
        return self._captured(*next(self._batches))

    def capture(self) -> int:
        """Captures a step, and takes the rest of the first steps; returns the peak bytes of the capture."""
        torch.cuda.empty_cache()
        memory = self._peak_of_next_step()
        # A call stays eager if torch.compile was used since the last call.
        while torch.cuda.is_available() and not self._captured.graphs:
            memory = self._peak_of_next_step()
        while len(self.losses) < self._case.steps:
            self.losses.append(self.graph())
        return memory

    def _step(self, *batch: Any) -> Any:
        for each in self._task.parameters:
            each.grad = None
        loss = self._cost(*batch)
        loss.backward(self._task.gradient)
        if self._optimizer is not None:
            self._optimizer.step()
        return loss

    def _peak_of_next_step(self) -> int:
        others = torch.cuda.memory_allocated() - self._own
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.losses.append(self.graph())
        return int(torch.cuda.max_memory_allocated()) - others


class Way(NamedTuple):
    """A way to build contenders: the library, and the mode of torch.compile (None: not compiled)."""

    library: str
    mode: str | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """The beginning of the contenders' names."""
        return self.library + {None: "", "default": "_compile", AUTOTUNE: "_max_autotune"}[self.mode]

    @property
    def eager(self) -> str:
        """Name of the contender whose steps Python launches."""
        return self.name if self.mode else f"{self.name}_eager"

    @property
    def graph(self) -> str:
        """Name of the contender whose steps are launches of a graph."""
        return f"{self.name}_graph"


def measure(case: TorchCase, options: argparse.Namespace) -> Row:
    """Builds the contenders of a case, makes their first steps, and times them alternately."""
    torch.set_float32_matmul_precision("high")
    if not options.no_compile:
        torch._dynamo.reset()
    names = {way: {way.eager} if case.is_host else {way.eager, way.graph} for way in _ways(case, options)}
    wanted = {each for found in names.values() for each in found if matches(options.contenders, each)}
    trainings, left_out = built({way: partial(Training, case, *way) for way, found in names.items() if found & wanted})
    captured, failed = built({way: each.capture for way, each in trainings.items() if way.graph in wanted})
    eager: dict[str, Call] = {way.eager: each.eager for way, each in trainings.items() if way.eager in wanted}
    calls = eager | {way.graph: trainings[way].graph for way in captured}
    turns, late = built({name: partial(_turn, case, call) for name, call in calls.items()})
    timings = take_turns(turns, options.rounds)
    sustained = {} if case.is_host else {name: _sustained(case, eager[name]) for name in turns if name in eager}
    memory = {way.eager: each.memory for way, each in trainings.items() if way.eager in eager}
    memory |= {way.graph: peak for way, peak in captured.items()}
    losses = {way.name: [round(float(loss.mean()), 5) for loss in each.losses] for way, each in trainings.items()}
    setting = {"task": case.task, "sizes": dict(case.sizes), "type": case.dtype, "rounds": options.rounds}
    setting |= {"memory_bytes": memory, "losses": losses, "sustained_us": sustained}
    setting |= {"threads": sorted(each.name for each in threading.enumerate())}
    told = {way.name: why for way, why in left_out.items()} | {way.graph: why for way, why in failed.items()}
    return Row(case.name, timings, case.ours, setting=setting, left_out=told | late)


def _ways(case: TorchCase, options: argparse.Namespace) -> list[Way]:
    """All ways to build contenders of a case."""
    if case.is_host:
        return [*map(Way, case.libraries)]
    best = [Way("torch", AUTOTUNE)] if options.max_autotune and "torch" in case.libraries else []
    return [*(Way(each, mode) for each in case.libraries for mode in _MODES[: 1 if options.no_compile else 2]), *best]


def _turn(case: TorchCase, call: Call) -> Turn:
    """Times calls by the wall clock: the host's time alone, or whole steps, as many as take about `_TURN_US`."""
    device = torch.get_device_module(case.device)
    if case.is_host:
        return HostTurn(call, _HOST_CALLS, device.synchronize)
    calls = partial(repeat, call)
    once = min(timed_calls(calls, 1, device)() for _ in range(2))
    return timed_calls(calls, min(math.ceil(_TURN_US / once), _MOST_CALLS), device)


def _sustained(case: TorchCase, call: Call) -> float:
    """The time (µs) of a step that Python launches, as in a long training: the contender runs alone until it settles.

    While addresses repeat, the package captures calls as graphs, a few in each second. In turns with other contenders
    addresses seldom repeat, because the others use PyTorch's allocator too.
    """
    device = torch.get_device_module(case.device)
    calls = partial(repeat, call)
    steps = max(1, round(_SUSTAINED_S * 1e6 / timed_calls(calls, 2, device)()))
    turn, times = timed_calls(calls, steps, device), list[float]()
    gc.collect()
    gc.freeze()  # A script has no other contenders' objects, which the garbage collector would search in every step.
    while len(times) < _MOST_TURNS and not _are_settled(times):
        times.append(turn())
    gc.unfreeze()
    return round(statistics.median(times[-_SETTLED:]), 4)


def _are_settled(times: list[float]) -> bool:
    """Whether no recent time is shorter by more than 2 % than the shortest time before."""
    return len(times) > _SETTLED and min(times[-_SETTLED:]) > 0.98 * min(times[:-_SETTLED])
