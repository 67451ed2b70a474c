"""Array libraries: what comes back from an operation is of the kind that went in."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lt_runtime.errors import MissingLibraryError, OperandError
from lt_runtime.gpu.direct import is_current
from lt_runtime.gpu.streams import cupy_current


class Library(Protocol):
    """Makes arrays of one kind on a GPU."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, stream: int) -> Any:
        """An uninitialised row-major array whose memory is ordered with `stream`."""

    def address(self, array: Any) -> int:
        """Of the first element of an array as `empty` makes it."""

    def current_stream(self, device: int) -> int:
        """The handle of the stream that the library itself puts work on now."""

    def export(self, array: Any, stream: int) -> Any:
        """`array`, as `empty` made it and with its contents put on `stream`, in the form that the caller gets."""


def cupy() -> Any:
    """The module CuPy.

    Raises:
        MissingLibraryError: it is not installed.
    """
    try:
        import cupy
    except ImportError as error:
        raise MissingLibraryError("CuPy is not installed: pip install 'lt_runtime[cuda13]'") from error
    return cupy


@dataclass(frozen=True, slots=True)
class _StreamHandle:
    """A handle as an object of the CUDA stream protocol."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@contextlib.contextmanager
def cupy_stream(device: int, stream: int) -> Iterator[Any]:
    """CuPy with `device` and `stream` current: that orders its memory pool, and what it exchanges over DLPack."""
    module = cupy()
    with module.cuda.Device(device):
        if module.cuda.get_current_stream().ptr == stream:
            yield module
        else:
            with module.cuda.Stream.from_external(_StreamHandle(stream)):
                yield module


class CupyLibrary:
    """CuPy arrays; also what the other libraries' results are made of."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, stream: int) -> Any:
        """See `Library`."""
        module = sys.modules.get("cupy") or cupy()
        if is_current(device) and module.cuda.get_current_stream().ptr == stream:
            return module.ndarray(shape, dtype)
        with cupy_stream(device, stream):
            return module.ndarray(shape, dtype)

    def address(self, array: Any) -> int:
        """See `Library`."""
        return int(array.data.ptr)

    def current_stream(self, device: int) -> int:
        """See `Library`; the default stream where CuPy is not in use."""
        return cupy_current(device)

    def export(self, array: Any, stream: int) -> Any:
        """See `Library`."""
        return array


class TorchLibrary:
    """PyTorch tensors."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, stream: int) -> Any:
        """See `Library`."""
        torch = sys.modules["torch"]
        kind = getattr(torch, dtype.name)
        if self.current_stream(device) == stream:
            return torch.empty(shape, dtype=kind, device=f"cuda:{device}")
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=f"cuda:{device}")):
            return torch.empty(shape, dtype=kind, device=f"cuda:{device}")

    def address(self, array: Any) -> int:
        """See `Library`."""
        return int(array.data_ptr())

    def current_stream(self, device: int) -> int:
        """See `Library`."""
        torch = sys.modules["torch"]
        # `torch.cuda.current_stream` builds an object for the handle, which takes as long as the rest of a short call.
        handle: int = torch._C._cuda_getCurrentRawStream(device)
        return handle

    def export(self, array: Any, stream: int) -> Any:
        """See `Library`."""
        return array


class NumpyLibrary:
    """NumPy arrays, which live in host memory: they have no streams."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, stream: int) -> Any:
        """See `Library`."""
        return np.empty(shape, dtype)

    def address(self, array: Any) -> int:
        """See `Library`."""
        return int(array.ctypes.data)

    def current_stream(self, device: int) -> int:
        """See `Library`."""
        return 0

    def export(self, array: Any, stream: int) -> Any:
        """See `Library`."""
        return array


class ArrayApiLibrary(CupyLibrary):
    """Any library with the array API's `from_dlpack` (JAX, for one): made by CuPy, handed over without a copy."""

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace

    def export(self, array: Any, stream: int) -> Any:
        """See `Library`. CuPy makes the receiver's stream wait for `stream`."""
        with cupy_stream(array.device.id, stream):
            return self._namespace.from_dlpack(array)


def contiguous(array: Any) -> Any:
    """A row-major copy without gaps; the array itself if it is one already.

    Args:
        array: NumPy, CuPy or PyTorch.

    Raises:
        OperandError: any other kind.
    """
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array)
    if is_from(array, "cupy"):
        return cupy().ascontiguousarray(array)
    if is_from(array, "torch"):
        return array.contiguous()
    raise OperandError(f"array is a {type(array).__name__}; accepted are NumPy and CuPy arrays and PyTorch tensors")


def is_from(array: Any, library: str) -> bool:
    """Whether an array is of the class of `library` ("cupy" or "torch"), which is not imported for the question."""
    module = sys.modules.get(library)
    return module is not None and isinstance(array, module.Tensor if library == "torch" else module.ndarray)
