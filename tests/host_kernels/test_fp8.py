"""FP8 casts by the kernel against NumPy's, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_runtime.kernels import fp8
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.fp8 import CastPass
from lt_runtime.kernels.tiling import Tiling
from lt_runtime.problem import DType
from lt_runtime.reference import amax_of, cast_fp8
from lt_runtime.reference.fp8 import FP8_TYPES
from tests.host_kernels.arrays import Guarded, numbers
from tests.host_kernels.cases import FEW, orders, seeds
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.products import Memory, spec_of
from tests.host_kernels.variants import TYPES
from tests.support.strategies import Placement, placements

_SPECIAL = (np.nan, -np.nan, np.inf, -np.inf, 3e38, -3e38, 448.0, 464.0, 464.1, 57344.0, 61440.0, 1e-40, -0.0)
_WIDTHS = (1, 5, 16, 40, 128, 144, 200, 264)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A cast.

    Attributes:
        aligned: whether rows begin at multiples of 16 bytes, and rows and columns are multiples of 16.
        wanted: whether rows, the transpose and the largest absolute value are wanted.
        short: whether the grid has one block in y, which goes from tile to tile.
    """

    shape: tuple[int, int]
    aligned: bool
    places: tuple[Placement, ...]
    wanted: tuple[bool, bool, bool]
    scale: float
    special: bool
    short: bool
    order: int
    seed: int


cases = st.builds(
    Case,
    shape=st.tuples(st.sampled_from(_WIDTHS), st.sampled_from(_WIDTHS)),
    aligned=st.booleans(),
    places=st.tuples(*(placements for _ in range(3))),
    wanted=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    scale=st.sampled_from((1.0, 0.25, 2.0**9, 0.3)),
    special=st.booleans(),
    short=st.booleans(),
    order=orders,
    seed=seeds,
)


def _suited(case: Case, place: Placement, width: int, itemsize: int) -> Placement:
    """The placement of the case, or one whose rows begin at multiples of 16 bytes."""
    if not case.aligned:
        return place
    step = 16 // itemsize
    return Placement(column_major=False, gap=-width % step + step * place.gap, offset=step * place.offset)


@pytest.mark.parametrize("to", FP8_TYPES)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda each: each.value)
@FEW
@given(case=cases)
def test_casts(host: HostKernels, dtype: DType, to: str, case: Case) -> None:
    rows, cols = (-(-each // 16) * 16 if case.aligned else each for each in case.shape)
    generator = np.random.default_rng(case.seed)
    values = numbers(generator, (rows, cols), dtype)
    if case.special:
        with np.errstate(over="ignore"):
            values.flat[: len(_SPECIAL)] = np.array(_SPECIAL).astype(values.dtype)[: values.size]
    x = Guarded(values, _suited(case, case.places[0], cols, dtype.itemsize))
    out, transposed = (
        Guarded(np.zeros(shape, FP8_TYPES[to]), _suited(case, place, shape[1], 1))
        for shape, place in zip(((rows, cols), (cols, rows)), case.places[1:], strict=True)
    )
    specs = [spec_of(each) if wanted else None for each, wanted in zip((out, transposed), case.wanted, strict=False)]
    before = np.float32([0.5])
    scale, amax = np.float32([case.scale]), before.copy()
    with pytest.MonkeyPatch.context() as patch, host.in_order(case.order):
        patch.setattr(fp8, "check_fp8", lambda _: None)
        if case.short:
            patch.setattr(fp8, "square_tiles", lambda layout: Tiling((-(-layout.cols // 128), 1), (16, 16)))
        made = CastPass(dtype, to, spec_of(x), *specs, 0)
    memory = Memory()
    addresses = x.address, scale.ctypes.data, out.address, transposed.address, amax.ctypes.data * case.wanted[2]
    made.launch(Call(addresses, 0), memory)  # type: ignore[arg-type]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = cast_fp8(x.array, case.scale, to)
    for found, wanted, exact in zip((out, transposed), case.wanted, (expected, expected.T), strict=False):
        found.values()
        if wanted:
            np.testing.assert_array_equal(found.array.copy().view(np.uint8), exact.copy().view(np.uint8))
        else:
            found.assert_unchanged()
    largest = amax_of(np.array([0.5, amax_of(x.array)])) if case.wanted[2] else np.float32(0.5)
    np.testing.assert_array_equal(amax[0], largest)
    x.assert_unchanged()
