"""What only a GPU's matrix products can get wrong is refused before anything is launched or written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, DeviceError, DTypeError, LayoutError, LtError, OverlapError, ShapeError

M, N, K = 6, 5, 4


def _ones(*shape: int, dtype: Any = np.float32) -> Any:
    return cp.ones(shape, dtype)


CASES: list[tuple[dict[str, Callable[[], Any]], type[LtError], str]] = [
    ({"b": lambda: _ones(K + 1, N)}, ShapeError, "b has shape"),
    ({"b": lambda: np.ones((K, N), np.float32)}, DeviceError, "b in host memory"),
    ({"a": lambda: cp.ones((2 * M, 3 * K), cp.float32)[::2, ::3]}, LayoutError, "a .*neither axis is contiguous"),
    ({"alpha": lambda: _ones(1)}, ArgumentError, "alpha and beta must both"),
    ({"alpha": lambda: _ones(2), "beta": lambda: _ones(1)}, DTypeError, "alpha is float32 of shape"),
    ({"alpha": lambda: _ones(1, dtype=np.float64), "beta": lambda: _ones(1)}, DTypeError, "alpha is float64"),
    ({"epilogue": lambda: "bias", "bias": lambda: _ones(2 * N)[::2]}, LayoutError, "bias has stride"),
    ({"epilogue": lambda: "bias", "bias": lambda: _ones(N, dtype=np.float16)}, DTypeError, "bias is float16"),
    ({"epilogue": lambda: "gelu_aux", "aux": lambda: _ones(M, N)}, LayoutError, "aux has leading dimension 5"),
    ({"epilogue": lambda: "gelu_aux", "aux": lambda: _ones(8, M)[:N].T}, LayoutError, "orders must be equal"),
    ({"epilogue": lambda: "relu_aux", "aux": lambda: cp.zeros((M, 8), cp.uint8)}, LayoutError, "multiple of 16 bytes"),
    ({"epilogue": lambda: "relu_aux", "aux": lambda: cp.zeros((N, 16), cp.uint8)}, ShapeError, "aux has shape"),
    (
        {"epilogue": lambda: "bgradb", "bias_gradient": lambda: _ones(2 * N)[::2]},
        LayoutError,
        "bias_gradient has strides",
    ),
    ({"out": lambda: cp.broadcast_to(_ones(1, N), (M, N))}, LayoutError, "out of shape .* its rows overlap"),
]


@pytest.mark.parametrize(("changes", "error", "message"), CASES, ids=[message for _, _, message in CASES])
def test_refused(changes: dict[str, Callable[[], Any]], error: type[LtError], message: str) -> None:
    out = cp.full((M, N), 7, cp.float32)
    arguments = {"a": _ones(M, K), "b": _ones(K, N), "out": out} | {name: make() for name, make in changes.items()}
    with pytest.raises(error, match=message):
        lt.matmul(**arguments)
    assert (out == 7).all()
    assert (lt.matmul(_ones(M, K), _ones(K, N)) == K).all(), "the stream must stay usable"


def test_outputs_must_not_share_memory() -> None:
    a, b = _ones(8, 8), _ones(8, 8)
    with pytest.raises(OverlapError, match="out shares memory with a"):
        lt.matmul(a, b, out=a)
    c = _ones(8, 8)
    with pytest.raises(OverlapError, match="out shares memory with c"):
        lt.matmul(a, b, c, out=c.T[::-1][::-1])
    assert lt.matmul(a, b, c, out=c) is c
    assert (c == 9).all()


def test_fp64_and_operand_sums_need_c_as_d_lies() -> None:
    a, b, c = (cp.ones((8, 8), cp.float64) for _ in range(3))
    with pytest.raises(LayoutError, match="c is column-major and out row-major"):
        lt.matmul(a, b, c.T)
