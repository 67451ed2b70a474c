"""PyTorch's side of the kernels' suite; the import fails where it is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy as cp
import torch

from benchmarks import cases
from benchmarks.buffers import Sets, normal
from benchmarks.graphs import Contender, capture_torch
from lt_runtime.problem import DType

_aten = torch.ops.aten


def tensor(array: Any) -> torch.Tensor:
    """The same memory as a tensor; BF16 goes by way of integers, which every version exchanges."""
    if array.dtype == DType.BFLOAT16.numpy:
        return torch.from_dlpack(array.view(cp.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def _over(sets: list[tuple[torch.Tensor, ...]], task: Callable[..., object]) -> Contender:
    """The task on each set's tensors; the stream that is captured is the current one."""
    return Contender(lambda i, _: task(*sets[i]), capture_torch)


def _inputs(buffers: Sets, count: int) -> list[tuple[torch.Tensor, ...]]:
    """The first arrays of each set; PyTorch makes its own results."""
    return [tuple(tensor(array) for array in arrays[:count]) for arrays in buffers]


def gelu_backward(buffers: Sets) -> Contender:
    """dz alone."""
    return _over(_inputs(buffers, 2), lambda dy, z: _aten.gelu_backward(dy, z, approximate="tanh"))


def epilogue_backward(case: cases.EpilogueBackward, buffers: Sets) -> Contender:
    """dz, and its column sums as the bias gradient."""

    def task(dy: torch.Tensor, z: torch.Tensor) -> object:
        dz = _aten.gelu_backward(dy, z, approximate="tanh")
        return dz, dz.sum(0)

    def task_with_dropout(dy: torch.Tensor, z: torch.Tensor, mask: torch.Tensor) -> object:
        return task(_aten.native_dropout_backward(dy, mask, 1 / (1 - case.dropout)), z)

    inputs = _inputs(buffers, 2)
    if not case.dropout:
        return _over(inputs, task)
    return _over([(dy, z, torch.rand_like(dy) >= case.dropout) for dy, z in inputs], task_with_dropout)


def epilogue_forward(case: cases.EpilogueForward, buffers: Sets) -> Contender:
    """GELU, then dropout, which stores its mask."""

    def task(z: torch.Tensor) -> object:
        return torch.native_dropout(torch.nn.functional.gelu(z, approximate="tanh"), case.dropout, True)

    return _over(_inputs(buffers, 1), task)


def dropout(case: cases.Dropout, buffers: Sets) -> Contender:
    """What F.dropout and its derivative run: the mask is stored, a byte an element."""

    def task(x: torch.Tensor, dy: torch.Tensor) -> object:
        y, mask = torch.native_dropout(x, case.p, True)
        return y, mask, _aten.native_dropout_backward(dy, mask, 1 / (1 - case.p))

    return _over(_inputs(buffers, 2), task)


def _parameters(case: cases.AdamWStep) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(tensor(normal(shape, DType.FLOAT32))) for shape in case.shapes]
    for parameter in made:
        parameter.grad = tensor(normal(tuple(parameter.shape), DType.FLOAT32))
    return made


def adamw(case: cases.AdamWStep) -> Contender:
    """The fused optimizer in FP32.

    With a low-precision copy of the parameters, what a script does around it: gradients to FP32, clipping, the step,
    and parameters back.
    """
    parameters = _parameters(case)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True, capturable=True)
    if case.dtype is DType.FLOAT32:
        return Contender(lambda *_: optimizer.step(), capture_torch)
    copies = [tensor(normal(shape, case.dtype)) for shape in case.shapes]
    gradients = [tensor(normal(shape, case.dtype)) for shape in case.shapes]

    def run(*_: int) -> None:
        torch._foreach_copy_([parameter.grad for parameter in parameters], gradients)
        if case.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, case.max_norm, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(copies, parameters)

    return Contender(run, capture_torch)


def cross_entropy(buffers: Sets, targets: Any) -> Contender:
    """F.cross_entropy and its gradient through autograd."""
    labels = tensor(targets)

    def task(logits: torch.Tensor) -> object:
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return loss.detach(), *torch.autograd.grad(loss, logits)

    return _over([(logits.requires_grad_(),) for (logits,) in _inputs(buffers, 1)], task)


def log_softmax_gradient(buffers: Sets, targets: Any) -> Contender:
    """The same by hand, from log_softmax: autograd would write the gradient of log_softmax's output as well."""
    labels = tensor(targets)[:, None]
    minus_one = torch.full(labels.shape, -1.0, device="cuda", dtype=torch.bfloat16)

    def task(logits: torch.Tensor) -> object:
        log_p = torch.log_softmax(logits, 1)
        loss = -log_p.gather(1, labels).mean()
        return loss, log_p.exp_().scatter_add_(1, labels, minus_one).mul_(1 / len(labels))

    return _over(_inputs(buffers, 1), task)
