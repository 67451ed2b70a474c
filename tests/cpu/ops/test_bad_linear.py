"""Arguments that forward, backward and dropout refuse on NumPy arrays, before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    LayoutError,
    LtError,
    MissingLibraryError,
    OperandError,
    OverlapError,
    ShapeError,
)
from tests.support.numpy_cases import SENTINEL, Array, DeviceArray

M, N, K = 6, 5, 4


def ones(*shape: int, dtype: Any = np.float32) -> Array:
    return np.ones(shape, dtype)


def read_only(*shape: int) -> Array:
    array = ones(*shape)
    array.flags.writeable = False
    return array


ACCEPTED_TYPES = "accepted are float32, float16, bfloat16"

FORWARD: list[tuple[dict[str, Any], type[LtError], str]] = [
    ({"w": ones(N, K + 1)}, ShapeError, r"w has shape \(5, 5\); its second axis must be 4, as in x of shape \(6, 4\)"),
    ({"x": ones(K)}, ShapeError, r"x has shape \(4,\); accepted are matrices, two axes, or more axes of rows"),
    ({"x": ones(2, M, K)}, ShapeError, r"out has shape \(6, 5\); it must be \(2, 6, 5\)"),
    (
        {"x": ones(3, M, K)[:, :2]},
        LayoutError,
        r"x of shape \(3, 2, 4\) has strides \(24, 4, 1\): its leading axes are no rows .*lt.contiguous\(x\)",
    ),
    ({"x": ones(2, 3, K), "out": ones(2, M, N)[:, :3]}, LayoutError, r"out of shape .* leading axes .*uous\(out\)"),
    ({"w": ones(K)}, ShapeError, r"w has shape \(4,\); accepted are matrices"),
    ({"bias": ones(N + 1)}, ShapeError, r"bias has shape \(6,\); it must be \(5,\), as w of shape \(5, 4\)"),
    ({"bias": ones(1, N)}, ShapeError, r"bias has shape \(1, 5\)"),
    ({"add": ones(N)}, ShapeError, r"add has shape \(5,\); it must be \(6, 5\), y's shape"),
    ({"add": ones(M, N, dtype=np.float16)}, DTypeError, "add is float16 but x is float32; types must be equal"),
    ({"add": ones(M, 2 * N)[:, ::2]}, LayoutError, r"add of shape .*: neither axis is .*lt.contiguous\(add\)"),
    ({"out": ones(N, M)}, ShapeError, r"out has shape \(5, 6\); it must be \(6, 5\)"),
    ({"out_z": ones(M, N + 1)}, ShapeError, r"out_z has shape \(6, 6\); it must be \(6, 5\)"),
    ({"x": ones(M, K, dtype=np.float64)}, DTypeError, f"x has type float64; {ACCEPTED_TYPES}"),
    ({"x": ones(M, K, dtype=np.int32)}, DTypeError, f"x has type int32; {ACCEPTED_TYPES}"),
    ({"x": ones(M, K, dtype=np.complex64)}, DTypeError, "x has type complex64"),
    ({"w": ones(N, K, dtype=np.float16)}, DTypeError, "w is float16 but x is float32; types must be equal"),
    ({"bias": ones(N, dtype=np.int64)}, DTypeError, "bias is int64 but x is float32"),
    ({"out": ones(M, N, dtype=np.float64)}, DTypeError, "out is float64 but x is float32; types must be equal"),
    ({"out_z": ones(M, N, dtype=np.float16)}, DTypeError, "out_z is float16 but x is float32; types must be equal"),
    ({"out": read_only(M, N)}, OperandError, "out is read-only"),
    ({"activation": "softmax"}, ArgumentError, r"activation is 'softmax'; accepted are none, relu.*silu"),
    ({"activation": "leaky_relu", "negative_slope": np.nan}, ArgumentError, "negative_slope is nan"),
    ({"compute": "fp8"}, ArgumentError, "compute is 'fp8'; accepted are float32, tf32"),
    ({"dropout": 1.0}, ArgumentError, r"probability is 1.0; it must be in \[0, 1\)"),
    ({"dropout": -0.1}, ArgumentError, "probability is -0.1"),
    ({"dropout": np.nan}, ArgumentError, "probability is nan"),
    ({"dropout": 0.5}, ArgumentError, "dropout is 0.5 but rng is None; pass rng="),
    ({"dropout": 0.5, "rng": lt.Philox(step=np.zeros(1, np.int64))}, DTypeError, r"step is int64 of shape \(1,\)"),
    ({"dropout": 0.5, "rng": lt.Philox(step=np.zeros(2, np.uint32))}, DTypeError, r"step is uint32 of shape \(2,\)"),
    ({"dropout": 0.5, "rng": lt.Philox(step=DeviceArray((1,), "<u4"))}, DeviceError, "step is a DeviceArray"),
    ({"w": DeviceArray((N, K))}, DeviceError, "x, bias, out in host memory .NumPy. but w not; all must be on one"),
    ({"bias": DeviceArray((N,))}, DeviceError, "but bias not"),
    ({"out": DeviceArray((M, N))}, DeviceError, "but out not"),
]


@pytest.mark.parametrize(("changes", "error", "message"), FORWARD)
def test_forward(changes: dict[str, Any], error: type[LtError], message: str) -> None:
    out, out_z = np.full((M, N), SENTINEL, np.float32), np.full((M, N), SENTINEL, np.float32)
    arguments: dict[str, Any] = {"x": ones(M, K), "w": ones(N, K), "bias": ones(N), "out": out}
    if "out_z" in changes:
        arguments["out_z"] = out_z
    with pytest.raises(error, match=message):
        lt.linear_fwd(**{**arguments, **changes})
    assert (out == SENTINEL).all()
    if not changes.keys() & {"dropout", "rng", "out_z"}:
        with pytest.raises(error, match=message):
            lt.linear(**{**arguments, **changes})
    assert (out == SENTINEL).all()
    assert (lt.linear(ones(M, K), ones(N, K)) == K).all(), "what is right must go on working"


def test_tf32_needs_fp32() -> None:
    x = ones(4, 4, dtype=np.float16)
    with pytest.raises(ArgumentError, match="compute='tf32' needs float32 operands, not float16"):
        lt.linear(x, x, compute="tf32")


@pytest.mark.parametrize("name", ["x", "w", "bias"])
def test_out_over_an_input(name: str) -> None:
    buffer = ones(M, 3 * M)
    operands: dict[str, Any] = {"x": ones(M, M), "w": ones(M, M), "bias": ones(M)}
    operands[name] = buffer[0, :M] if name == "bias" else buffer[:, :M]
    for out in (buffer[:, :M], buffer[:, M - 1 : 2 * M - 1]):
        with pytest.raises(OverlapError, match=f"out shares memory with {name}; it must not"):
            lt.linear_fwd(**operands, out=out)
    with pytest.raises(OverlapError, match=f"out_z shares memory with {name}"):
        lt.linear_fwd(**operands, out_z=buffer[:, :M])
    assert (buffer == 1).all()
    # These two outputs are slices whose rows alternate in memory, but do not overlap.
    lt.linear_fwd(**operands, out=buffer[:, M : 2 * M], out_z=buffer[:, 2 * M :])
    assert (buffer[:, :M] == 1).all()
    assert (buffer[:, M:] == M + 1).all()


def test_out_over_an_addend_in_part() -> None:
    buffer = ones(M + 1, M)
    for out, add in ((buffer[1:], buffer[:-1]), (buffer[:M].T, buffer[:M])):
        with pytest.raises(OverlapError, match="out shares memory with add; it must not"):
            lt.linear(ones(M, K), ones(M, K), add=add, out=out)
    with pytest.raises(OverlapError, match="out_z shares memory with add"):
        lt.linear_fwd(ones(M, K), ones(M, K), add=buffer[1:], out_z=buffer[1:])
    assert (buffer == 1).all()


def test_outputs_over_each_other() -> None:
    both = np.full((M, N), SENTINEL, np.float32)
    with pytest.raises(OverlapError, match="out_z shares memory with out"):
        lt.linear_fwd(ones(M, K), ones(N, K), out=both, out_z=both)
    assert (both == SENTINEL).all()


BACKWARD: list[tuple[dict[str, Any], type[LtError], str]] = [
    ({"dy": ones(2, 3, N)}, ShapeError, r"dy has shape \(2, 3, 5\); it must be \(6, 5\)"),
    ({"dy": ones(N, M)}, ShapeError, r"dy has shape \(5, 6\); it must be \(6, 5\)"),
    ({"dy": ones(M, N, dtype=np.float16)}, DTypeError, "dy is float16 but x is float32"),
    ({"dy": DeviceArray((M, N))}, DeviceError, "x, w, the saved tensor, out_dw in host memory .* but dy not"),
    ({"out_dx": ones(K, M)}, ShapeError, r"out_dx has shape \(4, 6\); it must be \(6, 4\)"),
    ({"out_db": ones(N, 1)}, ShapeError, r"out_db has shape \(5, 1\); it must be \(5,\)"),
    ({"out_dz": ones(M, M)}, ShapeError, r"out_dz has shape \(6, 6\); it must be \(6, 5\)"),
    ({"out_dx": ones(M, K, dtype=np.float64)}, DTypeError, "out_dx is float64 but x is float32; types must be equal"),
    ({"out_db": DeviceArray((N,))}, DeviceError, "but out_db not"),
    ({"out_dx": read_only(M, K)}, OperandError, "out_dx is read-only"),
    ({"accumulate": True, "out_dw": None, "out_db": ones(N)}, ArgumentError, "accumulate=True needs out_dw, to add to"),
    ({"accumulate": True}, ArgumentError, "accumulate=True needs out_db, to add to"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BACKWARD)
def test_backward(changes: dict[str, Any], error: type[LtError], message: str) -> None:
    _, ctx = lt.linear_fwd(ones(M, K), ones(N, K), ones(N), activation="tanh")
    dw = np.full((N, K), SENTINEL, np.float32)
    arguments: dict[str, Any] = {"dy": ones(M, N), "ctx": ctx, "out_dw": dw}
    with pytest.raises(error, match=message):
        lt.linear_bwd(**{**arguments, **changes})
    assert (dw == SENTINEL).all()
    assert np.isfinite(lt.linear_bwd(ones(M, N), ctx, out_dw=dw).dx).all()


def test_gradients_over_inputs_and_each_other() -> None:
    x, w, dy = ones(M, M), ones(M, M), ones(M, M)
    _, ctx = lt.linear_fwd(x, w, activation="gelu")
    for name in ("out_dx", "out_dw", "out_dz"):
        for other, array in (("dy", dy), ("x", x), ("w", w), ("the saved tensor", ctx.saved)):
            with pytest.raises(OverlapError, match=f"{name} shares memory with {other}"):
                lt.linear_bwd(dy, ctx, **{name: array})  # type: ignore[arg-type]
    both = np.full((M, M), SENTINEL, np.float32)
    with pytest.raises(OverlapError, match="out_dw shares memory with out_dx"):
        lt.linear_bwd(dy, ctx, out_dx=both, out_dw=both)
    assert (both == SENTINEL).all()
    assert (x == 1).all()
    assert (dy == 1).all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"p": 1.0}, ArgumentError, r"probability is 1.0; it must be in \[0, 1\)"),
        ({"p": -1e-9}, ArgumentError, "probability is -1e-09"),
        ({"rng": None}, ArgumentError, "dropout is 0.5 but rng is None"),
        ({"x": ones(4, dtype=np.int8)}, DTypeError, f"x has type int8; {ACCEPTED_TYPES}"),
        ({"x": DeviceArray((4,))}, DeviceError, "out in host memory .* but x not"),
        ({"out": ones(5)}, ShapeError, r"out has shape \(5,\); it must be \(4,\)"),
        ({"out": ones(4, dtype=np.float16)}, DTypeError, "out is float16 but x is float32; types must be equal"),
        ({"rng": lt.Philox(step=np.zeros(3, np.uint32))}, DTypeError, r"step is uint32 of shape \(3,\)"),
        ({"x": ones(8)[::2]}, LayoutError, r"x has strides \(2,\); it must be row-major without gaps"),
    ],
)
def test_dropout(changes: dict[str, Any], error: type[LtError], message: str) -> None:
    out = np.full(4, SENTINEL, np.float32)
    arguments: dict[str, Any] = {"x": ones(4), "p": 0.5, "rng": lt.Philox(), "out": out}
    with pytest.raises(error, match=message):
        lt.dropout(**{**arguments, **changes})
    assert (out == SENTINEL).all()


def test_dropout_over_part_of_its_input() -> None:
    buffer = ones(8)
    with pytest.raises(OverlapError, match="out shares memory with x"):
        lt.dropout(buffer[:6], 0.5, lt.Philox(), out=buffer[2:])
    assert (buffer == 1).all()
    frozen = read_only(4)
    with pytest.raises(OperandError, match="out is read-only"):
        lt.dropout(frozen, 0.5, lt.Philox(), out=frozen)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, r"seed is -1; it must be an integer in \[0, 2\*\*64\)"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"layer": -1}, r"layer is -1; it must be an integer in \[0, 2\*\*32\)"),
        ({"layer": 2**32}, "layer is 4294967296"),
        ({"step": -1}, r"step is -1; it must be an integer in \[0, 2\*\*32\)"),
        ({"step": 2**32}, "step is 4294967296"),
    ],
)
def test_philox(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        lt.Philox(**arguments)
    lt.Philox(2**64 - 1, 2**32 - 1, 2**32 - 1)


def test_what_is_no_array_anywhere() -> None:
    for operands in (([[1.0]], [[1.0]]), (None, None), ("x", "w")):
        with pytest.raises(OperandError, match=r"x is a .*; accepted are NumPy and CuPy arrays"):
            lt.linear(*operands)


def test_memory_that_is_no_gpus() -> None:
    # On a machine without a driver the error names the missing driver; with a driver, it says that the address is not a
    # GPU's.
    with pytest.raises((MissingLibraryError, DeviceError), match=r"driver|x is 0x"):
        lt.linear(DeviceArray((M, K)), DeviceArray((N, K)))


def test_contiguous() -> None:
    strided = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2]
    copied = lt.contiguous(strided)
    assert copied.flags.c_contiguous
    assert (copied == strided).all()
    assert lt.contiguous(copied) is copied
    with pytest.raises(OperandError, match=r"array is a list .*; accepted are NumPy"):
        lt.contiguous([[1.0]])
