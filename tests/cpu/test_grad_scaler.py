"""`lt.GradScaler`: how the scale changes, that gradients are divided by it, and refused arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError
from tests.support.numpy_cases import numbers

GOOD, BAD = False, True


def optimizer_with(scaler: lt.GradScaler, size: int = 4) -> tuple[lt.Parameter, lt.AdamW]:
    parameter = lt.Parameter(np.ones(size, np.float32), np.ones(size, np.float32))
    return parameter, lt.AdamW([parameter], scaler=scaler)


def scales(scaler: lt.GradScaler, steps: list[bool]) -> list[tuple[float, int]]:
    """Steps with the given gradients (True: not finite); returns scale and growth tracker after each step."""
    parameter, optimizer = optimizer_with(scaler)
    seen = []
    for bad in steps:
        parameter.grad[0] = math.inf if bad else 1.0
        optimizer.step()
        seen.append((float(scaler.scale), int(scaler.growth_tracker)))
    return seen


def test_defaults_are_pytorch_s() -> None:
    scaler = lt.GradScaler()
    optimizer_with(scaler)
    assert (scaler.scale.dtype, scaler.scale.shape, float(scaler.scale)) == (np.float32, (), 65536.0)
    assert (scaler.growth_tracker.dtype, scaler.growth_tracker.shape, int(scaler.growth_tracker)) == (np.int32, (), 0)
    assert (scaler.growth_factor, scaler.backoff_factor, scaler.growth_interval) == (2.0, 0.5, 2000)


def test_grows_after_so_many_updates_in_a_row() -> None:
    expected = [(8, 1), (8, 2), (16, 0), (16, 1), (16, 2), (32, 0), (32, 1)]
    assert scales(lt.GradScaler(8.0, growth_interval=3), [GOOD] * 7) == expected


def test_backs_off_and_counts_anew() -> None:
    scaler = lt.GradScaler(8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    assert scales(scaler, [GOOD, BAD, GOOD, GOOD, BAD, BAD]) == [(8, 1), (2, 0), (2, 1), (8, 0), (2, 0), (0.5, 0)]


def test_stays_a_normal_number() -> None:
    assert scales(lt.GradScaler(2.0**127, growth_interval=1), [GOOD, GOOD]) == [(2.0**127, 0)] * 2
    assert scales(lt.GradScaler(2.0**-125), [BAD, BAD, BAD]) == [(2.0**-126, 0)] * 3


def test_the_arrays_stay_the_same() -> None:
    scaler = lt.GradScaler(8.0, growth_interval=1)
    _, optimizer = optimizer_with(scaler)
    scale, tracker = scaler.scale, scaler.growth_tracker
    optimizer.step()
    assert scaler.scale is scale
    assert scaler.growth_tracker is tracker


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_gradients_are_divided_by_it(max_norm: float | None) -> None:
    def train(scaler: lt.GradScaler | None) -> tuple[lt.Parameter, lt.AdamW]:
        parameter = lt.Parameter(numbers(1, (9,), "float32"), np.zeros(9, np.float32))
        optimizer = lt.AdamW([parameter], lr=0.1, max_norm=max_norm, scaler=scaler)
        for step in range(4):
            factor = float(scaler.scale) if scaler else 1.0
            parameter.grad[...] = numbers(10 + step, (9,), "float32") * np.float32(factor)
            optimizer.step()
        return parameter, optimizer

    (plain, unscaled), (scaled, optimizer) = train(None), train(lt.GradScaler(1024.0, growth_interval=2))
    assert (plain.data == scaled.data).all(), "powers of two are exact"
    if max_norm:
        assert float(optimizer.grad_norm) == float(unscaled.grad_norm), "the norm is the unscaled gradients'"
    assert float(optimizer.scaler.scale) == 4096.0


def test_has_no_arrays_before_it_has_an_optimizer() -> None:
    scaler = lt.GradScaler()
    for name in ("scale", "growth_tracker"):
        with pytest.raises(ArgumentError, match=r"pass it to lt\.AdamW\(\.\.\., scaler=scaler\) first"):
            getattr(scaler, name)
    assert not scaler.is_bound


def test_serves_one_optimizer() -> None:
    scaler = lt.GradScaler()
    optimizer_with(scaler)
    with pytest.raises(ArgumentError, match="scaler already serves an optimizer; make one for each"):
        optimizer_with(scaler)


def test_is_free_again_where_no_optimizer_came_to_be() -> None:
    scaler = lt.GradScaler()
    with pytest.raises(lt.errors.OperandError):
        lt.AdamW([lt.Parameter(np.ones(3, np.float32), np.ones(4, np.float32))], scaler=scaler)
    optimizer_with(scaler)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init_scale": 0.0}, "init_scale is 0.0; it must be a positive, normal FP32 number"),
        ({"init_scale": -1.0}, "init_scale is -1.0"),
        ({"init_scale": math.inf}, "init_scale is inf"),
        ({"init_scale": 2.0**128}, "init_scale is 3.4"),
        ({"init_scale": 2.0**-127}, "init_scale is 5.8"),
        ({"init_scale": math.nan}, "init_scale is nan"),
        ({"growth_factor": 1.0}, "growth_factor is 1.0; it must be finite and above 1"),
        ({"growth_factor": math.inf}, "growth_factor is inf"),
        ({"backoff_factor": 1.0}, "backoff_factor is 1.0; it must be between 0 and 1"),
        ({"backoff_factor": 0.0}, "backoff_factor is 0.0"),
        ({"growth_interval": 0}, r"growth_interval is 0; it must be in \[1, 2\*\*31\)"),
        ({"growth_interval": 1 << 31}, "growth_interval is 2147483648"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        lt.GradScaler(**arguments)
