"""PyTorch's contenders in the suite `steps`; and its profiler, which sees every kernel on the GPU, also ours."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
from cuda.bindings import driver
from torch.autograd import DeviceType
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from benchmarks.peers.torch_kernels import tensor
from benchmarks.peers.torch_layers import time_limit  # That module also lets products be TF32.
from benchmarks.steps import LEARNING_RATE, WEIGHT_DECAY, Setup, StepCase, StepContender, covered

_WARM_UP: Final = 3  # steps before the capture, as PyTorch's documentation asks for
_PREFIX: Final = "CU_GRAPH_NODE_TYPE_"
_PROFILED_STEPS: Final = 20

Cost = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def contender(setup: Setup, way: str | None, mode: str | None = None, seconds: float = 0.0) -> StepContender:
    """A whole step in a graph: forward and loss, gradients by autograd, and the fused optimizer.

    Args:
        way: see `StepCase.ways`.
        mode: of torch.compile, which then makes forward, loss and their gradients; None for PyTorch's own kernels.
        seconds: that compiling may take.

    Raises:
        TimeoutError: it takes longer.
    """
    outside = torch.cuda.ExternalStream(setup.stream.ptr)
    with torch.cuda.stream(outside):
        torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))  # makes the workspace of the stream
        before = torch.cuda.memory_allocated()
        made = _Step(setup, way, mode)
        if mode is None:
            made.warm_up()
        else:
            with time_limit(seconds):
                made.warm_up()
    torch.cuda.reset_peak_memory_stats()
    made.capture(outside)
    return made.contender(outside, torch.cuda.max_memory_allocated() - before)


class _Step:
    """Parameters, optimizer, and buffers for a batch."""

    def __init__(self, setup: Setup, way: str | None, mode: str | None) -> None:
        self._given = itertools.cycle([(tensor(x), tensor(target)) for x, target in setup.batches])
        self._buffers = tuple(tensor(each).clone() for each in (setup.x, setup.target))
        network = _network(setup, torch.bfloat16 if way == "bf16" else torch.float32)
        self._optimizer = torch.optim.AdamW(
            network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True, capturable=True
        )
        self._cost = _cost(network, setup.case.loss, autocast=way == "autocast")
        if mode is not None:
            torch._dynamo.reset()
            self._cost = torch.compile(self._cost, mode=mode, dynamic=False)
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # kept so that its nodes can be counted
        self._first_loss = float("nan")

    def _run(self) -> torch.Tensor:
        loss = self._cost(*self._buffers)
        with torch.autograd.set_multithreading_enabled(False):  # Another thread has no CUDA context yet.
            loss.backward()
        self._optimizer.step()
        return loss.detach()

    def warm_up(self) -> None:
        """Some steps. Afterwards there are no gradients, so that the captured step overwrites its own."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # A capturable optimizer that is not captured warns.
            losses = []
            for _ in range(_WARM_UP):
                losses.append(self._run())
                self._optimizer.zero_grad(set_to_none=True)
        self._first_loss = float(losses[0])
        torch.cuda.synchronize()

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Captures one step; its results lie in memory of the graph's own."""
        with torch.cuda.graph(self._graph, stream=stream):
            self._loss = self._run()
        self._graph.instantiate()

    def contender(self, stream: torch.cuda.Stream, memory: int) -> StepContender:
        """See `StepContender`."""

        def replays(count: int) -> None:
            with torch.cuda.stream(stream):
                for _ in range(count):
                    self._graph.replay()

        def calls(count: int) -> None:
            with torch.cuda.stream(stream):
                for batch in itertools.islice(self._given, count):
                    for buffer, given in zip(self._buffers, batch, strict=True):
                        buffer.copy_(given)
                    self._graph.replay()

        return StepContender(replays, calls, self._first_loss, _nodes(self._graph), memory)


def _network(setup: Setup, dtype: torch.dtype) -> torch.nn.Sequential:
    """Linear layers with activations between them, and our initial values."""
    case, layers = setup.case, list[torch.nn.Module]()
    for inputs, outputs in itertools.pairwise(case.dims):
        layers += [torch.nn.Linear(inputs, outputs, device="cuda", dtype=dtype), _activation(case)]
    network = torch.nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for parameter, values in zip(network.parameters(), setup.values, strict=True):
            parameter.copy_(tensor(values))
    return network


def _activation(case: StepCase) -> torch.nn.Module:
    return torch.nn.ReLU() if case.activation == "relu" else torch.nn.GELU(approximate="tanh")


def _cost(network: torch.nn.Module, loss: str, *, autocast: bool) -> Cost:
    """Forward and loss."""
    of_outputs = functional.cross_entropy if loss == "cross_entropy" else functional.mse_loss

    def cost(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        # No cache of cast weights: each is read by only one layer, and what is made in a capture must not outlive it.
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast, cache_enabled=False):
            return of_outputs(network(x), target)

    return cost


def _nodes(graph: Any) -> dict[str, int]:
    """The nodes of a graph by kind."""
    raw = driver.CUgraph(int(graph.raw_cuda_graph()))
    _, _, count = driver.cuGraphGetNodes(raw, 0)
    _, found, _ = driver.cuGraphGetNodes(raw, count)
    kinds = (driver.cuGraphNodeGetType(node)[1].name.removeprefix(_PREFIX).lower() for node in found)
    return dict(Counter(kinds))


def kernel_times(replays: Callable[[int], object]) -> dict[str, float]:
    """Microseconds of a profiled step: the sum of its kernels' times, the time in which any runs, and end to end.

    The last two differ by the gaps between kernels, and the first two by kernels that run side by side. Profiling
    makes the gaps longer.

    Args:
        replays: puts so many steps on the GPU.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        replays(_PROFILED_STEPS)
        torch.cuda.synchronize()
    events: Any = profiler.events()
    on_gpu = (each.time_range for each in events if each.device_type == DeviceType.CUDA)
    spans = sorted((each.start, each.end) for each in on_gpu)
    if not spans:
        raise RuntimeError("the profiler saw no kernels")
    times = {
        "sum": sum(end - start for start, end in spans),
        "busy": covered(spans),
        "step": max(end for _, end in spans) - spans[0][0],
    }
    return {name: round(us / _PROFILED_STEPS, 2) for name, us in times.items()}
