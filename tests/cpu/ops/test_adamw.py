"""AdamW on NumPy arrays against a scalar loop, and the parameters that it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime import schedules
from lt_runtime.errors import ArgumentError, DeviceError, DTypeError, LayoutError, LtError, OperandError, ShapeError
from lt_runtime.schedules import Schedule
from tests.support.numpy_cases import DTYPES, Array, DeviceArray, numbers

STEPS = 7
SCHEDULES = [
    schedules.constant(),
    schedules.warmup(3),
    schedules.warmup_linear(2, 6, 0.1),
    schedules.warmup_cosine(2, 6),
]


def scalar_factor(schedule: Schedule, step: int) -> float:
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.decay == "constant":
        return 1.0
    progress = min(1.0, (step - schedule.warmup_steps) / (schedule.total_steps - schedule.warmup_steps))
    shape = {"linear": 1 - progress, "cosine": math.cos(math.pi / 2 * progress) ** 2}[schedule.decay]
    return schedule.final_factor + shape * (1 - schedule.final_factor)


def scalar_adamw(value: float, gradients: list[float], schedule: Schedule) -> float:
    """Algorithm 2 of Loshchilov and Hutter with lr·λ as decay, in double precision throughout."""
    m = v = 0.0
    for step, gradient in enumerate(gradients, 1):
        rate = 0.02 * scalar_factor(schedule, step)
        value -= rate * 0.3 * value
        m = 0.8 * m + 0.2 * gradient
        v = 0.95 * v + 0.05 * gradient**2
        value -= rate * (m / (1 - 0.8**step)) / (math.sqrt(v / (1 - 0.95**step)) + 1e-6)
    return value


def train(data: Array, gradients: list[Array], schedule: Schedule) -> tuple[lt.Parameter, lt.AdamW]:
    parameter = lt.Parameter(data, np.zeros_like(gradients[0]))
    optimizer = lt.AdamW([parameter], lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, schedule=schedule)
    for gradient in gradients:
        parameter.grad[...] = gradient
        optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gradient_dtype", DTYPES)
def test_agrees_with_a_scalar_loop(schedule: Schedule, dtype: str, gradient_dtype: str) -> None:
    start = numbers(1, (3, 5), dtype)
    gradients = [numbers(10 + step, (3, 5), gradient_dtype) for step in range(STEPS)]
    data = start.copy()
    parameter, optimizer = train(data, gradients, schedule)
    exact = parameter.data if dtype == "float32" else parameter.master
    assert exact.dtype == np.float32
    for index in np.ndindex(start.shape):
        expected = scalar_adamw(float(start[index]), [float(g[index]) for g in gradients], schedule)
        assert float(exact[index]) == pytest.approx(expected, rel=3e-6, abs=1e-6)
    assert parameter.data is data
    assert (parameter.data == exact.astype(DTYPES[dtype])).all()
    assert optimizer.steps.dtype == np.uint32
    assert optimizer.steps.tolist() == [STEPS]


def test_a_given_master_is_what_is_trained() -> None:
    values = np.array([1 + 2.0**-20], np.float32)
    parameter = lt.Parameter(values.astype(np.float16), np.ones(1, np.float16), values.copy())
    lt.AdamW([parameter], lr=0.0).step()
    assert (parameter.master == values).all()


def test_many_parameters_of_any_shape() -> None:
    def parameters() -> list[lt.Parameter]:
        shapes: list[tuple[int, ...]] = [(), (7,), (2, 3, 4), (0,), (5, 1)]
        return [
            lt.Parameter(numbers(i, s, "float32"), numbers(9 + i, s, "float32"), name=f"p{i}")
            for i, s in enumerate(shapes)
        ]

    together, apart = parameters(), parameters()
    optimizer = lt.AdamW(together)
    optimizer.step()
    optimizer.step()
    for parameter, alone in zip(together, apart, strict=True):
        single = lt.AdamW([alone])
        single.step()
        single.step()
        assert (parameter.data == alone.data).all()
    assert int(optimizer.steps[0]) == 2


def test_nothing_to_optimize() -> None:
    with pytest.raises(ArgumentError, match="parameters is empty"):
        lt.AdamW([])


def ones(*shape: int, dtype: Any = np.float32) -> Array:
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (lt.Parameter(ones(4), ones(5), name="b"), ShapeError, r"b\.grad has shape \(5,\); it must be \(4,\)"),
        (lt.Parameter(ones(4, dtype=np.float64), ones(4), name="b"), DTypeError, r"b\.data has type float64; accepted"),
        (lt.Parameter(ones(4), ones(4, dtype=np.int32), name="b"), DTypeError, r"b\.grad has type int32; accepted"),
        (lt.Parameter(ones(8)[::2], ones(4), name="b"), LayoutError, r"b\.data has strides .* row-major without gaps"),
        (lt.Parameter(ones(4), ones(8)[::2], name="b"), LayoutError, r"b\.grad has strides"),
        (lt.Parameter(ones(4, 3).T, ones(3, 4), name="b"), LayoutError, r"b\.data has strides"),
        (
            lt.Parameter(ones(4, dtype=np.float16), ones(4), ones(3), "b"),
            ShapeError,
            r"b\.master has shape \(3,\); it must be \(4,\)",
        ),
        (
            lt.Parameter(ones(4, dtype=np.float16), ones(4), ones(4, dtype=np.float16), "b"),
            DTypeError,
            r"b\.master is float16; it must be float32",
        ),
        (lt.Parameter([1.0], ones(1), name="b"), OperandError, r"b\.data .* is a list .*; accepted are"),
        (lt.Parameter(DeviceArray((4,)), DeviceArray((4,)), name="b"), DeviceError, r"b\.data .* not; all must be on"),
    ],
)
@pytest.mark.parametrize("name", ["a", "b"])
def test_parameters_that_do_not_fit(bad: lt.Parameter, error: type[LtError], message: str, name: str) -> None:
    good = lt.Parameter(ones(4), ones(4), name=name)
    for parameters in ([good, bad], [bad, good]):
        with pytest.raises(error, match=message):
            lt.AdamW(parameters)
    assert (good.data == 1).all()


def test_data_must_not_be_the_gradient() -> None:
    both = ones(4)
    with pytest.raises(
        lt.errors.OverlapError, match=r"b\.data \(parameter 0\) shares memory with b\.grad \(parameter 0\)"
    ):
        lt.AdamW([lt.Parameter(both, both, name="b")])
