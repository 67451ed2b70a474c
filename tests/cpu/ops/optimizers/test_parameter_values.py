"""`Parameter.assign` writes data and master copy, or nothing; master copies that differ from data are noticed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, DTypeError, LtError, OperandError, ShapeError
from tests.support.numpy_cases import DTYPES, Array
from tests.support.torch_state import HostTensor, fake_module

VALUES = np.array([[0.1, -1 / 3, 0.0], [np.nan, np.inf, 1e-7]])


def parameter(dtype: str, *, master: bool = True, shape: tuple[int, ...] = (2, 3)) -> lt.Parameter:
    arrays = np.ones(shape, DTYPES[dtype]), np.zeros(shape, DTYPES[dtype])
    has_master = master and dtype != "float32"
    return lt.Parameter(*arrays, np.ones(shape, np.float32) if has_master else None, name="p")


class DlpackOnly:
    """Stands in for an array in host memory of a library that offers no interface but DLPack."""

    def __init__(self, values: Array) -> None:
        self._values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._values.__dlpack_device__()


class ArrayOnly:
    """An object with `__array__`, which NumPy converts to an array."""

    def __init__(self, values: Array) -> None:
        self._values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self._values


SOURCES: dict[str, Callable[[Array], Any]] = {
    "float64": lambda values: values,
    "float32": lambda values: values.astype(np.float32),
    "float16": lambda values: values.astype(np.float16),
    "bfloat16": lambda values: values.astype(ml_dtypes.bfloat16),
    "longdouble": lambda values: values.astype(np.longdouble),
    "float8": lambda values: values.astype(ml_dtypes.float8_e5m2),
    "nested sequences": lambda values: tuple(values.tolist()),
    "rows": lambda values: [*values],
    "with gaps": lambda values: np.repeat(values, 2, axis=1)[:, ::2],
    "reversed": lambda values: values[::-1, ::-1].copy()[::-1, ::-1],
    "other byte order": lambda values: values.astype(">f4"),
    "PyTorch": HostTensor,
    "PyTorch, FP32 with a gradient": lambda values: HostTensor(values.astype(np.float32), requires_grad=True),
    "PyTorch, BF16 with a gradient": lambda values: HostTensor(values.astype(DTYPES["bfloat16"]), requires_grad=True),
    "DLPack": DlpackOnly,
    "__array__": ArrayOnly,
}


@pytest.fixture(autouse=True)
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_module())


def numbers_in(source: Any) -> Array:
    """Returns the numbers of a source in FP64."""
    while hasattr(source, "values") or hasattr(source, "_values"):
        source = getattr(source, "values", getattr(source, "_values", None))
    return np.array([[float(value) for value in row] for row in source])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", SOURCES)
def test_values_of_any_library(source: str, dtype: str) -> None:
    given, tensor = SOURCES[source](VALUES), parameter(dtype)
    data, master = tensor.data, tensor.master
    tensor.assign(given)
    exact = numbers_in(given).astype(np.float32)
    assert tensor.data is data
    assert tensor.master is master
    np.testing.assert_array_equal(tensor.data.astype(np.float32), exact.astype(DTYPES[dtype]).astype(np.float32))
    if dtype != "float32":
        np.testing.assert_array_equal(tensor.master, exact)


def test_without_a_master_copy_data_alone_are_written() -> None:
    tensor = parameter("bfloat16", master=False)
    tensor.assign(VALUES)
    assert tensor.master is None
    expected = VALUES.astype(np.float32).astype(DTYPES["bfloat16"])
    np.testing.assert_array_equal(tensor.data.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize(
    "values", [np.arange(6).reshape(2, 3), [[1, 2, 3], [4, 5, 1 << 24]], np.ones((2, 3), np.uint8)]
)
def test_integers_that_fp32_holds(values: Any) -> None:
    tensor = parameter("float32")
    tensor.assign(values)
    np.testing.assert_array_equal(tensor.data, np.asarray(values))


def ones(dtype: Any, **places: Any) -> Array:
    values = np.ones((2, 3), dtype)
    values[1, 2] = places["last"]
    return values


REFUSED: list[tuple[str, Any, type[LtError], str]] = [
    ("float32", np.ones((3, 2)), ShapeError, r"values is array\(.*, of shape \(3, 2\); .* have shape \(2, 3\), as p"),
    ("float32", 1.0, ShapeError, r"values is 1.0, of shape \(\)"),
    ("float32", np.ones((2, 3), np.complex64), DTypeError, r"values \(complex64\) is array.*; accepted are arrays"),
    ("float32", np.ones((2, 3), bool), DTypeError, r"values \(bool\)"),
    ("float32", [["a"] * 3] * 2, DTypeError, r"values \(<U1\) is \[\['a', 'a', 'a'\]"),
    ("float32", [[None] * 3] * 2, DTypeError, r"values \(object\)"),
    ("float32", [[1, 2, 3], [1, 2]], OperandError, r"values is \[\[1, 2, 3\], \[1, 2\]\]; accepted"),
    ("float32", [[10**400] * 3] * 2, DTypeError, r"values \(object\)"),
    ("float32", np.ma.masked_array(np.ones((2, 3))), OperandError, "values is masked_array"),
    ("float32", ones(np.int64, last=-(1 << 24) - 1), ArgumentError, r"integers beyond 2\*\*24 in magnitude"),
    ("float32", ones(np.uint64, last=(1 << 64) - 1), ArgumentError, r"integers beyond 2\*\*24 in magnitude"),
    ("float32", ones(np.float64, last=1e39), ArgumentError, r"values has 1e\+39 at \(1, 2\), .* too large for float32"),
    ("float16", ones(np.float32, last=-65520), ArgumentError, r"has -65520.0 at \(1, 2\), .* too large for float16"),
    ("bfloat16", ones(np.float32, last=3.4e38), ArgumentError, r"has 3.4e\+38 at \(1, 2\), .* too large for bfloat16"),
    ("float16", ones(ml_dtypes.bfloat16, last=1e5), ArgumentError, "too large for float16"),
]


@pytest.mark.parametrize(("dtype", "values", "error", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refused_values_leave_the_parameter(dtype: str, values: Any, error: type[LtError], message: str) -> None:
    tensor = parameter(dtype)
    with pytest.raises(error, match=message):
        tensor.assign(values)
    assert (tensor.data == 1).all()
    assert tensor.master is None or (tensor.master == 1).all()


def test_a_master_copy_of_another_shape_is_not_written_half() -> None:
    tensor = parameter("float16")
    tensor.master = np.ones((1, 3), np.float32)
    with pytest.raises(ShapeError, match=r"p.master has shape \(1, 3\); it must be \(2, 3\), as the values"):
        tensor.assign(VALUES)
    assert (tensor.data == 1).all()


def test_arrays_of_the_host_that_are_no_parameters() -> None:
    tensor = lt.Parameter(SimpleNamespace(shape=(2, 3)), np.ones((2, 3)), name="p")
    with pytest.raises(OperandError, match=r"p\.data is a SimpleNamespace"):
        tensor.assign(VALUES)


STALE = r"p.data has 2 at \(1, 0\), but its master copy 1.0: what is written into data .* is lost .* parameter.assign"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_optimizer_refuses_a_stale_master_copy(dtype: str) -> None:
    tensor = parameter(dtype)
    tensor.data[1, 0] = 2
    with pytest.raises(OperandError, match=STALE.replace("has 2 ", r"has 2(\.0)? ")):
        lt.AdamW([tensor])
    tensor.assign(tensor.data)
    lt.AdamW([tensor])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_step_refuses_a_stale_master_copy_and_changes_nothing(dtype: str) -> None:
    first, tensor = parameter(dtype), parameter(dtype)
    optimizer = lt.AdamW([first, tensor])
    for _ in range(2):
        optimizer.step()
    tensor.data[1, 0] = 2
    before = first.data.copy()
    with pytest.raises(OperandError, match=r"p.data has 2(\.0)? at \(1, 0\)"):
        optimizer.step()
    assert int(optimizer.steps[0]) == 2
    assert (first.data == before).all()


def test_what_training_makes_of_numbers_is_not_stale() -> None:
    tensor = parameter("float16", shape=(7,))
    tensor.assign([0.0, -0.0, np.nan, np.inf, 65504, 6e-8, 1e-3])
    tensor.grad[...] = [np.nan, np.inf, 1, 1, -1, 1, 0]
    optimizer = lt.AdamW([tensor], lr=100.0, weight_decay=0.0)
    for _ in range(3):
        optimizer.step()
    assert np.isinf(tensor.data[4])  # only the FP32 master copy can hold a value beyond 65504, the largest of FP16
    assert np.isfinite(tensor.master[4])
    tensor.master[2], tensor.data[2] = np.float32(np.nan), -np.float16(np.nan)  # two NaNs need not have equal bits
    optimizer.step()


def test_zeros_of_both_signs_are_equal() -> None:
    tensor = parameter("bfloat16", shape=(2,))
    tensor.assign([0.0, -0.0])
    tensor.data[...] = -tensor.data
    lt.AdamW([tensor]).step()


def test_the_master_copy_of_a_parameter_in_fp32_is_no_matter() -> None:
    tensor = parameter("float32")
    tensor.master = np.zeros((2, 3), np.float32)
    lt.AdamW([tensor]).step()
