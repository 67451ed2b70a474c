"""Places of memory with known lifetimes, and the memory that later runs get."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_runtime.training.arena import Lifetime, offsets_of
from tests.support.fake_gpu import FakeGpu

_MOST, _NEVER = 12, 1 << 62
_events = st.lists(st.tuples(st.integers(1, 8), st.integers(1, _MOST)), min_size=1, max_size=_MOST)


def _lifetimes(events: list[tuple[int, int]]) -> list[Lifetime]:
    """Lifetimes of pieces of some units, each in use until a number of further allocations have been made."""
    made = [Lifetime(256 * units, i) for i, (units, _) in enumerate(events)]
    for each, (_, length) in zip(made, events, strict=True):
        end = each.begin + length
        each.end = min(end, _NEVER) if end <= len(made) else _NEVER
    return made


@given(_events)
def test_pieces_in_use_at_the_same_time_do_not_overlap(events: list[tuple[int, int]]) -> None:
    lifetimes = _lifetimes(events)
    pieces = [(each, at, at + each.size) for each, at in zip(lifetimes, offsets_of(lifetimes), strict=True)]
    for i, (one, begin, end) in enumerate(pieces):
        for other, other_begin, other_end in pieces[:i]:
            in_use_together = max(one.begin, other.begin) < min(one.end, other.end)
            assert end <= other_begin or other_end <= begin or not in_use_together


def test_memory_is_as_large_as_what_is_in_use_at_once() -> None:
    """The sequence of a training step of two layers in FP8, which a memory pool would not place in so few bytes."""
    sizes_and_lengths = [(14, 11), (2, 10), (2, 1), (4, 4), (7, 6), (7, 1), (1, 4), (2, 3), (2, 2), (14, 2), (8, 1)]
    lifetimes = _lifetimes(sizes_and_lengths)
    used = [
        sum(each.size for each in lifetimes if each.begin <= now and now < each.end) for now in range(len(lifetimes))
    ]
    ends = [at + each.size for each, at in zip(lifetimes, offsets_of(lifetimes), strict=True)]
    assert max(ends) == max(used)


@pytest.fixture
def arena(gpu: FakeGpu) -> Any:
    """The module, of the package that runs on the pretended GPU."""
    return importlib.import_module("lt_runtime.training.arena")


def test_a_run_gets_the_places_of_the_recorded_one(gpu: FakeGpu, arena: Any) -> None:
    cuda = gpu.cp.cuda
    pool, other = cuda.MemoryPool(), cuda.MemoryPool()

    def run(allocate: Any) -> list[int]:
        one, two = allocate(300), allocate(512)
        addresses = [one.ptr, two.ptr]
        del one
        three = allocate(256)
        return [*addresses, three.ptr]

    recorder = arena.Recorder(pool.malloc, 0)
    run(recorder)
    made = arena.Arena(recorder.lifetimes, lambda size: arena.Block(cuda.alloc(size)), other.malloc, 0)
    assert made.size == 2 * 512
    first = run(made.again())
    assert [each - min(first) for each in first] == [0, 512, 0]
    assert run(made.again()) == first


def test_a_run_that_differs_gets_other_memory(gpu: FakeGpu, arena: Any) -> None:
    cuda = gpu.cp.cuda
    recorder = arena.Recorder(cuda.MemoryPool().malloc, 0)
    one = recorder(512)
    del one
    recorder(512)
    made = arena.Arena(recorder.lifetimes, lambda size: arena.Block(cuda.alloc(size)), cuda.MemoryPool().malloc, 0)
    assert made.size == 512
    allocate = made.again()
    held, second, larger = allocate(512), allocate(512), allocate(1024)  # the first piece was free by now
    assert len({held.ptr, second.ptr, larger.ptr}) == 3
    assert made.again()(256).ptr not in range(held.ptr, held.ptr + 512)
