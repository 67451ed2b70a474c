"""Protocols for communication in a group of processes: `Wire` sends values of the host, `Engine` sends arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Wire(Protocol):
    """Exchanges small values of the host between all processes, and ends all of them.

    Attributes:
        limit: seconds after which a call that waits for another process ends all processes, with a message that names
            the missing ones.
    """

    rank: int
    size: int
    limit: float

    def gather(self, value: bytes, what: str) -> list[bytes]:
        """The values of all processes, in the order of their ranks.

        Args:
            what: the purpose of the call, for errors.
        """

    def host_engine(self) -> Engine:
        """The engine for NumPy arrays. Raises `GroupError` if there is none."""

    def abort(self, why: str) -> None:
        """Ends all processes of the group, this one included. `why` is printed."""

    def close(self) -> None:
        """Frees the communicators or connections that the wire holds. All processes call this method."""


class Engine(Protocol):
    """Collective operations on arrays of one device. All processes call the same operations in the same order.

    The arrays of a call have the same number, order, shapes and types in all processes, and no gaps between elements.
    On a GPU the operations are put on `stream`, a handle, and may be captured; NumPy arrays have been written when the
    call returns, and their `stream` is None. Results have equal bits in all processes.
    """

    def sum(self, arrays: Sequence[Any], stream: int | None) -> None:
        """Adds up each array over all processes, in place."""

    def maximum(self, arrays: Sequence[Any], stream: int | None) -> None:
        """Replaces each element by its maximum over all processes."""

    def reduce(self, arrays: Sequence[Any], owner: int, stream: int | None) -> None:
        """Adds up each array over all processes, in place in the process `owner`.

        In the other processes the contents of the arrays are undefined afterwards.
        """

    def broadcast(self, arrays: Sequence[Any], root: int, stream: int | None) -> None:
        """Copies the arrays of the process `root` into those of all processes."""

    def close(self) -> None:
        """Frees what the engine holds. All processes call it, after graphs with its operations have been freed."""
