"""Models with activation, dropout and bias by layer, their gradients and their representations."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, DeviceError, DTypeError, KindError, LtError, OperandError, ShapeError
from tests.support.numpy_cases import FORMULAS, Array, DeviceArray, numbers

DIMS = [3, 5, 4, 2]
MIXED: Any = {"activation": ["tanh", lt.Activation("leaky_relu", 0.3), "sigmoid"], "bias": [False, True, False]}
SLOPES = (0.01, 0.3, 0.01)


def outputs_of(names: tuple[str, ...], x: Array, values: list[tuple[Array, Array | None]]) -> Array:
    """Computes the outputs of a model without dropout, by scalar formulas in float64."""
    for name, slope, (weight, bias) in zip(names, SLOPES, values, strict=True):
        z = x @ weight.T + (0.0 if bias is None else bias)
        x = np.vectorize(lambda each, name=name, slope=slope: FORMULAS[name](each, slope))(z)
    return x


def in_float64(model: lt.MLP) -> list[tuple[Array, Array | None]]:
    return [
        (each.weight.data.astype(np.float64), None if each.bias is None else each.bias.data.astype(np.float64))
        for each in model.layers
    ]


def differences(function: Any, array: Array) -> Array:
    """Computes the gradient of a function of an array, by central differences."""
    made, at = np.empty_like(array), array.reshape(-1)
    for i in range(at.size):
        old, step = at[i], 1e-5
        at[i] = old + step
        above = function()
        at[i] = old - step
        made.reshape(-1)[i] = (above - function()) / (2 * step)
        at[i] = old
    return made


def test_every_layer_is_as_it_was_asked_for() -> None:
    model = lt.MLP(DIMS, **MIXED, device="cpu", seed=2)
    assert [each.bias is None for each in model.layers] == [True, False, True]
    assert [each.name for each in model.parameters()] == [
        *("layer0.weight", "layer1.weight", "layer1.bias", "layer2.weight")
    ]
    x = numbers(0, (6, 3), "float32")
    expected = outputs_of(("tanh", "leaky_relu", "sigmoid"), x.astype(np.float64), in_float64(model))
    np.testing.assert_allclose(model(x), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(model.forward(x)[0], model(x))


def test_gradients_of_a_mixed_model() -> None:
    model = lt.MLP(DIMS, **MIXED, device="cpu", seed=2)
    x, dy = numbers(0, (6, 3), "float32"), numbers(1, (6, 2), "float32")
    _, contexts = model.forward(x)
    dx = model.backward(dy, contexts, need_dx=True)
    values, exact_x = in_float64(model), x.astype(np.float64)

    def loss() -> float:
        return float((outputs_of(("tanh", "leaky_relu", "sigmoid"), exact_x, values) * dy).sum())

    np.testing.assert_allclose(dx, differences(loss, exact_x), rtol=1e-3, atol=1e-5)
    for layer, (weight, bias) in zip(model.layers, values, strict=True):
        np.testing.assert_allclose(layer.weight.grad, differences(loss, weight), rtol=1e-3, atol=1e-5)
        if layer.bias is not None and bias is not None:
            np.testing.assert_allclose(layer.bias.grad, differences(loss, bias), rtol=1e-3, atol=1e-5)


def test_the_gradient_of_the_inputs_is_made_only_if_it_is_asked_for() -> None:
    for dims in ([3, 2], [3, 4, 2]):
        model = lt.MLP(dims, device="cpu", output_activation="tanh")
        x, dy = numbers(0, (5, 3), "float32"), numbers(1, (5, 2), "float32")
        y, contexts = model.forward(x)
        assert model.backward(dy, contexts) is None
        assert model.backward(dy, contexts, need_dx=True).shape == (5, 3)
        grad, last = model.layers[-1].weight.grad.copy(), contexts[-1].x.astype(np.float64)
        np.testing.assert_allclose(grad, (dy * (1 - y.astype(np.float64) ** 2)).T @ last, rtol=1e-4, atol=1e-6)


def test_dropout_by_layer_the_last_included() -> None:
    model = lt.MLP(DIMS, dropout=[0.0, 0.25, 0.5], device="cpu")
    x = numbers(0, (64, 3), "float32")
    y, contexts = model.forward(x, 3)
    assert [ctx.dropout for ctx in contexts] == [0.0, 0.25, 0.5]
    assert 0.3 < (y == 0).mean() < 0.7
    dy = np.ones_like(y)
    model.backward(dy, contexts)
    kept = 2 * (y != 0)
    np.testing.assert_allclose(model.layers[-1].bias.grad, kept.sum(axis=0), rtol=1e-6)  # type: ignore[union-attr]
    assert (model(x) != 0).all()


RULES: list[tuple[dict[str, Any], list[str], list[float], list[bool]]] = [
    ({}, ["relu", "relu", "none"], [0, 0, 0], [True] * 3),
    ({"activation": "gelu", "dropout": 0.5}, ["gelu", "gelu", "none"], [0.5, 0.5, 0], [True] * 3),
    ({"activation": "gelu", "output_activation": "tanh"}, ["gelu", "gelu", "tanh"], [0, 0, 0], [True] * 3),
    ({"activation": ("silu", "tanh", "gelu"), "bias": False}, ["silu", "tanh", "gelu"], [0, 0, 0], [False] * 3),
    ({"dropout": [0, 0.5, 0.2], "bias": [True, False, 1]}, ["relu", "relu", "none"], [0, 0.5, 0.2], [1, 0, 1]),
]


@pytest.mark.parametrize(("options", "activations", "dropouts", "biases"), RULES)
def test_the_rules(options: dict[str, Any], activations: list[str], dropouts: list[float], biases: list[bool]) -> None:
    model = lt.MLP(DIMS, **options, device="cpu")
    for made in (model, lt.MLP(**json.loads(json.dumps(model.options)), device="cpu")):
        assert [each.activation.name for each in made.layers] == activations
        assert [each.dropout for each in made.layers] == dropouts
        assert [each.bias is not None for each in made.layers] == biases
        for one, other in zip(model.parameters(), made.parameters(), strict=True):
            np.testing.assert_array_equal(one.data, other.data)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.ones((2, 5), np.float32), ShapeError, r"^x has shape \(2, 5\); the model takes \(\.\.\., 4\)$"),
        (np.ones(4, np.float32), ShapeError, r"^x has shape \(4,\); the model takes \(\.\.\., 4\)$"),
        (np.ones((2, 4)), DTypeError, r"^x is float64; the model takes float32: x.astype\('float32'\)$"),
        ([[1.0] * 4], OperandError, r"^x is a list .*; numpy.asarray\(x\) makes one$"),
        (DeviceArray((2, 4)), DeviceError, "the model in host memory .* but x not; .*cupy.asnumpy to the host"),
    ],
)
@pytest.mark.parametrize("call", ["__call__", "forward"])
def test_inputs_that_do_not_fit(x: Any, error: type[LtError], message: str, call: str) -> None:
    with pytest.raises(error, match=message):
        getattr(lt.MLP([4, 3, 2], device="cpu"), call)(x)


def test_options_that_mean_the_same_are_the_same() -> None:
    one = lt.MLP(DIMS, "tanh", dropout=0.5, device="cpu")
    other = lt.MLP(DIMS, ["tanh", "tanh", "none"], dropout=[0.5, 0.5, 0.0], bias=[True] * 3, device="cpu")
    assert one.options == other.options
    assert other.options["dropout"] == 0.5
    assert lt.MLP([3, 2], "tanh", device="cpu").options["activation"]["name"] == "tanh"
    assert lt.MLP([3, 2], ["tanh"], device="cpu").options["activation"] == [{"name": "tanh", "negative_slope": 0.01}]


def test_options_are_what_the_layers_are_now() -> None:
    model = lt.MLP(DIMS, device="cpu")
    model.layers[1].dropout = 0.5
    assert model.options["dropout"] == [0.0, 0.5, 0.0]
    model.layers[0].dropout = 0.5
    assert model.options["dropout"] == 0.5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"activation": ["relu", "tanh"]}, ArgumentError, r"activation is \['relu', 'tanh'\], of length 2; .* 3"),
        ({"dropout": (0.1,)}, ArgumentError, r"dropout is \(0\.1,\), of length 1"),
        ({"bias": [True] * 4}, ArgumentError, r"bias is \[True, True, True, True\], of length 4"),
        ({"activation": ["relu", "tann", "none"]}, ArgumentError, r"activation\[1\] is 'tann'; accepted are none"),
        ({"activation": ["relu", None, "none"]}, KindError, r"activation\[1\] is None"),
        ({"dropout": [0.0, 1.5, 0.0]}, ArgumentError, r"dropout\[1\] is 1\.5; it must be in \[0, 1\)"),
        ({"dropout": [0.0, "a", 0.0]}, KindError, r"dropout\[1\] is 'a'; it must be a number"),
        ({"bias": [True, "yes", False]}, KindError, r"bias\[1\] is 'yes'; it must be True or False"),
        ({"output_activation": "softmax"}, ArgumentError, "output_activation is 'softmax'; accepted are none"),
        (
            {"output_activation": "none", "activation": ["relu"] * 3},
            ArgumentError,
            "output_activation is 'none' and activation is .*; a sequence has the last layer's activation itself",
        ),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], error: type[LtError], message: str) -> None:
    with pytest.raises(error, match=message):
        lt.MLP(DIMS, **options, device="cpu")


def test_training_without_a_step_is_refused_if_there_is_dropout() -> None:
    model, x = lt.MLP(DIMS, dropout=[0, 0, 0.5], device="cpu"), numbers(0, (4, 3), "float32")
    message = r"step is None, but the model has dropout, .*forward\(x, optimizer\.steps\) in training, or call model"
    with pytest.raises(ArgumentError, match=message):
        model.forward(x)
    np.testing.assert_array_equal(lt.MLP(DIMS, device="cpu").forward(x)[0], lt.MLP(DIMS, device="cpu")(x))


def test_a_model_is_shown_as_a_table() -> None:
    options: dict[str, Any] = {"dtype": "float16", "device": "cpu"}
    inner = lt.Chain(lt.RMSNorm(64, **options), lt.SwiGLU(64, 96, dropout=0.5, **options))
    mlp, shared = lt.MLP([784, 64, 64], dropout=0.1, bias=[True, False], **options), lt.Linear(64, 64, **options)
    assert [line.rstrip() for line in repr(lt.Chain(mlp, shared, lt.Residual(inner), shared)).splitlines()] == [
        "Chain on cpu, float16, FP32 master copies",
        "block           kind     inputs  outputs  bias  activation  dropout  parameters",
        "0.layer0        Linear   784     64       yes   relu        0.1          50,240",
        "0.layer1        Linear   64      64             none        0             4,096",
        "3               Linear   64      64       yes   none        0             4,160",
        "2.inner.0       RMSNorm  64      64                                          64",
        "2.inner.1       SwiGLU   64      64             silu        0.5               0",
        "2.inner.1.up    Linear   64      192            none        0            12,288",
        "2.inner.1.down  Linear   96      64             none        0             6,144",
        "3               Linear   64      64       yes   none        0                 0",
        "total                                                                    76,992",
    ]
    assert repr(lt.Dropout(0.5)).startswith("Dropout\n")
    assert "copies" not in repr(lt.MLP([2, 3], device="cpu"))


def test_parameters_layers_and_optimizers_are_shown_in_a_line() -> None:
    model = lt.MLP([784, 64, 10], bias=[True, False], dtype="float16", device="cpu")
    optimizer = lt.AdamW(model.parameters(), lr=0.5, weight_decay=0.25)
    assert repr(model.parameters()[0]) == "Parameter(layer0.weight, (64, 784), float16, FP32 master copy)"
    assert repr(model.layers[1]) == "Linear(layer1, 64 to 10, none, bias=False, dropout=0.0)"
    expected = "AdamW(3 parameters, lr=0.5, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.25)"
    assert repr(optimizer) == expected
    assert repr(lt.Parameter(None, None)) == "Parameter(parameter, None, of unknown type)"


def test_layers_without_a_bias_have_the_values_that_they_would_have_alone() -> None:
    """As in PyTorch, initialisation draws no random numbers for a layer without a bias."""
    whole, without = lt.MLP([3, 4, 2], device="cpu"), lt.MLP([3, 4, 2], bias=False, device="cpu")
    np.testing.assert_array_equal(whole.layers[0].weight.data, without.layers[0].weight.data)
    assert len(without.parameters()) == 2
    assert all(each.data.size for each in itertools.chain(whole.parameters(), without.parameters()))
