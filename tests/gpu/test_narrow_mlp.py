"""A narrow MLP's forward and backward as one kernel each: against float64, with repeatable bits, in training steps."""

from __future__ import annotations

import itertools
from typing import Any

import cupy as cp
import numpy as np
import pytest
from numpy.typing import NDArray

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.nn.narrow import NarrowPasses
from lt_runtime.ops._mlp import MLP_GRADIENTS, MLP_OUTPUTS, filled
from lt_runtime.ops.call import perform
from lt_runtime.problem import ACTIVATIONS, Activation, DType
from tests.host_kernels.arrays import EPSILON

Array = NDArray[Any]
SHAPES = (
    ((64, 64, 64, 64, 3), 1000),
    ((64, 64, 64, 64, 3), 40_000),
    ((16, 16, 16), 70),
    ((20, 24, 9, 5), 129),
    ((3, *[32] * 6, 1), 4097),
    ((48, 48, 48, 40), 3333),
    ((100, 112, 7), 515),
    ((48, 96, 96, 96, 16), 5000),
    ((65, 75, 10), 3001),
    ((128, 128, 10), 5000),
    ((128, 128, 128, 10), 5000),
    ((128, 128, 128, 128, 10), 3000),
    (((64,) * 8 + (3,)), 20_000),
    (((16,) * 17), 300),
)


class _Network:
    """Values of an MLP's parameters and inputs, on the host and on the GPU."""

    def __init__(self, dims: tuple[int, ...], rows: int, dtype: DType, activation: str, integers: bool = False) -> None:
        generator = np.random.default_rng(rows)
        shapes = [(rows, dims[0]), (rows, dims[-1])]
        shapes += [shape for k, n in itertools.pairwise(dims) for shape in ((n, k), (n,))]
        draw = _integers if integers else _normal
        self.host = [draw(generator, shape).astype(dtype.numpy) for shape in shapes]
        self.gpu = [cp.asarray(each) for each in self.host]
        self.activation = Activation(activation)

    @property
    def made(self) -> list[Array]:
        """Runs the fused forward and backward kernels; returns the outputs, and the gradients of all parameters."""
        x, dy, *parameters = self.gpu
        gradients = [each.copy() for each in parameters]
        y = perform(MLP_OUTPUTS, (x, None, *filled(parameters)), self.activation, None, None)
        operands = (x, dy, *filled(parameters), *filled(gradients), None, None)
        perform(MLP_GRADIENTS, operands, (self.activation, False, None), None, None)
        return [cp.asnumpy(each).astype(np.float64) for each in (y, *gradients)]

    @property
    def expected(self) -> list[Array]:
        """Computes outputs and gradients in float64, with each layer's output rounded as the kernels round it."""
        x, dy, *parameters = self.host
        weights, biases = parameters[::2], parameters[1::2]
        activations = [*[self.activation] * (len(weights) - 1), Activation()]
        inputs, sums, results = [x], [], []
        for w, bias, activation in zip(weights, biases, activations, strict=True):
            y, z = reference.linear_fwd(inputs[-1], w, bias, activation)
            inputs.append(y.astype(x.dtype))
            sums.append(z)
        for i in reversed(range(len(weights))):
            found = reference.linear_bwd(dy, inputs[i], weights[i], sums[i], activations[i])
            dy, results = found.dx, [found.dw, found.db, *results]
        return [each.astype(x.dtype).astype(np.float64) for each in (inputs[-1], *results)]


def _normal(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return generator.standard_normal(shape) / np.sqrt(shape[-1])


def _integers(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Draws small integers, most of them 0, so that most sums are exact."""
    values = generator.integers(-1, 2, shape)
    return np.where(generator.random(shape) < min(1.0, 4.0 / shape[-1]), values, 0)


def _off(made: Array, exact: Array) -> float:
    return float(np.linalg.norm(made - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize(("dims", "rows"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16], ids=lambda each: each.value)
def test_shapes(dims: tuple[int, ...], rows: int, dtype: DType) -> None:
    network = _Network(dims, rows, dtype, "tanh")
    for made, exact in zip(network.made, network.expected, strict=True):
        assert _off(made, exact) < 2 * len(dims) * EPSILON[dtype]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    network = _Network((40, 64, 48, 8), 2000, DType.BFLOAT16, activation)
    for made, exact in zip(network.made, network.expected, strict=True):
        assert _off(made, exact) < 16 * EPSILON[DType.BFLOAT16]


def test_small_integers_are_exact() -> None:
    """Sums are exact, so that a row, column or step that is left out or counted twice cannot hide among roundings."""
    network = _Network((24, 64, 32, 8), 50, DType.BFLOAT16, "relu", integers=True)
    for made, exact in zip(network.made, network.expected, strict=True):
        assert np.array_equal(made, exact)


def test_bits_are_the_same_each_time() -> None:
    network = _Network((64, 64, 64, 64, 3), 100_000, DType.BFLOAT16, "relu")
    first = [each.tobytes() for each in network.made]
    assert all([each.tobytes() for each in network.made] == first for _ in range(5))


def _trained(graph: bool, rows: int = 3000, **options: Any) -> tuple[list[Array], list[float]]:
    model = lt.MLP([64, 64, 64, 10], "relu", dtype="bfloat16", seed=2, device="cuda", **options)
    step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=3e-3), graph=graph)
    generator = np.random.default_rng(4)
    x = cp.asarray(generator.standard_normal((rows, 64)).astype(model.dtype.numpy))
    labels = cp.asarray(generator.integers(0, 10, rows))
    losses = [float(step(x, labels)) for _ in range(12)]
    return [cp.asnumpy(each.data).astype(np.float64) for each in model.parameters()], losses


@pytest.mark.parametrize(("columns", "begin", "width"), [(64, 0, 64), (64, 8, 80), (64, 4, 80), (20, 3, 33)])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_graph_reads_batches_in_place(columns: int, begin: int, width: int, accumulate: int) -> None:
    """The bits are those of a step without a graph, which copies every batch first."""
    rows, trained = 3000, []
    for graph in (True, False):
        generator = np.random.default_rng(5)
        model = lt.MLP([columns, 64, 96, 10], "gelu", dtype="bfloat16", seed=2, device="cuda")
        options: dict[str, Any] = {"loss": "mse", "graph": graph, "accumulate": accumulate, "tune": False}
        step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=3e-3), **options)
        for _ in range(4):
            x = cp.asarray(generator.standard_normal((rows, width)).astype(model.dtype.numpy))
            target = cp.asarray(generator.standard_normal((rows, 10)).astype(model.dtype.numpy))
            step(x[:, begin : begin + columns], target)
            x.data.memset_async(0xFF, x.nbytes)  # overwrites x with NaN on the same stream, after the step
        trained.append([cp.asnumpy(each.data).tobytes() for each in model.parameters()])
    assert trained[0] == trained[1]


def test_training_follows_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    _, losses = _trained(graph=True)
    monkeypatch.setattr(NarrowPasses, "take", lambda *_, **__: False)
    _, by_layers = _trained(graph=True)
    assert losses[-1] < 0.98 * losses[0]
    np.testing.assert_allclose(losses, by_layers, rtol=1e-2)
