"""CUDA driver calls with every status checked."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from lt_runtime.errors import DriverError, MissingLibraryError


def call(name: str, *arguments: Any) -> Any:
    """Calls the driver function `name`; returns its result, a tuple of several, or None.

    Raises:
        DriverError: the driver reported a failure.
        MissingLibraryError: there is no NVIDIA driver on this machine.
    """
    try:
        status, *results = getattr(driver, name)(*arguments)
    except RuntimeError as error:  # cuda.bindings found no libcuda
        raise MissingLibraryError(f"no NVIDIA driver on this machine ({error})") from error
    check(name, status)
    if len(results) > 1:
        return tuple(results)
    return results[0] if results else None


def check(name: str, status: int) -> None:
    """Raises `DriverError` unless the driver function `name` returned success."""
    if status != driver.CUresult.CUDA_SUCCESS:
        result = driver.CUresult(status)
        raise DriverError(name, int(result), result.name, _explanation(result))


def _explanation(status: driver.CUresult) -> str:
    _, text = driver.cuGetErrorString(status)
    return text.decode() if text else "unknown error"
