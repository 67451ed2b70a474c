"""Array libraries: how a call's arrays are told from another's, and results of the kind that went in."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any, Final, TypeAlias

import numpy as np

from lt_runtime.arguments import shown
from lt_runtime.errors import MissingLibraryError, OperandError
from lt_runtime.gpu.streams import cupy_current

_ALIGNED: Final = 256  # the best alignment that makes a difference

Look: TypeAlias = Callable[[Any], tuple[Any, ...]]
"""Gives an array's address, device, shape, strides and type."""
Signature: TypeAlias = tuple[Any, ...]
"""What a call asks for, then the look of each of its arrays, None for an absent one."""

_looks: dict[type, Look] = {}

current_streams: Final[dict[type, Callable[[int], int]]] = {}
"""For each kind of array that has signatures, the function that gives its library's current stream on a device."""


class Library(ABC):
    """Makes arrays of one kind.

    Attributes:
        address: gives the address of the first element of an array as `empty` makes it.
    """

    address: Callable[[Any], int]

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, stream: int) -> Any:
        """An uninitialised row-major array whose memory is ordered with `stream`."""

    def current_stream(self, device: int) -> int:
        """The handle of the stream that the library itself puts work on now; 0 for a library of the host."""
        return 0

    def export(self, array: Any, stream: int) -> Any:
        """`array`, as `empty` made it and with its contents put on `stream`, in the form that the caller gets."""
        return array


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


class CupyLibrary(Library):
    """CuPy arrays; also what the other libraries' results are made of."""

    address = attrgetter("data.ptr")

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, stream: int) -> Any:
        """See `Library`."""
        module = sys.modules.get("cupy") or cupy()
        if module.cuda.runtime.getDevice() == device and module.cuda.get_current_stream().ptr == stream:
            return module.ndarray(shape, dtype)
        with cupy_stream(device, stream):
            return module.ndarray(shape, dtype)

    def current_stream(self, device: int) -> int:
        """See `Library`; the default stream where CuPy is not in use."""
        return cupy_current(device)


class TorchLibrary(Library):
    """PyTorch tensors."""

    address = methodcaller("data_ptr")

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, stream: int) -> Any:
        """See `Library`."""
        torch = sys.modules["torch"]
        kind = getattr(torch, dtype.name)
        if self.current_stream(device) == stream:
            return torch.empty(shape, dtype=kind, device=f"cuda:{device}")
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=f"cuda:{device}")):
            return torch.empty(shape, dtype=kind, device=f"cuda:{device}")

    def current_stream(self, device: int) -> int:
        """See `Library`."""
        torch = sys.modules["torch"]
        # `torch.cuda.current_stream` builds an object for the handle, which takes as long as the rest of a short call.
        handle: int = torch._C._cuda_getCurrentRawStream(device)
        return handle


class NumpyLibrary(Library):
    """NumPy arrays, which live in host memory: they have no streams."""

    address = attrgetter("ctypes.data")

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, stream: int) -> Any:
        """See `Library`."""
        return np.empty(shape, dtype)


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
    found = f"array is a {type(array).__name__} ({shown(array)})"
    raise OperandError(f"{found}; accepted are NumPy and CuPy arrays and PyTorch tensors")


def is_from(array: Any, library: str) -> bool:
    """Whether an array is of the class of `library` ("cupy" or "torch"), which is not imported for the question."""
    module = sys.modules.get(library)
    return module is not None and isinstance(array, module.Tensor if library == "torch" else module.ndarray)


def signature_of(arrays: tuple[Any, ...], asked: Hashable) -> Signature | None:
    """The signature of a call with these arrays, any of which but the first may be None.

    Args:
        asked: all else that the call's course depends on.

    Returns:
        None unless all arrays are CuPy's, or all are PyTorch's.
    """
    kind = type(arrays[0])
    look = _looks.get(kind) or _look_of(kind)
    if look is None:
        return None
    try:
        return (asked, *[None if array is None else look(array) for array in arrays])
    except (AttributeError, TypeError):  # an array of another library than the first
        return None


def without_addresses(signature: Signature) -> tuple[Hashable, tuple[int, ...]]:
    """The part that is the same for all calls whose arrays differ in nothing but their addresses; and the addresses.

    An absent array has address 0. How well the addresses are aligned is in the first part.
    """
    asked, *looks = signature
    addresses = tuple([0 if look is None else look[0] for look in looks])
    alignments = tuple([address & -address & _ALIGNED - 1 for address in addresses])
    return (asked, *[look and look[1:] for look in looks], alignments), addresses


def _look_of(kind: type) -> Look | None:
    """None for classes that are not known through and through, subclasses among them."""
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if cupy is not None and kind is cupy.ndarray:
        look: Look = attrgetter("data.ptr", "data.device_id", "shape", "strides", "dtype")
        current_streams[kind] = lambda device: int(cupy.cuda.get_current_stream(device).ptr)
    elif torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        look = _look_at_tensor
        current_streams[kind] = TorchLibrary().current_stream
    else:
        return None
    return _looks.setdefault(kind, look)


def _look_at_tensor(tensor: Any) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.get_device(), tensor.shape, tensor.stride(), tensor.dtype
