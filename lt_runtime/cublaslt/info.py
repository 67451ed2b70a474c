"""What the library says of itself, and its settings that hold for the process."""

from __future__ import annotations

import ctypes

from lt_runtime.cublaslt.enums import LibraryProperty
from lt_runtime.cublaslt.library import call, function
from lt_runtime.errors import ArgumentError


def get_cudart_version() -> int:
    """Version of the CUDA runtime that the library was built with, major·1000 + minor·10."""
    return int(function("cublasLtGetCudartVersion")())


def get_property(which: LibraryProperty) -> int:
    """One part of the library's version."""
    value = ctypes.c_int()
    call("cublasLtGetProperty", which, ctypes.byref(value))
    return value.value


def get_status_name(status: int) -> str:
    """The library's name for a status, such as CUBLAS_STATUS_INVALID_VALUE."""
    return str(function("cublasLtGetStatusName")(status).decode())


def get_status_string(status: int) -> str:
    """The library's explanation of a status."""
    return str(function("cublasLtGetStatusString")(status).decode())


def heuristics_cache_get_capacity() -> int:
    """Entries that the library's cache of heuristic results can hold."""
    capacity = ctypes.c_size_t()
    call("cublasLtHeuristicsCacheGetCapacity", ctypes.byref(capacity))
    return capacity.value


def heuristics_cache_set_capacity(capacity: int) -> None:
    """Sets the number of entries that the cache of heuristic results can hold; 0 turns it off.

    The library rounds the number up.

    Raises:
        ArgumentError: the number is negative or does not fit size_t.
    """
    if not 0 <= capacity < 2**64:
        raise ArgumentError(f"capacity is {capacity}; accepted: 0 or more (size_t)")
    call("cublasLtHeuristicsCacheSetCapacity", capacity)


def disable_cpu_instructions_set_mask(mask: int) -> int:
    """Forbids the library CPU instructions, 1 being AVX512; returns the mask that was set before.

    Raises:
        ArgumentError: the mask does not fit an unsigned int.
        MissingLibraryError: the library does not export the function; none is known to, up to 13.10.
    """
    if not 0 <= mask < 2**32:
        raise ArgumentError(f"mask is {mask}; accepted: 0 to 2**32 - 1")
    return int(function("cublasLtDisableCpuInstructionsSetMask")(mask))
