"""Compiles the package's CUDA sources with NVRTC, and keeps the machine code in the user's cache directory.

Cached machine code is used only if the same compiler would produce it again from the same sources, headers and options.
The driver runs cached files as they are. So a file is used only if nobody but the user and root can have written it,
and if its header has the expected key and the SHA-256 digest of the rest.

A process that finds all its kernels in the cache does not load NVRTC: loading NVRTC takes longer than all other work of
this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from cuda import pathfinder

from lt_runtime.errors import CompileError, GpuError, MissingLibraryError
from lt_runtime.files import UntrustedError, digest_of, read_private, remove_abandoned, replace_private
from lt_runtime.paths import cache_directory, kernel_sources

Macros = tuple[tuple[str, str], ...]
"""Preprocessor definitions, (name, value)."""

_FLUSHED: Final = frozenset({"cross_entropy.cu"})
"""Sources that are compiled with --ftz=true (subnormal FP32 numbers become zero), which saves three instructions for
each exponential.
"""

_FOR_HOPPER: Final = frozenset({"mlp_bwd.cu"})
"""Sources that use instructions which Hopper has and later architectures lack; for them sm_90 becomes sm_90a."""

watchers: Final[list[Callable[[str], object]]] = []
"""Functions that are called with the name of each source before it is compiled, for progress bars."""
_warned: Final[set[Path]] = set()
"""Cache directories for which this process has already given a warning."""

_TOOLKIT_HEADERS: Final = ("cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp16.h", "cuda_fp16.hpp", "math_constants.h")
"""The CUDA runtime's headers that our sources include, directly or through another header, under NVRTC."""

_NVRTC: Final = "libnvrtc.so.13"
_SEARCHED_FIRST: Final = ("site-packages", "conda")
"""The places that cuda.pathfinder searches for a library before it asks the system's loader. The NVRTC in the place
where its headers are found is therefore the NVRTC that would be loaded.
"""
_HEAD_BYTES: Final = 4096

# Limit of the bytes of all files in the kernel cache.
_LIMIT: Final = 256 << 20
# Bytes of the largest file that is read from the kernel cache; a kernel has about 100 kB.
_LARGEST: Final = 16 << 20
_SUFFIX: Final = ".kernel"


def compile_kernel(source: str, macros: Macros, architecture: str) -> bytes:
    """Machine code (cubin) of one file of `cuda_src` under the given definitions.

    Args:
        source: the file's name, such as "epilogue_fwd.cu".
        architecture: such as "sm_90".

    Raises:
        CompileError: NVRTC rejected the source; the error carries the compiler's log.
        MissingLibraryError: NVRTC or the CUDA runtime's headers are not installed.
    """
    code, options = (kernel_sources() / source).read_bytes(), _options(source, macros, architecture)
    directory = cache_directory()
    cache = KernelCache(directory / "kernels")
    for library in nvrtc_libraries():
        key = _key(source, code, options, library)
        with _warning_of_no_cache(directory):
            if (cached := cache.get(key)) is not None:
                return cached
    for tell in watchers:
        tell(source)
    cubin = compile_cubin(source, code, [*options, *_include_paths()])
    with _warning_of_no_cache(directory):
        cache.put(key, cubin)
    return cubin


@contextlib.contextmanager
def _warning_of_no_cache(directory: Path) -> Iterator[None]:
    """Warns, once for each directory, if the block fails because the kernel cache cannot be used."""
    try:
        yield
    except OSError as error:
        if directory not in _warned:
            _warned.add(directory)
            reason = error if isinstance(error, UntrustedError) else f"cannot write to {directory} ({error})"
            warnings.warn(f"kernels are compiled anew in each process: {reason}", stacklevel=4)


def _options(source: str, macros: Macros, architecture: str) -> list[bytes]:
    """Compiler options, except include paths: the machine code depends on the headers, not on where they lie."""
    # "--minimal" leaves out textures and the device runtime, which saves 6 of 75 ms and gives the same machine code.
    # Diagnostic 177 reports declarations that are never referenced: dead code.
    suffix = "a" if source in _FOR_HOPPER and architecture == "sm_90" else ""
    fixed = f"-arch={architecture}{suffix}", "--std=c++17", "--minimal", "--diag-error=177"
    flushes = ["--ftz=true"] if source in _FLUSHED else []
    return [each.encode() for each in (*fixed, *flushes, *(f"--define-macro={name}={value}" for name, value in macros))]


def _include_paths() -> list[bytes]:
    return [f"--include-path={directory}".encode() for directory in (kernel_sources(), runtime_headers())]


def _key(source: str, code: bytes, options: Sequence[bytes], library: Path) -> str:
    """A digest of everything that the machine code depends on.

    The compiler is identified by the size, modification time and first bytes of its file, which contain the sizes of
    all ELF segments.
    """
    with library.open("rb") as file:
        status = os.fstat(file.fileno())
        compiler = status.st_size, status.st_mtime_ns, file.read(_HEAD_BYTES)
    return hashlib.sha256(repr((source, code, tuple(options), _included_files(), compiler)).encode()).hexdigest()


@functools.cache
def runtime_headers() -> str:
    """The directory of the CUDA runtime's headers (`cuda_bf16.h` and others).

    Raises:
        MissingLibraryError: the headers are not installed.
    """
    directory = pathfinder.find_nvidia_header_directory("cudart")
    if directory is None:
        raise MissingLibraryError("the CUDA runtime headers are not installed: pip install 'lt_runtime[cuda13]'")
    return str(directory)


@functools.cache
def _included_files() -> bytes:
    """Digest of all headers that a source may include."""
    ours = sorted(kernel_sources().glob("*.cuh"))
    theirs = [Path(runtime_headers()) / name for name in _TOOLKIT_HEADERS]
    return digest_of([*ours, *theirs])


def nvrtc_libraries() -> Iterator[Path]:
    """Yields the path of the NVRTC library: first as found without loading it, if possible, then as loaded.

    Raises:
        MissingLibraryError: NVRTC is not installed.
    """
    header = None if _is_loaded() else pathfinder.locate_nvidia_header_directory("nvrtc")
    if header is not None and header.found_via in _SEARCHED_FIRST:
        # Wheels and conda packages have the library in the directory lib beside that of the headers.
        library = Path(header.abs_path or "").parent / "lib" / _NVRTC
        if library.is_file():
            yield library
    try:
        yield Path(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path or "")
    except pathfinder.DynamicLibNotFoundError as error:
        raise MissingLibraryError("NVRTC is not installed: pip install 'lt_runtime[cuda13]'") from error


def _is_loaded() -> bool:
    """Whether a library with NVRTC's name is already loaded in this process, from any path; it would then be used."""
    try:
        ctypes.CDLL(_NVRTC, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def compile_cubin(name: str, code: bytes, options: Sequence[bytes]) -> bytes:
    """Compiles a source to machine code for the architecture that the options name.

    Args:
        name: name of the source, for messages.

    Raises:
        CompileError: the compiler rejected the source; the error carries the compiler's log.
    """
    from cuda.bindings import nvrtc  # imported late: a process that finds every kernel in the cache does not need it

    program = _call("nvrtcCreateProgram", code, name.encode(), 0, [], [])
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), list(options))
        if status:
            raise CompileError(name, _output("ProgramLog", program).rstrip(b"\0").decode() or status.name)
        return _output("CUBIN", program)
    finally:
        _call("nvrtcDestroyProgram", program)


def _output(kind: str, program: Any) -> bytes:
    """An output of the compiler for a program: "ProgramLog" or "CUBIN"."""
    text = bytes(_call(f"nvrtcGet{kind}Size", program))
    _call(f"nvrtcGet{kind}", program, text)  # NVRTC writes its output into the buffer `text`
    return text


def _call(function: str, *arguments: Any) -> Any:
    from cuda.bindings import nvrtc

    status, *results = getattr(nvrtc, function)(*arguments)
    if status:
        raise GpuError(f"{function} returned {status.name}")
    return results[0] if results else None


class KernelCache:
    """A directory with one file of machine code for each key; `put` makes the directory.

    The modification time of a file is set at each use. When all files together exceed the limit, the least recently
    used are deleted.

    Args:
        directory: a directory inside the cache directory; see `read_private`.
        limit: largest total size of the files in bytes.
    """

    def __init__(self, directory: Path, limit: int = _LIMIT) -> None:
        self._directory, self._limit = directory, limit

    def get(self, key: str) -> bytes | None:
        """The machine code stored under a key; None if there is none, or the file is unreadable or damaged.

        Raises:
            UntrustedError: another user could have written the file.
        """
        path = self._path(key)
        try:
            content = read_private(path, _LARGEST)
        except UntrustedError:
            raise
        except (OSError, ValueError):
            return None
        head, code = content[: len(_head(key, b""))], content[len(_head(key, b"")) :]
        if head != _head(key, code):
            return None
        # setting the time fails if the file belongs to root or the directory is read-only
        with contextlib.suppress(OSError):
            os.utime(path)
        return code

    def put(self, key: str, code: bytes) -> None:
        """Stores machine code under a key, replacing an old file; deletes files that exceed the limit.

        Raises:
            UntrustedError: other users can write to the directory.
            OSError: the file cannot be written.
        """
        replace_private(self._path(key), _head(key, code) + code)
        remove_abandoned(self._directory, ".*")
        files = []
        for path in self._directory.iterdir():
            if path.suffix == _SUFFIX:
                with contextlib.suppress(FileNotFoundError):  # another process may have deleted the file meanwhile
                    status = path.lstat()
                    files.append((status.st_mtime_ns, status.st_size, path))
        total = 0
        for _, size, path in sorted(files, reverse=True):
            total += size
            if total > self._limit:
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}{_SUFFIX}"


def _head(key: str, code: bytes) -> bytes:
    """The header of a file of the kernel cache; its length depends only on the length of the key."""
    return f"lt_runtime kernel\n{key}\n{hashlib.sha256(code).hexdigest()}\n".encode()
