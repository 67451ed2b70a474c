"""`lt.add` on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import DTypeError, LayoutError, OverlapError, ShapeError
from tests.host_kernels.arrays import Guarded
from tests.support.numpy_cases import DTYPES, PLACES, numbers

_A = np.ones((4, 6), np.float32)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(dtype: str, place: Any) -> None:
    a, b, out = (Guarded(numbers(seed, (5, 7), dtype), place) for seed in range(3))
    expected = (a.array.astype(np.float64) + b.array.astype(np.float64)).astype(DTYPES[dtype])
    for buffer in (out.array, a.array.copy(), None):
        made = lt.add(a.array, b.array, out=buffer)
        assert made is buffer or buffer is None
        assert (made == expected).all()
    assert lt.add(b.array, a.array, out=a.array) is a.array
    assert (a.values() == expected.astype(np.float64)).all()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 5), (0, 4)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    a = np.asarray(numbers(1, shape, "float32"))
    np.testing.assert_array_equal(lt.add(a, a), 2 * a)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: lt.add(_A, _A[0]), ShapeError, r"b has shape \(6,\); it must be \(4, 6\), a's shape, because nothing"),
        (lambda: lt.add(_A, _A, out=_A[:3].copy()), ShapeError, r"out has shape \(3, 6\); it must be \(4, 6\)"),
        (lambda: lt.add(_A, _A.astype("f2")), DTypeError, "b is float16 but a is float32; types must be equal"),
        (lambda: lt.add(_A, _A, out=_A.astype("f2")), DTypeError, "out is float16 but a is float32"),
        (lambda: lt.add(_A.astype("f8"), _A), DTypeError, r"a has type float64; .*a\.astype\('float32'\)"),
        (lambda: lt.add(_A, np.ones((4, 12), "f4")[:, ::2]), LayoutError, r"pass lt\.contiguous\(b\)"),
        (lambda: lt.add(_A[1:], _A[1:], out=_A[:3]), OverlapError, "out shares memory with a"),
        (lambda: lt.add(_A[:3] + 1, _A[1:], out=_A[:3]), OverlapError, "out shares memory with b"),
    ],
)
def test_refusals(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
    assert (_A == 1).all()
