"""y = dropout(act(z + bias)) against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.gpu.params import EpilogueFwdParams, Matrix
from lt_runtime.problem import ACTIVATIONS, Activation, DType, keep_scale, keep_threshold
from lt_runtime.reference import activate
from tests.host_kernels.arrays import EPS32, Guarded, assert_close, numbers, rounding, vector
from tests.host_kernels.cases import (
    FEW,
    NO_DROPOUT,
    Drops,
    Shape,
    Tiling,
    drops,
    launch_shape,
    orders,
    seeds,
    shapes,
    tilings,
)
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.variants import F32, FORWARD_EPILOGUES, Epilogue
from tests.strategies import Placement, placements

SPECIAL = np.array([[np.nan, 0.0, -0.0, 40.0, -40.0, 1e-30, 300.0, -300.0, 1e30]], np.float32)


@dataclass(frozen=True)
class ForwardCase:
    shape: Shape
    bias: bool
    bias_offset: int
    kept: str  # the pre-activation: "absent", "apart", or "in place" of the product
    in_place: bool  # y over the product
    slope: float
    drops: Drops
    tiling: Tiling | None
    order: int
    product: Placement
    preactivation: Placement
    y: Placement
    seed: int


cases = st.builds(
    ForwardCase,
    shape=shapes,
    bias=st.booleans(),
    bias_offset=st.sampled_from((0, 0, 1, 3)),
    kept=st.sampled_from(("absent", "apart", "in place")),
    in_place=st.booleans(),
    slope=st.sampled_from((0.01, 0.25, 1.5, -0.5)),
    drops=drops,
    tiling=tilings,
    order=orders,
    product=placements,
    preactivation=placements,
    y=placements,
    seed=seeds,
)


@dataclass(frozen=True)
class Operands:
    product: Guarded
    bias: Guarded
    preactivation: Guarded | None
    y: Guarded

    @classmethod
    def of(cls, case: ForwardCase, dtype: DType) -> Operands:
        generator = np.random.default_rng(case.seed)
        product = Guarded(numbers(generator, case.shape, dtype), case.product)
        empty = np.zeros(case.shape)
        kept = {"absent": None, "in place": product}.get(case.kept, Guarded(empty, case.preactivation, dtype))
        over_product = case.in_place and case.kept != "in place"
        bias = vector(numbers(generator, case.shape[1:], dtype), dtype, case.bias_offset)
        return cls(product, bias, kept, product if over_product else Guarded(empty, case.y, dtype))


def launch(host: HostKernels, variant: Epilogue, case: ForwardCase, operands: Operands) -> None:
    state, step = case.drops.state()
    params = EpilogueFwdParams(
        in_=operands.product.matrix,
        preactivation=operands.preactivation.matrix if operands.preactivation else Matrix(),
        out=operands.y.matrix,
        bias=operands.bias.address if case.bias else 0,
        rows=case.shape[0],
        cols=case.shape[1],
        dropout=state.block() if variant.dropout else NO_DROPOUT,
        slope=case.slope,
    )
    grid, block = launch_shape(case.shape, case.tiling)
    host.get("epilogue_fwd", variant.macros).launch(grid, block, params, order=case.order)
    assert step[0] == case.drops.philox.step


@pytest.mark.parametrize("variant", FORWARD_EPILOGUES, ids=str)
@FEW
@given(case=cases)
def test_forward(host: HostKernels, variant: Epilogue, case: ForwardCase) -> None:
    dtype = variant.dtype
    operands = Operands.of(case, dtype)
    product: NDArray[Any] = operands.product.array.astype(np.float64)
    bias = operands.bias.array.astype(np.float64) if case.bias else np.zeros((1, case.shape[1]))
    launch(host, variant, case, operands)

    z = product + bias
    size = 1.0 + np.abs(product) + np.abs(bias)
    expected = activate(z, Activation(variant.activation, case.slope))
    scale = keep_scale(keep_threshold(case.drops.p)) if variant.dropout else 1.0
    if variant.dropout:
        expected = expected * case.drops.factors(case.shape)
    tolerance = rounding(dtype, expected) + 8 * EPS32 * scale * max(1.0, abs(case.slope)) * size
    assert_close("y", operands.y.values(), expected, tolerance)
    if operands.preactivation is not None:
        assert_close("z", operands.preactivation.values(), z, rounding(dtype, z) + EPS32 * size)
    operands.bias.assert_unchanged()
    if operands.product not in (operands.y, operands.preactivation):
        operands.product.assert_unchanged()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_special_values(host: HostKernels, name: str) -> None:
    x, y = Guarded(SPECIAL), Guarded(np.zeros_like(SPECIAL))
    cols = SPECIAL.shape[1]
    params = EpilogueFwdParams(x.matrix, Matrix(), y.matrix, 0, 1, cols, NO_DROPOUT, 0.25)
    host.get("epilogue_fwd", Epilogue(F32, name, dropout=False).macros).launch((1, 1), (2, 1), params)
    expected = activate(SPECIAL, Activation(name, 0.25))
    assert_close(name, y.values(), expected, 8 * EPS32 * np.abs(SPECIAL) + 1e-37)
