"""Casts of NumPy arrays to FP8."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, DTypeError, OverlapError, ShapeError
from lt_runtime.reference import amax_of, cast_fp8
from tests.host_kernels.arrays import Guarded
from tests.support.numpy_cases import DTYPES, PLACES, numbers

_X = np.ones((4, 6), np.float32)
_E4M3 = ml_dtypes.float8_e4m3fn
_SCALE = np.float32([64.0])


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", ["float8_e4m3fn", "float8_e5m2"])
def test_casts(to: Any, dtype: str, place: Any) -> None:
    x = Guarded(numbers(1, (5, 7), dtype), place)
    out, transposed = (Guarded(np.zeros(shape, getattr(ml_dtypes, to)), place) for shape in ((5, 7), (7, 5)))
    amax = np.zeros((), np.float32)
    found = lt.cast_fp8(x.array, _SCALE, dtype=to, out=out.array, out_transposed=transposed.array, amax=amax)
    assert found[0] is out.array
    assert found[1] is transposed.array
    expected = cast_fp8(x.array, 64.0, to).astype(np.float64)
    np.testing.assert_array_equal(out.values(), expected)
    np.testing.assert_array_equal(transposed.values(), expected.T)
    assert amax == amax_of(x.array)
    x.assert_unchanged()


@pytest.mark.parametrize("shape", [(3,), (2, 3, 5), (0, 4), (4, 0)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    x = np.asarray(numbers(1, shape, "float32"))
    rows, transposed = lt.cast_fp8(x)
    assert rows.shape == shape
    np.testing.assert_array_equal(transposed, rows.reshape(-1, shape[-1]).T if x.size else np.zeros(transposed.shape))
    assert transposed.shape == (shape[-1], int(np.prod(shape[:-1])))


def test_what_is_not_needed_is_not_made() -> None:
    amax = np.float32([2.0])
    assert lt.cast_fp8(_X * 3, need_out=False, need_transposed=False, amax=amax) == (None, None)
    assert amax == 3
    assert lt.cast_fp8(_X, need_out=False, dtype=ml_dtypes.float8_e5m2, amax=amax)[0] is None
    rows, none = lt.cast_fp8(_X * 1000, need_transposed=False)
    assert (amax, none, rows.dtype) == (3, None, _E4M3)
    assert (rows.astype(np.float32) == 448).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: lt.cast_fp8(_X, dtype="float16"), DTypeError, "dtype is float16; accepted are float8_e4m3fn and"),  # type: ignore[arg-type]
        (lambda: lt.cast_fp8(_X.astype(_E4M3)), DTypeError, "x has type float8_e4m3fn"),
        (
            lambda: lt.cast_fp8(_X, out=np.zeros((6, 4), _E4M3)),
            ShapeError,
            r"out has shape \(6, 4\); it must be \(4, 6",
        ),
        (lambda: lt.cast_fp8(_X, out_transposed=np.zeros((4, 6), _E4M3)), ShapeError, "out_transposed has shape"),
        (
            lambda: lt.cast_fp8(_X, out=np.zeros((4, 6), ml_dtypes.float8_e5m2)),
            DTypeError,
            "out is float8_e5m2; it must",
        ),
        (lambda: lt.cast_fp8(_X, _X), ShapeError, r"scale has shape \(4, 6\); accepted are \(\) and \(1,\)"),
        (lambda: lt.cast_fp8(_X, amax=np.zeros(1)), DTypeError, "amax is float64; it must be float32"),
        (lambda: lt.cast_fp8(_X, _SCALE, amax=_SCALE), OverlapError, "amax shares memory with scale"),
        (lambda: lt.cast_fp8(np.float32(3)[...]), ShapeError, r"x has shape \(\); accepted are \(\.\.\., N\)"),
        (lambda: lt.cast_fp8_rows(_X, dtype="float16"), DTypeError, "dtype is float16; accepted are float8_e4m3fn and"),  # type: ignore[arg-type]
        (lambda: lt.cast_fp8_rows(_X[:0]), ShapeError, r"x has shape \(0, 6\); accepted are \(\.\.\., N\)"),
        (lambda: lt.cast_fp8_rows(np.float32(3)[...]), ShapeError, r"x has shape \(\); accepted"),
        (
            lambda: lt.cast_fp8_rows(_X, out_scales=np.ones(6, np.float32)),
            ShapeError,
            r"out_scales has shape \(6,\); it must be \(4,\)",
        ),
        (
            lambda: lt.cast_fp8_rows(_X, out_transposed_scales=np.ones(6)),
            DTypeError,
            "out_transposed_scales is float64",
        ),
        (lambda: lt.cast_fp8_rows(_X, need_out=False, need_transposed=False), ArgumentError, "need_out and need_tr"),
        (
            lambda: lt.cast_fp8(_X, need_out=False, need_transposed=False),
            ArgumentError,
            "need_out and need_transposed are",
        ),
    ],
)
def test_refusals(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
