"""Our side of the kernels' suite: public calls where there are some, passes of a plan for the epilogues."""

from __future__ import annotations

from typing import Any

import cupy as cp

import lt_runtime as lt
from benchmarks import cases
from benchmarks.buffers import Sets, normal
from benchmarks.graphs import Contender, capture
from lt_runtime.gpu.memory import MAX_TICKETS
from lt_runtime.kernels.call import DropoutState
from lt_runtime.kernels.epilogue import BackwardPass, ForwardPass, Sums
from lt_runtime.layout import packed
from lt_runtime.problem import (
    Activation,
    Compute,
    Derivative,
    DType,
    ForwardProblem,
    Philox,
    Saved,
    Spec,
    keep_threshold,
)

_RNG = Philox(seed=20, layer=1, step=7)


def _state(p: float) -> DropoutState | None:
    return DropoutState(keep_threshold(p), _RNG) if p else None


def epilogue_backward(
    case: cases.EpilogueBackward, dropout: float, buffers: Sets, *, db: bool = True, transposed: bool = False
) -> Contender:
    """dz and db from dy and the pre-activation; dz transposed, through shared memory, on request."""
    spec = Spec(packed(case.rows, case.cols))
    dz_spec = Spec(packed(case.cols, case.rows)).transposed if transposed else spec
    derivative = Derivative(Activation("gelu"), Saved.PREACTIVATION, spec, dropout=dropout > 0)
    backward = BackwardPass(DType.BFLOAT16, derivative, spec, dz_spec, 0, sums=Sums() if db else None)
    state = _state(dropout)
    partial, sums = cp.empty(backward.partial_bytes, cp.uint8), cp.empty(case.cols, DType.BFLOAT16.numpy)
    tickets = cp.zeros(MAX_TICKETS, cp.uint32)

    def run(i: int, stream: int) -> None:
        dy, z, dz = (each.data.ptr for each in buffers[i])
        backward.run(dy, z, dz, sums.data.ptr, partial.data.ptr, tickets.data.ptr, state, stream)

    return Contender(run, capture)


def epilogue_forward(case: cases.EpilogueForward, buffers: Sets) -> Contender:
    """y from the pre-activation."""
    spec = Spec(packed(case.rows, case.cols))
    problem = ForwardProblem(
        dtype=DType.BFLOAT16,
        compute=Compute.FLOAT32,
        activation=Activation("gelu"),
        x=spec,
        w=spec,
        y=spec,
        dropout=True,
    )
    forward, state = ForwardPass(problem, 0, source=spec, adds_bias=False), _state(case.dropout)

    def run(i: int, stream: int) -> None:
        z, y = buffers[i]
        forward.run(z.data.ptr, 0, y.data.ptr, dropout=state, stream=stream)

    return Contender(run, capture)


def dropout(case: cases.Dropout, buffers: Sets) -> Contender:
    """Forward, then backward, which is the same call on the gradient."""

    def run(i: int, stream: int) -> None:
        x, dy, y, dx = buffers[i]
        lt.dropout(x, case.p, _RNG, out=y, stream=stream)
        lt.dropout(dy, case.p, _RNG, out=dx, stream=stream)

    return Contender(run, capture)


def adamw(case: cases.AdamWStep) -> Contender:
    """One step over all tensors."""
    parameters = [lt.Parameter(normal(shape, case.dtype), normal(shape, case.dtype)) for shape in case.shapes]
    clipping: dict[str, Any] = {} if case.max_norm is None else {"max_norm": case.max_norm}
    optimizer = lt.AdamW(parameters, lr=1e-5, **clipping)
    return Contender(lambda _, stream: optimizer.step(stream=stream), capture)


def cross_entropy(buffers: Sets, targets: Any) -> Contender:
    """Loss and gradient."""
    loss = cp.empty((), cp.float32)

    def run(i: int, stream: int) -> None:
        logits, gradient = buffers[i]
        lt.cross_entropy(logits, targets, out_gradient=gradient, out_loss=loss, stream=stream)

    return Contender(run, capture)
