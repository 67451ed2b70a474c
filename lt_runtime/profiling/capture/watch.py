"""Finds the range and the line of Python that each node of a captured graph comes from."""

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

_PYTHON: Final = (
    *site.getsitepackages(),
    site.getusersitepackages(),
    *map(sysconfig.get_path, ("stdlib", "platstdlib")),
)
_LIBRARIES: Final = tuple(each + os.sep for each in (str(Path(lt_runtime.errors.__file__).parent), *_PYTHON))
"""Directories of this package, of installed packages, and of the standard library: their lines are not reported."""


class Place(NamedTuple):
    """A place in the watched code: the open ranges and the line of Python.

    Attributes:
        range: the path of open ranges, outermost first.
        where: file, number and text of the innermost line outside of libraries; "" if all lines are in libraries.
    """

    range: tuple[str, ...] = ()
    where: str = ""


class Watch:
    """A listener of ranges and a trace function of Python, which inspects the graph under capture at each line.

    Attributes:
        nodes: maps each node's handle to the place where the node was captured, in the order of capture.
        broken: the place where the capture was first found invalid; None while the capture is valid.
        raised: the last exception seen, and the place where it was raised; None if there was no exception.
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
        """The innermost range ends, perhaps by an exception."""
        self.note()
        error = sys.exc_info()[1]
        if error is not None:
            self._note_error(error)
        if self._here.range[-1:] == (name,):
            self._here = self._here._replace(range=self._here.range[:-1])

    def note(self) -> None:
        """Assigns new nodes to the current place, or notes the current place if the capture has become invalid."""
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
        """Watches the calling thread; another trace function, such as a debugger's, is suspended."""
        previous = sys.gettrace()
        with listening(self):
            sys.settrace(self._trace)
            try:
                yield
            finally:
                sys.settrace(previous)
                self.note()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Trace function of calls, lines, exceptions and returns in functions outside of libraries."""
        if _is_library(frame.f_code.co_filename):
            return None
        self.note()
        if event == "exception":
            self._note_error(argument[1])
        place: FrameType | None = frame if event != "return" else frame.f_back
        while place is not None and _is_library(place.f_code.co_filename):
            place = place.f_back
        self._here = self._here._replace(where="" if place is None else _shown(place))
        return self._trace


@functools.cache
def _is_library(file: str) -> bool:
    return file.startswith(("<frozen", *_LIBRARIES))


def _shown(frame: FrameType) -> str:
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{line}: {linecache.getline(file, line).strip()}".removesuffix(": ")
