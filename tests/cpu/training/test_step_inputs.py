"""Batches on their way into a training step's buffers, with the GPU's memory on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.arrays.operand import Operand
from lt_runtime.errors import DeviceError, DTypeError, LayoutError, LtError, ShapeError
from lt_runtime.kernels import kernel
from lt_runtime.training import captured, inputs, staging
from lt_runtime.training.captured import Batches
from lt_runtime.training.inputs import read_batch
from lt_runtime.training.losses import NamedLoss, OwnLoss, StepLoss
from lt_runtime.training.staging import Slot
from tests.host_kernels.harness import HostKernels
from tests.support.fake_device import DeviceArray, call, operand_of
from tests.support.numpy_cases import DTYPES, Array

ROWS, INPUTS, OUTPUTS = 12, 5, 3


@pytest.fixture(autouse=True)
def _memory_of_the_host(monkeypatch: pytest.MonkeyPatch, host: HostKernels) -> None:
    @contextlib.contextmanager
    def stream(device: int, handle: int) -> Iterator[Any]:
        yield SimpleNamespace(zeros=lambda *arguments: np.zeros(*arguments).view(DeviceArray))

    monkeypatch.setattr(captured, "cupy_stream", stream)

    monkeypatch.setattr(kernel, "get_kernel", host.get)
    host_read = inputs.read

    def read(name: str, array: Any, stream: int) -> Operand:
        return (host_read if type(array) is np.ndarray else operand_of)(name, array, stream)

    monkeypatch.setattr(inputs, "read", read)


def model_of(dtype: str = "float32") -> Any:
    """As much of a model as is asked for."""
    made = lt.MLP([INPUTS, OUTPUTS], dtype=dtype, device="cpu")
    return SimpleNamespace(dims=made.dims, dtype=made.dtype, device=SimpleNamespace(ordinal=0, description="cuda:0"))


def loss_of(classifies: bool) -> StepLoss:
    return NamedLoss("cross_entropy" if classifies else "mse", {}, lt.MLP([INPUTS, OUTPUTS], device="cpu"))


OWN = OwnLoss(lambda *_: None, lt.MLP([INPUTS, OUTPUTS], device="cpu"))


def fill(batches: Batches, operands: tuple[Operand, ...]) -> None:
    batches.fill([(operand.address, captured._pitch(operand)) for operand in operands], 0)


def on_gpu(values: Array) -> Array:
    return values.view(DeviceArray)


def numbers(shape: tuple[int, ...], dtype: str = "float32") -> Array:
    return on_gpu(np.arange(np.prod(shape)).reshape(shape).astype(DTYPES[dtype]))


def sliced(values: Array) -> Array:
    """The same values with gaps after each row."""
    wide = np.full((values.shape[0], values.shape[1] + 3), 99, values.dtype).view(DeviceArray)
    wide[:, 1:-2] = values
    return wide[:, 1:-2]


@pytest.mark.parametrize("place", [lambda values: values, sliced], ids=["packed", "sliced"])
@pytest.mark.parametrize("parts", [1, 3, 12])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classifies", [True, False])
def test_batches_are_copied_row_by_row(classifies: bool, dtype: str, parts: int, place: Any) -> None:
    x = place(numbers((ROWS, INPUTS), dtype))
    target = on_gpu(np.arange(ROWS) % OUTPUTS) if classifies else place(numbers((ROWS, OUTPUTS), dtype))
    weights = on_gpu(np.arange(ROWS, dtype=np.float32))
    operands = read_batch(model_of(dtype), (x, target, weights), loss_of(classifies), 0)
    batches = Batches(operands, parts, 0)
    assert all((each == 0).all() for part in batches.parts for each in part)
    fill(batches, operands)
    for i, given in enumerate((x, target, weights)):
        copies = [part[i] for part in batches.parts]
        assert [copy.shape[0] for copy in copies] == [ROWS // parts] * parts
        assert np.concatenate(copies).tobytes() == np.ascontiguousarray(given).tobytes()
        starts = {(copy.ctypes.data - copies[0].ctypes.data) % 256 for copy in copies}
        assert starts == {0}


@pytest.mark.parametrize(
    ("x", "target", "classifies", "error", "message"),
    [
        (
            np.ones((4, INPUTS), np.float32),
            numbers((4, 3)),
            False,
            DeviceError,
            "x is in host memory .* use lt.prefetch",
        ),
        (numbers((4, INPUTS)), np.ones((4, 3), np.float32), False, DeviceError, "target is in host memory"),
        (numbers((4, INPUTS), "float16"), numbers((4, 3)), False, DTypeError, "x is float16; the model is float32"),
        (numbers((4, INPUTS)), numbers((4, 3), "bfloat16"), False, DTypeError, "target is bfloat16; the model is"),
        (numbers((INPUTS, 4)).T, numbers((4, 3)), False, LayoutError, r"x has strides \(1, 4\); its rows must be"),
        (numbers((4, INPUTS)), numbers((3, 4)).T, False, LayoutError, "target has strides"),
        (numbers((4, INPUTS)), numbers((4, 4)), False, ShapeError, r"target has shape \(4, 4\); it must be \(4, 3\)"),
        (numbers((4, INPUTS)), numbers((4,)), True, DTypeError, "labels has type float32"),
        (numbers((4, INPUTS)), on_gpu(np.zeros(5, int)), True, ShapeError, r"labels has shape \(5,\)"),
        (numbers((4, INPUTS)), on_gpu(np.zeros(8, int)[::2]), True, LayoutError, r"labels has strides \(2,\)"),
    ],
)
def test_batches_that_do_not_fit(x: Array, target: Array, classifies: bool, error: type[LtError], message: str) -> None:
    with pytest.raises(error, match=message):
        read_batch(model_of(), (x, target), loss_of(classifies), 0)


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (numbers((4, 1)), ShapeError, r"row_weights has shape \(4, 1\); it must be \(4,\), one a row of x"),
        (numbers((4,), "float16"), DTypeError, "row_weights is float16; it must be float32"),
        (numbers((8,))[::2], LayoutError, r"row_weights has strides \(2,\)"),
        (np.ones(4, np.float32), DeviceError, "row_weights is in host memory .* use lt.prefetch"),
    ],
)
def test_weights_that_do_not_fit(weights: Array, error: type[LtError], message: str) -> None:
    with pytest.raises(error, match=message):
        read_batch(model_of(), (numbers((4, INPUTS)), numbers((4, OUTPUTS)), weights), loss_of(False), 0)


@pytest.mark.parametrize("kind", ["float64", "float16", "bfloat16", "int8", "uint64", "bool"])
@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 2), (ROWS, 2, 3)])
@pytest.mark.parametrize("parts", [1, 4])
def test_targets_of_an_own_loss_are_any_array_of_rows(kind: str, shape: tuple[int, ...], parts: int) -> None:
    target = on_gpu(np.arange(np.prod(shape)).reshape(shape).astype(kind))
    if len(shape) == 2:
        target = sliced(target)
    operands = read_batch(model_of(), (numbers((ROWS, INPUTS)), target), OWN, 0)
    batches = Batches(operands, parts, 0)
    fill(batches, operands)
    copies = np.concatenate([part[1] for part in batches.parts])
    assert (copies.dtype, copies.shape) == (target.dtype, shape)
    assert copies.tobytes() == np.ascontiguousarray(target).tobytes()


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (numbers((5, 2)), ShapeError, r"target has shape \(5, 2\); it must have 4 rows, as x has"),
        (numbers(()), ShapeError, r"target has shape \(\); it must have 4 rows"),
        (numbers((8,))[::2], LayoutError, r"target has strides \(2,\); it must be row-major without gaps"),
        (numbers((2, 4)).T, LayoutError, r"target has strides \(1, 4\); its rows must be contiguous"),
        (on_gpu(np.zeros(4, complex)), DTypeError, "target is complex128; accepted are float16, bfloat16, .*bool"),
    ],
)
def test_targets_that_an_own_loss_cannot_have(target: Array, error: type[LtError], message: str) -> None:
    with pytest.raises(error, match=message):
        read_batch(model_of(), (numbers((4, INPUTS)), target), OWN, 0)


def test_one_row_or_one_column_lies_in_any_order() -> None:
    for shape in ((1, INPUTS), (4, 1)):
        model = model_of()
        model.dims = (shape[1], OUTPUTS)
        x = on_gpu(np.asfortranarray(numbers(shape)))
        operands = read_batch(model, (x, numbers((shape[0], OUTPUTS))), loss_of(False), 0)
        batches = Batches(operands, 1, 0)
        fill(batches, operands)
        assert (batches.parts[0][0] == x).all()


class Pointer(SimpleNamespace):
    """Stands in for CuPy's pointers into memory."""

    def __add__(self, offset: int) -> tuple[int, Array]:
        return offset, self.array


@pytest.mark.parametrize("pinned", [True, False])
def test_a_slot_grows_and_is_used_again(monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    log: list[str] = []

    def noted(name: str, *arguments: Any) -> Any:
        log.append(name)
        return None if name in ("cuEventCreate", "cuEventDestroy") else call(name, *arguments)

    def empty(size: int, dtype: Any) -> Any:
        array = np.empty(size, dtype)
        return SimpleNamespace(data=Pointer(ptr=array.ctypes.data, array=array))

    def ndarray(shape: tuple[int, ...], dtype: Any, place: tuple[int, Array]) -> Array:
        offset, memory = place
        return memory[offset : offset + int(np.prod(shape)) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)

    fake = SimpleNamespace(cuda=SimpleNamespace(alloc_pinned_memory=bytearray), empty=empty, ndarray=ndarray)
    monkeypatch.setattr(staging, "call", noted)
    monkeypatch.setattr(staging, "cupy", lambda: fake)
    monkeypatch.setattr(staging, "cupy_stream", lambda *_: contextlib.nullcontext(fake))
    monkeypatch.setattr(staging, "is_pinned", lambda _: pinned)
    slot = Slot(0, 1)
    for rows in (3, 100, 7):
        x, labels = np.random.default_rng(rows).standard_normal((rows, 6)), np.arange(rows, dtype=np.int32)
        given = {"x": x[:, ::2], "y": (labels.astype(DTYPES["bfloat16"]), labels)}
        log.clear()
        found = slot.fill(given)
        assert (found["x"] == given["x"]).all()
        assert found["y"][0].dtype == DTYPES["bfloat16"]
        assert all((one == other).all() for one, other in zip(found["y"], given["y"], strict=True))
        assert log[:2] == ["cuEventSynchronize", "cuStreamWaitEvent"]
        assert log[2:] == ["cuMemcpyHtoDAsync"] * 3 + ["cuEventRecord"] + ["cuEventSynchronize"] * pinned
