"""Handles of the library: one for each device, which is never destroyed, and those that the caller closes."""

from __future__ import annotations

import ctypes
import threading
import warnings
from typing import Final, Self

from lt_runtime.cublaslt.library import call
from lt_runtime.errors import ArgumentError

_handles: Final[dict[int, int]] = {}
_lock: Final = threading.Lock()


class Handle:
    """`cublasLtHandle_t` for the device that is current when the handle is made; close it with that device current.

    Closing a handle synchronises the device, and must therefore not happen while a stream is captured. For the same
    reason the garbage collector closes none: a handle that is left open stays open until the process ends, and gives
    a `ResourceWarning`.

    Raises:
        CublasLtError: the library could not be initialised. Without a GPU the status is NOT_INITIALIZED.
    """

    def __init__(self) -> None:
        self._value: int | None = None
        self._value = _create()

    @property
    def value(self) -> int:
        """The C pointer.

        Raises:
            ArgumentError: the handle is closed.
        """
        if self._value is None:
            raise ArgumentError("this Handle is closed")
        return self._value

    def close(self) -> None:
        """Destroys the handle; a second call does nothing."""
        value, self._value = self._value, None
        if value is not None:
            call("cublasLtDestroy", value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._value is not None:
            warnings.warn("a cuBLASLt Handle was never closed", ResourceWarning, source=self, stacklevel=2)


def handle(device: int) -> int:
    """The handle for a device, which must be current. It is made once and used until the process ends.

    It is never destroyed, because `cublasLtDestroy` synchronises the device.

    Raises:
        CublasLtError: the library could not be initialised.
    """
    known = _handles.get(device)
    if known is not None:
        return known
    with _lock:
        if device not in _handles:
            _handles[device] = _create()
        return _handles[device]


def pointer(owner: Handle | int) -> int:
    """The C pointer of a `Handle`; the result of `handle` is one already."""
    return owner if isinstance(owner, int) else owner.value


def _create() -> int:
    created = ctypes.c_void_p()
    call("cublasLtCreate", ctypes.byref(created))
    return created.value or 0
