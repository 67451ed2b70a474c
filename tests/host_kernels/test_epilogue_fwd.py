"""The kernel of y = dropout(act(z + bias)) + addend, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.kernels import epilogue
from lt_runtime.kernels.epilogue import EPILOGUE_FWD, ForwardPass
from lt_runtime.kernels.kernel import Matrix
from lt_runtime.kernels.tiling import Access
from lt_runtime.layout import packed
from lt_runtime.problem import Activation, Compute, ForwardProblem, MatmulProblem, Spec, keep_scale, keep_threshold
from lt_runtime.reference import activate
from tests.host_kernels.arrays import EPS32, Guarded, assert_close, numbers, rounding, vector
from tests.host_kernels.build import Variant
from tests.host_kernels.cases import FEW, LAUNCH, NO_DROPOUT, Launch, suit_places, suit_shape
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.products import launching, spec_of
from tests.host_kernels.variants import F32, FORWARD_EPILOGUES, Forward
from tests.support.strategies import Placement, placements

UNUSED = Spec(packed(1, 1))
# special values in sixteen columns, a width that both the aligned and the scattered loads support
SPECIAL = np.array(
    [[np.nan, 0.0, -0.0, 40.0, -40.0, 1e-30, -1e-30, 300.0, -300.0, 1e15, -1e15, 1e30, -1e30, 3e38, -3e38, np.inf]],
    np.float32,
)


@dataclass(frozen=True, kw_only=True)
class ForwardCase(Launch):
    bias: bool
    bias_offset: int
    kept_in_place: bool  # the pre-activation overwrites the product
    product: Placement
    preactivation: Placement
    y: Placement
    addend: Placement
    over_addend: bool  # y overwrites the addend

    def suited(self, variant: Forward) -> ForwardCase:
        """Returns the case, changed as little as possible so that a kernel variant supports it."""
        is_aligned, is_flat = (variant.access is each for each in (Access.ALIGNED, Access.FLAT))
        shape = suit_shape(self.shape, aligned=is_aligned, flat=is_flat)
        # a matrix of another type cannot share the product's memory
        kept_in_place, in_place = (each and not variant.once for each in (self.kept_in_place, self.in_place))
        apart = [0, *([1] if variant.keeps and not kept_in_place else []), *([] if in_place else [2])]
        product, preactivation, y, addend = suit_places(
            variant.access,
            shape,
            (self.product, variant.product),
            (self.preactivation, variant.dtype),
            (self.y, variant.dtype),
            (self.addend, variant.dtype),
            odd=apart[self.seed // 2 % len(apart)],
            others_aligned=self.seed % 2 == 1,
        )
        places = {
            "product": product,
            "preactivation": preactivation,
            "y": y,
            "addend": y if self.over_addend else addend,
        }
        blocks = self.blocks if self.blocks and self.blocks.suit(variant.access) else None
        return replace(self, shape=shape, kept_in_place=kept_in_place, in_place=in_place, blocks=blocks, **places)


cases = st.builds(
    ForwardCase,
    bias=st.booleans(),
    bias_offset=st.sampled_from((0, 0, 1, 3)),
    kept_in_place=st.booleans(),
    product=placements,
    preactivation=placements,
    y=placements,
    addend=placements,
    over_addend=st.booleans(),
    **LAUNCH,
)


@dataclass(frozen=True)
class Operands:
    product: Guarded
    bias: Guarded
    preactivation: Guarded | None
    y: Guarded
    addend: Guarded | None
    added: NDArray[Any]  # the addend's values before the launch, or zeros

    @classmethod
    def of(cls, case: ForwardCase, variant: Forward) -> Operands:
        generator, dtype = np.random.default_rng(case.seed), variant.dtype
        product = Guarded(numbers(generator, case.shape, variant.product), case.product)
        empty = np.zeros(case.shape)
        kept = None
        if variant.keeps:
            kept = product if case.kept_in_place else Guarded(empty, case.preactivation, dtype)
        over_product = case.in_place and kept is not product
        bias = vector(numbers(generator, case.shape[1:], dtype), dtype, case.bias_offset)
        added = numbers(generator, case.shape, dtype) if variant.adds else empty
        addend = Guarded(added, case.addend, dtype) if variant.adds else None
        y = product if over_product else addend if addend and case.over_addend else Guarded(empty, case.y, dtype)
        return cls(product, bias, kept, y, addend, added.astype(dtype.numpy).astype(np.float64))


def launch(host: HostKernels, variant: Forward, case: ForwardCase, operands: Operands, order: int) -> None:
    state, step = case.drops.state()
    activation, kept = Activation(variant.activation, case.slope), operands.preactivation
    problem = ForwardProblem(
        variant.dtype,
        Compute.FLOAT32,
        activation,
        x=UNUSED,
        w=UNUSED,
        y=spec_of(operands.y),
        bias=16 if case.bias else None,
        dropout=variant.dropout,
        addend=spec_of(operands.addend) if operands.addend else None,
    )
    with launching(host, {Variant(EPILOGUE_FWD.source, variant.macros)}, order) as patch:
        if case.blocks:
            patch.setattr(epilogue, "sweep", lambda *_: case.blocks.tiling(case.shape))
        kinds = variant.dtype, variant.product, Compute.FLOAT32
        product = MatmulProblem(*kinds, a=UNUSED, b=UNUSED, d=spec_of(operands.product))
        forward = ForwardPass(problem, product, spec_of(kept) if kept else None, 0)
    addresses = [each.address if each else 0 for each in (operands.product, operands.bias, operands.y, kept)]
    addend = operands.addend.address if operands.addend else 0
    forward.launch(*addresses, addend, state if variant.dropout else None, 0)
    assert step[0] == case.drops.philox.step


@pytest.mark.parametrize("variant", FORWARD_EPILOGUES, ids=str)
@FEW
@given(drawn=cases)
def test_forward(host: HostKernels, variant: Forward, drawn: ForwardCase) -> None:
    dtype, case = variant.dtype, drawn.suited(variant)
    operands = Operands.of(case, variant)
    product: NDArray[Any] = operands.product.array.astype(np.float64)
    bias = operands.bias.array.astype(np.float64) if case.bias else np.zeros((1, case.shape[1]))
    launch(host, variant, case, operands, case.order)

    z = product + bias
    size = 1.0 + np.abs(product) + np.abs(bias)
    expected = activate(z, Activation(variant.activation, case.slope))
    scale = keep_scale(keep_threshold(case.drops.p)) if variant.dropout else 1.0
    if variant.dropout:
        expected = expected * case.drops.factors(case.shape)
    expected = expected + operands.added
    size += np.abs(operands.added)
    tolerance = rounding(dtype, expected) + 8 * EPS32 * scale * max(1.0, abs(case.slope)) * size
    assert_close("y", operands.y.values(), expected, tolerance)
    if operands.preactivation is not None:
        assert_close("z", operands.preactivation.values(), z, rounding(dtype, z) + EPS32 * size)
    if variant.once:  # an FP32 product and its bias are added in FP32, and rounded once
        sums = (product.astype(np.float32) + bias.astype(np.float32)).astype(dtype.numpy).astype(np.float64)
        assert operands.preactivation is None or np.array_equal(operands.preactivation.values(), sums)
        is_sum = variant.activation == "none" and not variant.dropout and not variant.adds
        assert not is_sum or np.array_equal(operands.y.values(), sums)
    operands.bias.assert_unchanged()
    if operands.addend not in (None, operands.y):
        operands.addend.assert_unchanged()
    if operands.product not in (operands.y, operands.preactivation):
        operands.product.assert_unchanged()


@pytest.mark.parametrize(
    "variant", [v for v in FORWARD_EPILOGUES if v.dtype is F32 and not v.dropout and not v.adds], ids=str
)
def test_special_values(host: HostKernels, variant: Forward) -> None:
    x, y = Guarded(SPECIAL), Guarded(np.zeros_like(SPECIAL))
    cols = SPECIAL.shape[1]
    params = EPILOGUE_FWD.params(x.matrix, Matrix(), y.matrix, Matrix(), 0, 1, cols, NO_DROPOUT, 0.25)
    host.get(EPILOGUE_FWD, variant.macros).launch((1, 1), (2, 1), params)
    with np.errstate(over="ignore"):
        expected = activate(SPECIAL, Activation(variant.activation, 0.25))
    assert_close(str(variant), y.values(), expected, 8 * EPS32 * np.abs(SPECIAL) + 1e-37)
