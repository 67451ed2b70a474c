"""Which calls are taken to be like one made before, and when their launches are bound; without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_runtime.arrays import are_apart, signature_of, signatures, without_addresses
from lt_runtime.errors import GpuError
from lt_runtime.ops import _known_calls
from lt_runtime.ops._known_calls import KnownCall, note, repeated
from lt_runtime.plans import cache, first_use
from lt_runtime.plans.cache import age

_AT = 0x10000


@dataclass(frozen=True)
class Array:
    """Stands for an array of a library that is known."""

    address: int = _AT
    shape: tuple[int, ...] = (4, 8)
    strides: tuple[int, ...] = (32, 4)
    dtype: str = "float32"
    device: int = 0


X = Array()
OUT = Array(2 * _AT)
ASKED = ("gelu", 0.0)


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Streams that are captured, and the thread's current device."""
    state = SimpleNamespace(captured=set(), device=0)

    def look(array: Any) -> tuple[Any, ...]:
        return array.address, array.device, array.shape, array.strides, array.dtype

    monkeypatch.setitem(signatures._readers, Array, look)
    monkeypatch.setattr(cache, "_calls", {})
    monkeypatch.setattr(_known_calls, "is_current", lambda device: device == state.device)
    monkeypatch.setattr(_known_calls, "is_captured", lambda stream: stream in state.captured)
    monkeypatch.setattr(_known_calls, "stream_handle", lambda stream, device: stream or 7)
    return state


def signature(*arrays: Any, asked: tuple[Any, ...] = ASKED) -> Any:
    return signature_of(arrays, asked)


def remember(*arrays: Array, asked: tuple[Any, ...] = ASKED) -> Any:
    call = SimpleNamespace(device=0)
    operands: Any = [SimpleNamespace(extent=32, itemsize=4) for _ in arrays]
    note(signature(*arrays, asked=asked), KnownCall(call, operands, inputs=1), age())
    return call


CHANGES: dict[str, dict[str, Any]] = {
    "shape": {"shape": (8, 4)},
    "strides": {"strides": (64, 4)},
    "type": {"dtype": "float16"},
    "device": {"device": 1},
    "alignment": {"address": _AT + 4},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_plan_depends_on_is_told_apart(change: str) -> None:
    other = without_addresses(signature(replace(X, **CHANGES[change]), OUT))
    assert without_addresses(signature(X, OUT))[0] != other[0]


def test_addresses_are_left_to_the_caller() -> None:
    first, second = (without_addresses(signature(replace(X, address=at), None, OUT)) for at in (256, 512))
    assert first[0] == second[0]
    assert (first[1], second[1]) == ((256, 2 * _AT), (512, 2 * _AT))


def test_options_are_told_apart() -> None:
    assert signature(X, asked=("relu",)) != signature(X, asked=("gelu",))


@pytest.mark.parametrize("arrays", [(np.ones(2),), (X, np.ones(2)), ("x", X), (None, X)])
def test_what_is_of_no_known_library_has_no_signature(arrays: tuple[Any, ...]) -> None:
    assert signature(*arrays) is None


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=5), st.integers(0, 5))
def test_outputs_apart(spans: list[tuple[int, int]], inputs: int) -> None:
    bytes_of = [set(range(at, at + size)) for at, size in spans]
    meet = any(bytes_of[i] & bytes_of[j] for i in range(inputs, len(spans)) for j in range(i))
    if meet:  # that an empty one lies within another may count as meeting
        assert not are_apart(*zip(*spans, strict=True), inputs)
    elif all(size for _, size in spans):
        assert are_apart(*zip(*spans, strict=True), inputs)


def test_a_call_like_one_before_is_known() -> None:
    assert repeated(signature(X, None, OUT), None) is None
    call = remember(X, OUT)
    found = repeated(signature(X, OUT), None)
    assert found is not None
    assert (found.call, found.addresses, found.stream) == (call, (_AT, 2 * _AT), 7)
    assert repeated(signature(X, OUT), None) is found
    assert repeated(signature(X, OUT), 9) is not found
    moved = repeated(signature(replace(X, address=3 * _AT), OUT), None)
    assert moved is not None
    assert (moved.call, moved.addresses) == (call, (3 * _AT, 2 * _AT))


def test_another_look_is_taken(world: Any) -> None:
    remember(X, OUT)
    assert repeated(signature(X, replace(OUT, address=_AT + 64)), None) is None  # it meets x
    assert repeated(signature(X, OUT, asked=(["gelu"],)), None) is None  # no value
    with first_use.tuning():
        assert repeated(signature(X, OUT), None) is None
    world.device = 1
    assert repeated(signature(X, OUT), None) is None


def test_nothing_outlives_its_plan() -> None:
    remember(X, OUT)
    assert repeated(signature(X, OUT), None) is not None
    since = age()
    cache.forget([], 0)
    assert repeated(signature(X, OUT), None) is None
    cache.remember("made with a plan of before", 1, since)
    assert cache.recall("made with a plan of before") is None


def test_the_oldest_calls_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MOST_CALLS", 3)
    for key in range(5):
        cache.remember(key, str(key), age())
    assert [cache.recall(key) for key in range(5)] == [None, None, "2", "3", "4"]


def test_launches_are_bound_when_they_come_a_second_time(world: Any) -> None:
    remember(X, OUT)
    found = repeated(signature(X, OUT), None)
    assert found is not None
    plans: list[Any] = []

    def bind() -> Any:
        plans.append(object())
        return plans[-1]

    world.captured.add(7)
    for _ in range(3):
        found.came_with((0,), bind)
    world.captured.clear()
    found.came_with((0,), bind)
    assert not plans
    assert found.bound((0,)) is None
    found.came_with((0,), bind)
    assert found.bound((0,)) is plans[0]
    assert found.bound((1,)) is None
    for address in range(1, 200):
        found.came_with((address,), bind)
    assert len(found._bound) <= _known_calls._MOST


def test_what_cannot_be_bound_stays_as_it_was() -> None:
    remember(X, OUT)
    found = repeated(signature(X, OUT), None)
    assert found is not None

    def bind() -> Any:
        raise GpuError("no memory")

    found.came_with((0,), bind)
    with pytest.warns(UserWarning, match=r"could not be bound and stays as it was \(no memory\)"):
        found.came_with((0,), bind)
    for _ in range(3):
        found.came_with((0,), bind)
    assert found.bound((0,)) is None


def test_what_has_an_option_that_is_no_value_is_looked_at_each_time() -> None:
    remember(X, OUT, asked=(["gelu"],))
    assert repeated(signature(X, OUT, asked=(["gelu"],)), None) is None
