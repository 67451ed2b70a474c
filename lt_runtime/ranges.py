"""Named ranges of a step: a layer, forward, loss, backward, optimizer.

Each range is pushed to NVTX, so that Nsight shows it, and reported to the listeners in this process. Without a tool
and without a listener a range costs a fraction of a microsecond.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Protocol


class Listener(Protocol):
    """An object that is told when ranges begin and end."""

    def enter(self, name: str) -> None:
        """A range begins."""

    def exit(self, name: str) -> None:
        """The innermost open range ends."""


_listeners: list[Listener] = []


@functools.cache
def _domain() -> Any:
    import nvtx

    return nvtx.get_domain("lt_runtime")


@functools.cache
def _attributes(name: str) -> Any:
    return _domain().get_event_attributes(message=name)


@contextlib.contextmanager
def range_of(name: str) -> Iterator[None]:
    """Opens the range `name` for the duration of the block. Ranges nest; slashes in a name separate levels."""
    _domain().push_range(_attributes(name))
    for listener in _listeners:
        listener.enter(name)
    try:
        yield
    finally:
        for listener in _listeners:
            listener.exit(name)
        _domain().pop_range()


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Reports the ranges that begin and end during the block to `listener`."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
