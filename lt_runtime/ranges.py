"""Named ranges of a step: a layer, forward, loss, backward, optimizer.

A range is pushed to NVTX, where Nsight shows it, and every listener in this process is told of it. NVTX settles at the
first range whether a tool is attached: if none is, it stays out for the life of the process, and so its calls, which
take longer than all else here, are left out. A range that nobody hears costs two calls that do nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, ParamSpec, Protocol, TypeVar

from lt_runtime.arguments import check_instance

_P = ParamSpec("_P")
_R = TypeVar("_R")

STEP: Final = "step"
"""The name of the range around one training step. A profile counts steps by it."""

_MOST_RANGES: Final = 4096  # names that are kept; a script may make them up as it runs


class Listener(Protocol):
    """An object that is told when ranges begin and end, on the thread where that happens.

    It may hear the end of a range whose beginning it has missed.
    """

    def enter(self, name: str) -> None:
        """A range begins."""

    def exit(self, name: str) -> None:
        """The innermost open range of that name ends."""


watchers: Final[list[Callable[[Any], None]]] = []
"""Are told within an operation's range what the operation runs: a `PreparedCall` of `ops/call.py`, or an `AdamW`."""


def tell(work: Any) -> None:
    """Tells the watchers what runs."""
    for watcher in watchers:
        watcher(work)


_listeners: tuple[Listener, ...] = ()
_lock = threading.Lock()
_place = threading.local()


class Range:
    """A range as a context manager, or as the decorator of a function, each call of which is in the range.

    It may be entered again before it has ended, and by several threads at once.
    """

    __slots__ = ("_attributes", "name")

    # Nobody hears. These two are not Python functions because calling two of those takes three times as long: the
    # first turns an empty list round, the second releases a view of nothing, whatever its arguments are.
    __enter__: Any = [].reverse
    __exit__: Any = memoryview(b"").__exit__

    def __init__(self, name: str) -> None:
        self.name = name
        domain = _nvtx_domain()
        self._attributes = None if domain is None else domain.get_event_attributes(message=name)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """The function, each call of it within the range."""

        @functools.wraps(function)
        def within(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self:
                return function(*args, **kwargs)

        return within


_SILENT: Final = Range.__enter__, Range.__exit__


def _enter(self: Range) -> None:
    if _push is not None:
        _push(self._attributes)
    for listener in _listeners:
        listener.enter(self.name)


def _exit(self: Range, kind: object, error: object, trace: object) -> None:
    for listener in _listeners:
        listener.exit(self.name)
    if _pop is not None:
        _pop()


def _enter_for_tool(self: Range) -> None:
    _push(self._attributes)  # type: ignore[misc]


def _exit_for_tool(self: Range, kind: object, error: object, trace: object) -> None:
    _pop()  # type: ignore[misc]


_push: Callable[[Any], object] | None = None
_pop: Callable[[], object] | None = None
"""NVTX's, where a tool is attached."""


is_heard = False
"""Whether a listener or a tool is told of ranges, for those who make some only then."""


def _settle() -> None:
    """Gives all ranges the way to begin and end that suits who hears them."""
    global is_heard, _push, _pop
    domain = _nvtx_domain()
    if domain is not None:
        _push, _pop = domain.push_range, domain.pop_range
    is_heard = bool(_listeners) or domain is not None
    for_tool = _SILENT if domain is None else (_enter_for_tool, _exit_for_tool)
    Range.__enter__, Range.__exit__ = (_enter, _exit) if _listeners else for_tool


@functools.cache
def _nvtx_domain() -> Any:
    """Our domain; None if no tool was attached when it was made."""
    import nvtx

    domain = nvtx.get_domain("lt_runtime")
    return domain if isinstance(domain, nvtx.Domain) else None


_made: dict[str, Range] = {}


def range_of(name: str) -> Range:
    """The range of a name, public as `lt.range`.

    It is a context manager and a decorator: `with lt.range("block0.fc1"):`. Nsight shows it, and `lt.profile` reports
    it. Ranges nest. Names that begin with "forward/" or "backward/" say which pass of the layer behind the slash is
    meant; a range within another called "forward" or "backward" needs no such beginning.

    Raises:
        KindError: the name is no string.
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
    """Reports the ranges that begin and end during the block, on any thread, to `listener`."""
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
    """Says that what this thread's ranges hold goes to `stream`, which need not be the current one of any library."""
    before = placed()
    _place.stream = stream
    try:
        yield
    finally:
        _place.stream = before


def placed() -> int | None:
    """The stream that `on` names; None outside of it."""
    return getattr(_place, "stream", None)


PHASES: Final = ("input", "forward", "loss", "backward", "optimizer")
"""The parts of a step, by the names of their ranges."""

OPERATION: Final = "lt."
"""Names of the ranges that operations open themselves begin so."""


class Place(NamedTuple):
    """Where work belongs.

    Attributes:
        layer: the name of the innermost range that is no part of a step; "" if there is none.
        phase: one of `PHASES`, or "" if no range and no operation tells.
    """

    layer: str
    phase: str


@functools.lru_cache(maxsize=4096)
def place_of(path: tuple[str, ...]) -> Place:
    """The place of a path of ranges, outermost first.

    An operation belongs to the range around it, and is a layer of its own only where there is none. Backward tells
    itself; other operations outside of all parts of a step are taken for forward. Ranges around a step name no layer.
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
