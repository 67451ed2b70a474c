"""Compiles our CUDA sources with NVRTC and keeps the result in the user's cache directory."""

from __future__ import annotations

import functools
import hashlib
import warnings
from pathlib import Path
from typing import Any, Final

from lt_runtime.errors import CompileError, MissingLibraryError
from lt_runtime.paths import cache_directory, kernel_sources

Macros = tuple[tuple[str, str], ...]
"""Preprocessor definitions, (name, value)."""

_FLUSHED: Final = frozenset({"cross_entropy.cu"})
"""Sources in which FP32 numbers below 2⁻¹²⁶ are taken for zero: it saves three instructions an exponential."""


def compile_kernel(source: str, macros: Macros, architecture: str) -> bytes:
    """Machine code (cubin) of one file of `cuda_src` under the given definitions.

    Args:
        source: the file's name, such as "epilogue_fwd.cu".
        architecture: such as "sm_90".

    Raises:
        CompileError: NVRTC rejected it; carries the compiler's log.
        MissingLibraryError: NVRTC or the CUDA runtime's headers are not installed.
    """
    from cuda.core.utils import make_program_cache_key

    code, options = (kernel_sources() / source).read_text(), _options(source, macros, architecture)
    key = make_program_cache_key(
        code=code, code_type="c++", options=options, target_type="cubin", extra_digest=_included_files()
    )
    cache = _open_cache()
    cached = cache.get(key) if cache is not None else None
    if cached is not None:
        return bytes(cached)
    cubin = _compile(source, code, options)
    if cache is not None:
        try:
            cache[key] = cubin
        except OSError as error:  # the directory is there, but read-only or on a full disk
            _warn_of_no_cache(error)
    return cubin


def _options(source: str, macros: Macros, architecture: str) -> Any:
    from cuda.core import ProgramOptions

    return ProgramOptions(
        name=source,
        arch=architecture,
        std="c++17",
        include_path=[str(kernel_sources()), runtime_headers()],
        define_macro=list(macros) or None,
        diag_error=[177],  # declared but never referenced: dead code
        ftz=source in _FLUSHED or None,
    )


def _compile(source: str, code: str, options: Any) -> bytes:
    from cuda import pathfinder
    from cuda.core import Program

    try:
        return bytes(Program(code, "c++", options=options).compile("cubin").code)
    except pathfinder.DynamicLibNotFoundError as error:
        raise MissingLibraryError("NVRTC is not installed: pip install 'lt_runtime[cuda13]'") from error
    except Exception as error:  # cuda.core's own class is private; its text holds the log
        raise CompileError(source, str(error)) from error


@functools.cache
def runtime_headers() -> str:
    """The directory of the CUDA runtime's headers (`cuda_bf16.h` and friends).

    Raises:
        MissingLibraryError: they are not installed.
    """
    from cuda import pathfinder

    directory = pathfinder.find_nvidia_header_directory("cudart")
    if directory is None:
        raise MissingLibraryError("the CUDA runtime headers are not installed: pip install 'lt_runtime[cuda13]'")
    return str(directory)


@functools.cache
def _included_files() -> bytes:
    ours = sorted(kernel_sources().glob("*.cuh"))
    theirs = [Path(runtime_headers()) / name for name in ("cuda_bf16.hpp", "cuda_fp16.hpp")]
    digest = hashlib.sha256()
    for path in (*ours, *theirs):
        digest.update(path.read_bytes())
    return digest.digest()


@functools.cache
def _open_cache() -> Any:
    from cuda.core.utils import FileStreamProgramCache

    directory = cache_directory() / "kernels"
    try:
        return FileStreamProgramCache(directory, max_size_bytes=256 << 20)
    except OSError as error:
        _warn_of_no_cache(error)
        return None


def _warn_of_no_cache(error: OSError) -> None:
    directory = cache_directory()
    warnings.warn(f"kernels are compiled anew in each process: cannot write to {directory} ({error})", stacklevel=3)
