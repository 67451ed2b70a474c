"""Operands are read from the attributes and protocols of array libraries; the driver's answers are simulated."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from lt_runtime.arrays import operand
from lt_runtime.arrays.checks import check_device, check_same
from lt_runtime.arrays.operand import Operand, read
from lt_runtime.errors import AlignmentError, DeviceError, DTypeError, LayoutError, LtError, OperandError, ShapeError
from lt_runtime.gpu import streams
from lt_runtime.gpu.streams import stream_handle
from tests.support.numpy_cases import DeviceArray


@pytest.fixture(autouse=True)
def every_address_is_on_gpu_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operand, "device_of_address", lambda name, address: 3)


def made(name: str, shape: tuple[int, ...], dtype: Any = np.float32, address: int = 4096, device: int = 0) -> Operand:
    """A row-major operand."""
    array = np.zeros(shape, dtype)
    steps = tuple(stride // array.itemsize for stride in array.strides)
    return Operand(name, address, shape, steps, array.dtype.name, array.itemsize, device, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (DeviceArray((4, 5)), ((4, 5), (5, 1), "float32", 4)),
        (DeviceArray((4, 5), "<f2", strides=None), ((4, 5), (5, 1), "float16", 2)),
        (DeviceArray((4, 5), strides=(4, 16)), ((4, 5), (1, 4), "float32", 4)),
        (DeviceArray((4, 5), strides=(48, 8)), ((4, 5), (12, 2), "float32", 4)),
        (DeviceArray((7,), "<u4"), ((7,), (1,), "uint32", 4)),
        (DeviceArray((2, 3, 4), "<f8"), ((2, 3, 4), (12, 4, 1), "float64", 8)),
        (DeviceArray(()), ((), (), "float32", 4)),
    ],
)
def test_the_interface(array: DeviceArray, expected: tuple[Any, ...]) -> None:
    result = read("x", array, 0)
    assert (result.shape, result.strides, result.dtype, result.itemsize) == expected
    assert (result.name, result.address, result.device, result.array) == ("x", 1 << 40, 3, array)


def test_bfloat16_has_no_type_string_of_its_own() -> None:
    array = DeviceArray((4,), "<V2")
    with pytest.raises(DTypeError, match="x has type string '<V2'"):
        read("x", array, 0)
    array.dtype = "bfloat16"  # type: ignore[attr-defined]
    assert read("x", array, 0).dtype == "bfloat16"


class HostArray:
    """An array in host memory that belongs to another library than NumPy."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (DeviceArray((4,), ">f4"), DTypeError, "x has byte order '>', as '>f4' says; accepted is this machine's"),
        (DeviceArray((4,), "|V8"), DTypeError, "x has type string"),
        (DeviceArray((4,), address=4098), AlignmentError, "x is at 0x1002; it must be a multiple of 4"),
        (DeviceArray((2, 2), strides=(10, 4)), LayoutError, r"x has strides of \(10, 4\) bytes; .* multiples of 4"),
        ([1.0], OperandError, r"x is a list \(\[1.0\]\); accepted are NumPy and CuPy arrays"),
        (None, OperandError, "x is a NoneType"),
        (HostArray(), DeviceError, r"x lives on DLPack device \(1, 0\); accepted are NumPy arrays and GPUs"),
        (np.ones(3, ">f4"), DTypeError, r"byte order '>', .*accepted is this machine's, as in x.astype\('<f4'\)"),
    ],
)
def test_refused(array: Any, error: type[LtError], message: str) -> None:
    with pytest.raises(error, match=message):
        read("x", array, 0)


def test_layouts_of_an_operand() -> None:
    assert made("x", (4, 5)).layout.strides == (5, 1)
    assert made("x", (2, 3, 4)).check_packed().shape == (1, 24)
    assert made("x", ()).check_packed().shape == (1, 1)
    assert made("x", (0, 3)).check_packed().size == 0
    assert made("x", (2, 3, 4)).spec.layout.shape == (6, 4)
    with pytest.raises(ShapeError, match=r"x has shape \(3,\); accepted are matrices"):
        _ = made("x", (3,)).layout
    with pytest.raises(LayoutError, match=r"x has strides \(1, 4\); it must be row-major without gaps"):
        read("x", DeviceArray((4, 5), strides=(4, 16)), 0).check_packed()


def test_vectors() -> None:
    made("bias", (5,)).check_packed()
    read("bias", DeviceArray((1,), strides=(400,)), 0).check_packed()
    assert made("bias", (5,)).spec.layout.shape == (1, 5)
    with pytest.raises(LayoutError, match=r"bias has strides \(2,\); it must be row-major without gaps"):
        read("bias", DeviceArray((5,), strides=(8,)), 0).check_packed()


@pytest.mark.parametrize(("address", "alignment"), [(4096, 256), (256, 256), (4096 + 16, 16), (6, 2), (1, 1), (0, 256)])
def test_alignment(address: int, alignment: int) -> None:
    assert made("x", (1, 1), address=address).alignment == alignment
    assert made("x", (1, 1), address=address).spec.alignment == alignment


def test_operands_must_agree() -> None:
    x = made("x", (4, 5))
    check_same(x, made("w", (9,)), made("y", ()))
    with pytest.raises(DTypeError, match="w is float16 but x is float32; types must be equal"):
        check_same(x, made("w", (4, 5), np.float16))
    for check in (check_same, check_device):
        with pytest.raises(DeviceError, match="w is on GPU 1 but x on GPU 0; all must be on one device"):
            check(x, made("w", (4, 5), device=1))
    check_device(x, made("labels", (4,), np.int64))


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (12345, 12345),
        (2**64 - 1, 2**64 - 1),
        (types.SimpleNamespace(__cuda_stream__=lambda: (0, 77)), 77),
        (types.SimpleNamespace(__cuda_stream__=(0, 78)), 78),
    ],
)
def test_streams(monkeypatch: pytest.MonkeyPatch, stream: Any, handle: int) -> None:
    monkeypatch.setattr(streams, "call", lambda name, handle: {"cuStreamGetDevice": 0}[name])
    monkeypatch.setattr(streams, "is_capturing", lambda _: False)
    monkeypatch.setattr(streams, "_placed", set())
    assert stream_handle(stream, 0) == handle


@pytest.mark.parametrize("stream", ["main", 1.5, -1, 2**64, True])
def test_no_streams(stream: Any) -> None:
    with pytest.raises(LtError, match=r"stream is .*; accepted are None, an int handle, or an object with"):
        stream_handle(stream, 0)
