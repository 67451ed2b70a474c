"""PyTorch's side of a training step; the import fails where it is not installed."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
from cuda.bindings import driver
from torch.nn import functional

from benchmarks.block_torch import time_limit  # which lets products be TF32 as well
from benchmarks.kernel_torch import tensor
from benchmarks.step_cases import LEARNING_RATE, WEIGHT_DECAY, StepCase
from benchmarks.step_lt import Contender, Setup
from lt_runtime.gpu.driver import call

_WARM_UP: Final = 3  # steps before the capture, as its documentation asks for
_PREFIX: Final = "CU_GRAPH_NODE_TYPE_"

Cost = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def contender(setup: Setup, way: str | None, mode: str | None = None, seconds: float = 0.0) -> Contender:
    """A whole step in a graph: forward and loss, gradients by autograd, and the fused optimizer.

    Args:
        way: see `StepCase.ways`.
        mode: of torch.compile, which then makes forward, loss and their gradients; None runs PyTorch's own kernels.
        seconds: that compiling may take.

    Raises:
        TimeoutError: it takes longer.
    """
    outside = torch.cuda.ExternalStream(setup.stream.ptr)
    with torch.cuda.stream(outside):
        made = _Step(setup, way, mode)
        if mode is None:
            made.warm_up()
        else:
            with time_limit(seconds):
                made.warm_up()
    made.capture(outside)
    return made.contender(outside)


class _Step:
    """Parameters, optimizer, and buffers for a batch."""

    def __init__(self, setup: Setup, way: str | None, mode: str | None) -> None:
        self._given = tensor(setup.x), tensor(setup.target)
        self._buffers = tuple(each.clone() for each in self._given)
        network = _network(setup, torch.bfloat16 if way == "bf16" else torch.float32)
        self._optimizer = torch.optim.AdamW(
            network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True, capturable=True
        )
        self._cost = _cost(network, setup.case.loss, autocast=way == "autocast")
        if mode is not None:
            torch._dynamo.reset()
            self._cost = torch.compile(self._cost, mode=mode, dynamic=False)
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # whose nodes can be counted
        self._first_loss = float("nan")

    def _run(self) -> torch.Tensor:
        loss = self._cost(*self._buffers)
        with torch.autograd.set_multithreading_enabled(False):  # another thread would have no CUDA context yet
            loss.backward()
        self._optimizer.step()
        return loss.detach()

    def warm_up(self) -> None:
        """Some steps; afterwards there are no gradients, so that the capture overwrites its own and adds to none."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a capturable optimizer that is not captured
            losses = []
            for _ in range(_WARM_UP):
                losses.append(self._run())
                self._optimizer.zero_grad(set_to_none=True)
        self._first_loss = float(losses[0])
        torch.cuda.synchronize()

    def capture(self, stream: torch.cuda.Stream) -> None:
        """What a step launches, in memory of the graph's own."""
        with torch.cuda.graph(self._graph, stream=stream):
            self._loss = self._run()
        self._graph.instantiate()

    def contender(self, stream: torch.cuda.Stream) -> Contender:
        def replays(count: int) -> None:
            with torch.cuda.stream(stream):
                for _ in range(count):
                    self._graph.replay()

        def calls(count: int) -> None:
            with torch.cuda.stream(stream):
                for _ in range(count):
                    for buffer, given in zip(self._buffers, self._given, strict=True):
                        buffer.copy_(given)
                    self._graph.replay()

        return Contender(replays, calls, self._first_loss, _nodes(self._graph))


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
        # No cache of casted weights: each is read by one layer, and what a capture has made must not outlive it.
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast, cache_enabled=False):
            return of_outputs(network(x), target)

    return cost


def _nodes(graph: Any) -> dict[str, int]:
    """The nodes of a graph by kind."""
    raw = driver.CUgraph(int(graph.raw_cuda_graph()))
    _, count = call("cuGraphGetNodes", raw, 0)
    found, _ = call("cuGraphGetNodes", raw, count)
    kinds = (call("cuGraphNodeGetType", node).name.removeprefix(_PREFIX).lower() for node in found)
    return dict(Counter(kinds))
