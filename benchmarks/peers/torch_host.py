"""PyTorch's contenders in the suite `host`; each function returns a call."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from benchmarks.host import Layer
from benchmarks.peers import torch_kernels
from benchmarks.peers.torch_kernels import Shapes, tensor
from benchmarks.peers.torch_networks import layers
from benchmarks.timing import Call


def matmul(a: Any, b: Any, d: Any) -> Call:
    """A call of torch.matmul that writes into a given buffer."""
    x, y, out = tensor(a), tensor(b), tensor(d)
    torch.set_float32_matmul_precision("highest")  # as `lt.matmul`, whose default is not TF32
    return lambda: torch.matmul(x, y, out=out)


def matmul_linear(a: Any, b: Any, _: Any) -> Call:
    """A call of F.linear for the product alone, which allocates its result."""
    x, w = tensor(a), tensor(b).T
    return lambda: functional.linear(x, w)


def _operands(at: Layer, *, gradients: bool) -> tuple[torch.Tensor, ...]:
    return tuple(tensor(each).requires_grad_(gradients) for each in (at.x, at.w, at.bias))


def _gelu_of_linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.gelu(functional.linear(x, w, bias), approximate="tanh")


def linear_forward(at: Layer, *, gradients: bool = False) -> Call:
    """F.linear and F.gelu; with `gradients`, autograd records what backward needs, as `linear_fwd` does."""
    x, w, bias = _operands(at, gradients=gradients)
    return lambda: _gelu_of_linear(x, w, bias)


def linear_both(at: Layer) -> Call:
    """Forward, and backward by autograd, which runs in a thread of autograd's while the caller waits."""
    operands, dy = _operands(at, gradients=True), tensor(at.dy)
    return lambda: torch.autograd.grad(_gelu_of_linear(*operands), operands, dy)


def linear_both_one_thread(at: Layer) -> Call:
    """Forward, and all gradients by autograd in the calling thread."""
    call = linear_both(at)

    def in_one_thread() -> object:
        with torch.autograd.set_multithreading_enabled(False):
            return call()

    return in_one_thread


def adamw(shapes: Shapes) -> Call:
    """A step of PyTorch's fused AdamW with `capturable=True`."""
    run = torch_kernels.adamw(shapes).run
    return lambda: run(0, 0)


def replayed(name: str, *arguments: Any) -> Call:
    """Captures the call that this module's function `name` makes; returns the function that replays the graph."""
    graph = _captured(globals()[name](*arguments))
    return graph.replay


def train_step(dims: tuple[int, ...], x: Any, targets: Any) -> Call:
    """Copies the batch into the graph's buffers, and replays the graph of a whole training step."""
    inputs, wanted = tensor(x), tensor(targets)
    static_inputs, static_wanted = inputs.clone(), wanted.clone()
    model = layers(dims, "relu", device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True, capturable=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(static_inputs), static_wanted).backward()
        optimizer.step()

    graph = _captured(step)

    # The default argument keeps the model and the optimizer alive: the graph has only the addresses of their tensors.
    def call(_held: object = (model, optimizer)) -> None:
        static_inputs.copy_(inputs)
        static_wanted.copy_(wanted)
        graph.replay()

    return call


def _captured(step: Call) -> torch.cuda.CUDAGraph:
    """Captures `step` in a CUDA graph after a warm-up, as PyTorch's documentation says."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
