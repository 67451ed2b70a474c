"""Learning-rate schedules: their factors at the begin and end of every phase, and refused arguments."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_runtime import schedules
from lt_runtime.errors import ArgumentError
from lt_runtime.reference.optimizer import learning_rate_factor
from lt_runtime.schedules import Schedule


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (schedules.constant(), {1: 1, 2: 1, 10**6: 1}),
        (schedules.warmup(4), {1: 0.25, 3: 0.75, 4: 1, 5: 1, 1000: 1}),
        (schedules.warmup_linear(2, 12), {1: 0.5, 2: 1, 3: 0.9, 7: 0.5, 11: 0.1, 12: 0, 13: 0, 10**6: 0}),
        (schedules.warmup_linear(2, 12, 0.2), {2: 1, 7: 0.6, 12: 0.2, 100: 0.2}),
        (schedules.warmup_linear(0, 10), {1: 0.9, 10: 0}),
        (schedules.warmup_cosine(2, 14), {1: 0.5, 2: 1, 5: 0.5 + math.sqrt(0.125), 8: 0.5, 10: 0.25, 14: 0, 15: 0}),
        (schedules.warmup_cosine(2, 14, 0.1), {2: 1, 8: 0.55, 14: 0.1, 99: 0.1}),
        (schedules.warmup_cosine(2, 3, 0.1), {1: 0.5, 2: 1, 3: 0.1}),
    ],
)
def test_factors(schedule: Schedule, factors: dict[int, float]) -> None:
    for step, factor in factors.items():
        assert learning_rate_factor(schedule, step) == pytest.approx(factor, abs=1e-15), step


@settings(max_examples=80, deadline=None)
@given(
    decay=st.sampled_from(schedules.DECAYS), warmup=st.integers(0, 20), span=st.integers(1, 40), final=st.floats(0, 1)
)
def test_rises_to_one_and_falls_to_the_final_factor(decay: str, warmup: int, span: int, final: float) -> None:
    schedule = Schedule(decay, warmup, warmup + span, final)
    factors = [learning_rate_factor(schedule, step) for step in range(1, warmup + span + 3)]
    rising, falling = factors[:warmup], factors[warmup:]
    assert rising == [step / warmup for step in range(1, warmup + 1)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(falling))
    last = 1.0 if decay == "constant" else final
    assert falling[span - 1 :] == pytest.approx([last] * 3, abs=1e-15)
    assert all(min(last, 1.0) - 1e-15 <= factor <= 1.0 for factor in falling)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decay": "step"}, r"decay is 'step'; accepted are constant, linear, cosine"),
        ({"warmup_steps": -1}, r"warmup_steps is -1; it must be in \[0, 2\*\*32\)"),
        ({"warmup_steps": 2**32}, "warmup_steps is 4294967296"),
        ({"decay": "linear", "total_steps": 2**32}, "total_steps is 4294967296"),
        ({"decay": "linear", "warmup_steps": 5, "total_steps": 5}, r"total_steps is 5; it must exceed .*\(5\)"),
        ({"decay": "cosine"}, "total_steps is 0; it must exceed"),
        ({"final_factor": -0.1}, r"final_factor is -0\.1; it must be in \[0, 1\]"),
        ({"final_factor": 1.5}, "final_factor is 1.5"),
        ({"final_factor": math.nan}, "final_factor is nan"),
    ],
)
def test_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Schedule(**arguments)  # type: ignore[arg-type]


def test_the_longest_schedule_is_accepted() -> None:
    assert learning_rate_factor(Schedule("linear", 2**32 - 2, 2**32 - 1), 2**32 - 1) == 0
