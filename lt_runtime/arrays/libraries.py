"""Array libraries: signatures of a call's arrays, and new arrays of the library that the operands come from."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any, Final, TypeAlias

import numpy as np

from lt_runtime.arguments import shown
from lt_runtime.errors import MissingLibraryError, OperandError
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import cupy_current

_ALIGNED: Final = 256  # bytes; larger alignments of an address make no difference to any plan

Look: TypeAlias = tuple[Callable[[Any], int], Callable[[Any], tuple[Any, ...]]]
"""Two functions of an array: the first returns its address, the second its device, shape, strides and type."""
Signature: TypeAlias = tuple[tuple[Any, ...], tuple[int, ...]]
"""Two tuples with an entry for each array of a call. The first holds device, shape, strides and type (None for an
absent array), the second addresses (0 for an absent array). If an address is not a multiple of 256, the first tuple
ends with all alignments."""

_looks: dict[type, Look] = {}
_ABSENT: Final[Look] = (lambda _: 0), (lambda _: None)  # type: ignore[assignment,return-value]  # the Look of None

current_streams: Final[dict[type, Callable[[int], int]]] = {}
"""For CuPy's and PyTorch's class of arrays, a function that returns the library's current stream on a device."""


class Library(ABC):
    """Makes arrays of one array library, such as CuPy, PyTorch or NumPy.

    Attributes:
        address: function that returns the address of the first element of an array made by `empty`.
    """

    address: Callable[[Any], int]

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, stream: int) -> Any:
        """An uninitialised row-major array, allocated in stream order on `stream`."""

    def maker(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> Callable[[], Any]:
        """Returns a function that makes arrays as `empty` does, on the current stream; `device` must be current."""
        return lambda: self.empty(shape, dtype, device, self.current_stream(device))

    def current_stream(self, device: int) -> int:
        """The handle of the library's current stream on a device; 0 for a library of the host."""
        return 0

    def export(self, array: Any, stream: int) -> Any:
        """Converts an array from `empty`, which work on `stream` fills, to an array of the library."""
        return array


def cupy() -> Any:
    """Imports CuPy, and returns the module.

    Raises:
        MissingLibraryError: CuPy is not installed.
    """
    try:
        import cupy
    except ImportError as error:
        raise MissingLibraryError("CuPy is not installed: pip install 'lt_runtime[cuda13]'") from error
    return cupy


@dataclass(frozen=True, slots=True)
class _StreamHandle:
    """Wraps a stream handle in the CUDA stream protocol (`__cuda_stream__`)."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@contextlib.contextmanager
def cupy_stream(device: int, stream: int) -> Iterator[Any]:
    """Makes `device` and `stream` current in CuPy; orders its allocations and DLPack exchanges with `stream`."""
    module = cupy()
    with module.cuda.Device(device):
        if module.cuda.get_current_stream().ptr == stream:
            yield module
        else:
            with module.cuda.Stream.from_external(_StreamHandle(stream)):
                yield module


class CupyLibrary(Library):
    """CuPy arrays. CuPy also allocates results for libraries other than PyTorch."""

    address = attrgetter("data.ptr")

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, stream: int) -> Any:
        """See `Library`."""
        module = sys.modules.get("cupy") or cupy()
        make = self.maker(shape, dtype, device)
        if module.cuda.runtime.getDevice() == device and module.cuda.get_current_stream().ptr == stream:
            return make()
        with cupy_stream(device, stream):
            return make()

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, stream: int) -> Any:
        """An array of zeros, allocated as by `empty` and filled by a memset, which a captured graph repeats."""
        array = self.empty(shape, dtype, device, stream)
        if array.nbytes:
            call("cuMemsetD8Async", array.data.ptr, 0, array.nbytes, stream)
        return array

    def maker(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> Callable[[], Any]:
        """See `Library`. CuPy cannot allocate arrays of FP8, but can view arrays of bytes as FP8."""
        make = cupy().ndarray
        if dtype.kind in "Vf" and dtype.itemsize == 1:  # NumPy's kind is "V" for E4M3, and "f" for E5M2
            return lambda: make(shape, np.uint8).view(dtype)
        return functools.partial(make, shape, dtype)

    def current_stream(self, device: int) -> int:
        """See `Library`; the default stream if CuPy was not imported."""
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

    def maker(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> Callable[[], Any]:
        """See `Library`."""
        torch, strides = sys.modules["torch"], tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        kind, place = getattr(torch, dtype.name), torch.device("cuda", device)
        # `torch.empty` takes a third longer, because it parses its arguments in more ways.
        return functools.partial(torch.empty_strided, shape, strides, dtype=kind, device=place)

    def current_stream(self, device: int) -> int:
        """See `Library`."""
        torch = sys.modules["torch"]
        # `torch.cuda.current_stream` is avoided: it wraps the handle in an object, which takes as long as a short call.
        handle: int = torch._C._cuda_getCurrentRawStream(device)
        return handle


class NumpyLibrary(Library):
    """NumPy arrays, in host memory and without streams."""

    address = attrgetter("ctypes.data")

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, stream: int) -> Any:
        """See `Library`."""
        return np.empty(shape, dtype)


class ArrayApiLibrary(CupyLibrary):
    """A library with the array API's `from_dlpack`, such as JAX: CuPy allocates results, DLPack converts them."""

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace

    def export(self, array: Any, stream: int) -> Any:
        """See `Library`. CuPy makes the receiver's stream wait for `stream`."""
        with cupy_stream(array.device.id, stream):
            return self._namespace.from_dlpack(array)


def contiguous(array: Any) -> Any:
    """A contiguous row-major copy of an array; the array itself if it is already contiguous and row-major.

    Args:
        array: array of NumPy, CuPy or PyTorch.

    Raises:
        OperandError: the array is from another library.
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
    """Whether an array belongs to `library` ("cupy" or "torch"); the check does not import the library."""
    module = sys.modules.get(library)
    return module is not None and isinstance(array, module.Tensor if library == "torch" else module.ndarray)


def signature_of(arrays: tuple[Any, ...]) -> Signature | None:
    """The signature of a call's arrays; all but the first may be None.

    Returns:
        The signature; None unless every array is CuPy's or PyTorch's.
    """
    kind = type(arrays[0])
    look = _looks.get(kind) or _look_of(kind)
    if look is None:
        return None
    address_of, form_of = look
    try:
        forms = tuple([None if array is None else form_of(array) for array in arrays])
        addresses = tuple([0 if array is None else address_of(array) for array in arrays])
    except (AttributeError, TypeError):  # Arrays of both libraries, such as PyTorch tensors and a layer's FP8 scales.
        looks = [_ABSENT if array is None else _looks.get(type(array)) or _look_of(type(array)) for array in arrays]
        known = [each for each in looks if each is not None]
        if len(known) < len(arrays):
            return None
        forms = tuple([form_of(array) for (_, form_of), array in zip(known, arrays, strict=True)])
        addresses = tuple([address_of(array) for (address_of, _), array in zip(known, arrays, strict=True)])
    bits = 0
    for address in addresses:
        bits |= address
    if bits & _ALIGNED - 1:
        forms += (tuple([address & -address & _ALIGNED - 1 for address in addresses]),)
    return forms, addresses


def _look_of(kind: type) -> Look | None:
    """The functions that read an array of a class: of CuPy's ndarray, or of PyTorch's Tensor or Parameter.

    For any other class the result is None; also for a subclass of these, which may override the attributes.
    """
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if cupy is not None and kind is cupy.ndarray:
        look: Look = attrgetter("data.ptr"), attrgetter("data.device_id", "shape", "strides", "dtype")
        current_streams[kind] = lambda device: int(cupy.cuda.get_current_stream(device).ptr)
    elif torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        look = methodcaller("data_ptr"), _form_of_tensor
        current_streams[kind] = TorchLibrary().current_stream
    else:
        return None
    return _looks.setdefault(kind, look)


def _form_of_tensor(tensor: Any) -> tuple[Any, ...]:
    return tensor.get_device(), tensor.shape, tensor.stride(), tensor.dtype
