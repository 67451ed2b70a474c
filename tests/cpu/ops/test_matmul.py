"""`lt.matmul` on NumPy arrays: every epilogue, batches, and arguments that are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import lt_runtime as lt
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import ArgumentError, DTypeError, LayoutError, LtError, OverlapError, ShapeError

Array = NDArray[Any]
M, N, K = 5, 11, 7


def _draw(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _gelu(z: float) -> float:
    return 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def _by_element(z: Array, epilogue: Epilogue) -> Array:
    functions = {"none": lambda v: v, "relu": lambda v: max(v, 0.0), "gelu": _gelu}
    return np.vectorize(functions[epilogue.activation], otypes=[np.float64])(z)


def _aux(rows: int, cols: int) -> Array:
    """Allocates a pre-activation whose leading dimension is a multiple of 8, as on a GPU."""
    return np.zeros((rows, -(-cols // 8) * 8), np.float32)[:, :cols]


FORWARD = [e for e in Epilogue if not e.is_derivative and not e.sums_operand]


@pytest.mark.parametrize("epilogue", FORWARD)
def test_forward_epilogues(epilogue: Epilogue) -> None:
    a, b, c, bias = _draw(M, K), _draw(K, N), _draw(M, N), _draw(N)
    z = 0.5 * np.einsum("mk,kn->mn", a, b, dtype=np.float64) - 2.0 * c.astype(np.float64)
    if epilogue.has_bias:
        z = z + bias.astype(np.float64)
    is_mask = epilogue.activation == "relu"
    aux: Any = None
    if epilogue.has_aux_output:
        aux = np.zeros((M, 16), np.uint8) if is_mask else _aux(M, N)
    d = lt.matmul(
        a, b, c, alpha=0.5, beta=-2.0, epilogue=epilogue.value, bias=bias if epilogue.has_bias else None, aux=aux
    )
    np.testing.assert_allclose(d, _by_element(z, epilogue), rtol=1e-6, atol=1e-6)
    if epilogue.has_aux_output and is_mask:
        bits = [[bool(aux[i, j // 8] >> (j % 8) & 1) for j in range(N)] for i in range(M)]
        np.testing.assert_array_equal(bits, z > 0)
        assert not aux[:, 2:].any()
    elif epilogue.has_aux_output:
        np.testing.assert_allclose(aux, z, rtol=1e-6)


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_derivatives_undo_what_forward_kept(activation: str, column_major: bool) -> None:
    a, b, w = _draw(M, K), _draw(K, N), _draw(N, N)
    order = "F" if column_major else "C"
    aux = _aux(N, M).T if column_major else _aux(M, N)
    if activation == "relu":
        aux = np.zeros((N if column_major else M, 16), np.uint8)
    out = np.zeros((M, N), np.float32, order)
    assert lt.matmul(a, b, epilogue=f"{activation}_aux", aux=aux, out=out) is out
    gradient = np.zeros(N, np.float32)
    derivative, out = f"d{activation}_bgrad", np.zeros((M, N), np.float32, order)
    d = lt.matmul(a @ b, w, epilogue=derivative, aux=aux, bias_gradient=gradient, out=out)
    z, step = (a @ b).astype(np.float64), 1e-6
    slope = (_by_element(z + step, Epilogue(activation)) - _by_element(z - step, Epilogue(activation))) / (2 * step)
    np.testing.assert_allclose(d, (a @ b @ w) * slope, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(gradient, d.sum(axis=0), rtol=1e-5, atol=1e-5)


def test_operand_sums() -> None:
    a, b = _draw(3, M, K), _draw(K, N)
    sums = np.zeros((3, M), np.float32)
    d = lt.matmul(a, b, epilogue="bgrada", bias_gradient=sums)
    np.testing.assert_allclose(d, a @ b, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sums, a.sum(axis=-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("a", "b", "shape"), [((3, M, K), (K, N), 3), ((M, K), (2, K, N), 2), ((1, M, K), (4, K, N), 4)]
)
def test_batches(a: tuple[int, ...], b: tuple[int, ...], shape: int) -> None:
    x, y = _draw(*a), _draw(*b)
    # A negative stride is accepted for an axis of size 1, where it has no meaning.
    d = lt.matmul(x[::-1] if a[0] == 1 else x, y)
    assert d.shape == (shape, M, N)
    np.testing.assert_allclose(d, np.matmul(x, y), rtol=1e-5, atol=1e-5)


def test_types() -> None:
    half = _draw(M, K).astype(np.float16)
    assert lt.matmul(half, half.T).dtype == np.float16
    assert lt.matmul(half, half.T, dtype="float32").dtype == np.float32
    double = _draw(M, K).astype(np.float64)
    np.testing.assert_array_equal(lt.matmul(double, double.T), double @ double.T)


def test_c_is_not_looked_at_where_beta_is_zero() -> None:
    c = np.full((M, N), np.nan, np.float32)
    assert np.isfinite(lt.matmul(_draw(M, K), _draw(K, N), c, beta=0.0)).all()


BAD: list[tuple[dict[str, Any], type[LtError], str]] = [
    ({"b": _draw(K + 1, N)}, ShapeError, "b has shape"),
    ({"a": _draw(K)}, ShapeError, "a has shape"),
    ({"a": _draw(2, M, K), "b": _draw(3, K, N)}, ShapeError, "equal batches"),
    ({"b": _draw(K, N).astype(np.float16)}, DTypeError, "b is float16 but a is float32"),
    ({"a": np.ones((M, K), np.int32)}, DTypeError, "a has type int32"),
    ({"c": _draw(N, M)}, ShapeError, "c has shape"),
    ({"dtype": "float16"}, DTypeError, "dtype is float16"),
    (
        *({"a": np.ones((M, K), np.float16), "b": np.ones((K, N), np.float16), "dtype": "bfloat16"}, DTypeError),
        "dtype is bfloat16; with float16 operands, that or float32",
    ),
    ({"epilogue": "softmax"}, ArgumentError, "'softmax'; accepted are none, bias"),
    ({"epilogue": "bias"}, ArgumentError, "bias is None; epilogue 'bias' needs it"),
    ({"bias": _draw(N)}, ArgumentError, "bias is given; epilogue 'none' has none"),
    ({"epilogue": "bias", "bias": _draw(N + 1)}, ShapeError, "bias has shape"),
    ({"epilogue": "gelu_aux"}, ArgumentError, "aux is None"),
    ({"epilogue": "relu_aux", "aux": _draw(M, N)}, DTypeError, "aux is float32; it must be uint8"),
    ({"epilogue": "bgrada", "bias_gradient": _draw(N)}, ShapeError, "bias_gradient has shape"),
    ({"compute": "fp8"}, ArgumentError, "'fp8'"),
    ({"beta": 2.0}, ArgumentError, r"beta is 2\.0, but there is no c to multiply"),
    ({"beta": np.float32(-1)}, ArgumentError, r"beta is .*-1\.0.*, but there is no c"),
    ({"alpha": np.ones(2, np.float32), "beta": np.ones(1, np.float32)}, DTypeError, r"alpha is .* of shape \(2,\)"),
    ({"alpha": np.ones(1, np.float32)}, ArgumentError, "alpha and beta must both be numbers, or both be arrays"),
    ({"alpha": np.ones(1), "beta": np.ones(1, np.float32)}, DTypeError, "alpha is float64"),
    ({"aux": np.zeros((M, N), np.float32), "epilogue": "gelu_aux"}, LayoutError, "aux has leading dimension"),
    ({"aux": np.zeros((N, 16), np.float32)[:, :M].T, "epilogue": "gelu_aux"}, LayoutError, "orders must be equal"),
    ({"aux": np.zeros((M, 8), np.uint8), "epilogue": "relu_aux"}, LayoutError, "multiple of 16 bytes"),
    ({"aux": np.zeros((N + M, 16), np.uint8), "epilogue": "relu_aux"}, ShapeError, "aux has shape"),
    ({"bias": _draw(2 * N)[::2], "epilogue": "bias"}, LayoutError, "bias has stride"),
    ({"bias": _draw(N).astype(np.float16), "epilogue": "bias"}, DTypeError, "bias is float16"),
    ({"bias_gradient": _draw(2 * N)[::2], "epilogue": "bgradb"}, LayoutError, "bias_gradient has strides"),
    ({"out": np.empty((2, M, N), np.float32)[::-1], "a": _draw(2, M, K)}, LayoutError, "first must not be negative"),
    ({"c": _draw(N, M).T, "epilogue": "bgradb", "bias_gradient": _draw(N)}, LayoutError, "c is column-major"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=[message for _, _, message in BAD])
def test_bad_input(changes: dict[str, Any], error: type[LtError], message: str) -> None:
    out = np.full((M, N), 7, np.float32)
    with pytest.raises(error, match=message):
        lt.matmul(**{"a": _draw(M, K), "b": _draw(K, N), "out": out, **changes})
    assert (out == 7).all()


def test_fp64_has_no_epilogues() -> None:
    double = np.ones((3, 3))
    with pytest.raises(ArgumentError, match="float64 has none"):
        lt.matmul(double, double, epilogue="relu")


def test_outputs_must_not_share_memory() -> None:
    a = _draw(M, M)
    with pytest.raises(OverlapError, match="out shares memory with a"):
        lt.matmul(a, _draw(M, M), out=a)
    c = _draw(M, M)
    assert lt.matmul(a, a, c, out=c) is c
    with pytest.raises(OverlapError, match="out shares memory with c"):
        lt.matmul(a, a, c.T, out=c)
    batch, repeated = _draw(2, M, M), np.lib.stride_tricks.as_strided(c, (2, M, M), (0, *c.strides))
    with pytest.raises(OverlapError, match=r"out has strides \(0, \d+, 1\): its elements share memory"):
        lt.matmul(batch, a, out=repeated)


@pytest.mark.parametrize("epilogue", ["gelu_aux", "gelu_aux_bias"])
def test_what_an_epilogue_writes_besides_shares_no_memory(epilogue: str) -> None:
    a, b, bias = _draw(16, 16), _draw(16, 16), _draw(16) if "bias" in epilogue else None
    before = a.copy(), b.copy()
    for name, aux in (("a", a), ("b", b)):
        with pytest.raises(OverlapError, match=f"aux shares memory with {name}"):
            lt.matmul(a, b, epilogue=epilogue, bias=bias, aux=aux)
    np.testing.assert_array_equal((a, b), before)
