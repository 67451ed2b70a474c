"""In full FP32 a layer's GELU is as accurate as FP32: cuBLASLt's GELU is less accurate and is not used."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime import reference
from tests.support.gpu_arrays import to_host

GELU = lt.Activation("gelu")
FORWARD, DERIVATIVE = 2e-6, 2.5e-6
"""Bounds of the error of GELU for |z| < 4, and of its derivative for |z| < 2: for larger |z|, GELU's
derivative subtracts nearly equal numbers. The error of cuBLASLt's GELU is 5e-6."""
ROWS, WIDTH = 4096, 64


@pytest.fixture(scope="module")
def z() -> Any:
    """Makes x whose product with the unit matrix, the pre-activation, is exact: only the activation has an error."""
    values = np.random.default_rng(5).uniform(-4, 4, (ROWS, WIDTH))
    return values.astype(np.float32)


def error(actual: Any, expected: Any) -> float:
    return float(np.abs(to_host(actual) - expected).max())


def test_forward(z: Any) -> None:
    x, w, bias = cp.asarray(z), cp.eye(WIDTH, dtype=cp.float32), cp.zeros(WIDTH, cp.float32)
    expected = reference.activate(z, GELU)
    assert error(lt.linear(x, w, bias, activation="gelu"), expected) < FORWARD
    assert error(lt.linear_fwd(x, w, bias, activation="gelu")[0], expected) < FORWARD


@pytest.mark.parametrize("epilogue", ["gelu", "gelu_bias", "gelu_aux", "gelu_aux_bias"])
def test_products(z: Any, epilogue: str) -> None:
    options: dict[str, Any] = {"bias": cp.zeros(WIDTH, cp.float32)} if "bias" in epilogue else {}
    if "aux" in epilogue:
        options["aux"] = cp.empty((ROWS, WIDTH), cp.float32)
    made = lt.matmul(cp.asarray(z), cp.eye(WIDTH, dtype=cp.float32), epilogue=epilogue, **options)
    assert error(made, reference.activate(z, GELU)) < FORWARD


def test_derivatives(z: Any) -> None:
    z = z / 2
    ones, unit = cp.ones((ROWS, WIDTH), cp.float32), cp.eye(WIDTH, dtype=cp.float32)
    expected = reference.derivative(z, GELU)
    assert error(lt.matmul(ones, unit, epilogue="dgelu", aux=cp.asarray(z)), expected) < DERIVATIVE
    y, below = lt.linear_fwd(cp.asarray(z), unit, activation="gelu")
    _, above = lt.linear_fwd(y, unit)
    chained = lt.linear_bwd(ones, above, through=below)
    assert error(chained.dz_below, expected) < DERIVATIVE
