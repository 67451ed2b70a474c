"""Averages of parameters on NumPy arrays: against a loop in float64, in a training step, and copied into a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, FixedError, OperandError, ShapeError
from tests.support.numpy_cases import DTYPES

DIMS, ROWS = [5, 7, 3], 8


def model_of(dtype: str = "float32", dims: list[int] = DIMS, **options: Any) -> lt.MLP:
    return lt.MLP(dims, dtype=dtype, device="cpu", **options)


def batch(seed: int, dtype: str = "float32") -> tuple[Any, Any]:
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((ROWS, DIMS[0])).astype(DTYPES[dtype])
    return x, generator.integers(0, DIMS[-1], ROWS).astype(np.int32)


def trained_values(model: lt.MLP) -> list[Any]:
    return [(each.data if each.master is None else each.master).astype(np.float64) for each in model.parameters()]


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.999])
@pytest.mark.parametrize(
    ("dtype", "options"), [*((dtype, {}) for dtype in DTYPES), ("bfloat16", {"master_weights": False})]
)
def test_a_training_step_averages_what_it_has_updated(dtype: str, options: dict[str, Any], decay: float) -> None:
    model = model_of(dtype, **options)
    ema = lt.EMA(model, decay)
    in_place = bool(options)
    optimizer = lt.AdamW(model.parameters(), lr=0.1, stochastic_rounding=in_place)
    step = lt.TrainStep(model, optimizer, ema=ema)
    expected = trained_values(model)
    for average, value in zip(ema.averages.values(), expected, strict=True):
        assert average.dtype == np.float32
        assert (average == value).all()  # the averages begin as the model's values
    for i in range(5):
        step(*batch(i, dtype))
        expected = [decay * old + (1 - decay) * new for old, new in zip(expected, trained_values(model), strict=True)]
    for (name, average), value in zip(ema.averages.items(), expected, strict=True):
        np.testing.assert_allclose(average, value, rtol=1e-6, atol=1e-7, err_msg=name)


def test_averages_have_the_parameters_names_and_shapes() -> None:
    model = model_of()
    averages = lt.EMA(model).averages
    assert [*averages] == [each.name for each in model.parameters()]
    assert [each.shape for each in averages.values()] == [each.data.shape for each in model.parameters()]


def test_a_loop_of_ones_own() -> None:
    model = model_of()
    ema, before = lt.EMA(model, decay=0.75), trained_values(model)
    for each in model.parameters():
        each.data += 1
    ema.update()
    for average, value in zip(ema.averages.values(), before, strict=True):
        np.testing.assert_allclose(average, value + 0.25, rtol=1e-6)


def test_an_average_of_a_parameter_that_stays_is_that_parameter() -> None:
    model = model_of()
    ema = lt.EMA(model, decay=0.9)
    for _ in range(50):
        ema.update()
    for average, value in zip(ema.averages.values(), trained_values(model), strict=True):
        assert (average == value).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_averages_are_copied_into_a_model_with_its_master_copies(dtype: str) -> None:
    model, target = model_of(), model_of(dtype, seed=5)
    ema = lt.EMA(model)
    arrays = [(each.data, each.master) for each in target.parameters()]
    ema.copy_to(target)
    for each, average, (data, master) in zip(target.parameters(), ema.averages.values(), arrays, strict=True):
        assert each.data is data
        assert each.master is master
        assert (data == average.astype(DTYPES[dtype])).all()
        assert master is None or (master == average).all()
    x, _ = batch(0, dtype)
    if dtype == "float32":
        assert (target(x) == model(x)).all()
    lt.AdamW(target.parameters(), lr=0.0).step()
    assert (target.layers[0].weight.data == ema.averages["layer0.weight"].astype(DTYPES[dtype])).all()


def test_what_cannot_be() -> None:
    model, other = model_of(), model_of()
    for decay in (-0.1, 1.0, np.nan):
        with pytest.raises(ArgumentError, match=r"decay is (-0.1|1.0|nan); it must be in \[0, 1\)"):
            lt.EMA(model, decay)
    ema = lt.EMA(model)
    with pytest.raises(ArgumentError, match=r"ema averages another model; make it with lt.EMA\(model\)"):
        lt.TrainStep(other, lt.AdamW(other.parameters()), ema=ema)
    with pytest.raises(ShapeError, match=r"model has the parameters .*\(3, 5\)}; the averages are of .*layer1.weight"):
        ema.copy_to(model_of(dims=[5, 3]))
    with pytest.raises(FixedError, match=r"EMA.decay cannot be set to 0.5; make another EMA"):
        ema.decay = 0.5


def test_replaced_arrays() -> None:
    model = model_of()
    ema, bias = lt.EMA(model), model.layers[0].bias
    bias.data = bias.data.copy()
    with pytest.raises(OperandError, match=r"an array of layer0.bias was replaced after the EMA was made"):
        ema.update()
    with pytest.raises(OperandError, match=r"an array of layer0.bias was replaced after the EMA was made"):
        lt.TrainStep(model, lt.AdamW(model.parameters()), ema=ema)
