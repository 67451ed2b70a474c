"""Loads cuBLASLt at first use, declares its functions, makes its handles, and turns statuses into exceptions.

The functions of the header that concern the whole library (versions, statuses, cache of heuristics, logger) are here as
well. Levels of the logger: 0 off, 1 errors, 2 performance trace, 3 performance hints, 4 heuristics trace, 5 API trace.
The bits of the logger's mask are 1 errors, 2 performance trace, 4 performance hints, 8 heuristics trace, 16 API trace.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, Self

from lt_runtime.cublaslt.attributes import Attribute
from lt_runtime.cublaslt.enums import Status
from lt_runtime.errors import ArgumentError, CublasLtError, MissingLibraryError

ALGO_BYTES: Final = 64
"""The size of `cublasLtMatmulAlgo_t`."""

_PROTOTYPES: Final = """
    cublasLtCreate                          | void_p*                              |        |
    cublasLtDestroy                         | void_p                               |        |
    cublasLtGetStatusName                   | int                                  | char_p |
    cublasLtGetStatusString                 | int                                  | char_p |
    cublasLtGetVersion                      |                                      | size_t |
    cublasLtGetCudartVersion                |                                      | size_t |
    cublasLtHeuristicsCacheGetCapacity      | size_t*                              |        |
    cublasLtHeuristicsCacheSetCapacity      | size_t                               |        |
    cublasLtMatmulDescCreate                | void_p* int×2                        |        |
    cublasLtMatmulDescDestroy               | void_p                               |        |
    cublasLtMatmulDescSetAttribute          | void_p int void_p size_t             |        |
    cublasLtMatmulDescGetAttribute          | void_p int void_p size_t size_t*     |        |
    cublasLtMatrixLayoutCreate              | void_p* int uint64×2 int64           |        |
    cublasLtGroupedMatrixLayoutCreate       | void_p* int×2 void_p×3               |        | 130200
    cublasLtMatrixLayoutDestroy             | void_p                               |        |
    cublasLtMatrixLayoutSetAttribute        | void_p int void_p size_t             |        |
    cublasLtMatrixLayoutGetAttribute        | void_p int void_p size_t size_t*     |        |
    cublasLtMatmulPreferenceCreate          | void_p*                              |        |
    cublasLtMatmulPreferenceDestroy         | void_p                               |        |
    cublasLtMatmulPreferenceSetAttribute    | void_p int void_p size_t             |        |
    cublasLtMatmulPreferenceGetAttribute    | void_p int void_p size_t size_t*     |        |
    cublasLtMatrixTransformDescCreate       | void_p* int                          |        |
    cublasLtMatrixTransformDescDestroy      | void_p                               |        |
    cublasLtMatrixTransformDescSetAttribute | void_p int void_p size_t             |        |
    cublasLtMatrixTransformDescGetAttribute | void_p int void_p size_t size_t*     |        |
    cublasLtEmulationDescCreate             | void_p*                              |        | 130100
    cublasLtEmulationDescDestroy            | void_p                               |        | 130100
    cublasLtEmulationDescSetAttribute       | void_p int void_p size_t             |        | 130100
    cublasLtEmulationDescGetAttribute       | void_p int void_p size_t size_t*     |        | 130100
    cublasLtMatmulAlgoGetHeuristic          | void_p×7 int void_p int*             |        |
    cublasLtMatmulAlgoGetHeuristicForStream | void_p×7 int void_p int* void_p      |        | 130501
    cublasLtMatmulAlgoGetIds                | void_p int×7 void_p int*             |        |
    cublasLtMatmulAlgoInit                  | void_p int×7 void_p                  |        |
    cublasLtMatmulAlgoCheck                 | void_p×8                             |        |
    cublasLtMatmulAlgoCheckForStream        | void_p×9                             |        | 130501
    cublasLtMatmulAlgoCapGetAttribute       | void_p int void_p size_t size_t*     |        |
    cublasLtMatmulAlgoConfigSetAttribute    | void_p int void_p size_t             |        |
    cublasLtMatmulAlgoConfigGetAttribute    | void_p int void_p size_t size_t*     |        |
    cublasLtMatmul                          | void_p×14 size_t void_p              |        |
    cublasLtMatrixTransform                 | void_p×11                            |        |
    cublasLtLoggerSetCallback               | void_p                               |        |
    cublasLtLoggerOpenFile                  | char_p                               |        |
    cublasLtLoggerSetLevel                  | int                                  |        |
    cublasLtLoggerSetMask                   | int                                  |        |
    cublasLtLoggerForceDisable              |                                      |        |
"""
"""The binary interface of `cublasLt.h`. The columns are a function, the types of its arguments, the type of its result
if that is not a status, and the version that brought it (major·10000 + minor·100 + patch) if CUDA 12.0 lacks it. Types
are named as ctypes names them without "c_"; a type with a star is an address to which the function writes."""


def _types(named: str) -> Iterator[Any]:
    """Reads the ctypes types from a cell of `_PROTOTYPES`; "int×2" means two arguments of the type int."""
    for word in named.split():
        name, _, count = word.partition("×")
        kind = getattr(ctypes, f"c_{name.rstrip('*')}")
        yield from [ctypes.POINTER(kind) if name.endswith("*") else kind] * int(count or 1)


_ROWS: Final = [[cell.strip() for cell in row.split("|")] for row in _PROTOTYPES.strip().splitlines()]
ARGUMENTS: Final = {name: tuple(_types(arguments)) for name, arguments, _, _ in _ROWS}
RESULTS: Final = {name: next(_types(result)) for name, _, result, _ in _ROWS if result}
SINCE: Final = {name: int(since) for name, _, _, since in _ROWS if since}

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
    """Converts cuBLASLt's version number to text: 131000 is "13.10.0"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


@functools.cache
def loaded() -> Library:
    """The library, which the first call finds and loads.

    The library is the file that LT_RUNTIME_CUBLASLT names, otherwise the one in NVIDIA's wheels or toolkits.

    Raises:
        MissingLibraryError: cuBLASLt is not installed, or the file cannot be loaded.
    """
    from cuda import pathfinder

    named = os.environ.get(_OVERRIDE)
    try:
        path = named or str(pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path)
        return Library(path)
    except pathfinder.DynamicLibNotFoundError as error:
        raise MissingLibraryError("cuBLASLt is not installed: pip install 'lt_runtime[cuda13]'") from error
    except OSError as error:
        hint = f"; {_OVERRIDE} names it" if named else ""
        raise MissingLibraryError(f"{path} cannot be loaded{hint}: {error}") from error


def function(name: str) -> Callable[..., Any]:
    """The C function `name`, with its types declared.

    Raises:
        MissingLibraryError: cuBLASLt is not installed, or the installed version lacks the function.
    """
    return loaded().function(name)


def call(name: str, *arguments: Any, attribute: Attribute | None = None) -> None:
    """Calls the C function `name`; raises the exception that `failure` makes if the call fails."""
    if status := loaded().function(name)(*arguments):
        raise failure(name, status, attribute)


def failure(name: str, status: int, attribute: Attribute | None = None) -> CublasLtError | MissingLibraryError:
    """Makes the exception for a C call that failed with `status`; `attribute` is the one that it read or wrote.

    A library that is older than the attribute returns INVALID_VALUE; the exception then says which version has it.
    """
    if attribute is not None and status == Status.INVALID_VALUE and get_version() < attribute.since:
        older = version_text(get_version())
        return MissingLibraryError(f"{attribute} is not in cuBLASLt {older}; {_remedy(attribute.since)}")
    return CublasLtError(name, status, get_status_name(status), get_status_string(status))


def read_bytes(name: str, owner: Any, attribute: Attribute) -> bytes:
    """Reads an attribute of a descriptor or algorithm by the C function `name`; returns its bytes.

    Raises:
        MissingLibraryError: the attribute is newer than the library.
        CublasLtError: the library refused.
    """
    cell, written = ctypes.create_string_buffer(attribute.size), ctypes.c_size_t()
    call(name, owner, attribute, cell, attribute.size, ctypes.byref(written), attribute=attribute)
    return cell.raw


class Owner:
    """The base of objects that own a pointer of the library: context managers that free it at the end.

    A subclass stores the pointer in `_handle`, and None once it is closed.
    """

    _handle: int | None = None

    @property
    def handle(self) -> int:
        """The object's C pointer.

        Raises:
            ArgumentError: the object is closed.
        """
        if self._handle is None:
            raise ArgumentError(f"this {type(self).__name__} is closed")
        return self._handle

    def close(self) -> None:
        """Frees the pointer; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Handle(Owner):
    """`cublasLtHandle_t` for the device that is current when the handle is made; close it with that device current.

    Closing a handle synchronises the device, so it must not happen while a stream is captured. For the same reason the
    garbage collector does not close a handle: one that is left open stays open until the process ends, and gives a
    `ResourceWarning`.

    Raises:
        CublasLtError: the library could not be initialised. Without a GPU the status is NOT_INITIALIZED.
    """

    def __init__(self) -> None:
        self._handle = _create()

    def close(self) -> None:
        """See `Owner`."""
        value, self._handle = self._handle, None
        if value is not None:
            call("cublasLtDestroy", value)

    def __del__(self) -> None:
        if self._handle is not None:
            warnings.warn("a cuBLASLt Handle was never closed", ResourceWarning, source=self, stacklevel=2)


def handle(device: int) -> int:
    """The process's one handle for a device, which must be current; made at the first call.

    The handle is never destroyed, because `cublasLtDestroy` synchronises the device.

    Raises:
        CublasLtError: the library could not be initialised.
    """
    with _lock:
        if device not in _handles:
            _handles[device] = _create()
        return _handles[device]


def pointer(owner: Handle | int) -> int:
    """The C pointer of a `Handle`, or of the int that `handle` returns."""
    return owner if isinstance(owner, int) else owner.handle


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

    The library rounds `capacity` up.

    Raises:
        ArgumentError: the number is negative or does not fit size_t.
    """
    if not 0 <= capacity < 2**64:
        raise ArgumentError(f"capacity is {capacity}; accepted: 0 or more (size_t)")
    call("cublasLtHeuristicsCacheSetCapacity", capacity)


Callback = Callable[[int, str, str], None]
_callback: Callback | None = None


def _forward(level: int, function: bytes, message: bytes) -> None:
    callback = _callback
    if callback is not None:
        callback(level, function.decode(errors="replace"), message.decode(errors="replace"))


_forwarder: Final = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)(_forward)
"""A `cublasLtLoggerCallback_t`. It is never freed, because another thread may be about to call it."""


def logger_set_callback(callback: Callback | None) -> None:
    """Passes every log message to `callback(level, function, message)` besides writing it; None removes the callback.

    The callback runs in the thread that logs, during the call that is logged, and must not call the library. An
    exception that it raises is reported as unraisable, and the call continues.
    """
    global _callback
    call("cublasLtLoggerSetCallback", None if callback is None else _forwarder)
    _callback = callback


@atexit.register
def _stop_logging() -> None:
    """Removes the callback at exit: the library must not call an interpreter that no longer runs."""
    if _callback is not None:
        logger_set_callback(None)


def logger_set_level(level: int) -> None:
    """Has cuBLASLt log the messages of a level and of all lower levels.

    Raises:
        ArgumentError: the level is not 0 to 5. The library itself would accept 6.
    """
    if not 0 <= level <= 5:
        raise ArgumentError(f"level is {level}; accepted: 0 (off) to 5 (API trace)")
    call("cublasLtLoggerSetLevel", level)


def logger_set_mask(mask: int) -> None:
    """Has cuBLASLt log the kinds of messages whose bits are set in the mask.

    Raises:
        ArgumentError: the mask has a bit that stands for no kind of message.
    """
    if not 0 <= mask <= 31:
        raise ArgumentError(f"mask is {mask}; accepted: 0 (off) to 31, the sum of 1, 2, 4, 8 and 16")
    call("cublasLtLoggerSetMask", mask)


def logger_open_file(path: str | os.PathLike[str]) -> None:
    """Writes cuBLASLt's log messages to a file, which is created if it does not exist.

    Raises:
        CublasLtError: the file cannot be opened.
    """
    call("cublasLtLoggerOpenFile", os.fsencode(path))


def logger_force_disable() -> None:
    """Turns cuBLASLt's logging off until the process ends."""
    call("cublasLtLoggerForceDisable")
