"""The variants that plans of linear layers ask for are those that the compile matrix compiles, no more and no less."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lt_runtime.gpu.devices import DeviceInfo
from lt_runtime.kernels import kernel as kernels
from lt_runtime.kernels import tiling
from lt_runtime.kernels.kernel import SCALAR
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.plans.layers import BackwardPlan, ForwardPlan
from lt_runtime.plans.strategies import backward_strategies, forward_strategies, kept_spec, unchanged
from lt_runtime.problem import (
    ACTIVATIONS,
    Activation,
    BackwardProblem,
    Compute,
    Derivative,
    DType,
    ForwardProblem,
    MatmulProblem,
    Saved,
    Spec,
)
from lt_runtime.products.matmul import MatmulPlan
from tests.compile_matrix import VARIANTS
from tests.support.kernel_usage import Variant

WHOLE, ODD, FLAT = (Spec(packed(16, cols)) for cols in (72, 13, 71))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[Variant]:
    """Collects the kernel variants that plans request from the runtime."""
    seen: set[Variant] = set()
    monkeypatch.setattr(kernels, "get_kernel", lambda entry, macros, _: seen.add(Variant(entry.source, macros)))
    monkeypatch.setattr(tiling, "device_info", lambda _: DeviceInfo(0, "", 90, multiprocessors=132, memory=0))
    return seen


def _no_product(problem: MatmulProblem, device: int) -> MatmulPlan:
    """Stands in for the search for a cuBLASLt algorithm, on whose answers the variants of our kernels do not depend."""
    return object.__new__(MatmulPlan)


def _forward_problems() -> Iterator[ForwardProblem]:
    for dtype, name, y, bias, keeps, dropout, backward, adds in itertools.product(
        SCALAR, ACTIVATIONS, (WHOLE, ODD, FLAT), (None, 256), *[(False, True)] * 4
    ):
        w = Spec(packed(y.layout.cols, 8))
        yield ForwardProblem(
            dtype,
            Compute.FLOAT32,
            Activation(name),
            Spec(packed(16, 8)),
            w,
            y,
            bias=bias,
            preactivation=y if keeps else None,
            dropout=dropout,
            backward=backward,
            addend=y if adds else None,
        )


def _derivatives() -> Iterator[tuple[DType, Spec, Derivative]]:
    """Yields the derivatives that backward computes: from the tensor that each forward problem and strategy saves, and
    from a pre-activation, which callers that pass raw pointers keep.
    """
    for problem in filter(lambda each: each.backward, _forward_problems()):
        for strategy in forward_strategies(problem):
            spec = problem.y if strategy.saved is Saved.OUTPUT else kept_spec(problem, strategy.saved)
            saved_spec = None if strategy.saved is Saved.NOTHING else spec
            made = Derivative(problem.activation, strategy.saved, saved_spec, problem.bias, problem.dropout)
            yield problem.dtype, problem.y, made
        if problem.activation.name != "none" and not problem.dropout:
            raw = Derivative(problem.activation, Saved.PREACTIVATION, problem.y, problem.bias)
            yield problem.dtype, problem.y, raw


def _backward_problems() -> Iterator[BackwardProblem]:
    """Yields problems that need the kernel that multiplies by an activation's derivative.

    The kernel multiplies dy by the derivative of the layer's own activation, without a product, and writes dz in either
    layout or not at all; or, after the product, it multiplies dx by the derivative of the lower layer's activation.
    """
    for dtype, y, derivative in _derivatives():
        x, w = Spec(packed(16, 8)), Spec(packed(y.layout.cols, 8))
        alone = BackwardProblem(dtype, Compute.FLOAT32, x, w, y, derivative, None, None)
        yield from (replace(alone, dz=dz) for dz in (None, y, _column_major(y)))
        through = replace(alone, x=y, w=Spec(packed(8, y.layout.cols)), dy=x, output_derivative=unchanged(None), dx=y)
        yield replace(through, input_derivative=derivative)


def _column_major(spec: Spec) -> Spec:
    return Spec(Layout(*spec.layout.shape, Order.COLUMN, spec.layout.rows))


def _compiled(source: str) -> set[Variant]:
    return {variant for variant in VARIANTS if variant.source == source}


def test_forward(asked: set[Variant]) -> None:
    for problem in _forward_problems():
        for strategy in forward_strategies(problem):
            ForwardPlan(problem, 0, strategy, _no_product)
    assert asked == _compiled("epilogue_fwd.cu")


def test_backward(asked: set[Variant]) -> None:
    for problem in _backward_problems():
        for strategy in backward_strategies(problem):
            BackwardPlan(problem, 0, strategy, _no_product)
    assert asked == _compiled("epilogue_bwd.cu")
