"""Operands and results that are arrays of other libraries."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt

X = (np.arange(12, dtype=np.float32) - 5).reshape(3, 4)
W = np.arange(20, dtype=np.float32).reshape(5, 4) / 8
BIAS = np.arange(5, dtype=np.float32)
EXPECTED = np.maximum(X @ W.T + BIAS, 0)


def _installed(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason="a peer, where it is installed")


class InterfaceOnly:
    """An array that has only `__cuda_array_interface__`."""

    def __init__(self, array: Any, stream: int | None = None) -> None:
        self._array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream}


class DLPackOnly:
    """An array that has only DLPack."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._array.__dlpack_device__()
        return device


@pytest.mark.parametrize("wrap", [InterfaceOnly, DLPackOnly])
def test_protocols(wrap: Any) -> None:
    y, ctx = lt.linear_fwd(*(wrap(cp.asarray(a)) for a in (X, W, BIAS)), activation="relu")
    np.testing.assert_array_equal(cp.asnumpy(y), EXPECTED)
    dx, dw, db = lt.linear_bwd(wrap(cp.ones_like(y)), ctx)
    assert dx.shape == X.shape
    assert dw.shape == W.shape
    assert db.shape == BIAS.shape


def test_interface_stream_is_waited_for() -> None:
    producer, consumer = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    w = cp.eye(256, dtype=cp.float32)
    cp.cuda.get_current_stream().synchronize()
    for value in range(1, 6):
        with producer:
            x = cp.zeros((4096, 256), cp.float32)
            for _ in range(20 * value):
                x += 1
        with consumer:
            y = lt.linear(InterfaceOnly(x, producer.ptr), w, stream=consumer)
        consumer.synchronize()
        assert (y == 20 * value).all()


def test_interface_outputs_are_written_in_place() -> None:
    out = cp.zeros((3, 5), cp.float32)
    wrapped = InterfaceOnly(out)
    assert lt.linear(cp.asarray(X), cp.asarray(W), cp.asarray(BIAS), activation="relu", out=wrapped) is wrapped
    np.testing.assert_array_equal(cp.asnumpy(out), EXPECTED)


@_installed("torch")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pytorch(dtype: str) -> None:
    import torch

    kind = getattr(torch, dtype)
    x, w, b = (torch.tensor(a, device="cuda", dtype=kind) for a in (X, W, BIAS))
    ones = torch.ones(EXPECTED.shape, device="cuda", dtype=kind)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    y, ctx = lt.linear_fwd(x, w, b, activation="relu", stream=stream)
    gradients = lt.linear_bwd(ones, ctx, stream=stream)
    stream.synchronize()
    torch.cuda.synchronize()
    assert all(isinstance(a, torch.Tensor) and a.dtype == kind for a in (y, *gradients))
    torch.testing.assert_close(y.float().cpu(), torch.tensor(EXPECTED), rtol=0, atol=0 if dtype != "bfloat16" else 0.5)
    expected = torch.autograd.functional.vjp(lambda *a: torch.relu(torch.nn.functional.linear(*a)), (x, w, b), ones)[1]
    for actual, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-2, atol=1e-2)


@_installed("torch")
def test_adamw_over_tensors() -> None:
    import torch

    parameter = lt.Parameter(torch.ones(5, device="cuda", dtype=torch.bfloat16), torch.ones(5, device="cuda"))
    lt.AdamW([parameter], lr=0.1).step()
    torch.cuda.synchronize()
    assert isinstance(parameter.master, torch.Tensor)
    assert (parameter.data < 1).all()


@_installed("jax")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax(dtype: str) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    x, w, b = (jax.numpy.asarray(a, dtype=dtype) for a in (X, W, BIAS))
    y, ctx = lt.linear_fwd(x, w, b, activation="relu")
    dx, _, _ = lt.linear_bwd(jax.numpy.ones_like(y), ctx)
    assert isinstance(y, jax.Array)
    assert isinstance(dx, jax.Array)
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y, dtype=np.float32), EXPECTED, rtol=1e-2)
