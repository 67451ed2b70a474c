"""Named ranges, who is told of them, and the timer that listens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lt_runtime.profiling import LayerTime, RangeTimer, range_timer
from lt_runtime.ranges import listening, range_of


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
        with listening(second), range_of("both"):
            pass
        with range_of("one"):
            pass
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


def run_step(at: list[float], monkeypatch: pytest.MonkeyPatch, timer: RangeTimer) -> None:
    """A step of two layers, the clock showing each of the times in turn."""
    clock = iter(at)
    monkeypatch.setattr(range_timer, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with listening(timer):
        with range_of("forward"):
            for layer in ("a", "b"):
                with range_of(f"forward/{layer}"):
                    pass
        with range_of("loss"):
            pass
        with range_of("backward"):
            for layer in ("b", "a"):
                with range_of(f"backward/{layer}"):
                    pass
        with range_of("optimizer"):
            pass


def test_the_timer_averages_each_layer_over_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = RangeTimer()
    #        fwd  a        b        fwd  loss     bwd  b        a         bwd  optimizer
    run_step([0, 1, 3, 3, 7, 8, 10, 15, 20, 21, 27, 27, 28, 30, 40, 47], monkeypatch, timer)
    run_step([0, 1, 7, 7, 9, 9, 10, 11, 20, 20, 30, 30, 33, 33, 40, 41], monkeypatch, timer)
    seconds = {"a": (4.0, 2.0), "b": (3.0, 8.0), "loss": (3.0, 0.0), "optimizer": (4.0, 0.0)}
    expected = [LayerTime(name, 1e6 * forward, 1e6 * backward) for name, (forward, backward) in seconds.items()]
    assert timer.layers() == expected
    assert [row.total_us for row in timer.layers()] == [6e6, 11e6, 3e6, 4e6]


def test_a_timer_that_heard_nothing_has_no_rows() -> None:
    assert RangeTimer().layers() == []
