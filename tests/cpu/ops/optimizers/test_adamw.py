"""AdamW and its options on NumPy arrays against a scalar loop, and the parameters and options that it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime import reference, schedules
from lt_runtime.errors import ArgumentError, DeviceError, DTypeError, LayoutError, LtError, OperandError, ShapeError
from lt_runtime.reference.optimizer import learning_rate_factor
from lt_runtime.schedules import Schedule
from tests.support.numpy_cases import DTYPES, Array, DeviceArray, numbers

STEPS = 7
CONSTANT = schedules.constant()
SCHEDULES = [CONSTANT, schedules.warmup(3), schedules.warmup_linear(2, 6, 0.1), schedules.warmup_cosine(2, 6)]


def parameter(seed: int, shape: tuple[int, ...] = (3, 5), dtype: str = "float32", **more: Any) -> lt.Parameter:
    return lt.Parameter(numbers(seed, shape, dtype), np.zeros(shape, DTYPES[dtype]), **more)


def train(
    parameters: list[lt.Parameter], gradients: list[list[Array]], **options: Any
) -> tuple[lt.AdamW, list[list[float]]]:
    """Makes a step for each gradient; returns the optimizer and, if it computes them, the norms of the gradients."""
    optimizer = lt.AdamW(parameters, lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, **options)
    norms = []
    for step in gradients:
        for each, gradient in zip(parameters, step, strict=True):
            each.grad[...] = gradient
        optimizer.step()
        norms.append([] if optimizer.grad_norm is None else [float(optimizer.grad_norm)])
    return optimizer, norms


def scalar_adamw(
    value: float,
    gradients: list[float],
    schedule: Schedule = CONSTANT,
    *,
    amsgrad: bool = False,
    lr_scale: float = 1.0,
    weight_decay: float = 0.3,
) -> float:
    """Computes AdamW for one number in double precision, by the formulas in PyTorch's documentation."""
    m = v = v_max = 0.0
    for step, gradient in enumerate(gradients, 1):
        rate = 0.02 * lr_scale * learning_rate_factor(schedule, step)
        value -= rate * weight_decay * value
        m = 0.8 * m + 0.2 * gradient
        v = 0.95 * v + 0.05 * gradient**2
        v_max = max(v_max, v) if amsgrad else v
        value -= rate * (m / (1 - 0.8**step)) / (math.sqrt(v_max / (1 - 0.95**step)) + 1e-6)
    return value


def assert_follows(trained: Array, start: Array, gradients: list[Array], **options: Any) -> None:
    for index in np.ndindex(start.shape):
        expected = scalar_adamw(float(start[index]), [float(g[index]) for g in gradients], **options)
        assert float(trained[index]) == pytest.approx(expected, rel=3e-6, abs=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gradient_dtype", DTYPES)
def test_agrees_with_a_scalar_loop(schedule: Schedule, dtype: str, gradient_dtype: str) -> None:
    start = numbers(1, (3, 5), dtype)
    gradients = [numbers(10 + step, (3, 5), gradient_dtype) for step in range(STEPS)]
    data = start.copy()
    parameter = lt.Parameter(data, np.zeros_like(gradients[0]))
    optimizer, _ = train([parameter], [[g] for g in gradients], schedule=schedule)
    exact = parameter.data if dtype == "float32" else parameter.master
    assert exact.dtype == np.float32
    assert_follows(exact, start, gradients, schedule=schedule)
    assert parameter.data is data
    assert (parameter.data == exact.astype(DTYPES[dtype])).all()
    assert optimizer.steps.dtype == np.uint32
    assert optimizer.steps.tolist() == [STEPS]


def shrinking_gradients(seed: int, shape: tuple[int, ...] = (3, 5)) -> list[Array]:
    """Draws gradients that become smaller from step to step, so that AMSGrad's maximum comes from an early step."""
    return [numbers(seed + step, shape, "float32") / 4**step for step in range(STEPS)]


def test_amsgrad() -> None:
    tensor, gradients = parameter(1), shrinking_gradients(10)
    start = tensor.data.copy()
    train([tensor], [[g] for g in gradients], amsgrad=True)
    assert_follows(tensor.data, start, gradients, amsgrad=True)
    plain = scalar_adamw(float(start[0, 0]), [float(g[0, 0]) for g in gradients])
    assert abs(plain - float(tensor.data[0, 0])) > 1e-3, "the gradients tell AMSGrad and AdamW apart"


def test_each_parameter_has_its_own_rate_and_decay() -> None:
    options = [{}, {"lr_scale": 0.5}, {"weight_decay": 0.0}, {"lr_scale": 2.0, "weight_decay": 1.5}, {"lr_scale": 0.0}]
    tensors = [parameter(i, **given) for i, given in enumerate(options)]
    starts = [tensor.data.copy() for tensor in tensors]
    gradients = shrinking_gradients(20)
    train(tensors, [[g] * len(tensors) for g in gradients])
    for tensor, start, given in zip(tensors, starts, options, strict=True):
        assert_follows(tensor.data, start, gradients, **given)
    assert (tensors[-1].data == starts[-1]).all()


@pytest.mark.parametrize("max_norm", [0.5, 1e-3, 1e6, math.inf])
def test_clipping_is_over_all_parameters_together(max_norm: float) -> None:
    tensors = [parameter(1), parameter(2, (7,))]
    starts = [tensor.data.copy() for tensor in tensors]
    gradients = [[numbers(10 * step + i, t.data.shape, "float32") for i, t in enumerate(tensors)] for step in range(3)]
    optimizer, norms = train(tensors, gradients, max_norm=max_norm)
    clipped: list[list[Array]] = [[], []]
    for step, (norm,) in zip(gradients, norms, strict=True):
        exact = math.sqrt(math.fsum(float(x) ** 2 for g in step for x in g.flat))
        assert norm == pytest.approx(exact, rel=1e-6)
        for kept, gradient in zip(clipped, step, strict=True):
            kept.append(gradient.astype(np.float64) * min(1.0, max_norm / (exact + 1e-6)))
    for tensor, start, gradient in zip(tensors, starts, clipped, strict=True):
        assert_follows(tensor.data, start, gradient)
    assert optimizer.grad_norm.dtype == np.float32
    assert optimizer.grad_norm.shape == ()


def test_clipping_adds_to_the_norm_what_pytorch_adds() -> None:
    assert reference.clip_factor(1e-6, 1e-6) == pytest.approx(0.5)
    assert reference.clip_factor(0.0, 1.0) == 1.0
    assert np.isnan(reference.clip_factor(float("nan"), 1.0))


def test_the_norm_is_measured_only_where_it_is_needed() -> None:
    assert lt.AdamW([parameter(1)]).grad_norm is None
    assert lt.AdamW([parameter(1)], skip_nonfinite=True).grad_norm is not None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "options", [{"skip_nonfinite": True}, {"scaler": True}, {"skip_nonfinite": True, "max_norm": 1}]
)
def test_a_skipped_update_changes_nothing(bad: float, options: dict[str, Any]) -> None:
    tensors = [parameter(1), parameter(2, (4,), "bfloat16")]
    given = {name: lt.GradScaler(1.0) if name == "scaler" else value for name, value in options.items()}
    optimizer = lt.AdamW(tensors, **given)
    optimizer.step()
    before = [array.copy() for t in tensors for array in (t.data, t.master) if array is not None]
    tensors[1].grad[2] = bad
    for _ in range(2):
        optimizer.step()
    after = [array for t in tensors for array in (t.data, t.master) if array is not None]
    assert all((x == y).all() for x, y in zip(before, after, strict=True))
    assert (optimizer.steps.tolist(), optimizer.skipped_steps.tolist()) == ([1], [2])
    tensors[1].grad[2] = 0.0
    optimizer.step()
    assert (optimizer.steps.tolist(), optimizer.skipped_steps.tolist()) == ([2], [2])


def test_after_a_skip_training_goes_on_as_if_nothing_had_been() -> None:
    gradients = shrinking_gradients(30)
    with_bad, without = parameter(3), parameter(3)
    bad = np.full((3, 5), np.nan, np.float32)
    train([with_bad], [[g] for g in [gradients[0], bad, *gradients[1:]]], skip_nonfinite=True)
    train([without], [[g] for g in gradients])
    assert (with_bad.data == without.data).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_without_skipping_arithmetic_takes_its_course(bad: float) -> None:
    tensor = lt.Parameter(np.ones(3, np.float32), np.array([1, bad, 1], np.float32))
    optimizer = lt.AdamW([tensor], max_norm=1.0)
    optimizer.step()
    assert optimizer.steps.tolist() == [1]
    # clipping by a norm of NaN makes every gradient NaN; an infinite norm makes the finite gradients 0
    assert np.isfinite(tensor.data).tolist() == ([False] * 3 if math.isnan(bad) else [True, False, True])
    assert not math.isfinite(float(optimizer.grad_norm))


def test_low_precision_moments_follow_on_average() -> None:
    gradient = np.full(4096, 0.1, np.float32)
    tensor = lt.Parameter(np.zeros(4096, np.float32), gradient)
    optimizer = lt.AdamW([tensor], lr=1e-3, weight_decay=0.0, moments="bfloat16")
    for _ in range(200):
        optimizer.step()
    # with a constant gradient, every update moves the parameter by the learning rate
    assert float(tensor.data.mean()) == pytest.approx(-0.2, rel=2e-3)
    assert float(tensor.data.std()) < 0.01


def test_stochastic_rounding_needs_no_master_copy() -> None:
    tensor = lt.Parameter(np.ones(4096, DTYPES["bfloat16"]), np.ones(4096, DTYPES["bfloat16"]))
    optimizer = lt.AdamW([tensor], lr=1e-4, weight_decay=0.0, stochastic_rounding=True)
    for _ in range(50):
        optimizer.step()
    assert tensor.master is None
    # rounded to nearest, a step of 1e-4 would never leave 1, whose neighbour below is 1 - 2⁻⁸
    assert float(tensor.data.astype(np.float64).mean()) == pytest.approx(1 - 50e-4, abs=3e-4)


@pytest.mark.parametrize(("dtype", "given"), [("float16", False), ("float32", False), ("bfloat16", True)])
def test_stochastic_rounding_is_for_bfloat16_without_a_master_copy(dtype: str, given: bool) -> None:
    def run(**options: Any) -> lt.Parameter:
        tensor = parameter(4, dtype=dtype)
        tensor.master = tensor.data.astype(np.float32) if given else None
        train([tensor], [[numbers(40 + step, (3, 5), dtype)] for step in range(3)], **options)
        return tensor

    plain, stochastic = run(), run(stochastic_rounding=True)
    assert (plain.data == stochastic.data).all()
    assert (plain.master is None) == (stochastic.master is None)


def test_a_seed_decides_the_rounding() -> None:
    def run(seed: int) -> bytes:
        tensor = parameter(5, (100,), "bfloat16")
        train([tensor], [[numbers(50, (100,), "bfloat16")]], stochastic_rounding=True, seed=seed)
        return bytes(tensor.data.tobytes())

    assert run(3) == run(3) != run(4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1e-3}, "lr is -0.001; it must be finite and not negative"),
        ({"lr": math.inf}, "lr is inf"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"weight_decay": math.nan}, "weight_decay is nan"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\); accepted are two numbers in \[0, 1\)"),
        ({"betas": (-0.1, 0.9)}, r"betas is \(-0.1, 0.9\)"),
        ({"betas": (0.9,)}, r"betas is \(0.9,\)"),
        ({"max_norm": 0.0}, "max_norm is 0.0; it must be positive, or None"),
        ({"max_norm": -1.0}, "max_norm is -1.0"),
        ({"max_norm": math.nan}, "max_norm is nan"),
        ({"moments": "float16"}, "moments is 'float16'; accepted are 'float32' and 'bfloat16'"),
        ({"moments": "half"}, "moments is 'half'"),
        ({"seed": -1}, r"seed is -1; it must be an integer in \[0, 2\*\*64\)"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616"),
    ],
)
def test_options_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        lt.AdamW([parameter(1)], **arguments)


def test_a_given_master_is_what_is_trained() -> None:
    values = np.array([1 + 2.0**-20], np.float32)
    parameter = lt.Parameter(values.astype(np.float16), np.ones(1, np.float16), values.copy())
    lt.AdamW([parameter], lr=0.0).step()
    assert (parameter.master == values).all()


def test_many_parameters_of_any_shape() -> None:
    shapes: list[tuple[int, ...]] = [(), (7,), (2, 3, 4), (0,), (5, 1)]
    together, apart = ([parameter(i, shape) for i, shape in enumerate(shapes)] for _ in range(2))
    gradients = [[numbers(9 * step + i, shape, "float32") for i, shape in enumerate(shapes)] for step in (1, 2)]
    optimizer, _ = train(together, gradients)
    for i, (one, alone) in enumerate(zip(together, apart, strict=True)):
        train([alone], [[step[i]] for step in gradients])
        assert (one.data == alone.data).all()
    assert int(optimizer.steps[0]) == 2


def test_nothing_to_optimize() -> None:
    with pytest.raises(ArgumentError, match="parameters is empty"):
        lt.AdamW([])


def ones(*shape: int, dtype: Any = np.float32) -> Array:
    return np.ones(shape, dtype)


HALF = ones(4, dtype=np.float16)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (lt.Parameter(ones(4), ones(5), name="b"), ShapeError, r"b\.grad has shape \(5,\); it must be \(4,\)"),
        (lt.Parameter(ones(4, dtype=np.float64), ones(4), name="b"), DTypeError, r"b\.data has type float64; accepted"),
        (lt.Parameter(ones(4), ones(4, dtype=np.int32), name="b"), DTypeError, r"b\.grad has type int32; accepted"),
        (lt.Parameter(ones(8)[::2], ones(4), name="b"), LayoutError, r"b\.data has strides .* row-major without gaps"),
        (lt.Parameter(ones(4), ones(8)[::2], name="b"), LayoutError, r"b\.grad has strides"),
        (lt.Parameter(ones(4, 3).T, ones(3, 4), name="b"), LayoutError, r"b\.data has strides"),
        (lt.Parameter(HALF, ones(4), ones(3), "b"), ShapeError, r"b\.master has shape \(3,\); it must be \(4,\)"),
        (lt.Parameter(HALF, ones(4), HALF, "b"), DTypeError, r"b\.master is float16; it must be float32"),
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
    both, shared = ones(4), r"b\.data \(parameter 0\) shares memory with b\.grad \(parameter 0\)"
    with pytest.raises(lt.errors.OverlapError, match=shared):
        lt.AdamW([lt.Parameter(both, both, name="b")])
