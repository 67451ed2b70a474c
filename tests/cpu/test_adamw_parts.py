"""A step of AdamW in parts: which rows of the table each launch has."""

from __future__ import annotations

from typing import Any

import pytest

from lt_runtime.errors import ArgumentError
from lt_runtime.ops._adamw_parts import StepInParts

ROWS = [range(3), range(3, 4), range(4, 4), range(4, 9), range(9, 11)]


@pytest.fixture
def launches() -> list[tuple[range, Any]]:
    return []


@pytest.fixture
def step(launches: list[tuple[range, Any]]) -> StepInParts:
    return StepInParts(lambda rows, stream: launches.append((rows, stream)), ROWS)


def test_parameters_side_by_side_are_one_launch(step: StepInParts, launches: list[Any]) -> None:
    step.update([3, 1], 7)  # between them lies an empty one
    assert launches == [(range(3, 9), 7)]
    step.finish(8)
    assert launches[1:] == [(range(3), 8), (range(9, 11), 8)]
    step.finish(8)
    assert len(launches) == 3, "nothing is left"


def test_a_step_that_ends_at_once_is_one_launch(step: StepInParts, launches: list[Any]) -> None:
    step.update([], 7)
    step.update([2], 7)
    assert launches == []
    step.finish(7)
    assert launches == [(range(11), 7)]


@pytest.mark.parametrize(("positions", "wrong"), [([2, 3], r"\[3\]"), ([5], r"\[5\]"), ([-1, 0], r"\[-1\]")])
def test_each_parameter_comes_once(step: StepInParts, launches: list[Any], positions: list[int], wrong: str) -> None:
    step.update([3], 7)
    with pytest.raises(
        ArgumentError, match=rf"positions {wrong} are not among those left in this step: \[0, 1, 2, 4\]"
    ):
        step.update(positions, 7)
    step.finish(7)
    assert launches == [(range(4, 9), 7), (range(4), 7), (range(9, 11), 7)]
