"""PyTorch's contenders in the suite `layers`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from benchmarks.layers import Arrays, Block
from benchmarks.peers.torch_kernels import capture, tensor
from benchmarks.timing import Contender

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Newer versions of PyTorch warn that this option has a new name.
    torch.backends.cuda.matmul.allow_tf32 = True

Inputs = tuple[torch.Tensor, ...]
Forward = Callable[..., torch.Tensor]


def eager(block: Block, buffers: list[Arrays]) -> Contender:
    """PyTorch's own kernels, with gradients by autograd."""
    return _contender(_forward(block), buffers)


def compiled(block: Block, buffers: list[Arrays], mode: str = "max-autotune-no-cudagraphs") -> Contender:
    """The block by torch.compile, by default at its greatest effort."""
    torch._dynamo.reset()
    return _contender(torch.compile(_forward(block), mode=mode, dynamic=False), buffers)


def _contender(forward: Forward, buffers: list[Arrays]) -> Contender:
    inputs = [_inputs(each) for each in buffers]
    return Contender(lambda i, _: _task(forward, *inputs[i]), capture)


def _task(forward: Forward, inputs: Inputs, dy: torch.Tensor) -> object:
    y = forward(*inputs)
    # A thread of autograd's would warn that it has no CUDA context.
    with torch.autograd.set_multithreading_enabled(False):
        return y.detach(), torch.autograd.grad(y, inputs, dy)


def _forward(block: Block) -> Forward:
    def activate(z: torch.Tensor) -> torch.Tensor:
        return torch.relu(z) if block.activation == "relu" else functional.gelu(z, approximate="tanh")

    def forward(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor) -> Any:
        return functional.linear(activate(functional.linear(x, w1, b1)), w2, b2)

    return forward


def _inputs(buffers: Arrays) -> tuple[Inputs, torch.Tensor]:
    operands = (buffers.x, buffers.w1, buffers.b1, buffers.w2, buffers.b2)
    return tuple(tensor(each).requires_grad_() for each in operands), tensor(buffers.dy)
