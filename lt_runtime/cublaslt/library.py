"""Loads cuBLASLt on first use, looks its functions up, and turns statuses into exceptions."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any, Final

from lt_runtime.cublaslt import abi
from lt_runtime.cublaslt.enums import Status
from lt_runtime.cublaslt.prototypes import ARGUMENTS, RESULTS, SINCE
from lt_runtime.errors import CublasLtError, MissingLibraryError

_OVERRIDE: Final = "LT_RUNTIME_CUBLASLT"


class Library:
    """The loaded library: its path, its version and its functions."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._dll = ctypes.CDLL(path)
        self._functions: dict[str, Callable[..., Any]] = {}
        self.version = self._read_version()

    def _read_version(self) -> int:
        return int(self.function("cublasLtGetVersion")())

    def find(self, name: str) -> Callable[..., Any] | None:
        """The C function `name` with its types declared; None if this version of the library lacks it."""
        try:
            found = getattr(self._dll, name)
        except AttributeError:
            return None
        found.argtypes, found.restype = ARGUMENTS[name], RESULTS.get(name, ctypes.c_int)
        self._functions[name] = found
        return found  # type: ignore[no-any-return]  # ctypes makes functions at run time

    def function(self, name: str) -> Callable[..., Any]:
        """The C function `name`; `MissingLibraryError` if this version of the library lacks it."""
        found = self._functions.get(name) or self.find(name)
        if found is None:
            raise MissingLibraryError(f"{name} is not in {self.path}; {_what_has(SINCE.get(name, 0))}")
        return found


def _what_has(since: int) -> str:
    if not since:
        return "cublasLt.h declares it, but this library does not export it"
    return f"it came with cuBLASLt {version_text(since)}: pip install 'nvidia-cublas>={version_text(since)}'"


def version_text(version: int) -> str:
    """A version number as people write it: 131000 is "13.10.0"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _find() -> str:
    """Where the library is: where LT_RUNTIME_CUBLASLT says, or else where NVIDIA's wheels and toolkits put it."""
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
    """The library, found, loaded and checked at the first call. Everything goes through here.

    Raises:
        MissingLibraryError: it is not installed.
        AbiError: it contradicts these bindings.
    """
    path = _find()
    try:
        library = Library(path)
    except OSError as error:
        hint = f"; {_OVERRIDE} names it" if os.environ.get(_OVERRIDE) else ""
        raise MissingLibraryError(f"{path} cannot be loaded{hint}: {error}") from error
    abi.check(library.find, library.version, path)
    return library


def function(name: str) -> Callable[..., Any]:
    """The C function `name`, its types declared.

    Raises:
        MissingLibraryError: cuBLASLt is not installed, or the installed version lacks the function.
        AbiError: the installed version contradicts these bindings.
    """
    return loaded().function(name)


def call(name: str, *arguments: Any) -> None:
    """Calls `name` and raises `CublasLtError`, which names the call and its status, unless it succeeds."""
    status = function(name)(*arguments)
    if status:
        raise failure(name, status)


def failure(name: str, status: int) -> CublasLtError:
    """The exception for `status`, which the call `name` returned."""
    status_name, text = (function(f"cublasLtGetStatus{what}")(status).decode() for what in ("Name", "String"))
    return CublasLtError(name, status, status_name, text)


def attribute_failure(name: str, status: int, attribute: Any, since: int) -> CublasLtError | MissingLibraryError:
    """The exception for `status`, which the call `name` for an attribute returned.

    Args:
        name: the call.
        status: not SUCCESS.
        attribute: a member of one of the attributes' enums.
        since: the version that introduced it: an older library is what is wrong then.
    """
    if status != Status.INVALID_VALUE or get_version() >= since:
        return failure(name, status)
    return MissingLibraryError(
        f"{type(attribute).__name__}.{attribute.name} is not in cuBLASLt {version_text(get_version())}; "
        f"{_what_has(since)}"
    )


def library_path() -> str:
    """Where the loaded library lies."""
    return loaded().path


def get_version() -> int:
    """The library's version, major·10000 + minor·100 + patch."""
    return loaded().version
