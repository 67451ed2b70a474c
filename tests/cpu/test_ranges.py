"""Named ranges, who is told of them, and to which layer they belong."""

from __future__ import annotations

import threading
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

import lt_runtime as lt
from lt_runtime import ranges
from lt_runtime.errors import KindError
from lt_runtime.ranges import Place, Range, listening, place_of, range_of


class Recorder:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def enter(self, name: str) -> None:
        self.seen.append(f"+{name}")

    def exit(self, name: str) -> None:
        self.seen.append(f"-{name}")


def test_ranges_nest() -> None:
    recorder = Recorder()
    with listening(recorder), range_of("forward"):
        with range_of("forward/layer0"):
            pass
        with range_of("forward/layer1"):
            pass
    assert recorder.seen == [
        "+forward", "+forward/layer0", "-forward/layer0", "+forward/layer1", "-forward/layer1", "-forward",
    ]  # fmt: skip


def test_a_range_may_be_entered_within_itself() -> None:
    recorder = Recorder()
    with listening(recorder), range_of("step"), range_of("step"):
        pass
    assert recorder.seen == ["+step", "+step", "-step", "-step"]


def test_a_range_ends_when_its_body_raises() -> None:
    recorder = Recorder()

    def fail() -> None:
        with range_of("outer"), range_of("inner"):
            raise RuntimeError("in the body")

    with listening(recorder):
        with pytest.raises(RuntimeError, match="in the body"):
            fail()
        with range_of("after"):
            pass
    assert recorder.seen == ["+outer", "+inner", "-inner", "-outer", "+after", "-after"]


def test_listeners_come_and_go() -> None:
    first, second = Recorder(), Recorder()
    with range_of("unheard"):
        pass
    with listening(first):
        assert ranges.is_heard
        with listening(second), range_of("both"):
            pass
        assert ranges.is_heard
        with range_of("one"):
            pass
    assert not ranges.is_heard
    with range_of("unheard"):
        pass
    assert first.seen == ["+both", "-both", "+one", "-one"]
    assert second.seen == ["+both", "-both"]


def test_a_listener_leaves_when_the_body_raises() -> None:
    recorder = Recorder()

    def fail() -> None:
        with listening(recorder):
            raise RuntimeError("in the body")

    with pytest.raises(RuntimeError, match="in the body"):
        fail()
    with range_of("unheard"):
        pass
    assert recorder.seen == []


def test_a_listener_that_leaves_while_it_is_told_keeps_nothing_from_others() -> None:
    recorder, stack = Recorder(), []

    class Leaver(Recorder):
        def exit(self, name: str) -> None:
            stack.pop().__exit__(None, None, None)

    leaver = listening(Leaver())
    stack.append(leaver)
    leaver.__enter__()
    with listening(recorder), range_of("last"):
        pass
    assert recorder.seen == ["+last", "-last"]


def test_a_range_that_began_unheard_tells_of_its_end() -> None:
    recorder = Recorder()
    outer = range_of("outer")
    outer.__enter__()
    with listening(recorder):
        outer.__exit__(None, None, None)
    assert recorder.seen == ["-outer"]


def test_a_range_decorates() -> None:
    recorder = Recorder()

    @lt.range("block0.fc1")
    def double(value: int, *, plus: int = 0) -> int:
        """Doubles."""
        return 2 * value + plus

    with listening(recorder):
        assert double(3, plus=1) == 7
    assert recorder.seen == ["+block0.fc1", "-block0.fc1"]
    assert (double.__name__, double.__doc__) == ("double", "Doubles.")


def test_listeners_hear_every_thread() -> None:
    recorder = Recorder()

    def work() -> None:
        with lt.range("elsewhere"):
            pass

    with listening(recorder):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert recorder.seen == ["+elsewhere", "-elsewhere"]


def test_what_nobody_hears_is_no_python_call() -> None:
    assert range_of("unheard") is range_of("unheard")
    assert not ranges.is_heard
    assert not isinstance(Range.__enter__, FunctionType)
    assert not isinstance(Range.__exit__, FunctionType)
    with range_of("unheard") as nothing:
        assert nothing is None


@pytest.mark.parametrize("name", [5, None, b"name", ["name"]])
def test_names_are_strings(name: Any) -> None:
    with pytest.raises(KindError, match=r"name is .*; it must be a string"):
        lt.range(name)


def test_names_that_a_script_makes_up_take_bounded_memory() -> None:
    for number in range(3 * ranges._MOST_RANGES):
        range_of(f"made up {number}")
    assert len(ranges._made) <= ranges._MOST_RANGES


def test_a_tool_that_is_attached_sees_ranges_without_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    domain = SimpleNamespace(
        get_event_attributes=lambda message: message, push_range=seen.append, pop_range=lambda: seen.append("pop")
    )
    monkeypatch.setattr(ranges, "_nvtx_domain", lambda: domain)
    with range_of("attached for the first time"):
        assert seen == ["attached for the first time"]
    assert seen[1:] == ["pop"]
    monkeypatch.undo()
    ranges._made.clear()
    range_of("detached")  # settles again
    assert not ranges.is_heard


def test_nvtx_stays_out_where_no_tool_is_attached() -> None:
    assert ranges._nvtx_domain() is None


@pytest.mark.parametrize(
    ("path", "layer", "phase"),
    [
        ((), "", ""),
        (("step",), "", ""),
        (("step", "forward"), "", "forward"),
        (("step", "forward", "forward/layer0"), "layer0", "forward"),
        (("step", "backward", "backward/layer0", "lt.linear_backward"), "layer0", "backward"),
        (("forward", "block0.fc1"), "block0.fc1", "forward"),
        (("backward", "block0", "block0.fc1"), "block0.fc1", "backward"),
        (("block0.fc1", "lt.linear_forward"), "block0.fc1", "forward"),
        (("block0.fc1", "lt.linear_backward"), "block0.fc1", "backward"),
        (("lt.matmul",), "matmul", "forward"),
        (("loss", "lt.cross_entropy"), "", "loss"),
        (("epoch", "step", "optimizer"), "", "optimizer"),
        (("epoch", "load"), "load", ""),
        (("a/b",), "a/b", ""),
        (("forward/",), "", "forward"),
    ],
)
def test_the_place_of_a_path(path: tuple[str, ...], layer: str, phase: str) -> None:
    assert place_of(path) == Place(layer, phase)
