"""Training steps on the pretended GPU whose loss does work of the last layer's backward pass: sums and casts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu
from tests.support.numpy_cases import DTYPES

INPUTS, HIDDEN, OUTPUTS, ROWS = 24, 32, 16, 40


def chain(lt: Any, *, place: Mapping[str, Any], last: Mapping[str, Any] = {}) -> Any:
    hidden = lt.Linear(INPUTS, HIDDEN, activation="gelu", seed=1, **place)
    return lt.Chain(hidden, lt.Chain(lt.Linear(HIDDEN, OUTPUTS, seed=2, **place, **last)))


def tied(lt: Any, place: Mapping[str, Any]) -> Any:
    """Makes a model whose last layer is also a hidden layer, and is the inner block of a residual."""
    layer = lt.Linear(INPUTS, INPUTS, seed=1, **place)
    return lt.Chain(layer, lt.Linear(INPUTS, INPUTS, activation="gelu", seed=2, **place), lt.Residual(layer))


def reversing(lt: Any, place: Mapping[str, Any]) -> Any:
    """Makes a model with a block after the last layer that returns another gradient than the loss's."""

    class Reversal(lt.Block):  # type: ignore[misc]
        def forward(self, x: Any, run: Any) -> Any:
            return x

        def backward(self, dy: Any, run: Any) -> Any:
            with run.array_module(dy):
                dy *= -1
            return dy

    return lt.Chain(chain(lt, place=place), Reversal())


@dataclass
class Case:
    """A training step, and whether its loss kernel computes the last layer's bias gradient."""

    sums: bool
    model: Callable[..., Any] = chain
    loss: str = "mse"
    dtype: str = "bfloat16"
    loss_options: dict[str, Any] | None = None
    accumulate: int = 1
    scaled: bool = False
    weighted: bool = False
    frozen: str = ""
    last: dict[str, Any] = field(default_factory=dict)


CASES = {
    "mse": Case(True),
    "huber, FP32": Case(True, loss="huber", dtype="float32", loss_options={"delta": 0.3}),
    "binary, scaled, FP16": Case(True, loss="bce_with_logits", dtype="float16", scaled=True),
    "two micro-batches": Case(True, accumulate=2),
    "a tied layer": Case(True, tied),
    "a frozen weight": Case(True, frozen="1.0.weight"),
    "a frozen bias": Case(False, frozen="1.0.bias"),
    "no bias": Case(False, last={"bias": False}),
    "an activation": Case(False, last={"activation": "relu"}),
    "dropout": Case(False, last={"dropout": 0.25}),
    "another gradient": Case(False, reversing),
    "row weights": Case(False, weighted=True),
    "weights of columns": Case(False, loss="bce_with_logits", loss_options={"pos_weight": np.ones(16, np.float32)}),
}


def gradients(lt: Any, case: Case, device: str, to: Callable[..., Any], *, graph: bool = True) -> list[Any]:
    place = {"dtype": case.dtype, "device": device}
    model = case.model(lt, place=place, **({"last": case.last} if case.last else {}))
    parameters = [each for each in model.parameters() if each.name != case.frozen]
    optimizer = lt.AdamW(parameters, lr=0.0, scaler=lt.GradScaler(64.0) if case.scaled else None)
    options = {"loss_options": case.loss_options, "accumulate": case.accumulate, "graph": graph, "tune": False}
    step = lt.TrainStep(model, optimizer, loss=case.loss, **options)
    generator = np.random.default_rng(0)
    batch = [generator.random((ROWS, cols)).astype(DTYPES[case.dtype]) for cols in (INPUTS, model.outputs)]
    batch += [generator.random(ROWS).astype(np.float32)] if case.weighted else []
    for _ in range(2):
        loss = step(*map(to, batch[:2]), **({"row_weights": to(batch[2])} if case.weighted else {}))
    return [loss, *(each.grad for each in parameters)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients(gpu: FakeGpu, case: Case) -> None:
    expected = gradients(gpu.lt, case, "cpu", np.asarray)
    found = []
    for graph in (True, False):
        gpu.kernels.launched.clear()
        made = gradients(gpu.lt, case, "cuda", gpu.cp.asarray, graph=graph)
        gpu.synchronize_all()
        found.append([gpu.host_of(each).astype(np.float64) for each in made])
        assert ("summed_loss" in gpu.kernels.launched) == case.sums
    assert all(map(np.array_equal, *found))
    for each, exact in zip(found[0], expected, strict=True):
        exact = np.asarray(exact, np.float64)
        np.testing.assert_allclose(each, exact, rtol=0, atol=0.02 * np.abs(exact).max())


@dataclass
class Fp8Case:
    """A step in FP8, and whether its loss casts the gradient."""

    casts: bool
    model: Callable[..., Any]
    recipe: dict[str, Any] = field(default_factory=dict)
    loss: str = "mse"
    accumulate: int = 1


def mlp(lt: Any, **options: Any) -> Any:
    return lt.MLP([32, 64, 48], "gelu", dtype="bfloat16", device="cuda", **options)


def without_bias(lt: Any, **options: Any) -> Any:
    place = {"dtype": "bfloat16", "device": "cuda", **options}
    return lt.Chain(lt.Linear(32, 64, seed=1, **place), lt.Linear(64, 48, seed=2, bias=False, **place))


def residual(lt: Any, **options: Any) -> Any:
    place = {"dtype": "bfloat16", "device": "cuda", **options}
    return lt.Chain(lt.Linear(32, 48, seed=1, **place), lt.Residual(lt.Linear(48, 48, seed=2, **place)))


FP8_CASES = {
    "mse": Fp8Case(True, mlp),
    "huber, two micro-batches, E4M3": Fp8Case(True, mlp, {"gradients": "e4m3"}, "huber", 2),
    "binary, without bias": Fp8Case(True, without_bias, {}, "bce_with_logits"),
    "current scales": Fp8Case(False, mlp, {"recipe": "current"}),
    "residual": Fp8Case(False, residual),
}


@pytest.mark.parametrize("case", FP8_CASES.values(), ids=FP8_CASES)
def test_gradients_in_fp8(gpu: FakeGpu, case: Fp8Case) -> None:
    """A loss that also casts its gradient to FP8 and sums it gives the same bits as a loss that does neither.

    A loss with row weights does neither, and weights of 1 change no value.
    """
    generator, found = np.random.default_rng(0), []
    x, target = ([generator.random((64, cols)).astype(DTYPES["bfloat16"]) for _ in range(3)] for cols in (32, 48))
    for weights, graph in (((), True), ((), False), ((np.ones(64, np.float32),), True)):
        gpu.kernels.launched.clear()
        model = case.model(gpu.lt, precision=gpu.lt.FP8(**case.recipe))
        optimizer = gpu.lt.AdamW(model.parameters(), lr=0.01)
        step = gpu.lt.TrainStep(model, optimizer, loss=case.loss, accumulate=case.accumulate, graph=graph, tune=False)
        losses = [step(*map(gpu.cp.asarray, (*batch, *weights))) for batch in zip(x, target, strict=True)]
        gpu.synchronize_all()
        assert ("loss_fp8" in gpu.kernels.launched) == (case.casts and not weights)
        scales = [
            each
            for layer in step.model.blocks()
            if (state := getattr(layer, "scales", None))
            for each in (state.slots, state.history)
        ]
        arrays = [*scales, *(each.grad for each in model.parameters()), *losses]
        found.append([gpu.host_of(each).astype(np.float64) for each in arrays])
    captured, eager, weighted = found
    assert all(map(np.array_equal, captured, eager))
    assert all(map(np.array_equal, captured[:-3], weighted[:-3]))
    np.testing.assert_allclose(captured[-3:], weighted[-3:], rtol=1e-5)
