"""The kernels of y = dropout(act(gate) · value), its gradients, and y computed again in backward, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.kernels import gated
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.gated import GATED_FWD, GatedPass
from lt_runtime.kernels.tiling import Access
from lt_runtime.problem import Activation, DType, Philox, keep_scale, keep_threshold
from lt_runtime.reference import activate, derivative
from tests.host_kernels.arrays import EPS32, FLAT, Guarded, assert_close, numbers, rounding
from tests.host_kernels.build import Variant
from tests.host_kernels.cases import EXAMPLES_ALONE, FEW, LAUNCH, Drops, Launch, Shape, suit_place, suit_shape
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.products import Memory, launching, spec_of
from tests.host_kernels.test_epilogue_bwd import SPECIAL
from tests.host_kernels.variants import GATED, Gated
from tests.support.strategies import Placement, placements

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class GatedCase(Launch):
    """A test case; `shape` is that of y.

    Attributes:
        y: placement of y in a forward pass, and of dy in a backward pass.
    """

    h: Placement = FLAT
    y: Placement = FLAT
    dh: Placement = FLAT

    def suited(self, variant: Gated, *, backward: bool) -> GatedCase:
        """Returns the case, changed as little as possible so that the runtime chooses the variant for it."""
        aligned, dtype = variant.access is Access.ALIGNED, variant.dtype
        rows, cols = suit_shape(self.shape, aligned=aligned)
        wide: Shape = (rows, 2 * cols)
        places = {"h": (self.h, wide), "y": (self.y, (rows, cols)), "dh": (self.dh, wide)}
        apart = ["h", "y", *(["dh"] if backward and not self.in_place else [])]
        odd = apart[self.seed // 2 % len(apart)]
        suited = {
            name: suit_place(place, shape, dtype, aligned=aligned or (self.seed % 2 == 1 and name != odd))
            for name, (place, shape) in places.items()
        }
        if not aligned:
            suited[odd] = replace(suited[odd], offset=suited[odd].offset | 1)
        return replace(self, shape=(rows, cols), **suited)


cases = st.builds(GatedCase, h=placements, y=placements, dh=placements, **LAUNCH)
EXAMPLE = GatedCase(shape=(70, 24), drops=Drops(0.5, Philox(1), step_in_memory=True), blocks=None)
"""A case of 70 rows, of which a thread computes several."""


def launch(
    host: HostKernels, variant: Gated, case: GatedCase, h: Guarded, y: Guarded, dh: Guarded | None = None
) -> None:
    """Runs the forward pass, which writes y, or the backward pass, for which `y` holds dy."""
    state, step = case.drops.state()
    activation = Activation(variant.activation, case.slope)
    specs = [spec_of(each) for each in (h, y, dh) if each is not None]
    with launching(host, {Variant(GATED_FWD.source, variant.macros)}, case.order) as patch:
        if case.blocks:
            patch.setattr(gated, "sweep", lambda *_: case.blocks.tiling(case.shape))
        made = GatedPass(variant.dtype, activation, variant.dropout, specs, variant.remakes, 0)
    addresses = (h.address, y.address) if dh is None else (y.address, h.address, dh.address)
    call = Call(addresses, 0, dropouts=(state if variant.dropout else None, None))
    memory = Memory()
    made.launch(call, memory)  # type: ignore[arg-type]
    assert step[0] == case.drops.philox.step
    memory.check()


def factors_of(variant: Gated, case: GatedCase) -> tuple[Array, float]:
    """Returns the factors of the dropout mask, and a bound of them and of the activation's slope."""
    if not variant.dropout:
        return np.ones(case.shape), max(1.0, abs(case.slope))
    return case.drops.factors(case.shape), max(1.0, abs(case.slope)) * keep_scale(keep_threshold(case.drops.p))


def halves(h: Guarded) -> tuple[Array, Array]:
    gate, value = np.split(h.array.astype(np.float64), 2, axis=1)
    return gate, value


@pytest.mark.parametrize("variant", GATED, ids=str)
@FEW
@example(drawn=EXAMPLE)
@given(drawn=cases)
def test_forward(host: HostKernels, variant: Gated, drawn: GatedCase) -> None:
    case, dtype = drawn.suited(variant, backward=False), variant.dtype
    (rows, cols), generator = case.shape, np.random.default_rng(case.seed)
    h, y = Guarded(numbers(generator, (rows, 2 * cols), dtype), case.h), Guarded(np.zeros(case.shape), case.y, dtype)
    launch(host, variant, case, h, y)
    (gate, value), (factors, bound) = halves(h), factors_of(variant, case)
    expected = activate(gate, Activation(variant.activation, case.slope)) * value * factors
    tolerance = 16 * EPS32 * bound * (1.0 + np.abs(gate)) * np.abs(value)
    assert_close("y", y.values(), expected, rounding(dtype, expected) + tolerance)
    h.assert_unchanged()


@pytest.mark.parametrize("variant", GATED, ids=str)
@FEW
@example(drawn=EXAMPLE)
@example(drawn=replace(EXAMPLE, in_place=True))
@given(drawn=cases)
def test_backward(host: HostKernels, variant: Gated, drawn: GatedCase) -> None:
    case, dtype = drawn.suited(variant, backward=True), variant.dtype
    (rows, cols), generator = case.shape, np.random.default_rng(case.seed)
    h = Guarded(numbers(generator, (rows, 2 * cols), dtype), case.h)
    dy = Guarded(numbers(generator, case.shape, dtype), case.y)
    dh = h if case.in_place else Guarded(np.zeros((rows, 2 * cols)), case.dh, dtype)
    (gate, value), (factors, bound) = halves(h), factors_of(variant, case)
    y = Guarded(np.zeros(case.shape), case.y, dtype)
    launch(host, variant, case, h, y)
    given = dy.array.astype(np.float64)
    launch(host, variant, case, h, dy, dh)
    activation, dz = Activation(variant.activation, case.slope), given * factors
    expected = np.concatenate([dz * value * derivative(gate, activation), dz * activate(gate, activation)], axis=1)
    size = np.abs(given) * bound * (1.0 + np.abs(gate))
    tolerance = 32 * EPS32 * np.concatenate([size * np.abs(value), size], axis=1)
    assert_close("dh", dh.values(), expected, rounding(dtype, expected) + tolerance)
    if variant.remakes:
        np.testing.assert_array_equal(dy.values(), y.values())  # backward computes y with the same bits as forward
    else:
        dy.assert_unchanged()
    if not case.in_place:
        h.assert_unchanged()


@pytest.mark.parametrize("variant", [each for each in GATED if not each.dropout], ids=str)
@EXAMPLES_ALONE
@example(case=replace(EXAMPLE, shape=SPECIAL.shape))
@given(case=cases)
def test_special_values(host: HostKernels, variant: Gated, case: GatedCase) -> None:
    """With values and gradients of one, y and the gradient of the value are act(gate), that of the gate act'(gate)."""
    special = SPECIAL.clip(-3e4, 3e4) if variant.dtype is DType.FLOAT16 else SPECIAL
    place = Placement(offset=0 if variant.access is Access.ALIGNED else 1)
    h = Guarded(np.concatenate([special, np.ones_like(special)], axis=1), place, variant.dtype)
    y, dh = Guarded(np.ones_like(special), dtype=variant.dtype), Guarded(np.zeros(h.array.shape), dtype=variant.dtype)
    launch(host, variant, case, h, y, dh)
    gate, activation = halves(h)[0], Activation(variant.activation, case.slope)
    with np.errstate(over="ignore", invalid="ignore"):
        slopes, expected = derivative(gate, activation), activate(gate, activation)
    dgate, dvalue = np.split(dh.values(), 2, axis=1)
    assert_close("dgate", dgate, slopes, rounding(variant.dtype, slopes) + 16 * EPS32)
    launch(host, variant, case, h, y)
    for name, each in (("y", y.values()), ("dvalue", dvalue)):
        assert_close(name, each, expected, rounding(variant.dtype, expected) + 8 * EPS32 * np.abs(gate) + 1e-37)
