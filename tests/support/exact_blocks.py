"""Computes blocks (models) in float64 by formulas independent of the package; gradients are central differences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lt_runtime as lt
from tests.support.block_trees import Tree

Array = NDArray[np.float64]

_STEP = 1e-6  # step of the central differences, whose error is then about 1e-10
_ERF = np.frompyfunc(math.erf, 1, 1)

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "none": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "leaky_relu": lambda z: np.maximum(z, 0.01 * z),
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "tanh": np.tanh,
    "gelu": lambda z: z / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "gelu_erf": lambda z: z / 2 * (1 + _ERF(z / math.sqrt(2)).astype(np.float64)),
    "silu": lambda z: z / (1 + np.exp(-z)),
}
_ACTIVATIONS_OF = {"MLP": "relu", "Gated": "silu", "SwiGLU": "silu", "GEGLU": "gelu", "ReGLU": "relu"}


class ExactModel:
    """Computes a model's outputs and gradients in float64.

    Args:
        tree, model: the description and the model on the host, which has the parameters' values.
        step: the number of the step, which decides dropout's masks.
    """

    def __init__(self, tree: Tree, model: Any, step: int) -> None:
        self.tree, self.model, self._step = tree, model, step
        self.values: dict[int, Array] = {id(each): each.data.astype(np.float64) for each in model.parameters()}
        self._trains, self._masks = True, itertools.count()

    def outputs(self, xs: Sequence[Array], *, trains: bool = True) -> Array:
        """Outputs (..., M, N) for inputs (..., M, K), whose first axes hold variants of the same rows."""
        self._trains, self._masks = trains, itertools.count()
        return self._run(self.tree, self.model, tuple(xs) if len(xs) > 1 else xs[0])

    def input_gradients(self, xs: Sequence[Array], dy: Array) -> list[Array]:
        """The gradients (M, K) of the sum of outputs · dy with respect to each of the inputs."""

        def total(i: int, variants: Array) -> Array:
            every = [variants if i == j else _repeated(x, len(variants)) for j, x in enumerate(xs)]
            return (self.outputs(every) * dy).sum((-2, -1))

        return [_central_differences(lambda variants, i=i: total(i, variants), x) for i, x in enumerate(xs)]

    def gradient(self, parameter: Any, xs: Sequence[Array], dy: Array) -> Array:
        """The gradient of the sum of outputs · dy with respect to a parameter."""
        own = self.values[id(parameter)]

        def total(variants: Array) -> Array:
            self.values[id(parameter)] = variants
            return (self.outputs([_repeated(x, len(variants)) for x in xs]) * dy).sum((-2, -1))

        found = _central_differences(total, own)
        self.values[id(parameter)] = own
        return found

    def _run(self, tree: Tree, block: Any, x: Any) -> Any:
        if tree.kind == "Chain":
            for part, inner in zip(tree.parts, block.sequence, strict=True):
                x = self._run(part, inner, x)
            return x
        if tree.kind == "Residual":
            return x + self._run(tree.parts[0], block.inner, x)
        if tree.kind == "Parallel":
            each = x if tree.option("split", True) else [x] * len(tree.parts)
            towers = [*map(self._run, tree.parts, block.towers, each)]
            return sum(towers) if tree.option("join", "concatenate") == "sum" else np.concatenate(towers, -1)
        if tree.kind == "Dropout":
            return x * self._mask(x, tree.option("p", 0.0), tree.seed)
        if tree.kind in ("LayerNorm", "RMSNorm"):
            return self._norm(tree, block, x)
        p, activation = tree.option("dropout", 0.0), tree.option("activation", _ACTIVATIONS_OF.get(tree.kind, "none"))
        if tree.kind == "MLP":
            hidden = self._linear(block.layers[0], x, activation, p, tree.seed)
            return self._linear(block.layers[1], hidden, "none", 0.0, tree.seed)
        if tree.kind == "Linear":
            return self._linear(block, x, activation, p, tree.seed)
        gate, value = np.split(self._linear(block.up, x, "none", 0.0, 0), 2, -1)
        h = ACTIVATIONS[activation](gate) * value
        return self._linear(block.down, h * self._mask(h, p, tree.seed), "none", 0.0, 0)

    def _linear(self, layer: Any, x: Array, activation: str, p: float, seed: int) -> Array:
        z = x @ self._value(layer.weight).swapaxes(-1, -2)
        if layer.bias is not None:
            z = z + self._value(layer.bias)[..., None, :]
        y = ACTIVATIONS[activation](z)
        return y * self._mask(y, p, seed)

    def _norm(self, tree: Tree, norm: Any, x: Array) -> Array:
        is_layer = tree.kind == "LayerNorm"
        centred = x - x.mean(-1, keepdims=True) if is_layer else x
        scale = np.sqrt((centred**2).mean(-1, keepdims=True) + tree.option("eps", 1e-5 if is_layer else 1e-6))
        y = centred / scale * self._value(norm.weight)[..., None, :]
        return y + self._value(norm.bias)[..., None, :] if is_layer and norm.bias is not None else y

    def _value(self, parameter: Any) -> Array:
        value = self.values[id(parameter.owner)]
        return value if parameter is parameter.owner else value.swapaxes(-1, -2)

    def _mask(self, x: Array, p: float, seed: int) -> Array | float:
        """The factors of a dropout, drawn by the package's own generator.

        Every dropout of a model has a number, even if p = 0.
        """
        place = next(self._masks)
        if not (p and self._trains):
            return 1.0
        ones = np.ones(x.shape[-2:], np.float32)
        return lt.dropout(ones, p, lt.Philox(seed, place, self._step)).astype(np.float64)  # type: ignore[no-any-return]


def _repeated(x: Array, count: int) -> Array:
    return np.broadcast_to(x, (count, *x.shape))


def _central_differences(total: Callable[[Array], Array], at: Array) -> Array:
    """The gradient of a function at an array, by central differences; the function takes many variants at once."""
    steps = _STEP * np.eye(at.size).reshape(at.size, *at.shape)
    return ((total(at + steps) - total(at - steps)) / (2 * _STEP)).reshape(at.shape)
