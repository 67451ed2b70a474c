"""Stands in for a GPU's memory: host arrays with CuPy's interface, and the driver's copies between such arrays."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np


class DeviceArray(np.ndarray[Any, Any]):
    """A host array that reports its address in the same way as CuPy's arrays do."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


class HostLibrary:
    """Stands in for `CupyLibrary`, the package's access to CuPy."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, stream: int) -> DeviceArray:
        filled: DeviceArray = np.full(shape, np.frombuffer(b"\xff" * dtype.itemsize, dtype)[0], dtype).view(DeviceArray)
        return filled

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, stream: int) -> DeviceArray:
        return np.zeros(shape, dtype).view(DeviceArray)


def call(name: str, *arguments: Any) -> None:
    """Stands in for the driver, which copies between such arrays."""
    if name == "cuMemsetD8Async":
        ctypes.memset(*arguments[:3])
    elif name == "cuMemsetD32Async":
        address, value, count, _ = arguments
        (ctypes.c_uint32 * count).from_address(address)[:] = [value] * count
    elif name in ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync"):
        ctypes.memmove(*arguments[:3])
    else:
        assert name in ("cuStreamSynchronize", "cuStreamWaitEvent", "cuEventRecord", "cuEventSynchronize"), name
