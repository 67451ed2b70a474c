"""Optimizer settings that may be changed between steps, attributes that may not, and arrays that are replaced."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.errors import ArgumentError, FixedError, KindError, LtError, OverlapError
from tests.support.adamw_reference import AdamWHyper, AdamWTensor, adamw_update
from tests.support.numpy_cases import Array, numbers

SHAPE = (3, 5)
CHANGES: dict[str, Callable[[lt.AdamW], None]] = {
    "lr": lambda optimizer: setattr(optimizer, "lr", np.float32(0.25)),
    "no lr": lambda optimizer: setattr(optimizer, "lr", 0),
    "weight decay": lambda optimizer: setattr(optimizer, "weight_decay", 0.5),
    "schedule": lambda optimizer: setattr(optimizer, "schedule", lt.schedules.warmup_cosine(1, 6)),
    "no schedule": lambda optimizer: setattr(optimizer, "schedule", None),
    "a parameter's rate": lambda optimizer: setattr(optimizer.parameters[1], "lr_scale", np.float32(0.5)),
    "a parameter's decay": lambda optimizer: setattr(optimizer.parameters[0], "weight_decay", 0.75),
    "the optimizer's decay again": lambda optimizer: setattr(optimizer.parameters[1], "weight_decay", None),
}


def parameters() -> list[lt.Parameter]:
    first = lt.Parameter(numbers(0, SHAPE, "float32"), numbers(1, SHAPE, "float32"), name="first")
    second = lt.Parameter(numbers(2, SHAPE, "float32"), numbers(3, SHAPE, "float32"), name="second", weight_decay=0.25)
    return [first, second]


def optimizer_of(given: list[lt.Parameter], **options: Any) -> lt.AdamW:
    return lt.AdamW(given, lr=0.02, schedule=lt.schedules.warmup_linear(2, 9), **options)


def expected_values(optimizer: lt.AdamW, states: list[AdamWTensor], step: int) -> list[Array]:
    """Makes one step of each parameter by the reference, with the optimizer's present settings; updates `states`."""
    for i, each in enumerate(optimizer.parameters):
        hyper = AdamWHyper(
            optimizer.lr * each.lr_scale,
            *(0.9, 0.999, 1e-8),
            optimizer.weight_decay if each.weight_decay is None else each.weight_decay,
            optimizer.schedule,
        )
        states[i] = adamw_update(states[i], each.grad, hyper, step)
    return [state.value for state in states]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_set_takes_effect_at_the_next_step(change: str) -> None:
    optimizer = optimizer_of(parameters())
    unchanged = optimizer_of(parameters())
    zeros = np.zeros(SHAPE, np.float32)
    states = [AdamWTensor(each.data.copy(), zeros, zeros) for each in optimizer.parameters]
    for step in range(1, 7):
        if step == 4:
            CHANGES[change](optimizer)
        for each in (optimizer, unchanged):
            each.step()
        for each, expected in zip(optimizer.parameters, expected_values(optimizer, states, step), strict=True):
            assert each.data.tobytes() == expected.tobytes(), step
        same = all((a.data == b.data).all() for a, b in zip(optimizer.parameters, unchanged.parameters, strict=True))
        assert same == (step < 4)


def test_what_is_set_can_be_read_and_is_a_number_of_python() -> None:
    optimizer = optimizer_of(parameters())
    optimizer.lr, optimizer.weight_decay = np.float32(0.5), np.int64(1)
    optimizer.parameters[0].lr_scale = np.float16(2)
    assert {*map(type, (optimizer.lr, optimizer.weight_decay, optimizer.parameters[0].lr_scale))} == {float}
    assert (optimizer.lr, optimizer.weight_decay) == (0.5, 1.0)
    assert (optimizer.rules[0].lr, optimizer.rules[0].weight_decay) == (0.5, 1.0)
    assert optimizer.schedule == lt.schedules.warmup_linear(2, 9)


@pytest.mark.parametrize(
    ("of", "name", "value", "error", "message"),
    [
        ("optimizer", "lr", -1.0, ArgumentError, "lr is -1.0; it must be finite and not negative"),
        ("optimizer", "lr", "fast", KindError, "lr is 'fast'; it must be a number"),
        ("optimizer", "weight_decay", math.nan, ArgumentError, "weight_decay is nan"),
        ("optimizer", "schedule", "cosine", KindError, "schedule is 'cosine'; it must be None or an lt.Schedule"),
        ("parameter", "lr_scale", math.inf, ArgumentError, "first.lr_scale is inf; it must be finite and not negative"),
        ("parameter", "lr_scale", math.nan, ArgumentError, "first.lr_scale is nan"),
        ("parameter", "weight_decay", -0.5, ArgumentError, "first.weight_decay is -0.5"),
        ("parameter", "name", 3, KindError, "name is 3; it must be a string"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_set(
    of: str, name: str, value: Any, error: type[LtError], message: str
) -> None:
    optimizer = optimizer_of(parameters())
    target = optimizer if of == "optimizer" else optimizer.parameters[0]
    before = getattr(target, name)
    with pytest.raises(error, match=message):
        setattr(target, name, value)
    assert getattr(target, name) == before


@pytest.mark.parametrize(
    "name",
    ["betas", "eps", "amsgrad", "max_norm", "moments", "seed", "options", "parameters", "steps", "learning_rate"],
)
def test_what_cannot_be_set_says_what_can(name: str) -> None:
    optimizer = optimizer_of(parameters())
    with pytest.raises(
        FixedError, match=rf"^AdamW.{name} cannot be set to 3; what can be set are lr, weight_decay, schedule$"
    ) as caught:
        setattr(optimizer, name, 3)
    assert isinstance(caught.value, AttributeError)
    assert not hasattr(optimizer, "learning_rate")


def test_a_scaler_cannot_be_changed_beside_its_optimizer() -> None:
    scaler = lt.GradScaler(growth_interval=3)
    optimizer_of(parameters(), scaler=scaler)
    with pytest.raises(FixedError, match=r"GradScaler.growth_interval cannot be set to 5; make another GradScaler"):
        scaler.growth_interval = 5
    assert scaler.growth_interval == 3


def test_arrays_that_count_may_be_changed_in_place() -> None:
    optimizer = optimizer_of(parameters())
    optimizer.steps += 4
    optimizer.step()
    assert optimizer.steps.tolist() == [5]


def test_each_parameter_is_given_once() -> None:
    given = parameters()
    with pytest.raises(OverlapError, match=r"(first|second).data \(parameter [23]\) shares memory with \1.data"):
        lt.AdamW(given + given)
    twin = lt.Parameter(given[0].data, numbers(5, SHAPE, "float32"), name="twin")
    with pytest.raises(OverlapError, match=r"twin.data .* shares memory with first.data"):
        lt.AdamW([*given, twin])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_longer_than_the_hosts_blocks(dtype: str) -> None:
    size, step = 70_000, 1  # the parameter fills two blocks and a part of a third
    data, grad = numbers(0, (size,), dtype), numbers(1, (size,), "float32")
    whole = lt.Parameter(data.copy(), grad)
    optimizer = lt.AdamW([whole], lr=0.1, moments="bfloat16", stochastic_rounding=dtype == "bfloat16", seed=3)
    optimizer.step()
    zeros = np.zeros(size, np.float32)
    hyper = AdamWHyper(0.1, 0.9, 0.999, 1e-8, 0.01, optimizer.schedule)
    new = adamw_update(AdamWTensor(data, zeros, zeros), grad, hyper, step)
    parts = zip((whole.data, *optimizer.moments[0]), new[:3], reference.RoundedTensor, strict=True)
    for found, exact, part in parts:
        lanes = reference.rounding_lanes(size, 3, 0, step, part)
        wanted = exact if found.dtype == np.float32 else reference.round_stochastically(exact, lanes)
        assert found.tobytes() == wanted.tobytes(), part
