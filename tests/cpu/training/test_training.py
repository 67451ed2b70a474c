"""A model, its training step and its optimizer on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, DTypeError, LtError, OperandError, ShapeError
from tests.support.numpy_cases import DTYPES, Array, DeviceArray, numbers

BATCH, CLASSES = 32, 3


def toy_problem(dtype: str) -> tuple[Array, Array]:
    """Draws points of the plane; the label of a point is the ring, one of three, in which it lies.

    A single layer cannot separate the rings.
    """
    points = np.random.default_rng(0).uniform(-1, 1, (512, 2))
    labels = np.digitize(np.hypot(*points.T), (0.5, 0.85)).astype(np.int32)
    return points.astype(DTYPES[dtype]), labels


def model_of(dtype: str = "float32", seed: int = 0, dropout: float = 0.0, **more: Any) -> lt.MLP:
    return lt.MLP([2, 32, 32, CLASSES], dtype=dtype, seed=seed, dropout=dropout, device="cpu", **more)


def curve(
    dtype: str = "float32", seed: int = 0, dropout: float = 0.0, steps: int = 200, in_place: bool = False
) -> list[float]:
    """Trains the model; returns the losses of all steps. With `in_place`, the parameters have no master copies."""
    points, labels = toy_problem(dtype)
    model = model_of(dtype, seed, dropout, master_weights=not in_place)
    kept = {"moments": "bfloat16", "stochastic_rounding": True} if in_place else {}
    step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=1e-2, **kept), batch_size=BATCH)
    assert all(parameter.master is None for parameter in model.parameters()) or not in_place
    order = np.random.default_rng(1).integers(0, len(labels), (steps, BATCH))
    return [float(step(points[batch], labels[batch])) for batch in order]


@pytest.mark.parametrize(("dtype", "in_place"), [*((dtype, False) for dtype in DTYPES), ("bfloat16", True)])
def test_a_small_model_learns(dtype: str, in_place: bool) -> None:
    losses = curve(dtype, in_place=in_place)
    assert np.mean(losses[:5]) > 0.9
    assert np.mean(losses[-20:]) < (0.3 if in_place else 0.25)


def test_a_seed_decides_everything() -> None:
    first = curve(seed=3, dropout=0.2, steps=20)
    assert curve(seed=3, dropout=0.2, steps=20) == first
    assert curve(seed=4, dropout=0.2, steps=20) != first
    assert curve(seed=3, dropout=0.0, steps=20) != first


def test_the_initial_values_are_pytorchs() -> None:
    model = lt.MLP([400, 300, 10], device="cpu", seed=1)
    for layer, inputs in zip(model.layers, (400, 300), strict=True):
        bound = 1 / np.sqrt(inputs)
        values = np.concatenate([layer.weight.data.ravel(), layer.bias.data])
        assert np.abs(values).max() <= bound
        assert values.std() == pytest.approx(bound / np.sqrt(3), rel=0.05)
        assert (layer.weight.data.shape[1], layer.bias.data.shape[0]) == (inputs, layer.weight.data.shape[0])


def test_a_type_below_fp32_has_master_copies_of_the_same_values() -> None:
    low, full = model_of("bfloat16", 7), model_of("float32", 7)
    for parameter, exact in zip(low.parameters(), full.parameters(), strict=True):
        assert (parameter.master == exact.data).all()
        assert (parameter.data == exact.data.astype(DTYPES["bfloat16"])).all()
        assert exact.master is None


def test_dropout_is_for_training_and_for_hidden_layers_only() -> None:
    model = model_of(dropout=0.5)
    x = numbers(1, (64, 2), "float32")
    first, contexts = model.forward(x, 1)
    assert [ctx.dropout for ctx in contexts] == [0.5, 0.5, 0.0]
    assert len({(ctx.rng.seed, ctx.rng.layer) for ctx in contexts[:2]}) == 2
    assert (model.forward(x, 1)[0] == first).all()
    assert (model.forward(x, 2)[0] != first).any()
    assert (model(x) == model(x)).all()


def test_every_step_has_masks_of_its_own() -> None:
    model = model_of(dropout=0.5)
    step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=0.0), batch_size=BATCH)
    points, labels = toy_problem("float32")
    losses = [float(step(points[:BATCH], labels[:BATCH])) for _ in range(4)]
    assert len(set(losses)) == 4


LABELS = np.zeros(BATCH, np.int32)


@pytest.mark.parametrize(
    ("x", "labels", "error", "message"),
    [
        (
            np.ones((BATCH - 1, 2), np.float32),
            LABELS[1:],
            ShapeError,
            r"\(31, 2\); .* for \(32, 2\); lt.TrainStep\(..., batch_size=None\) takes",
        ),
        (np.ones((BATCH, 2), np.float32), LABELS[1:], ShapeError, r"labels has shape \(31,\); it must be \(32,\)"),
        (np.ones((BATCH, 2), np.float32), LABELS + CLASSES, ArgumentError, "labels holds 3; accepted are 0 to 2"),
        ([[1.0, 2.0]] * BATCH, LABELS, OperandError, "x is a list .*; accepted are"),
        (DeviceArray((BATCH, 2)), LABELS, OperandError, "but x not; all must be on one device"),
    ],
)
def test_batches_that_do_not_fit(x: Any, labels: Array, error: type[LtError], message: str) -> None:
    model = model_of()
    before = [parameter.data.copy() for parameter in model.parameters()]
    step = lt.TrainStep(model, lt.AdamW(model.parameters()), batch_size=BATCH)
    with pytest.raises(error, match=message):
        step(x, labels)
    assert all((p.data == b).all() and (p.grad == 0).all() for p, b in zip(model.parameters(), before, strict=True))
    assert int(step.optimizer.steps[0]) == 0
    assert np.isfinite(float(step(np.ones((BATCH, 2), np.float32), LABELS)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dims": [2]}, ArgumentError, r"dims is \[2\]; accepted are at least two positive sizes"),
        ({"dims": []}, ArgumentError, r"dims is \[\]"),
        ({"dims": [2, 0, 3]}, ArgumentError, r"dims is \[2, 0, 3\]"),
        ({"activation": "softmax"}, ArgumentError, "activation is 'softmax'; accepted are none, relu"),
        ({"activation": None}, ArgumentError, "activation is None"),
        ({"dtype": "float64"}, DTypeError, "has type float64; accepted are float32, float16, bfloat16"),
        ({"dropout": 1.0}, ArgumentError, r"dropout is 1\.0; it must be in"),
        ({"master_weights": False}, ArgumentError, "master_weights is False, which is for bfloat16 alone"),
        ({"master_weights": False, "dtype": "float16"}, ArgumentError, "dtype is 'float16'"),
        ({"seed": -1}, ArgumentError, "seed is -1; it must be an integer"),
        ({"seed": 2**64}, ArgumentError, "seed is 18446744073709551616"),
        ({"compute": "fp8"}, ArgumentError, "compute is 'fp8'"),
        ({"compute": "tf32", "dtype": "bfloat16"}, ArgumentError, "compute='tf32' needs float32 .*, not bfloat16"),
        ({"device": "tpu"}, ArgumentError, "device is 'tpu'; accepted are 'auto', 'cpu', 'cuda' and 'cuda:N'"),
        ({"device": "cuda:"}, ArgumentError, "device is 'cuda:'"),
        ({"device": "cuda:99"}, ArgumentError, r"device is 'cuda:99', but this machine has \d+ usable GPUs; try 'cpu'"),
    ],
)
def test_models_that_cannot_be(arguments: dict[str, Any], error: type[LtError], message: str) -> None:
    with pytest.raises(error, match=message):
        lt.MLP(**{"dims": [2, 3], "device": "cpu", **arguments})
