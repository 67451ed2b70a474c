"""The library's logger, one for the whole process.

Levels: 0 off, 1 errors, 2 performance trace, 3 performance hints, 4 heuristics trace, 5 API trace. The mask's bits are
1 errors, 2 performance trace, 4 performance hints, 8 heuristics trace, 16 API trace.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Final

from lt_runtime.cublaslt.library import LoggerCallback, call
from lt_runtime.errors import ArgumentError

Callback = Callable[[int, str, str], None]

_MAX_LEVEL: Final = 5
_MAX_MASK: Final = 31
_callback: Callback | None = None


def _forward(level: int, function: bytes, message: bytes) -> None:
    callback = _callback
    if callback is not None:
        callback(level, function.decode(errors="replace"), message.decode(errors="replace"))


_forwarder: Final = LoggerCallback(_forward)  # never freed: another thread may be about to call it


def logger_set_callback(callback: Callback | None) -> None:
    """Passes every message to `callback(level, function, message)` as well as writing it; None removes the callback.

    The callback runs in the thread that logs, during the call that is logged, and must not call the library. An
    exception that it raises is reported as unraisable, and the call continues.
    """
    global _callback
    if callback is None:
        call("cublasLtLoggerSetCallback", None)
        _callback = None
        return
    previous, _callback = _callback, callback
    try:
        call("cublasLtLoggerSetCallback", _forwarder)
    except Exception:
        _callback = previous
        raise
    atexit.unregister(_stop)
    atexit.register(_stop)


def _stop() -> None:
    """Removes the callback at exit: the library must not call an interpreter that no longer runs."""
    logger_set_callback(None)


def logger_set_level(level: int) -> None:
    """Logs the messages of a level and of all lower levels.

    Raises:
        ArgumentError: the level is not 0 to 5. The library itself would accept 6.
    """
    if not 0 <= level <= _MAX_LEVEL:
        raise ArgumentError(f"level is {level}; accepted: 0 (off) to {_MAX_LEVEL} (API trace)")
    call("cublasLtLoggerSetLevel", level)


def logger_set_mask(mask: int) -> None:
    """Logs the kinds of messages whose bits are set in the mask.

    Raises:
        ArgumentError: the mask has other bits.
    """
    if not 0 <= mask <= _MAX_MASK:
        raise ArgumentError(f"mask is {mask}; accepted: 0 (off) to {_MAX_MASK}, the sum of 1, 2, 4, 8 and 16")
    call("cublasLtLoggerSetMask", mask)


def logger_open_file(path: str | os.PathLike[str]) -> None:
    """Writes the messages to a file, which is made if it does not exist.

    Raises:
        CublasLtError: the file cannot be opened.
    """
    call("cublasLtLoggerOpenFile", os.fsencode(path))


def logger_force_disable() -> None:
    """Turns logging off until the process ends."""
    call("cublasLtLoggerForceDisable")
