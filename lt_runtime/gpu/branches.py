"""A branch of a graph: work beside what else a captured stream is given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lt_runtime.gpu.direct import is_capturing
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.gpu.streams import order_after


@contextlib.contextmanager
def branch(memory: StreamMemory) -> Iterator[StreamMemory]:
    """The memory, and with it the stream, of a branch that starts after all that a stream was given so far.

    The stream goes on beside it, and waits for it at the end. While it is not being captured there is no branch, and
    this is its own memory: the events would take longer than most work. The branch's memory is made all the same, as
    none can be during a capture.

    Args:
        memory: of the stream.

    Raises:
        CaptureError: the stream is captured, and has never had a branch.
    """
    own = memory.branch
    if not is_capturing(memory.stream):
        yield memory
        return
    order_after(own.stream, memory.stream)
    try:
        yield own
    finally:
        order_after(memory.stream, own.stream)
