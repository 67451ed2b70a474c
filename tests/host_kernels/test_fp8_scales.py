"""The kernel that updates FP8 scales equals the NumPy reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_runtime.kernels import fp8
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.fp8 import ScalesPass
from lt_runtime.reference import fp8_slots, update_fp8_scales
from lt_runtime.reference.fp8 import AMAX, SCALE
from tests.host_kernels.arrays import FLAT, Guarded
from tests.host_kernels.cases import FEW, orders
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.products import Memory


@FEW
@given(
    lengths=st.sampled_from((1, 4)),
    maxima=st.lists(st.floats(0, width=32) | st.just(np.nan), min_size=1, max_size=9),
    headroom=st.sampled_from((1.0, 2.0, 1.3)),
    skipped=st.integers(0, 12),
    order=orders,
)
def test_scales(
    host: HostKernels, lengths: int, maxima: list[float], headroom: float, skipped: int, order: int
) -> None:
    """Five tensors over several steps, one of which may be skipped.

    The second tensor's scale is computed anew in each step.
    """
    dtypes = ["float8_e4m3fn", "float8_e5m2"] * 2 + ["float8_e4m3fn"]
    slots = Guarded(fp8_slots(dtypes), FLAT)
    history = Guarded(np.zeros((len(dtypes), lengths), np.float32), FLAT)
    skip = np.zeros(1, np.uint32)
    expected, past = slots.array.copy(), history.array.copy()
    with pytest.MonkeyPatch.context() as patch, host.in_order(order):
        patch.setattr(fp8, "THREADS", 2)
        made = ScalesPass(len(dtypes), lengths, headroom, 0)
    for step, amax in enumerate(maxima):
        with np.errstate(invalid="ignore"):
            slots.array[:, AMAX] = expected[:, AMAX] = np.float32(amax) * np.float32([1, 2**-20, 0, 0.3, 2**-126])
        slots.array[1, SCALE] = expected[1, SCALE] = 0
        skip[0] = step == skipped
        made.launch(Call((slots.address, history.address, skip.ctypes.data), 0), Memory())  # type: ignore[arg-type]
        with np.errstate(over="ignore", invalid="ignore"):
            update_fp8_scales(expected, past, headroom, skip=step == skipped)
        np.testing.assert_array_equal(slots.array, expected)
        np.testing.assert_array_equal(history.array, past)
    slots.values()
    history.values()
