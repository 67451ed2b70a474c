"""The kernel of `lt.add`: out = a + b equals the exact sum, rounded once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_runtime.kernels import add
from lt_runtime.kernels.add import ADD, AddPass
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.tiling import Access
from tests.host_kernels.arrays import Guarded, numbers
from tests.host_kernels.build import Variant
from tests.host_kernels.cases import FEW, LAUNCH, Launch, suit_places, suit_shape
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.products import Memory, launching, spec_of
from tests.host_kernels.variants import DROPPING, Dropping
from tests.support.strategies import Placement, placements


@dataclass(frozen=True, kw_only=True)
class AddCase(Launch):
    """A test case. With `in_place`, the sum overwrites a if the seed is even, otherwise b."""

    places: tuple[Placement, ...]


cases = st.builds(AddCase, places=st.tuples(placements, placements, placements), **LAUNCH)


@pytest.mark.parametrize("variant", DROPPING, ids=str)
@FEW
@given(case=cases)
def test_sums(host: HostKernels, variant: Dropping, case: AddCase) -> None:
    shape, dtype = suit_shape(case.shape, aligned=variant.aligned), variant.dtype
    odd = case.seed // 2 % (2 if case.in_place else 3)
    operands = ((place, dtype) for place in case.places)
    places = suit_places(Access(variant.aligned), shape, *operands, odd=odd, others_aligned=case.seed % 3 == 0)
    generator = np.random.default_rng(case.seed)
    a, b = (Guarded(numbers(generator, shape, dtype), place) for place in places[:2])
    out = (a, b)[case.seed % 2] if case.in_place else Guarded(np.zeros(shape), places[2], dtype)
    expected = (a.array.astype(np.float64) + b.array.astype(np.float64)).astype(dtype.numpy)
    with launching(host, {Variant(ADD.source, variant.macros)}, case.order) as patch:
        if case.blocks:
            patch.setattr(add, "sweep", lambda layout, _: case.blocks.tiling(layout.shape))
        made = AddPass(dtype, *map(spec_of, (a, b, out)), 0)
    memory = Memory()
    made.launch(Call((a.address, b.address, out.address), 0), memory)  # type: ignore[arg-type]
    memory.check()
    np.testing.assert_array_equal(out.values(), expected.astype(np.float64))
    for each in {a, b} - {out}:
        each.assert_unchanged()
