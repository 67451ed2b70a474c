"""`lt.range`: which listeners and tools hear of ranges, and the layer and phase to which nested ranges belong."""

from __future__ import annotations

import threading
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime import ranges
from lt_runtime.errors import KindError
from lt_runtime.ranges import Place, Range, listening, place_of


class Recorder:
    """A listener that notes "+name" at the begin of a range and "-name" at its end."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def enter(self, name: str) -> None:
        self.seen.append(f"+{name}")

    def exit(self, name: str) -> None:
        self.seen.append(f"-{name}")


def test_nested_ranges_end_and_a_listener_leaves_when_the_body_raises() -> None:
    recorder = Recorder()

    def fail() -> None:
        with listening(recorder), lt.range("outer"), lt.range("inner"), lt.range("outer"):
            raise RuntimeError("in the body")

    with pytest.raises(RuntimeError, match="in the body"):
        fail()
    with lt.range("unheard"):
        pass
    assert recorder.seen == ["+outer", "+inner", "+outer", "-outer", "-inner", "-outer"]


def test_listeners_hear_what_begins_or_ends_while_they_listen() -> None:
    first, second, outer = Recorder(), Recorder(), lt.range("outer")
    outer.__enter__()
    with listening(first):
        outer.__exit__(None, None, None)
        assert ranges.is_heard
        with listening(second), lt.range("both"):
            pass
        with lt.range("one"):
            pass
    assert not ranges.is_heard
    with lt.range("unheard"):
        pass
    assert first.seen == ["-outer", "+both", "-both", "+one", "-one"]
    assert second.seen == ["+both", "-both"]


def test_a_listener_that_leaves_while_it_is_told_keeps_nothing_from_others() -> None:
    recorder, stack = Recorder(), []

    class Leaver(Recorder):
        def exit(self, name: str) -> None:
            stack.pop().__exit__(None, None, None)

    leaver = listening(Leaver())
    stack.append(leaver)
    leaver.__enter__()
    with listening(recorder), lt.range("last"):
        pass
    assert recorder.seen == ["+last", "-last"]


def test_a_range_decorates_a_function_and_is_heard_from_any_thread() -> None:
    recorder = Recorder()

    @lt.range("block0.fc1")
    def double(value: int, *, plus: int = 0) -> int:
        """Doubles a value, and adds a number."""
        return 2 * value + plus

    with listening(recorder):
        assert double(3, plus=1) == 7
        thread = threading.Thread(target=double, args=(1,))
        thread.start()
        thread.join()
    assert recorder.seen == 2 * ["+block0.fc1", "-block0.fc1"]
    assert (double.__name__, double.__doc__) == ("double", "Doubles a value, and adds a number.")


def test_a_range_without_listeners_calls_no_python_function() -> None:
    assert not ranges.is_heard
    assert not isinstance(Range.__enter__, FunctionType)
    assert not isinstance(Range.__exit__, FunctionType)
    with lt.range("unheard") as nothing:
        assert nothing is None


@pytest.mark.parametrize("name", [5, None, b"name", ["name"]])
def test_names_are_strings(name: Any) -> None:
    with pytest.raises(KindError, match=r"name is .*; it must be a string"):
        lt.range(name)


def test_a_new_name_at_each_step_takes_bounded_memory() -> None:
    for number in range(3 * ranges._MOST_RANGES):
        lt.range(f"made up {number}")
    assert len(ranges._made) <= ranges._MOST_RANGES
    assert lt.range("kept") is lt.range("kept")


def test_a_call_of_an_operation_is_a_range() -> None:
    recorder, ones = Recorder(), np.ones((2, 2), np.float32)
    with listening(recorder):
        lt.matmul(ones, ones)
    assert recorder.seen == ["+lt.matmul", "-lt.matmul"]


def test_an_attached_tool_sees_ranges_with_and_without_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranges._nvtx_domain() is None, "no tool is attached to the tests"
    seen: list[str] = []
    domain = SimpleNamespace(
        get_event_attributes=lambda message: message, push_range=seen.append, pop_range=lambda: seen.append("pop")
    )
    monkeypatch.setattr(ranges, "_nvtx_domain", lambda: domain)
    with lt.range("attached for the first time"):
        assert seen == ["attached for the first time"]
    assert seen[1:] == ["pop"]
    seen.clear()
    recorder = Recorder()
    with listening(recorder), lt.range("heard by both"):
        pass
    assert seen == ["heard by both", "pop"]
    assert recorder.seen == ["+heard by both", "-heard by both"]
    monkeypatch.undo()
    ranges._made.clear()
    lt.range("detached")  # Making a new range makes the module ask again whether an NVTX tool is attached.
    assert not ranges.is_heard


@pytest.mark.parametrize(
    ("path", "layer", "phase"),
    [
        ("", "", ""),
        ("step", "", ""),
        ("step forward", "", "forward"),
        ("step forward forward/layer0", "layer0", "forward"),
        ("step backward backward/layer0 lt.linear_backward", "layer0", "backward"),
        ("forward block0.fc1", "block0.fc1", "forward"),
        ("backward block0 block0.fc1", "block0.fc1", "backward"),
        ("block0.fc1 lt.linear_forward", "block0.fc1", "forward"),
        ("block0.fc1 lt.linear_backward", "block0.fc1", "backward"),
        ("lt.matmul", "matmul", "forward"),
        ("loss lt.cross_entropy", "", "loss"),
        ("epoch step optimizer", "", "optimizer"),
        ("epoch load", "load", ""),
        ("a/b", "a/b", ""),
        ("forward/", "", "forward"),
    ],
)
def test_the_place_of_a_path(path: str, layer: str, phase: str) -> None:
    assert place_of(tuple(path.split())) == Place(layer, phase)
