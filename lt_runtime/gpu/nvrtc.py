"""NVRTC, NVIDIA's run-time compiler: finding the library without loading it, and compiling with it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from cuda import pathfinder

from lt_runtime.errors import CompileError, GpuError, MissingLibraryError

_LIBRARY: Final = "libnvrtc.so.13"
_SEARCHED_FIRST: Final = ("site-packages", "conda")
"""Where pathfinder looks for a library before it asks the system's loader, which would load the library."""
_HEAD_BYTES: Final = 4096


def libraries() -> Iterator[Path]:
    """The library that this process would load, if that is known without loading it; then the loaded library.

    Raises:
        MissingLibraryError: NVRTC is not installed.
    """
    expected = None if _is_loaded() else _expected()
    if expected is not None:
        yield expected
    yield _loaded()


def _is_loaded() -> bool:
    """Whether this process has loaded NVRTC; then it uses that library, wherever it comes from."""
    try:
        ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _expected() -> Path | None:
    """The library in the wheel or conda package whose headers pathfinder finds."""
    header = pathfinder.locate_nvidia_header_directory("nvrtc")
    if header is None or header.found_via not in _SEARCHED_FIRST:
        return None
    library = Path(header.abs_path or "").parent / "lib" / _LIBRARY
    return library if library.is_file() else None


def _loaded() -> Path:
    try:
        return Path(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path or "")
    except pathfinder.DynamicLibNotFoundError as error:
        raise MissingLibraryError("NVRTC is not installed: pip install 'lt_runtime[cuda13]'") from error


def identity(library: Path) -> tuple[int, int, bytes]:
    """What differs between any two builds of the library: size, time of change, and the head with all parts' sizes."""
    with library.open("rb") as file:
        status = os.fstat(file.fileno())
        return status.st_size, status.st_mtime_ns, file.read(_HEAD_BYTES)


def compile_cubin(name: str, code: bytes, options: Sequence[bytes]) -> bytes:
    """Machine code of a source, for the architecture that the options name.

    Args:
        name: name of the source, for messages.

    Raises:
        CompileError: the compiler rejected it; carries its log.
    """
    from cuda.bindings import nvrtc  # imported here: a process that finds every kernel in the cache does not need it

    program = _call("nvrtcCreateProgram", code, name.encode(), 0, [], [])
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), list(options))
        if status:
            raise CompileError(name, _text("ProgramLog", program).rstrip(b"\0").decode() or status.name)
        return _text("CUBIN", program)
    finally:
        _call("nvrtcDestroyProgram", program)


def _text(what: str, program: Any) -> bytes:
    """The log or machine code that the compiler has made of a program."""
    text = bytes(_call(f"nvrtcGet{what}Size", program))
    _call(f"nvrtcGet{what}", program, text)  # NVRTC writes into `text`
    return text


def _call(function: str, *arguments: Any) -> Any:
    from cuda.bindings import nvrtc

    status, *results = getattr(nvrtc, function)(*arguments)
    if status:
        raise GpuError(f"{function} returned {status.name}")
    return results[0] if results else None
