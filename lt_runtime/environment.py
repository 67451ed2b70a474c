"""The environment variables that lt_runtime reads, and their accepted values."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Final

RECORD_VARIABLE: Final = "LT_RUNTIME_RECORD"
TUNE_VARIABLE: Final = "LT_RUNTIME_TUNE"
VARIABLES: Final = ("LT_RUNTIME_CACHE_DIR", "LT_RUNTIME_CUBLASLT", RECORD_VARIABLE, TUNE_VARIABLE)
"""The names of lt_runtime's own environment variables."""

LOCAL_RANKS: Final = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
"""Variables of torchrun, MPICH, Open MPI and Slurm that hold a process's number among those on its machine."""

_MODES: Final = ("off", "first-use")
_SWITCHES: Final = ("0", "1", "false", "true", "no", "yes", "off", "on")


def fault_of(name: str) -> str | None:
    """Says what is wrong with an environment variable's value; None if the variable is unset, empty or valid."""
    value = os.environ.get(name)
    if value and name == TUNE_VARIABLE and value not in _MODES:
        return f"{name} is {value!r}; accepted are {' and '.join(map(repr, _MODES))}"
    if value and name == RECORD_VARIABLE and value.lower() in _SWITCHES:
        return f"{name} is {value!r}; accepted are names of files, such as met.jsonl"
    return None


def setting(name: str) -> str | None:
    """The value of an environment variable; None if unset, empty or invalid. An invalid value causes one warning."""
    fault = fault_of(name)
    if fault is not None:
        _warn(fault)
        return None
    return os.environ.get(name) or None


@functools.cache
def _warn(fault: str) -> None:
    warnings.warn(f"{fault}; it has no effect", stacklevel=3)


def local_rank() -> int:
    """The number of this process among those that a launcher has started on this machine; 0 without a launcher."""
    found = (os.environ.get(name, "") for name in LOCAL_RANKS)
    return next((int(value) for value in found if value.isdecimal()), 0)
