"""Every way to split a layer, and to chain two, gives the same results on the GPU: those of the reference."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import cupy as cp
import numpy as np
import pytest
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.errors import PlanError
from lt_runtime.gpu.graphs import Graph
from lt_runtime.kernels.call import Call
from lt_runtime.layout import packed
from lt_runtime.plans.layers import BackwardPlan, ForwardPlan
from lt_runtime.plans.strategies import (
    BackwardStrategy,
    ForwardStrategy,
    MadeBy,
    backward_strategies,
    forward_strategies,
    unchanged,
)
from lt_runtime.problem import Activation, BackwardProblem, Compute, Derivative, DType, ForwardProblem, Saved, Spec
from lt_runtime.products.methods import heuristic_algorithm
from tests.host_kernels.arrays import assert_close
from tests.support.calls import call_of
from tests.support.gpu_arrays import EPSILON, to_host
from tests.support.strategies import lattice

Array = NDArray[Any]

SHAPES = [(32, 64, 48), (65, 43, 21), (256, 512, 784), (128, 8, 16)]
_STEEPEST = 1.2


class Block:
    """Two layers, K -> N -> K, with an activation after the first layer alone, and the reference's results for them."""

    def __init__(self, shape: tuple[int, int, int], activation: str, dtype: DType) -> None:
        m, n, k = self.shape = shape
        self.activation, self.dtype = Activation(activation), dtype
        generator = np.random.default_rng(sum(shape))
        sizes = {"x": (m, k), "w1": (n, k), "b1": (n,), "w2": (k, n), "dy": (m, k)}
        self.host: dict[str, Array] = {name: lattice(generator, size, dtype) for name, size in sizes.items()}
        self.gpu = {name: cp.asarray(values) for name, values in self.host.items()}
        x, w1, b1 = (self.host[name] for name in ("x", "w1", "b1"))
        self.y, self.z = reference.linear_fwd(x, w1, b1, self.activation)

    def spec(self, name: str) -> Spec:
        return Spec(packed(*self.host[name].shape))

    @property
    def hidden(self) -> Spec:
        return Spec(packed(*self.shape[:2]))

    @property
    def forward(self) -> ForwardProblem:
        specs = self.spec("x"), self.spec("w1"), self.hidden
        return ForwardProblem(self.dtype, Compute.FLOAT32, self.activation, *specs, 256, backward=True)

    def backward(self, plan: ForwardPlan) -> BackwardProblem:
        """Backward problems of the second layer that continue through the first layer's activation."""
        saved = plan.kept_spec if plan.strategy.saved in (Saved.MASK, Saved.PREACTIVATION) else self.hidden
        below = Derivative(
            self.activation, plan.strategy.saved, None if plan.strategy.saved is Saved.NOTHING else saved, 256
        )
        specs = self.hidden, self.spec("w2"), self.spec("dy")
        return BackwardProblem(
            self.dtype, Compute.FLOAT32, *specs, unchanged(256), self.hidden, self.spec("w2"), input_derivative=below
        )

    def run_forward(self, plan: ForwardPlan) -> tuple[Any, Any]:
        y, kept = cp.full(self.shape[:2], cp.nan, self.dtype.numpy), _kept(plan)
        x, w, bias = (int(self.gpu[name].data.ptr) for name in ("x", "w1", "b1"))
        plan.run(Call((x, w, bias, y.data.ptr, kept.data.ptr, 0), 0))
        return y, kept

    def run_backward(
        self, plan: BackwardPlan, y: Any, kept: Any, stream: int = 0, into: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        n, k = self.shape[1:]
        sizes = {"dx": self.shape[:2], "dw": (k, n), "db": (k,), "db_below": (n,)}
        made = into or {name: cp.full(size, cp.nan, self.dtype.numpy) for name, size in sizes.items()}
        saved = y if plan.problem.input_derivative and plan.problem.input_derivative.saved is Saved.OUTPUT else kept
        addresses = {name: array.data.ptr for name, array in made.items()}
        inputs = {"dy": self.gpu["dy"], "x": y, "w": self.gpu["w2"], "saved_below": saved}
        addresses |= {name: array.data.ptr for name, array in inputs.items()}
        plan.run(call_of(plan.problem, stream, **addresses))
        return made

    def check_forward(self, y: Any) -> None:
        epsilon = 2 * EPSILON[self.dtype]
        tolerance = epsilon * (np.abs(self.y) + _STEEPEST * np.abs(self.z)) + 2e-5 * np.abs(self.z) + 1e-6
        assert_close("y", to_host(y), self.y, tolerance)

    def check_backward(self, made: dict[str, Any], y: Any) -> None:
        """The derivative is computed from the rounded y; the bound includes the rounding of dx before and after the
        derivative.
        """
        dy, w2 = (self.host[name].astype(np.float64) for name in ("dy", "w2"))
        exact = reference.linear_bwd(dy, to_host(y), w2, dy)
        dz = reference.through_activation(exact.dx, self.z, self.activation)
        epsilon, below = 4 * EPSILON[self.dtype], np.abs(exact.dx)
        near_zero = 8 * EPSILON[self.dtype] * below * np.abs(self.z) + 2e-5 * below
        if self.activation.name == "relu":
            near_zero += below * (self.z == 0)  # at 0, where ReLU has no derivative, cuBLASLt's mask is 1
        tolerance = epsilon * (np.abs(dz) + _STEEPEST * below) + near_zero + 1e-6
        assert_close("dz_below", to_host(made["dx"]), dz, tolerance)
        assert_close("dw", to_host(made["dw"]), exact.dw, epsilon * np.abs(exact.dw) + 2e-5 * np.abs(exact.dw).max())
        assert_close("db", to_host(made["db"]), exact.db, epsilon * np.abs(exact.db) + 1e-5)
        summed = tolerance.sum(axis=0) + epsilon * np.abs(dz.sum(axis=0))
        assert_close("db_below", to_host(made["db_below"]), dz.sum(axis=0), summed)


def _kept(plan: ForwardPlan) -> Any:
    if plan.kept_spec is None:
        return cp.empty(1, np.uint8)
    layout, in_bits = plan.kept_spec.layout, plan.strategy.saved is Saved.MASK
    size = layout.rows * layout.leading_dimension // (8 if in_bits else 1)
    return cp.zeros(size, np.uint8 if in_bits else plan.problem.dtype.numpy)


def forward_plans(problem: ForwardProblem) -> Iterator[ForwardPlan]:
    for strategy in forward_strategies(problem):
        try:
            yield ForwardPlan(problem, 0, strategy, heuristic_algorithm)
        except PlanError:
            assert strategy.epilogue.value != "none"  # cuBLASLt may refuse any strategy but this one


def backward_plans(problem: BackwardProblem) -> Iterator[BackwardPlan]:
    for strategy in backward_strategies(problem):
        try:
            yield BackwardPlan(problem, 0, strategy, heuristic_algorithm)
        except PlanError:
            assert MadeBy.EPILOGUE in (strategy.db, strategy.derivative)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh", "none"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16])
def test_every_strategy(shape: tuple[int, int, int], activation: str, dtype: DType) -> None:
    block = Block(shape, activation, dtype)
    plans = list(forward_plans(block.forward))
    assert plans
    for forward in plans:
        y, kept = block.run_forward(forward)
        block.check_forward(y)
        for backward in backward_plans(block.backward(forward)):
            block.check_backward(block.run_backward(backward, y, kept), y)


def test_a_branch_of_a_graph_gives_the_same() -> None:
    block = Block((256, 512, 784), "gelu", DType.BFLOAT16)
    forward = next(forward_plans(block.forward))
    y, kept = block.run_forward(forward)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    for plan in backward_plans(block.backward(forward)):
        if not plan.strategy.dw_concurrent:
            continue
        eager = block.run_backward(plan, y, kept)
        # The first call allocates the memory of the stream and of its branch.
        made = block.run_backward(plan, y, kept, stream.ptr)
        stream.synchronize()
        for array in made.values():
            array.fill(cp.nan)
        cp.cuda.Device().synchronize()
        with Graph(partial(block.run_backward, plan, y, kept, into=made), stream.ptr) as graph:
            for _ in range(20):
                graph.launch(stream.ptr)
            stream.synchronize()
        for name, array in eager.items():
            np.testing.assert_array_equal(to_host(made[name]), to_host(array), err_msg=name)


def test_the_library_does_all_of_it_somewhere() -> None:
    """For every kind of result, `test_every_strategy` runs a strategy in which a cuBLASLt epilogue computes it."""
    used: set[ForwardStrategy | BackwardStrategy] = set()
    for activation in ("relu", "gelu"):
        block = Block((256, 512, 784), activation, DType.BFLOAT16)
        for forward in forward_plans(block.forward):
            used |= {forward.strategy, *(each.strategy for each in backward_plans(block.backward(forward)))}
    made = {maker for each in used if isinstance(each, BackwardStrategy) for maker in (each.db, each.derivative)}
    assert made == {MadeBy.KERNEL, MadeBy.EPILOGUE}
    saved = {each.saved for each in used if isinstance(each, ForwardStrategy)}
    assert saved == {Saved.OUTPUT, Saved.MASK, Saved.PREACTIVATION}
