"""The raw-pointer interface in FP32 agrees with NumPy within the promised atol 1e-5 and rtol 1e-4."""

from __future__ import annotations

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.errors import DeviceError, OverlapError
from lt_runtime.problem import ACTIVATIONS

M, K, N = 32, 64, 16


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_agrees_with_numpy(activation: str, with_bias: bool, trans_a: bool, trans_b: bool) -> None:
    generator = np.random.default_rng(7)
    a, b, bias, g = (generator.standard_normal(s).astype(np.float32) for s in ((M, K), (K, N), (N,), (M, N)))
    stored_a, stored_b = (cp.asarray(np.ascontiguousarray(v.T if t else v)) for v, t in ((a, trans_a), (b, trans_b)))
    device_bias, device_g, stream = cp.asarray(bias), cp.asarray(g), cp.cuda.Stream(non_blocking=True)
    y, z, gc = (cp.full((M, N), cp.nan, cp.float32) for _ in range(3))
    ga, gb, gbias = cp.full_like(stored_a, cp.nan), cp.full_like(stored_b, cp.nan), cp.full((N,), cp.nan, cp.float32)
    cp.cuda.get_current_stream().synchronize()

    lt.raw.forward_raw(
        stored_a.data.ptr, stored_b.data.ptr, device_bias.data.ptr, y.data.ptr, M, K, N, trans_a, trans_b,
        activation, with_bias, 0.2, True, z.data.ptr, stream.ptr,
    )  # fmt: skip
    lt.raw.backward_raw(
        stored_a.data.ptr, stored_b.data.ptr, 0, device_g.data.ptr, z.data.ptr, ga.data.ptr, gb.data.ptr,
        gc.data.ptr, gbias.data.ptr, M, K, N, trans_a, trans_b, activation, with_bias, 0.2, stream,
    )  # fmt: skip
    stream.synchronize()

    act = lt.Activation(activation, 0.2)
    expected_y, expected_z = reference.linear_fwd(a, b.T, bias if with_bias else None, act)
    exact = reference.linear_bwd(g, a, b.T, expected_z, act)
    close = {"atol": 1e-5, "rtol": 1e-4}
    np.testing.assert_allclose(cp.asnumpy(y), expected_y, **close)
    np.testing.assert_allclose(cp.asnumpy(z), expected_z, **close)
    np.testing.assert_allclose(cp.asnumpy(gc), exact.dz, **close)
    np.testing.assert_allclose(cp.asnumpy(ga.T if trans_a else ga), exact.dx, **close)
    np.testing.assert_allclose(cp.asnumpy(gb if trans_b else gb.T), exact.dw, **close)
    if with_bias:
        np.testing.assert_allclose(cp.asnumpy(gbias), exact.db, **close)
    else:
        assert cp.isnan(gbias).all()


def test_addresses_that_are_refused() -> None:
    a, y, host = cp.ones((M, K), cp.float32), cp.full((M, N), 5, cp.float32), np.ones((K, N), np.float32)
    sizes_and_options = (M, K, N, False, False, "relu", False, 0.0, False, 0)
    with pytest.raises(DeviceError, match="B"):
        lt.raw.forward_raw(a.data.ptr, host.ctypes.data, 0, y.data.ptr, *sizes_and_options)
    with pytest.raises(OverlapError, match="Y"):
        lt.raw.forward_raw(a.data.ptr, cp.ones((K, N), cp.float32).data.ptr, 0, a.data.ptr, *sizes_and_options)
    assert (y == 5).all()
    assert (a == 1).all()
