"""Which calls use an earlier call's `PreparedCall`, and when a repeated call is captured; without a GPU."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_runtime.arrays import libraries as signatures
from lt_runtime.arrays.libraries import signature_of
from lt_runtime.errors import GpuError
from lt_runtime.gpu import streams
from lt_runtime.kernels.call import Call
from lt_runtime.ops import call as call_module
from lt_runtime.ops import first_use
from lt_runtime.ops.call import PreparedCall, perform
from lt_runtime.ops.operation import Operation, Request
from lt_runtime.plans import cache

_AT = 0x10000


@dataclass(frozen=True)
class Array:
    """An array of a library that has signatures."""

    address: int = _AT
    shape: tuple[int, ...] = (4, 8)
    strides: tuple[int, ...] = (32, 4)
    dtype: str = "float32"
    device: int = 0


X = Array()
OUT = Array(2 * _AT)
ASKED = ("gelu", 0.0)


class Doubling(Operation):
    """An operation that the tests never read: its calls are always prepared by `remember`."""

    names = ("x", "scale", "out")
    required = 1

    def read(self, operands: Any, options: Any, scalars: Any) -> Request:
        raise AssertionError("a known call is not read again")

    def on_host(self, request: Request, arrays: Any, scalars: Any) -> None:
        raise AssertionError("a known call is not read again")

    def result(self, prepared: PreparedCall, arrays: Any, scalars: Any) -> Any:
        return arrays[2]


DOUBLING = Doubling()


class Plan:
    """A plan that records its calls and the calls that are bound."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.bound: list[Call] = []
        self.launches = 0
        self.fails = False

    def put(self, call: Call, memory: Any) -> None:
        self.calls.append(call)

    def bind(self, call: Call) -> Any:
        if self.fails:
            raise GpuError("no memory")
        self.bound.append(call)
        return self._launch

    def _launch(self) -> None:
        self.launches += 1


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Captured streams, the thread's current device, and `looks`, the number of calls that were not prepared before."""
    state = SimpleNamespace(captured=set(), device=0, looks=0)

    def first(*_: Any) -> None:
        state.looks += 1

    prepare = attrgetter("address"), attrgetter("device", "shape", "strides", "dtype")
    monkeypatch.setitem(signatures._looks, Array, prepare)
    monkeypatch.setitem(signatures.current_streams, Array, lambda device: 7)
    monkeypatch.setattr(cache, "calls", {})
    monkeypatch.setattr(cache, "repeats", {})
    monkeypatch.setattr(call_module, "is_current", lambda device: device == state.device)
    monkeypatch.setattr(call_module, "is_captured", lambda stream: stream in state.captured)
    monkeypatch.setattr(call_module, "stream_memory", lambda *_: SimpleNamespace(lock=contextlib.nullcontext()))
    monkeypatch.setattr(call_module, "_cold_call", first)
    monkeypatch.setattr(streams, "_check_place", lambda *_: None)
    return state


def remember(*arrays: Array | None, options: Any = ASKED) -> Plan:
    """Prepares a call with these arrays; returns its plan."""
    plan = Plan()
    prepared = PreparedCall(DOUBLING, 0, Request(None, (2,), {}), plan, (128, 0, 128), True, cache.generation)
    signature = signature_of(arrays)
    assert signature is not None
    cache.calls[DOUBLING, options, signature[0]] = prepared
    return plan


def make(*arrays: Array | None, options: Any = ASKED, stream: Any = None) -> Any:
    return perform(DOUBLING, arrays, options, None, stream)


CHANGES: dict[str, dict[str, Any]] = {
    "shape": {"shape": (8, 4)},
    "strides": {"strides": (64, 4)},
    "type": {"dtype": "float16"},
    "device": {"device": 1},
    "alignment": {"address": _AT + 4},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_plan_depends_on_is_told_apart(change: str) -> None:
    one, other = signature_of((X, OUT)), signature_of((replace(X, **CHANGES[change]), OUT))
    assert one is not None
    assert other is not None
    assert one[0] != other[0]


def test_options_and_operations_are_told_apart(world: Any) -> None:
    remember(X, None, OUT)
    make(X, None, OUT, options=("relu",))
    perform(Doubling(), (X, None, OUT), ASKED, None, None)
    assert world.looks == 2


@pytest.mark.parametrize("arrays", [(np.ones(2),), (X, np.ones(2)), ("x", X), (None, X)])
def test_what_is_of_no_known_library_has_no_signature(arrays: tuple[Any, ...]) -> None:
    assert signature_of(arrays) is None


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=5)


@given(SPANS, st.sets(st.integers(0, 4)))
def test_what_is_written_lies_apart(spans: list[tuple[int, int]], written: set[int]) -> None:
    outputs = tuple(sorted(each for each in written if each < len(spans)))
    starts, sizes = zip(*spans, strict=True)
    prepared = PreparedCall(DOUBLING, 0, Request(None, outputs, {}), None, sizes, True, cache.generation)
    bytes_of = [set(range(at, at + size)) for at, size in spans]
    meet = any(bytes_of[i] & bytes_of[j] for i in outputs for j in range(len(spans)) if i != j)
    if meet:  # an empty span within another may count as an overlap
        assert not prepared.is_sound(starts)
    elif all(sizes):
        assert prepared.is_sound(starts)


def test_a_call_like_one_before_is_known(world: Any) -> None:
    make(X, None, OUT)
    assert world.looks == 1
    plan = remember(X, None, OUT)
    assert make(X, None, OUT) is OUT
    make(replace(X, address=3 * _AT), None, OUT)
    make(X, None, OUT, stream=9)
    assert plan.calls == [Call((_AT, 0, 2 * _AT), 7), Call((3 * _AT, 0, 2 * _AT), 7), Call((_AT, 0, 2 * _AT), 9)]
    assert world.looks == 1


def test_another_look_is_taken(world: Any) -> None:
    plan = remember(X, None, OUT)
    make(X, None, replace(OUT, address=_AT + 64))  # out overlaps x
    make(X, None, OUT, options=(["gelu"],))  # the option cannot be hashed
    with first_use.tuning():
        make(X, None, OUT)
    world.device = 1
    make(X, None, OUT)
    assert world.looks == 4
    assert plan.calls == []


def test_nothing_outlives_its_plan(world: Any) -> None:
    plan = remember(X, None, OUT)
    make(X, None, OUT)
    calls, repeats = dict(cache.calls), dict(cache.repeats)
    cache.forget([], 0)
    make(X, None, OUT)
    assert (len(plan.calls), world.looks) == (1, 1)
    cache.calls |= calls  # another thread found these entries before they were forgotten
    make(X, None, OUT)
    cache.repeats |= repeats
    make(X, None, OUT)
    assert (len(plan.calls), world.looks) == (1, 3)


def test_calls_that_are_not_bound_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_module, "_MOST_REPEATS", 8)
    plan = remember(X, None, OUT)
    for _ in range(3):
        make(X, None, OUT)
    assert len(plan.bound) == 1
    for i in range(3, 60):
        make(replace(X, address=i * _AT), None, OUT)
        assert len(cache.repeats) <= 8
    make(X, None, OUT)
    assert (len(plan.bound), plan.launches) == (1, 2)


def test_a_call_is_bound_when_it_comes_a_third_time(world: Any) -> None:
    plan = remember(X, None, OUT)
    world.captured.add(7)
    for _ in range(3):
        make(X, None, OUT)
    world.captured.clear()
    assert len(plan.calls) == 3, "a capture gets launches"
    for _ in range(5):
        assert make(X, None, OUT) is OUT
    assert (len(plan.calls), plan.launches) == (4, 4)
    assert plan.bound == plan.calls[-1:]


@pytest.mark.parametrize(("name", "is_bound"), [("a reader of batches", False), ("lt_runtime prefetch", True)])
def test_a_call_is_bound_while_no_thread_is_alive_that_may_synchronise(name: str, is_bound: bool) -> None:
    plan, ends = remember(X, None, OUT), threading.Event()
    thread = threading.Thread(target=ends.wait, name=name)
    thread.start()
    try:
        for _ in range(5):
            make(X, None, OUT)
    finally:
        ends.set()
        thread.join()
    assert (len(plan.bound), plan.launches, len(plan.calls)) == ((1, 3, 2) if is_bound else (0, 0, 5))
    for _ in range(2000):
        make(X, None, OUT)
    assert len(plan.bound) == 1, "once the thread has ended"
    assert plan.launches > 900


def test_as_many_launches_are_kept_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_module, "_MOST_REPEATS", 8)
    plan = remember(X, None, OUT)
    for i in range(3, 60):
        for _ in range(3):
            make(replace(X, address=i * _AT), None, OUT)
            assert len(cache.repeats) <= 8
    assert (len(plan.bound), plan.launches) == (57, 57)


def test_what_cannot_be_bound_stays_as_it_was() -> None:
    plan = remember(X, None, OUT)
    plan.fails = True
    make(X, None, OUT)
    with pytest.warns(UserWarning, match=r"could not be bound and stays as it was \(no memory\)"):
        make(X, None, OUT)
    for _ in range(3):
        make(X, None, OUT)
    assert (len(plan.calls), plan.launches) == (5, 0)
