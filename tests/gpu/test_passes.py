"""Our kernels before and after a product, alone: with K = 0 cuBLASLt is not called, and the bias is the product.

Without cuBLASLt, compute-sanitizer's initcheck can follow every byte: it cannot follow writes of cuBLASLt's kernels.
"""

from __future__ import annotations

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.problem import ACTIVATIONS, DType, Saved
from lt_runtime.reference import dropout_scale
from tests.host_kernels.arrays import assert_close
from tests.support.gpu_arrays import EPSILON, MaskPass, to_host
from tests.support.strategies import TYPES

RNG = lt.Philox(2**40 + 3, 5, 7)
_SLOPE = 1.2  # upper bound of the derivatives of all activations
_TINY = 1e-6
SHAPES = [(5, 3), (64, 96), (129, 777)]


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_without_inputs(dtype: DType, activation: str, dropout: float, shape: tuple[int, int]) -> None:
    m, n = shape
    generator = np.random.default_rng(m)
    bias, dy = (generator.standard_normal(s, np.float32).astype(dtype.numpy) for s in ((n,), shape))
    x, w, act = np.zeros((m, 0), dtype.numpy), np.zeros((n, 0), dtype.numpy), lt.Activation(activation)
    factors = dropout_scale(shape, dropout, RNG) if dropout else np.ones(shape)
    expected, z = reference.linear_fwd(x, w, bias, act, factors)
    exact = reference.linear_bwd(dy, x, w, z, act, factors)

    y, context = lt.linear_fwd(*map(cp.asarray, (x, w, bias)), activation=act, dropout=dropout, rng=RNG)
    dz = cp.empty(shape, dtype.numpy)
    db = lt.linear_bwd(cp.asarray(dy), context, need_dx=False, need_dw=False, out_dz=dz).db

    assert (context.layer.saved_as is Saved.NOTHING) == (activation == "none")
    epsilon = 4 * EPSILON[dtype]
    assert_close("y", to_host(y), expected, epsilon * (np.abs(expected) + _SLOPE * np.abs(z) * factors) + _TINY)
    tolerance = np.abs(dy.astype(np.float64)) * factors * (epsilon * (_SLOPE + np.abs(z)) + _TINY) + _TINY * 1e-2
    assert_close("dz", to_host(dz), exact.dz, tolerance)
    rounding = epsilon * np.abs(exact.db) + 2.0**-20 * np.abs(exact.dz).sum(axis=0)
    assert_close("db", to_host(db), exact.db, tolerance.sum(axis=0) + rounding + _TINY)


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("shape", [*SHAPES, (3000, 1024)])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_mask(dtype: DType, shape: tuple[int, int], order: str, in_place: bool) -> None:
    generator = np.random.default_rng(shape[0])
    values, positive = generator.standard_normal(shape, np.float32).astype(dtype.numpy), generator.random(shape) < 0.5
    values[0, 0] = np.nan
    dy = cp.asarray(values.copy(order))
    dz, db = dy if in_place else cp.empty_like(dy), cp.empty(shape[1], dtype.numpy)
    mask = cp.asarray(reference.pack_mask(positive))
    MaskPass(dy, mask).run(dy, dz, db)

    expected = values.astype(np.float64) * positive
    np.testing.assert_array_equal(to_host(dz), expected)
    np.testing.assert_array_equal(cp.asnumpy(mask), reference.pack_mask(positive))
    assert np.isnan(to_host(db)[0])
    sums, sizes = expected.sum(axis=0)[1:], np.abs(expected).sum(axis=0)[1:]
    assert_close("db", to_host(db)[1:], sums, EPSILON[dtype] * np.abs(sums) + 2.0**-20 * sizes + _TINY)
