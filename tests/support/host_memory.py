"""Operands of the tuner in host memory: kernels are replaced by NumPy, and tests look at the memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lt_runtime.kernels import kernel as kernels
from lt_runtime.tuner import operands as device_memory
from lt_runtime.tuner.operands import Buffer, Memory
from lt_runtime.tuner.verification import ProductOperands
from tests.host_kernels.harness import HostKernels
from tests.support.fake_clock import STREAM
from tests.support.fake_device import HostLibrary, call


@pytest.fixture
def host_memory(host: HostKernels, monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Host memory that takes the place of GPU memory."""
    monkeypatch.setattr(device_memory, "CUPY", HostLibrary())
    monkeypatch.setattr(device_memory, "call", call)
    monkeypatch.setattr(kernels, "get_kernel", host.get)
    return Memory(0, STREAM)


def flat(buffer: Buffer) -> NDArray[Any]:
    """Returns the whole memory as unsigned integers of the elements' size."""
    memory = (ctypes.c_uint8 * buffer.size).from_address(buffer.start)
    return np.frombuffer(memory, f"uint{8 * buffer.itemsize}")


def bits(buffer: Buffer) -> NDArray[Any]:
    """Returns the matrices as unsigned integers, (batch, rows, cols); of a mask, the bytes of its lines."""
    elements = buffer.elements
    strides = [elements.batch_stride, elements.row_stride, elements.col_stride]
    shape = buffer.shape
    if buffer.dtype is None:
        flipped = strides[1] == 1
        lines, length = (shape[2], shape[1]) if flipped else shape[1:]
        pitch = strides[2] if flipped else strides[1]
        shape, strides = (shape[0], lines, -(-length // 8)), [strides[0] // 8, pitch // 8, 1]
    start = flat(buffer)[(buffer.address - buffer.start) // buffer.itemsize :]
    return np.lib.stride_tricks.as_strided(start, shape, [buffer.itemsize * stride for stride in strides])


def values(buffer: Buffer) -> NDArray[np.float64]:
    """Returns the elements in FP64, (batch, rows, cols); a mask's bits as 0 and 1."""
    if buffer.dtype is not None:
        return bits(buffer).view(buffer.dtype.numpy).astype(np.float64)
    flipped = buffer.elements.row_stride == 1
    lines = np.unpackbits(bits(buffer), axis=-1, bitorder="little")
    lines = lines[..., : buffer.shape[1 if flipped else 2]]
    return (lines.swapaxes(1, 2) if flipped else lines).astype(np.float64)


def read(trial: ProductOperands, name: str) -> NDArray[np.float64]:
    return values(trial.buffers[name])
