"""Named ranges of a step: a layer, forward, loss, backward, optimizer.

A range is pushed to NVTX, where Nsight shows it, and every listener in this process is told of it. While no tool is
attached NVTX's part does nothing, so that a range without listeners costs two short Python calls.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Final, Protocol


class Listener(Protocol):
    """An object that is told when ranges begin and end."""

    def enter(self, name: str) -> None:
        """A range begins."""

    def exit(self, name: str) -> None:
        """The innermost open range ends."""


_listeners: list[Listener] = []


class Range:
    """A context manager: everything within belongs to the range. It may be entered again before it has ended."""

    __slots__ = ("_attributes", "_domain", "_name")

    def __init__(self, name: str) -> None:
        import nvtx

        self._name, self._domain = name, nvtx.get_domain("lt_runtime")
        self._attributes = self._domain.get_event_attributes(message=name)

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)
        for listener in _listeners:
            listener.enter(self._name)

    def __exit__(self, *_: object) -> None:
        for listener in _listeners:
            listener.exit(self._name)
        self._domain.pop_range()


range_of: Final = functools.cache(Range)
"""The range of a name. Ranges nest; slashes in the name separate levels, as in "forward/layer0"."""


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Reports the ranges that begin and end during the block to `listener`."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
