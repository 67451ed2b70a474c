"""Loads cuBLASLt on first use, declares its prototypes, and turns statuses into exceptions."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, Final

from lt_runtime.cublaslt.enums import Status
from lt_runtime.errors import CublasLtError, MissingLibraryError

_VOIDP, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_OUT = ctypes.POINTER(ctypes.c_void_p)
_SET = (_VOIDP, _INT, _VOIDP, _SIZE)
_GET = (_VOIDP, _INT, _VOIDP, _SIZE, ctypes.POINTER(_SIZE))

_PROTOTYPES: Final[dict[str, tuple[Any, ...]]] = {
    "cublasLtCreate": (_OUT,),
    "cublasLtMatmulDescCreate": (_OUT, _INT, _INT),
    "cublasLtMatmulDescDestroy": (_VOIDP,),
    "cublasLtMatmulDescSetAttribute": _SET,
    "cublasLtMatmulDescGetAttribute": _GET,
    "cublasLtMatrixLayoutCreate": (_OUT, _INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (_VOIDP,),
    "cublasLtMatrixLayoutSetAttribute": _SET,
    "cublasLtMatrixLayoutGetAttribute": _GET,
    "cublasLtMatmulPreferenceCreate": (_OUT,),
    "cublasLtMatmulPreferenceDestroy": (_VOIDP,),
    "cublasLtMatmulPreferenceSetAttribute": _SET,
    "cublasLtMatmulPreferenceGetAttribute": _GET,
    "cublasLtMatmulAlgoGetHeuristic": (
        *(_VOIDP,) * 7,
        _INT,
        _VOIDP,
        ctypes.POINTER(_INT),
    ),
    "cublasLtMatmulAlgoConfigGetAttribute": _GET,
    "cublasLtMatmul": (*(_VOIDP,) * 14, _SIZE, _VOIDP),
}

_handles: dict[int, int] = {}
_handles_lock = threading.Lock()


@functools.cache
def _loaded() -> tuple[ctypes.CDLL, str]:
    from cuda import pathfinder

    try:
        path = pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path
    except pathfinder.DynamicLibNotFoundError as error:
        raise MissingLibraryError("cuBLASLt is not installed: pip install 'lt_runtime[cuda13]'") from error
    library = ctypes.CDLL(path)
    for name, argument_types in _PROTOTYPES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = argument_types, _INT
    library.cublasLtGetVersion.argtypes, library.cublasLtGetVersion.restype = (), _SIZE
    library.cublasLtGetStatusName.argtypes, library.cublasLtGetStatusName.restype = (_INT,), ctypes.c_char_p
    return library, str(path)


def function(name: str) -> Callable[..., int]:
    """The C function `name`, its argument types declared; it returns the status.

    Raises:
        MissingLibraryError: cuBLASLt is not installed.
    """
    bound: Callable[..., int] = getattr(_loaded()[0], name)
    return bound


def call(name: str, *arguments: Any) -> None:
    """Calls `name` and raises `CublasLtError`, which names the call and its status, unless it succeeds."""
    check(name, function(name)(*arguments))


def check(name: str, status: int) -> None:
    """Raises `CublasLtError` unless `status`, which the call `name` returned, is SUCCESS."""
    if status != Status.SUCCESS:
        text: bytes = _loaded()[0].cublasLtGetStatusName(status)
        raise CublasLtError(name, status, text.decode())


def library_path() -> str:
    """Where the loaded library lies."""
    return _loaded()[1]


@functools.cache
def get_version() -> int:
    """The library's version, major·10000 + minor·100 + patch."""
    return int(_loaded()[0].cublasLtGetVersion())


def handle(device: int) -> int:
    """The handle for a device, which must be current; made once and kept for the life of the process.

    It is never destroyed: `cublasLtDestroy` synchronises the device.
    """
    known = _handles.get(device)
    if known is not None:
        return known
    with _handles_lock:
        if device not in _handles:
            created = ctypes.c_void_p()
            call("cublasLtCreate", ctypes.byref(created))
            _handles[device] = created.value or 0
        return _handles[device]
