"""The kernel that multiplies FP32 numbers by a factor, launched by the runtime, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from lt_runtime.kernels.losses import launch_scale
from lt_runtime.problem import DType
from tests.host_kernels.arrays import numbers, vector
from tests.host_kernels.variants import F32, TYPES


@pytest.mark.parametrize("dtype", TYPES)
def test_products_are_rounded_once(dtype: DType) -> None:
    share, factor = np.float32(0.3), vector(np.array([1.7]), F32)
    for size, on_device, offset in ((1, True, 0), (700, False, 3), (1025, True, 1)):
        source = vector(numbers(np.random.default_rng(size), (size,), F32), F32, offset)
        target = vector(np.zeros(size), dtype, offset)
        address = factor.address if on_device else 0
        launch_scale(source.address, target.address, size, dtype, address, float(share), 0, 0)
        product = source.array * (factor.array[0, 0] * share if on_device else share)
        assert np.array_equal(target.values(), product.astype(dtype.numpy).astype(np.float64))
        source.assert_unchanged()
