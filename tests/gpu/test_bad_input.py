"""Every kind of bad input is refused before anything is launched or written."""

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


CASES: list[tuple[str, dict[str, Callable[[], Any]], type[LtError], str]] = [
    ("shapes", {"w": lambda: _ones(N, K + 1)}, ShapeError, "w has shape"),
    ("three axes", {"x": lambda: _ones(2, M, K)}, ShapeError, "x has shape"),
    ("unsupported type", {"x": lambda: _ones(M, K, dtype=np.float64)}, DTypeError, "x has type float64"),
    ("mixed types", {"w": lambda: _ones(N, K, dtype=np.float16)}, DTypeError, "w is float16 but x is float32"),
    ("mixed devices", {"w": lambda: np.ones((N, K), np.float32)}, DeviceError, "w in host memory"),
    ("no unit stride", {"w": lambda: _strided(N, K)}, LayoutError, r"w .*lt\.contiguous\(w\)"),
    ("broadcast rows", {"x": lambda: cp.broadcast_to(_ones(K), (M, K))}, LayoutError, "x .*rows overlap"),
    ("activation", {"activation": lambda: "softmax"}, ArgumentError, "'softmax'.*accepted"),
    ("probability", {"dropout": lambda: 1.0}, ArgumentError, r"1\.0.*\[0, 1\)"),
    ("negative probability", {"dropout": lambda: -0.1}, ArgumentError, r"-0\.1"),
    ("no generator", {"dropout": lambda: 0.5}, ArgumentError, "rng"),
    ("bias length", {"bias": lambda: _ones(N + 1)}, ShapeError, "bias has shape"),
    ("bias axes", {"bias": lambda: _ones(1, N)}, ShapeError, "bias has shape"),
    ("bias stride", {"bias": lambda: _ones(2 * N)[::2]}, LayoutError, "bias has stride"),
    ("out shape", {"out": lambda: _ones(N, M)}, ShapeError, "out has shape"),
    ("out type", {"out": lambda: _ones(M, N, dtype=np.float16)}, DTypeError, "out is float16"),
    ("compute", {"compute": lambda: "fp8"}, ArgumentError, "'fp8'"),
    ("stream", {"stream": lambda: "main"}, ArgumentError, "stream"),
]


@pytest.mark.parametrize(("changes", "error", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_forward(changes: dict[str, Callable[[], Any]], error: type[LtError], message: str) -> None:
    out = cp.full((M, N), 7, cp.float32)
    arguments: dict[str, Any] = {"x": _ones(M, K), "w": _ones(N, K), "bias": _ones(N), "out": out}
    arguments |= {name: make() for name, make in changes.items()}
    with pytest.raises(error, match=message):
        lt.linear_fwd(**arguments)
    assert (out == 7).all()
    y = lt.linear(_ones(M, K), _ones(N, K))
    assert (y == K).all(), "the stream must stay usable"


def test_outputs_that_share_memory() -> None:
    buffer = cp.ones((M, 2 * K), cp.float32)
    x = buffer[:, :K]
    with pytest.raises(OverlapError, match="out shares memory with x"):
        lt.linear(x, _ones(K, K), out=buffer[:, 2 : K + 2])
    lt.linear(x, _ones(K, K), out=buffer[:, K:])  # interleaved, but disjoint
    assert (buffer[:, :K] == 1).all()
    assert (buffer[:, K:] == K).all()


def test_misaligned_address() -> None:
    base = cp.zeros(4 * M * K + 4, cp.uint8)
    memory = cp.cuda.UnownedMemory(base.data.ptr + 1, 4 * M * K, base)
    x = cp.ndarray((M, K), cp.float32, cp.cuda.MemoryPointer(memory, 0))
    with pytest.raises(lt.errors.AlignmentError, match="x is at"):
        lt.linear(x, _ones(N, K))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dy": lambda: _ones(N, M)}, ShapeError, "dy has shape"),
        ({"dy": lambda: _ones(M, N, dtype=np.float16)}, DTypeError, "dy is float16"),
        ({"dy": lambda: np.ones((M, N), np.float32)}, DeviceError, "dy"),
        ({"out_dx": lambda: _ones(K, M)}, ShapeError, "out_dx has shape"),
        ({"accumulate": lambda: True, "out_dw": lambda: None}, ArgumentError, "out_dw"),
    ],
)
def test_backward(arguments: dict[str, Callable[[], Any]], error: type[LtError], message: str) -> None:
    _, ctx = lt.linear_fwd(_ones(M, K), _ones(N, K), _ones(N), activation="tanh")
    dw = cp.full((N, K), 7, cp.float32)
    call: dict[str, Any] = {"dy": _ones(M, N), "ctx": ctx, "out_dw": dw}
    call |= {name: make() for name, make in arguments.items()}
    with pytest.raises(error, match=message):
        lt.linear_bwd(**call)
    assert (dw == 7).all()


def test_backward_outputs_that_share_memory() -> None:
    x, dy = _ones(M, K), _ones(M, K)
    _, ctx = lt.linear_fwd(x, _ones(K, K))
    with pytest.raises(OverlapError, match="out_dx shares memory with dy"):
        lt.linear_bwd(dy, ctx, out_dx=dy)


def test_the_layer_below_has_made_x() -> None:
    y, below = lt.linear_fwd(_ones(M, K), _ones(N, K), activation="gelu")
    dy = _ones(M, K)
    for _ in range(3):  # also when the call is known
        for x in (y, y[:], y.reshape(1, M, N)[0]):
            lt.linear_bwd(dy, lt.linear_fwd(x, _ones(K, N))[1], through=below)
        _, above = lt.linear_fwd(y + 1, _ones(K, N))
        with pytest.raises(ArgumentError, match="whose y is not the x of ctx"):
            lt.linear_bwd(dy, above, through=below)
        lt.linear_bwd(dy, above, through=below, require_same=False)


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
