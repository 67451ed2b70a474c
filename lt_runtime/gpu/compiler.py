"""Compiles our CUDA sources with NVRTC and keeps the machine code in the user's cache directory.

Kept code is used only if the same compiler would make it again from the same sources, headers and options. A process
that finds all its kernels there does not load NVRTC, which would take longer than everything else.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cuda import pathfinder

from lt_runtime.errors import MissingLibraryError
from lt_runtime.gpu import nvrtc
from lt_runtime.gpu.kernel_cache import KernelCache
from lt_runtime.paths import cache_directory, kernel_sources
from lt_runtime.private import UntrustedError

Macros = tuple[tuple[str, str], ...]
"""Preprocessor definitions, (name, value)."""

_FLUSHED: Final = frozenset({"cross_entropy.cu"})
"""Sources in which FP32 numbers below 2⁻¹²⁶ count as zero, which saves three instructions an exponential."""

_warned: Final[set[Path]] = set()
"""Cache directories of which something has been said."""

_TOOLKIT_HEADERS: Final = ("cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp16.h", "cuda_fp16.hpp", "math_constants.h")
"""The CUDA runtime's headers that the sources include, and the headers that those include under NVRTC."""


def compile_kernel(source: str, macros: Macros, architecture: str) -> bytes:
    """Machine code (cubin) of one file of `cuda_src` under the given definitions.

    Args:
        source: the file's name, such as "epilogue_fwd.cu".
        architecture: such as "sm_90".

    Raises:
        CompileError: NVRTC rejected it; carries the compiler's log.
        MissingLibraryError: NVRTC or the CUDA runtime's headers are not installed.
    """
    code, options = (kernel_sources() / source).read_bytes(), _options(source, macros, architecture)
    directory = cache_directory()
    cache = KernelCache(directory / "kernels")
    for library in nvrtc.libraries():
        key = _key(source, code, options, library)
        try:
            cached = cache.get(key)
        except UntrustedError as error:
            cached = None
            _warn_of_no_cache(directory, str(error))
        if cached is not None:
            return cached
    cubin = nvrtc.compile_cubin(source, code, [*options, *_include_paths()])
    try:
        cache.put(key, cubin)
    except UntrustedError as error:
        _warn_of_no_cache(directory, str(error))
    except OSError as error:
        _warn_of_no_cache(directory, f"cannot write to {directory} ({error})")
    return cubin


def _options(source: str, macros: Macros, architecture: str) -> list[bytes]:
    """All options but the headers' directories, which change nothing while the headers stay the same."""
    # "--minimal" leaves out textures and the device's runtime: the machine code is the same, 6 ms of 75 sooner.
    # Diagnostic 177 reports what is declared but never referenced: dead code.
    fixed = f"-arch={architecture}", "--std=c++17", "--minimal", "--diag-error=177"
    flushes = ["--ftz=true"] if source in _FLUSHED else []
    return [each.encode() for each in (*fixed, *flushes, *(f"--define-macro={name}={value}" for name, value in macros))]


def _include_paths() -> list[bytes]:
    return [f"--include-path={directory}".encode() for directory in (kernel_sources(), runtime_headers())]


def _key(source: str, code: bytes, options: Sequence[bytes], library: Path) -> str:
    """A key that differs whenever anything differs that the machine code depends on."""
    parts = (source, code, tuple(options), _included_files(), nvrtc.identity(library))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def runtime_headers() -> str:
    """The directory of the CUDA runtime's headers (`cuda_bf16.h` and friends).

    Raises:
        MissingLibraryError: they are not installed.
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
    digest = hashlib.sha256()
    for path in (*ours, *theirs):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.digest()


def _warn_of_no_cache(directory: Path, reason: str) -> None:
    """Warns once, whatever the reasons, that compiled kernels are not kept in a directory, or not taken from it."""
    if directory not in _warned:
        _warned.add(directory)
        warnings.warn(f"kernels are compiled anew in each process: {reason}", stacklevel=3)
