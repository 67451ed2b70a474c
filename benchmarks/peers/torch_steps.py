"""PyTorch's and torchao's contenders in the suites that measure training steps."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch

from benchmarks.peers.torch_kernels import tensor
from benchmarks.peers.torch_networks import LOSSES, network
from benchmarks.steps import LEARNING_RATE, WEIGHT_DECAY, Setup, StepContender

_WARM_UP: Final = 3  # steps that run before the capture, as PyTorch's documentation asks

Cost = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def contender(setup: Setup, way: str | None, *, compiled: str | None = None, recipe: Any = None) -> StepContender:
    """A whole step in a graph: forward and loss, gradients by autograd, and the fused optimizer.

    Args:
        way: see `StepCase.ways`.
        compiled: the mode in which torch.compile makes forward, loss and their gradients; None to run them eagerly.
        recipe: the recipe of torchao's by which linear layers compute in FP8; None for PyTorch's own layers.
    """
    outside = torch.cuda.ExternalStream(setup.stream.ptr)
    with torch.cuda.stream(outside):
        # A product makes cuBLAS allocate the stream's workspace before the capture.
        torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))
        before = torch.cuda.memory_allocated()
        made = _Step(setup, way, compiled, recipe)
        made.warm_up()
    torch.cuda.reset_peak_memory_stats()
    made.capture(outside)
    return made.contender(outside, torch.cuda.max_memory_allocated() - before)


class _Step:
    """A training step of PyTorch's, with its parameters, its optimizer, and buffers for a batch."""

    def __init__(self, setup: Setup, way: str | None, compiled: str | None, recipe: str | None) -> None:
        self._given = itertools.cycle([(tensor(x), tensor(target)) for x, target in setup.batches])
        self._buffers = tuple(tensor(each).clone() for each in (setup.x, setup.target))
        made = _network(setup, torch.bfloat16 if way == "bf16" else torch.float32, recipe)
        options: Any = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "fused": True, "capturable": True}
        self._optimizer = torch.optim.AdamW(made.parameters(), **options)
        self._cost = _cost(made, setup.case.loss, autocast=way == "autocast")
        self._parameters, self._decay, self._average = [*made.parameters()], setup.case.decay, _average
        self._averages = [] if self._decay is None else [_copy(each) for each in self._parameters]
        if compiled is not None:
            torch._dynamo.reset()
            self._cost = torch.compile(self._cost, mode=compiled, dynamic=False)
            self._average = torch.compile(_average, mode=compiled, dynamic=False)
        self._graph = torch.cuda.CUDAGraph()
        self._first_loss = float("nan")

    def _run(self) -> torch.Tensor:
        loss = self._cost(*self._buffers)
        # Backward runs in this thread, because a thread of autograd's would have no CUDA context.
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        self._optimizer.step()
        if self._decay is not None:
            self._average(self._averages, self._parameters, self._decay)
        return loss.detach()

    def warm_up(self) -> None:
        """Makes some steps and drops their gradients, so that the captured step writes its gradients anew."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns about an optimizer that is capturable but not captured.
            losses = []
            for _ in range(_WARM_UP):
                losses.append(self._run())
                self._optimizer.zero_grad(set_to_none=True)
        self._first_loss = float(losses[0])
        torch.cuda.synchronize()

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Captures one step, whose results lie in the graph's memory."""
        with torch.cuda.graph(self._graph, stream=stream):
            self._loss = self._run()

    def contender(self, stream: torch.cuda.Stream, memory: int) -> StepContender:
        """Wraps the captured step as a contender."""

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

        return StepContender(replays, calls, self._first_loss, memory)


def _network(setup: Setup, dtype: torch.dtype, recipe: str | None) -> torch.nn.Module:
    """The model of the case, with the initial values of ours; with a recipe, its linear layers compute in FP8."""
    made = network(setup.case, device="cuda", dtype=dtype)
    with torch.no_grad():
        for parameter, values in zip(made.parameters(), setup.values, strict=True):
            parameter.copy_(tensor(values))
    if recipe is None:
        return made
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(made, config=Float8LinearConfig.from_recipe_name(recipe))


def _copy(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to(torch.float32, copy=True)


@torch.no_grad()
def _average(averages: list[torch.Tensor], parameters: list[torch.Tensor], decay: float) -> None:
    """Updates FP32 moving averages of the parameters."""
    for average, parameter in zip(averages, parameters, strict=True):
        average.mul_(decay).add_(parameter, alpha=1 - decay)


def _cost(network: torch.nn.Module, loss: str, *, autocast: bool) -> Cost:
    """A function of inputs and targets that runs forward and loss."""
    of_outputs = LOSSES[loss]

    def cost(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        # Autocast's cache of cast weights is off: each weight is read by only one layer, and a tensor of a capture must
        # not outlive it.
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast, cache_enabled=False):
            return of_outputs(network(x), target)

    return cost
