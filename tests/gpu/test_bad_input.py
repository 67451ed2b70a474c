"""Device arrays that calls refuse before anything is launched or written; other arguments are in the CPU's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    LayoutError,
    LtError,
    OverlapError,
    ShapeError,
)

M, N, K = 6, 5, 4


def _ones(*shape: int, dtype: Any = np.float32) -> Any:
    return cp.ones(shape, dtype)


def _strided(rows: int, cols: int) -> Any:
    return cp.ones((2 * rows, 3 * cols), cp.float32)[::2, ::3]


def _host(rows: int, cols: int) -> Any:
    return np.ones((rows, cols), np.float32)


FORWARD: list[tuple[dict[str, Callable[[], Any]], type[LtError], str]] = [
    ({"w": lambda: _ones(N, K + 1)}, ShapeError, "w has shape"),
    ({"x": lambda: _ones(M, K, dtype=np.float64)}, DTypeError, "x has type float64"),
    ({"w": lambda: _ones(N, K, dtype=np.float16)}, DTypeError, "w is float16 but x is float32"),
    ({"w": lambda: _host(N, K)}, DeviceError, "w in host memory"),
    ({"w": lambda: _strided(N, K)}, LayoutError, r"w .*lt\.contiguous\(w\)"),
    ({"x": lambda: cp.broadcast_to(_ones(K), (M, K))}, LayoutError, "x .*rows overlap"),
    ({"bias": lambda: _ones(2 * N)[::2]}, LayoutError, "bias has stride"),
    ({"out": lambda: _ones(M, N, dtype=np.float16)}, DTypeError, "out is float16"),
]
BACKWARD: list[tuple[dict[str, Callable[[], Any]], type[LtError], str]] = [
    ({"dy": lambda: _ones(M, N, dtype=np.float16)}, DTypeError, "dy is float16"),
    ({"dy": lambda: _host(M, N)}, DeviceError, "dy"),
    ({"out_dx": lambda: _ones(K, M)}, ShapeError, "out_dx has shape"),
]
MATMUL: list[tuple[dict[str, Callable[[], Any]], type[LtError], str]] = [
    ({"b": lambda: _host(K, N)}, DeviceError, "b in host memory"),
    ({"a": lambda: _strided(M, K)}, LayoutError, "a .*neither axis is contiguous"),
    ({"alpha": lambda: _ones(1)}, ArgumentError, "alpha and beta must both"),
    ({"alpha": lambda: _ones(2), "beta": lambda: _ones(1)}, DTypeError, "alpha is float32 of shape"),
    ({"alpha": lambda: _ones(1, dtype=np.float64), "beta": lambda: _ones(1)}, DTypeError, "alpha is float64"),
    ({"epilogue": lambda: "gelu_aux", "aux": lambda: _ones(M, N)}, LayoutError, "aux has leading dimension 5"),
    ({"epilogue": lambda: "gelu_aux", "aux": lambda: _ones(8, M)[:N].T}, LayoutError, "orders must be equal"),
    ({"epilogue": lambda: "relu_aux", "aux": lambda: cp.zeros((M, 8), cp.uint8)}, LayoutError, "multiple of 16 bytes"),
    ({"epilogue": lambda: "bgradb", "bias_gradient": lambda: _ones(2 * N)[::2]}, LayoutError, "bias_gradient has str"),
    ({"out": lambda: cp.broadcast_to(_ones(1, N), (M, N))}, LayoutError, "out of shape .* its rows overlap"),
    (
        {"a": lambda: _ones(M, K, dtype="f8"), "b": lambda: _ones(K, N, dtype="f8"), "out": lambda: None}
        | {"c": lambda: _ones(N, M, dtype="f8").T},
        LayoutError,
        "c is column-major and out row-major",
    ),
]


@pytest.mark.parametrize(
    ("operation", "changes", "error", "message"),
    [
        *((lt.linear_fwd, *case) for case in FORWARD),
        *((lt.linear_bwd, *case) for case in BACKWARD),
        *((lt.matmul, *case) for case in MATMUL),
    ],
)
def test_refused(operation: Any, changes: dict[str, Callable[[], Any]], error: type[LtError], message: str) -> None:
    arguments: dict[str, Any] = {"a": _ones(M, K), "b": _ones(K, N), "out": cp.full((M, N), 7, cp.float32)}
    if operation is lt.linear_fwd:
        arguments = {"x": arguments["a"], "w": _ones(N, K), "bias": _ones(N), "out": arguments["out"]}
    elif operation is lt.linear_bwd:
        _, ctx = lt.linear_fwd(_ones(M, K), _ones(N, K), _ones(N), activation="tanh")
        arguments = {"dy": _ones(M, N), "ctx": ctx, "out_dw": cp.full((N, K), 7, cp.float32)}
    written = arguments["out_dw" if operation is lt.linear_bwd else "out"]
    with pytest.raises(error, match=message):
        operation(**arguments | {name: make() for name, make in changes.items()})
    assert (written == 7).all()
    assert (lt.linear(_ones(M, K), _ones(N, K)) == K).all(), "the stream must stay usable"


def test_outputs_that_share_memory() -> None:
    buffer = cp.ones((M, 2 * K), cp.float32)
    x = buffer[:, :K]
    with pytest.raises(OverlapError, match="out shares memory with x"):
        lt.linear(x, _ones(K, K), out=buffer[:, 2 : K + 2])
    lt.linear(x, _ones(K, K), out=buffer[:, K:])  # the columns interleave without overlap
    assert (buffer[:, :K] == 1).all()
    assert (buffer[:, K:] == K).all()


def test_misaligned_address() -> None:
    base = cp.zeros(4 * M * K + 4, cp.uint8)
    memory = cp.cuda.UnownedMemory(base.data.ptr + 1, 4 * M * K, base)
    x = cp.ndarray((M, K), cp.float32, cp.cuda.MemoryPointer(memory, 0))
    with pytest.raises(lt.errors.AlignmentError, match="x is at"):
        lt.linear(x, _ones(N, K))


def test_backward_outputs_that_share_memory() -> None:
    x, dy = _ones(M, K), _ones(M, K)
    _, ctx = lt.linear_fwd(x, _ones(K, K))
    with pytest.raises(OverlapError, match="out_dx shares memory with dy"):
        lt.linear_bwd(dy, ctx, out_dx=dy)


def test_the_layer_below_has_made_x() -> None:
    y, below = lt.linear_fwd(_ones(M, K), _ones(N, K), activation="gelu")
    dy = _ones(M, K)
    for _ in range(3):  # the call is refused also after it has been prepared
        for x in (y, y[:], y.reshape(1, M, N)[0]):
            lt.linear_bwd(dy, lt.linear_fwd(x, _ones(K, N))[1], through=below)
        _, above = lt.linear_fwd(y + 1, _ones(K, N))
        with pytest.raises(ArgumentError, match="whose y is not the x of ctx"):
            lt.linear_bwd(dy, above, through=below)
        lt.linear_bwd(dy, above, through=below, require_same=False)


def test_products_that_share_memory() -> None:
    a, b, c = _ones(8, 8), _ones(8, 8), _ones(8, 8)
    with pytest.raises(OverlapError, match="out shares memory with a"):
        lt.matmul(a, b, out=a)
    with pytest.raises(OverlapError, match="out shares memory with c"):
        lt.matmul(a, b, c, out=c.T[::-1][::-1])
    assert lt.matmul(a, b, c, out=c) is c
    assert (c == 9).all()


def test_step_must_be_one_uint32_on_the_device() -> None:
    for step in (cp.zeros(1, cp.int32), cp.zeros(2, cp.uint32)):
        with pytest.raises(DTypeError, match="step"):
            lt.dropout(_ones(4, 4), 0.5, lt.Philox(step=step))
    with pytest.raises(LtError, match="step"):
        lt.dropout(_ones(4, 4), 0.5, lt.Philox(step=np.zeros(1, np.uint32)))


def test_optimizer() -> None:
    good = lt.Parameter(_ones(4), _ones(4))
    with pytest.raises(ShapeError, match=r"b\.grad has shape"):
        lt.AdamW([good, lt.Parameter(_ones(4), _ones(5), name="b")])
    with pytest.raises(LayoutError, match=r"b\.data"):
        lt.AdamW([good, lt.Parameter(_ones(8)[::2], _ones(4), name="b")])
    with pytest.raises(DeviceError, match=r"b\.data"):
        lt.AdamW([good, lt.Parameter(np.ones(4, np.float32), np.ones(4, np.float32), name="b")])
