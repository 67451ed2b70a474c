"""When a call counts as a repetition of an earlier one, and which addresses a repeated call may have; without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_runtime.arrays import libraries
from lt_runtime.arrays.libraries import signature_of
from lt_runtime.ops.call import PreparedCall, Request

_AT = 0x10000


@dataclass(frozen=True)
class Array:
    """Stands in for an array of a library whose arrays have signatures, by which repeated calls are recognised."""

    address: int = _AT
    shape: tuple[int, ...] = (4, 8)
    strides: tuple[int, ...] = (32, 4)
    dtype: str = "float32"
    device: int = 0


X = Array()
OUT = Array(2 * _AT)


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    described = attrgetter("address"), attrgetter("device", "shape", "strides", "dtype")
    monkeypatch.setitem(libraries._looks, Array, described)
    monkeypatch.setitem(libraries.current_streams, Array, lambda device: 7)


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


def test_a_signature_tells_the_alignment_of_every_operand() -> None:
    arrays = [Array(_AT + (1 << bits)) for bits in range(9)]
    found = [signature_of(pair) for pair in itertools.product(arrays, arrays)]
    assert len({each[0] for each in found if each}) == 81


@pytest.mark.parametrize("arrays", [(np.ones(2),), (X, np.ones(2)), ("x", X), (None, X)])
def test_what_is_of_no_known_library_has_no_signature(arrays: tuple[Any, ...]) -> None:
    assert signature_of(arrays) is None


class Other(Array):
    """Stands in for an array of another library with signatures, whose attributes have other names."""

    @property
    def place(self) -> int:
        return self.device


def test_arrays_of_two_libraries_have_a_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    look = attrgetter("address"), attrgetter("place", "shape", "strides", "dtype")
    monkeypatch.setitem(libraries._looks, Other, look)
    monkeypatch.setitem(libraries._looks, Array, (look[0], attrgetter("device", "shape", "strides", "dtype")))
    scales = Other(3 * _AT, (3, 8))
    found = [signature_of(each) for each in ((scales, None, X), (scales, None, OUT), (scales, None, scales))]
    assert found[0] == (((0, (3, 8), (32, 4), "float32"), None, (0, (4, 8), (32, 4), "float32")), (3 * _AT, 0, _AT))
    assert found[1] is not None
    assert found[0][0] == found[1][0]
    assert found[2] is not None
    assert found[0][0] != found[2][0]
    assert signature_of((scales, np.ones(2))) is None


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=5)


@given(SPANS, st.sets(st.integers(0, 4)))
def test_what_is_written_lies_apart(spans: list[tuple[int, int]], written: set[int]) -> None:
    outputs = tuple(sorted(each for each in written if each < len(spans)))
    starts, sizes = zip(*spans, strict=True)
    prepared = PreparedCall(None, 0, Request(None, outputs, {}), None, sizes, 0)  # type: ignore[arg-type]
    bytes_of = [set(range(at, at + size)) for at, size in spans]
    meet = any(bytes_of[i] & bytes_of[j] for i in outputs for j in range(len(spans)) if i != j)
    if meet:  # an empty operand that lies inside another may count as overlapping, too
        assert not prepared.is_sound(starts)
    elif all(sizes):
        assert prepared.is_sound(starts)
