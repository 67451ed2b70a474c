"""What measuring costs, without what has to be done before."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Stopwatch:
    """Seconds that were spent on timing.

    Compiling kernels and loading them do not count: that happens once on a machine, and while others use its disk and
    processors it takes longer than all of the timing.

    Attributes:
        seconds: so far. What is known to be timing without having been watched may be added.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Counts what is done within."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - started
