"""The kernel that updates FP8 scales equals the NumPy reference, bit for bit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lt_runtime.kernels.call import Call
from lt_runtime.kernels.fp8 import ScalesPass
from lt_runtime.reference import fp8_slots, update_fp8_scales
from lt_runtime.reference.fp8 import AMAX, SCALE
from tests.host_kernels.arrays import FLAT, Guarded
from tests.host_kernels.cases import FEW, orders
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.products import Memory

_DTYPES = ["float8_e4m3fn", "float8_e5m2"] * 2 + ["float8_e4m3fn"]


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
    """Two layers of five tensors over several steps, one of which may be skipped.

    The scale of each layer's second tensor is computed anew in each step.
    """
    layers = [(Guarded(fp8_slots(_DTYPES), FLAT), Guarded(np.zeros((5, lengths), np.float32), FLAT)) for _ in range(2)]
    skip = np.zeros(1, np.uint32)
    expected = [(slots.array.copy(), history.array.copy()) for slots, history in layers]
    with host.in_order(order):
        made = ScalesPass(len(_DTYPES), lengths, headroom, len(layers), 0)
    addresses = [array.address for each in layers for array in each]
    for step, amax in enumerate(maxima):
        skip[0] = step == skipped
        for i, ((slots, _), (own, past)) in enumerate(zip(layers, expected, strict=True)):
            with np.errstate(over="ignore", invalid="ignore"):
                found = np.float32(amax) * np.float32([1, 2**-20, 0, 0.3, 2**-126]) * np.float32(1 + i)
            slots.array[:, AMAX] = own[:, AMAX] = found
            slots.array[1, SCALE] = own[1, SCALE] = 0
            with np.errstate(over="ignore", invalid="ignore"):
                update_fp8_scales(own, past, headroom, skip=step == skipped)
        made.launch(Call((*addresses, skip.ctypes.data), 0), Memory())  # type: ignore[arg-type]
        for (slots, history), (own, past) in zip(layers, expected, strict=True):
            np.testing.assert_array_equal(slots.array, own)
            np.testing.assert_array_equal(history.array, past)
    for each in layers:
        for array in each:
            array.values()
