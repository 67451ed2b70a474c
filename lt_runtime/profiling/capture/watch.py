"""Watches a function while a stream is captured: which range and which line of Python each node comes from."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import lt_runtime.errors
from lt_runtime.gpu.graphs import graph_under_capture, nodes_of
from lt_runtime.ranges import listening

_LIBRARIES: Final = tuple(
    directory + os.sep
    for directory in (
        str(Path(lt_runtime.errors.__file__).parent),
        *site.getsitepackages(),
        site.getusersitepackages(),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
    )
)
"""Where code lies whose lines nobody wants to be told of."""


class Place(NamedTuple):
    """Where something was done.

    Attributes:
        range: the path of ranges, outermost first.
        where: file and line of the innermost Python code that is no library's, and that line; "" if there is none.
    """

    range: tuple[str, ...] = ()
    where: str = ""


class Watch:
    """A listener of `lt_runtime.ranges` and a trace function; it looks at the capture before and after each line.

    Attributes:
        nodes: by handle, in the order of their capture, where the nodes come from.
        broken: where the capture was found invalid first; None as long as it is valid.
        raised: where the exception passed first that has come farthest; None without one.
    """

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._here = Place()
        self.nodes: dict[int, Place] = {}
        self.broken: Place | None = None
        self.raised: tuple[BaseException, Place] | None = None

    def enter(self, name: str) -> None:
        """A range begins."""
        self.note()
        self._here = self._here._replace(range=(*self._here.range, name))

    def exit(self, name: str) -> None:
        """The innermost range ends; an exception may be on its way through it."""
        self.note()
        error = sys.exc_info()[1]
        if error is not None:
            self._note_error(error)
        if self._here.range[-1:] == (name,):
            self._here = self._here._replace(range=self._here.range[:-1])

    def note(self) -> None:
        """Gives new nodes, or the end of the capture's validity, to the range and line that are being executed."""
        if self.broken is not None:
            return
        graph, _ = graph_under_capture(self._stream)
        if not graph:
            self.broken = self._here
            return
        for node in nodes_of(graph):
            self.nodes.setdefault(node, self._here)

    def _note_error(self, error: BaseException) -> None:
        if self.raised is None or self.raised[0] is not error:
            self.raised = error, self._here

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the calling thread; another trace function, such as a debugger's, rests meanwhile."""
        previous = sys.gettrace()
        with listening(self):
            sys.settrace(self._call)
            try:
                yield
            finally:
                sys.settrace(previous)
                self.note()

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        """What Python calls at the begin of every function."""
        if _is_library(frame.f_code.co_filename):
            return None
        self.note()
        self._go_to(frame)
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        """What Python calls within functions that are no library's."""
        self.note()
        if event == "exception":
            self._note_error(argument[1])
        self._go_to(frame if event != "return" else frame.f_back)
        return self._step

    def _go_to(self, frame: FrameType | None) -> None:
        while frame is not None and _is_library(frame.f_code.co_filename):
            frame = frame.f_back
        self._here = self._here._replace(where=_shown(frame) if frame is not None else "")


@functools.cache
def _is_library(file: str) -> bool:
    return file.startswith(("<frozen", *_LIBRARIES))


def _shown(frame: FrameType) -> str:
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{line}: {linecache.getline(file, line).strip()}".removesuffix(": ")
