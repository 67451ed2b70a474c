"""Errors of the CUDA driver, and kernels over matrices of very many rows or columns."""

from __future__ import annotations

import cupy as cp
import pytest

import lt_runtime as lt
from lt_runtime.errors import DriverError
from lt_runtime.gpu.driver import call


def test_a_failing_driver_call_names_itself_and_its_status() -> None:
    with pytest.raises(DriverError, match=r"cuMemFree failed with CUDA_ERROR_INVALID_VALUE \(1\)"):
        call("cuMemFree", 12345)


@pytest.mark.parametrize("shape", [(1, 3_000_000), (3_000_000, 1), (600_000, 8), (1, 3_000_001)])
def test_very_long_matrices(shape: tuple[int, int]) -> None:
    x = cp.ones(shape, cp.float32)
    y = lt.dropout(x, 0.5, lt.Philox(1))
    assert abs(float(y.mean()) - 1.0) < 0.01
    assert set(cp.unique(y).tolist()) == {0.0, 2.0}
