"""Named ranges of a step: a layer, forward, loss, backward, optimizer.

A range is pushed to NVTX, for Nsight, and reported to every listener in this process. NVTX decides at the first range
whether a tool is attached; if none is, it stays inactive for the life of the process, and its calls, which are the most
expensive part of a range, are skipped. Without a tool and listeners a range costs two calls that do nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, Protocol

from lt_runtime.arguments import check_instance

STEP: Final = "step"
"""The name of the range around one training step. A profile counts steps by it."""

_MOST_RANGES: Final = 4096  # limit of cached `Range` objects: a script may use a new name at each step


class Listener(Protocol):
    """An object whose methods are called when ranges begin and end, on the thread of the range.

    For a range that was open when the listener was added, only `exit` is called. Of several listeners, the last that
    was added hears the end of a range first.
    """

    def enter(self, name: str) -> None:
        """A range begins."""

    def exit(self, name: str) -> None:
        """The innermost open range called `name` ends."""


watchers: Final[list[Callable[[Any], None]]] = []
"""Functions that are called inside an operation's range with the `PreparedCall` or the `Optimizer` that it runs. If
layers may be in FP8, they are called with their `Fp8ChainProblem` before their work.
"""


def tell(work: Any) -> None:
    """Calls every function in `watchers` with `work`: the `PreparedCall`, optimizer or problem that is about to run."""
    for watcher in watchers:
        watcher(work)


_listeners: tuple[Listener, ...] = ()
_lock = threading.Lock()
_stream: Final[ContextVar[int | None]] = ContextVar("lt_runtime_stream", default=None)


class Range(contextlib.ContextDecorator):
    """A range, as a context manager or as a decorator of a function whose calls are in the range.

    A range may be entered again before it has ended, and by several threads at once.
    """

    # `__enter__` and `__exit__` of ranges without listeners and tools, which do nothing. Instead of Python functions,
    # which would take three times as long, they are methods of built-in objects: one reverses an empty list, the other
    # releases an empty memoryview.
    __enter__: Any = [].reverse
    __exit__: Any = memoryview(b"").__exit__

    def __init__(self, name: str) -> None:
        self.name = name
        domain = _nvtx_domain()
        self._attributes = None if domain is None else domain.get_event_attributes(message=name)


_SILENT: Final = Range.__enter__, Range.__exit__


def _enter(self: Range) -> None:
    if _domain is not None:
        _domain.push_range(self._attributes)
    for listener in _listeners:
        listener.enter(self.name)


def _exit(self: Range, kind: object, error: object, trace: object) -> None:
    for listener in reversed(_listeners):
        listener.exit(self.name)
    if _domain is not None:
        _domain.pop_range()


_domain: Any = None
"""The package's NVTX domain; None if no NVTX tool, such as Nsight, is attached."""

is_heard = False
"""Whether a listener or an NVTX tool exists. Code for which opening a range is costly opens it only if this is true."""


def _settle() -> None:
    """Gives `Range` its real `__enter__` and `__exit__` if there are listeners or an NVTX tool, else the empty ones."""
    global is_heard, _domain
    _domain = _nvtx_domain()
    is_heard = bool(_listeners) or _domain is not None
    Range.__enter__, Range.__exit__ = (_enter, _exit) if is_heard else _SILENT


@functools.cache
def _nvtx_domain() -> Any:
    """Makes the package's NVTX domain; returns None if no NVTX tool is attached at that moment."""
    import nvtx

    domain = nvtx.get_domain("lt_runtime")
    return domain if isinstance(domain, nvtx.Domain) else None


_made: dict[str, Range] = {}


def range_of(name: str) -> Range:
    """A named part of a step, such as a layer: a context manager and a decorator, public as `lt.range`.

    Use it as `with lt.range("block0.fc1"):`. Nsight shows the range, and `lt.profile` reports it as a layer. Ranges
    nest. A layer's range is in its forward or backward pass if a range named "forward" or "backward" is around it, or
    if its own name begins with "forward/" or "backward/".

    Raises:
        KindError: the name is not a string.
    """
    try:
        return _made[name]
    except (KeyError, TypeError):
        return _make(name)


range: Final = range_of  # noqa: A001 - the public name


def _make(name: str) -> Range:
    check_instance("name", name, str, "a string")
    if len(_made) >= _MOST_RANGES:
        _made.clear()
    made = _made[name] = Range(name)
    with _lock:
        _settle()
    return made


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Reports the ranges that begin and end during the `with` block, on any thread, to a listener."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)
        _settle()
    try:
        yield
    finally:
        with _lock:
            _listeners = tuple(each for each in _listeners if each is not listener)
            _settle()


@contextlib.contextmanager
def on(stream: int) -> Iterator[None]:
    """Declares that work in this thread's ranges runs on `stream`, which need not be a library's current stream."""
    token = _stream.set(stream)
    try:
        yield
    finally:
        _stream.reset(token)


placed: Final = _stream.get
"""Function without arguments that returns the stream that this thread declared by `on`; None outside of `on`."""


PHASES: Final = ("input", "forward", "loss", "backward", "optimizer")
"""Names of the ranges around the phases of a step."""

OPERATION: Final = "lt."
"""Prefix of the ranges that operations open themselves."""


class Place(NamedTuple):
    """The layer and the phase of a step to which a kernel, a call or a range belongs.

    Attributes:
        layer: the name of the innermost range that is neither a phase nor an operation's; "" if there is none.
        phase: one of `PHASES`; "" if neither a range nor an operation names one.
    """

    layer: str
    phase: str


@functools.lru_cache(maxsize=4096)
def place_of(path: tuple[str, ...]) -> Place:
    """The layer and phase of code that runs within nested ranges; `path` has the ranges' names, outermost first.

    An operation belongs to the layer around it, and is a layer of its own if there is none. Outside of all phases, a
    backward operation is in the phase "backward", any other in "forward". Ranges around a step do not count as layers.
    """
    layer = phase = operation = ""
    for name in path:
        head, _, rest = name.partition("/")
        if head in PHASES:
            phase = head
            layer = rest or layer
        elif name.startswith(OPERATION):
            operation = name.removeprefix(OPERATION)
        elif name == STEP:
            layer = phase = operation = ""
        else:
            layer = name
    if operation and not phase:
        phase = "backward" if operation.endswith("backward") else "forward"
        layer = layer or operation
    return Place(layer, phase)
