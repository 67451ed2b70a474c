"""ReLU's mask as cuBLASLt writes it, and as our kernel and cuBLASLt itself read it."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
import pytest
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels.call import Call
from lt_runtime.layout import packed
from lt_runtime.plans.layers import BackwardPlan, ForwardPlan
from lt_runtime.plans.strategies import BackwardStrategy, ForwardStrategy, MadeBy, unchanged
from lt_runtime.problem import Activation, BackwardProblem, Compute, Derivative, DType, ForwardProblem, Saved, Spec
from lt_runtime.products.methods import Choose, NarrowPlan, heuristic_algorithm
from tests.support.calls import call_of
from tests.support.gpu_arrays import to_host
from tests.support.strategies import TYPES, lattice

SHAPES = [(96, 512, 64), (40, 200, 32), (33, 72, 24), (17, 130, 8), (7, 9, 5)]
"""Sizes M, N and K of the tested layers.

The sizes are such that a row of a layer's mask ends at a multiple of 16 bytes, at a byte, or within a byte.
"""
CASES = [
    (dtype, shape)
    for dtype in TYPES
    for shape in SHAPES
    if dtype is DType.FLOAT32 or all(extent % 8 == 0 for extent in shape[1:])
]
"""For 16-bit types with ragged rows the package does not use cuBLASLt's epilogues, see `MatmulPlan`."""


def spec(*shape: int) -> Spec:
    return Spec(packed(*shape))


def slopes(mask: Any, columns: int) -> NDArray[np.float64]:
    """Unpacks a mask: ReLU's derivative, (M, columns), which is 1 where the mask has a bit set and otherwise 0."""
    return reference.unpack_mask(cp.asnumpy(mask), columns).astype(np.float64)


class Layer:
    """A layer relu(x · wᵀ + bias) of numbers whose products are exact in every type; many results are zero."""

    def __init__(self, dtype: DType, shape: tuple[int, int, int]) -> None:
        self.shape, self.dtype = shape, dtype
        m, n, k = shape
        generator = np.random.default_rng(n)
        x, w, bias = (lattice(generator, each, dtype) for each in ((m, k), (n, k), (n,)))
        self.operands = [cp.asarray(each) for each in (x, w, bias)]
        self.z = x.astype(np.float64) @ w.astype(np.float64).T + bias.astype(np.float64)
        problem = ForwardProblem(
            dtype, Compute.FLOAT32, Activation("relu"), spec(m, k), spec(n, k), spec(m, n), bias=256, backward=True
        )
        strategy = ForwardStrategy(Epilogue.RELU_AUX_BIAS, Saved.MASK)
        self.plan = ForwardPlan(problem, 0, strategy, heuristic_algorithm)

    def run(self) -> tuple[Any, Any]:
        """Runs cuBLASLt's ReLU epilogue.

        Returns y and the mask, in which a bit may be set where the pre-activation is zero.
        """
        m, n, _ = self.shape
        assert self.plan.kept_spec is not None
        y = cp.empty((m, n), self.dtype.numpy)
        mask = cp.full((m, self.plan.kept_spec.layout.leading_dimension // 8), 0xFF, cp.uint8)
        addresses = [each.data.ptr for each in (*self.operands, y, mask)]
        self.plan.run(Call((*addresses, 0), cp.cuda.get_current_stream().ptr))
        return y, mask


@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_the_library_writes_the_reference_s_mask(dtype: DType, shape: tuple[int, int, int]) -> None:
    layer = Layer(dtype, shape)
    y, mask = layer.run()
    np.testing.assert_array_equal(to_host(y) > 0, layer.z > 0)
    np.testing.assert_array_equal(slopes(mask, shape[1]).astype(bool)[layer.z != 0], (layer.z > 0)[layer.z != 0])


@pytest.mark.parametrize(("dtype", "shape"), CASES)
@pytest.mark.parametrize("maker", [MadeBy.KERNEL, MadeBy.EPILOGUE])
@pytest.mark.parametrize("choose", [heuristic_algorithm, NarrowPlan])
def test_a_gradient_goes_through_it(dtype: DType, shape: tuple[int, int, int], maker: MadeBy, choose: Choose) -> None:
    """ReLU's derivative gives the same bits if it is applied to dy in place, by a kernel after the product of the layer
    above, or within that product.

    If cuBLASLt offers no algorithm, the default is our kernel.
    """
    outputs, layer, (m, n, _) = 16, Layer(dtype, shape), shape
    _, mask = layer.run()
    below = Derivative(Activation("relu"), Saved.MASK, layer.plan.kept_spec, db=256)
    specs = spec(m, n), spec(outputs, n), spec(m, outputs)
    gradients = {"dx": spec(m, n), "dw": None, "input_derivative": below}
    problem = BackwardProblem(dtype, Compute.FLOAT32, *specs, unchanged(None), **gradients)
    generator = np.random.default_rng(2)
    dy, w = lattice(generator, (m, outputs), dtype), lattice(generator, (outputs, n), dtype)
    arrays = [cp.asarray(each) for each in (dy, w)]
    dx, db = cp.empty((m, n), dtype.numpy), cp.empty(n, dtype.numpy)
    plan = BackwardPlan(problem, 0, BackwardStrategy(MadeBy.NOBODY, maker, maker), choose)
    at = {"dy": arrays[0], "w": arrays[1], "dx": dx, "saved_below": mask, "db_below": db}
    stream = cp.cuda.get_current_stream().ptr
    plan.run(call_of(problem, stream, **{name: each.data.ptr for name, each in at.items()}))
    expected = dy.astype(np.float64) @ w.astype(np.float64) * slopes(mask, n)
    np.testing.assert_array_equal(to_host(dx), expected)
    np.testing.assert_array_equal(to_host(db), expected.sum(axis=0).astype(dtype.numpy).astype(np.float64))
