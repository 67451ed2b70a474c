"""Loads cuBLASLt at first use, declares its functions, makes its handles, and turns statuses into exceptions.

The tables declare the binary interface of `cublasLt.h`: the types of each function, and the version that brought it.

The functions of the header that concern the library as a whole (versions, statuses, its cache) are here as well.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

from lt_runtime.cublaslt.attributes import Attribute
from lt_runtime.cublaslt.enums import Status
from lt_runtime.errors import ArgumentError, CublasLtError, MissingLibraryError

ALGO_BYTES: Final = 64
"""The size of `cublasLtMatmulAlgo_t`."""

_VOIDP, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_OUT, _OUT_INT, _OUT_SIZE = ctypes.POINTER(_VOIDP), ctypes.POINTER(_INT), ctypes.POINTER(_SIZE)
_TEXT = ctypes.c_char_p
_SET: Final = (_VOIDP, _INT, _VOIDP, _SIZE)
_GET: Final = (_VOIDP, _INT, _VOIDP, _SIZE, _OUT_SIZE)
_TYPES: Final = (_INT,) * 6  # compute, scale, A, B, C, D
_PROBLEM: Final = (_VOIDP,) * 6  # handle, operation, layouts of A, B, C, D
_HEURISTIC: Final = (*_PROBLEM, _VOIDP, _INT, _VOIDP, _OUT_INT)

LoggerCallback = ctypes.CFUNCTYPE(None, _INT, _TEXT, _TEXT)
"""`cublasLtLoggerCallback_t`: level, function, message."""


def _descriptor(kind: str, *create: Any) -> dict[str, tuple[Any, ...]]:
    return {
        f"cublasLt{kind}Create": (_OUT, *create),
        f"cublasLt{kind}Destroy": (_VOIDP,),
        f"cublasLt{kind}SetAttribute": _SET,
        f"cublasLt{kind}GetAttribute": _GET,
    }


ARGUMENTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "cublasLtCreate": (_OUT,),
    "cublasLtDestroy": (_VOIDP,),
    "cublasLtGetStatusName": (_INT,),
    "cublasLtGetStatusString": (_INT,),
    "cublasLtGetVersion": (),
    "cublasLtGetCudartVersion": (),
    "cublasLtHeuristicsCacheGetCapacity": (_OUT_SIZE,),
    "cublasLtHeuristicsCacheSetCapacity": (_SIZE,),
    **_descriptor("MatmulDesc", _INT, _INT),
    **_descriptor("MatrixLayout", _INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtGroupedMatrixLayoutCreate": (_OUT, _INT, _INT, _VOIDP, _VOIDP, _VOIDP),
    **_descriptor("MatmulPreference"),
    **_descriptor("MatrixTransformDesc", _INT),
    **_descriptor("EmulationDesc"),
    "cublasLtMatmulAlgoGetHeuristic": _HEURISTIC,
    "cublasLtMatmulAlgoGetHeuristicForStream": (*_HEURISTIC, _VOIDP),
    "cublasLtMatmulAlgoGetIds": (_VOIDP, *_TYPES, _INT, _VOIDP, _OUT_INT),
    "cublasLtMatmulAlgoInit": (_VOIDP, *_TYPES, _INT, _VOIDP),
    "cublasLtMatmulAlgoCheck": (*_PROBLEM, _VOIDP, _VOIDP),
    "cublasLtMatmulAlgoCheckForStream": (*_PROBLEM, _VOIDP, _VOIDP, _VOIDP),
    "cublasLtMatmulAlgoCapGetAttribute": _GET,
    "cublasLtMatmulAlgoConfigSetAttribute": _SET,
    "cublasLtMatmulAlgoConfigGetAttribute": _GET,
    "cublasLtMatmul": (*(_VOIDP,) * 14, _SIZE, _VOIDP),
    "cublasLtMatrixTransform": (_VOIDP,) * 11,
    "cublasLtLoggerSetCallback": (_VOIDP,),
    "cublasLtLoggerOpenFile": (_TEXT,),
    "cublasLtLoggerSetLevel": (_INT,),
    "cublasLtLoggerSetMask": (_INT,),
    "cublasLtLoggerForceDisable": (),
}

RESULTS: Final[Mapping[str, Any]] = {
    "cublasLtGetStatusName": _TEXT,
    "cublasLtGetStatusString": _TEXT,
    "cublasLtGetVersion": _SIZE,
    "cublasLtGetCudartVersion": _SIZE,
}
"""The result types of the functions that do not return a status."""

SINCE: Final[Mapping[str, int]] = {
    **dict.fromkeys(_descriptor("EmulationDesc"), 130100),
    "cublasLtGroupedMatrixLayoutCreate": 130200,
    "cublasLtMatmulAlgoGetHeuristicForStream": 130501,
    "cublasLtMatmulAlgoCheckForStream": 130501,
}
"""The first version, major·10000 + minor·100 + patch, of the functions that CUDA 12.0 lacks."""

_OVERRIDE: Final = "LT_RUNTIME_CUBLASLT"
_handles: Final[dict[int, int]] = {}
_lock: Final = threading.Lock()


class Library:
    """The loaded library: its path, its version and its functions."""

    def __init__(self, path: str) -> None:
        self.path, self._dll = path, ctypes.CDLL(path)
        self._functions: dict[str, Any] = {}
        self.version = int(self.function("cublasLtGetVersion")())

    def function(self, name: str) -> Callable[..., Any]:
        """The C function `name`, with its types declared; see the module's `function`."""
        found = self._functions.get(name)
        if found is None:
            try:
                found = self._dll[name]
            except AttributeError:
                raise MissingLibraryError(f"{name} is not in {self.path}; {_remedy(SINCE.get(name, 0))}") from None
            found.argtypes, found.restype = ARGUMENTS[name], RESULTS.get(name, ctypes.c_int)
            self._functions[name] = found
        return found


def _remedy(since: int) -> str:
    if not since:
        return "cublasLt.h declares it, but this library does not export it"
    return f"it came with cuBLASLt {version_text(since)}: pip install 'nvidia-cublas>={version_text(since)}'"


def version_text(version: int) -> str:
    """A version number as people write it: 131000 is "13.10.0"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _find() -> str:
    """Path of the library: the value of LT_RUNTIME_CUBLASLT, or else the file in NVIDIA's wheels or toolkits."""
    named = os.environ.get(_OVERRIDE)
    if named:
        return named
    from cuda import pathfinder

    try:
        return str(pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path)
    except pathfinder.DynamicLibNotFoundError as error:
        raise MissingLibraryError("cuBLASLt is not installed: pip install 'lt_runtime[cuda13]'") from error


@functools.cache
def loaded() -> Library:
    """The library, which the first call finds and loads.

    Raises:
        MissingLibraryError: it is not installed.
    """
    path = _find()
    try:
        return Library(path)
    except OSError as error:
        hint = f"; {_OVERRIDE} names it" if os.environ.get(_OVERRIDE) else ""
        raise MissingLibraryError(f"{path} cannot be loaded{hint}: {error}") from error


def function(name: str) -> Callable[..., Any]:
    """The C function `name`, with its types declared.

    Raises:
        MissingLibraryError: cuBLASLt is not installed, or the installed version lacks the function.
    """
    return loaded().function(name)


def call(name: str, *arguments: Any, attribute: Attribute | None = None) -> None:
    """Calls `name`, and raises the exception of `failure` unless the call succeeds."""
    status = function(name)(*arguments)
    if status:
        raise failure(name, status, attribute)


def failure(name: str, status: int, attribute: Attribute | None = None) -> CublasLtError | MissingLibraryError:
    """The exception for the status, not SUCCESS, that the call `name` returned, perhaps for an attribute.

    A library that is older than the attribute returns INVALID_VALUE; the exception then says which version has it.
    """
    if attribute is not None and status == Status.INVALID_VALUE and get_version() < attribute.since:
        older = version_text(get_version())
        return MissingLibraryError(f"{attribute} is not in cuBLASLt {older}; {_remedy(attribute.since)}")
    return CublasLtError(name, status, get_status_name(status), get_status_string(status))


def read_attribute(name: str, owner: Any, attribute: Attribute) -> Any:
    """The value that the call `name` returns for an attribute of a descriptor or algorithm.

    Raises:
        MissingLibraryError: the attribute is newer than the library.
        CublasLtError: the library refused.
    """
    return attribute.unpack(read_bytes(name, owner, attribute))


def read_bytes(name: str, owner: Any, attribute: Attribute) -> bytes:
    """As `read_attribute`, but returns the bytes that the library wrote."""
    cell, written = ctypes.create_string_buffer(attribute.size), ctypes.c_size_t()
    call(name, owner, attribute, cell, attribute.size, ctypes.byref(written), attribute=attribute)
    return cell.raw


class Handle:
    """`cublasLtHandle_t` for the device that is current when the handle is made; close it with that device current.

    Closing a handle synchronises the device, so it must not happen while a stream is captured. For the same reason the
    garbage collector does not close a handle: one that is left open stays open until the process ends, and gives a
    `ResourceWarning`.

    Raises:
        CublasLtError: the library could not be initialised. Without a GPU the status is NOT_INITIALIZED.
    """

    _value: int | None = None

    def __init__(self) -> None:
        self._value = _create()

    @property
    def value(self) -> int:
        """The C pointer.

        Raises:
            ArgumentError: the handle is closed.
        """
        if self._value is None:
            raise ArgumentError("this Handle is closed")
        return self._value

    def close(self) -> None:
        """Destroys the handle; a second call does nothing."""
        value, self._value = self._value, None
        if value is not None:
            call("cublasLtDestroy", value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._value is not None:
            warnings.warn("a cuBLASLt Handle was never closed", ResourceWarning, source=self, stacklevel=2)


def handle(device: int) -> int:
    """The handle for a device, which must be current. It is made once and used until the process ends.

    It is never destroyed, because `cublasLtDestroy` synchronises the device.

    Raises:
        CublasLtError: the library could not be initialised.
    """
    known = _handles.get(device)
    if known is not None:
        return known
    with _lock:
        if device not in _handles:
            _handles[device] = _create()
        return _handles[device]


def pointer(owner: Handle | int) -> int:
    """The C pointer of a `Handle`, or of the int that `handle` returns."""
    return owner if isinstance(owner, int) else owner.value


def _create() -> int:
    created = ctypes.c_void_p()
    call("cublasLtCreate", ctypes.byref(created))
    return created.value or 0


def library_path() -> str:
    """The path of the loaded library."""
    return loaded().path


def get_version() -> int:
    """The library's version, major·10000 + minor·100 + patch."""
    return loaded().version


def get_cudart_version() -> int:
    """The version of the CUDA runtime that the library was built with, major·1000 + minor·10."""
    return int(function("cublasLtGetCudartVersion")())


def get_status_name(status: int) -> str:
    """The library's name for a status, such as CUBLAS_STATUS_INVALID_VALUE."""
    return str(function("cublasLtGetStatusName")(status).decode())


def get_status_string(status: int) -> str:
    """The library's explanation of a status."""
    return str(function("cublasLtGetStatusString")(status).decode())


def heuristics_cache_get_capacity() -> int:
    """The number of entries that the library's cache of heuristic results can hold."""
    capacity = ctypes.c_size_t()
    call("cublasLtHeuristicsCacheGetCapacity", ctypes.byref(capacity))
    return capacity.value


def heuristics_cache_set_capacity(capacity: int) -> None:
    """Sets the number of entries that the cache of heuristic results can hold; 0 turns the cache off.

    The library rounds the number up.

    Raises:
        ArgumentError: the number is negative or does not fit size_t.
    """
    if not 0 <= capacity < 2**64:
        raise ArgumentError(f"capacity is {capacity}; accepted: 0 or more (size_t)")
    call("cublasLtHeuristicsCacheSetCapacity", capacity)
