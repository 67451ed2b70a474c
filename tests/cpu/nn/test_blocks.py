"""Blocks on the host: gradients against finite differences, names, passes, and models that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, KindError, ShapeError

CPU: dict[str, Any] = {"device": "cpu"}


class Tied(lt.Block):
    """An autoencoder whose decoder shares the encoder's weight, transposed."""

    def __init__(self) -> None:
        self.enc = lt.Linear(8, 4, activation="gelu", seed=1, **CPU)
        self.dec = lt.Linear(4, 8, weight=self.enc.weight.T, seed=2)

    def forward(self, x: Any, run: lt.Pass) -> Any:
        return self.dec.forward(self.enc.forward(x, run), run)

    def backward(self, dy: Any, run: lt.Pass) -> Any:
        return self.enc.backward(self.dec.backward(dy, run), run)


def _mixed() -> lt.Block:
    inner = lt.Chain(lt.RMSNorm(8, **CPU), lt.SwiGLU(8, 12, seed=3, **CPU))
    first, last = lt.Linear(8, 8, activation="gelu", seed=1, **CPU), lt.Linear(8, 3, seed=2, **CPU)
    return lt.Chain(first, lt.Residual(inner), lt.Chain(lt.LayerNorm(8, **CPU), last))


MODELS: dict[str, Callable[[], lt.Block]] = {
    "linear": lambda: lt.Linear(8, 5, activation="tanh", dropout=0.25, seed=1, **CPU),
    "layers": lambda: lt.Chain(lt.Linear(8, 6, activation="silu", **CPU), lt.Linear(6, 8, bias=False, **CPU)),
    "mlp": lambda: lt.Chain(lt.MLP([8, 6, 8], "gelu", **CPU), lt.MLP([8, 4], **CPU)),
    "layer norm": lambda: lt.LayerNorm(8, **CPU),
    "layer norm without bias": lambda: lt.LayerNorm(8, bias=False, **CPU),
    "rms norm": lambda: lt.RMSNorm(8, **CPU),
    "swiglu": lambda: lt.SwiGLU(8, 6, dropout=0.25, **CPU),
    "geglu": lambda: lt.GEGLU(8, 6, bias=True, **CPU),
    "reglu": lambda: lt.ReGLU(8, 6, seed=5, **CPU),
    "dropout": lambda: lt.Chain(lt.Dropout(0.5, seed=4), lt.Linear(8, 3, **CPU)),
    "residual": lambda: lt.Residual(lt.Linear(8, 8, activation="sigmoid", **CPU)),
    "residual mlp": lambda: lt.Residual(lt.MLP([8, 6, 8], "gelu", **CPU)),
    "a norm twice": lambda: lt.Residual(lt.Chain(*[lt.LayerNorm(8, **CPU)] * 2)),
    "a layer twice": lambda: lt.Chain(*[lt.Linear(8, 8, activation="tanh", **CPU)] * 3),
    "sum": lambda: lt.Parallel(lt.Linear(8, 4, **CPU), lt.RMSNorm(8, **CPU), split=False),
    "towers": lambda: lt.Parallel(lt.Linear(8, 4, **CPU), lt.Residual(lt.LayerNorm(8, **CPU)), split=False),
    "tied": Tied,
    "mixed": _mixed,
}


def _total(model: lt.Block, x: Any, dy: Any, step: int) -> float:
    """The inner product of outputs in training with their gradient."""
    return float((model.forward(x, lt.Pass(step)).astype(np.float64) * dy).sum())


@pytest.mark.parametrize("axes", [(5,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "sum"])
def test_gradients_against_finite_differences(name: str, axes: tuple[int, ...]) -> None:
    model, generator, step = MODELS[name](), np.random.default_rng(7), 3
    x = generator.standard_normal((*axes, 8)).astype(np.float32)
    run = lt.Pass(step)
    dy = generator.standard_normal(model.forward(x, run).shape).astype(np.float32)
    dx = model.backward(dy, run)
    run.finish()
    arrays = [x, *(each.data for each in model.parameters())]
    for array, gradient in zip(arrays, [dx, *(each.grad for each in model.parameters())], strict=True):
        direction = generator.standard_normal(array.shape).astype(np.float32)
        old, found = array.copy(), []
        for sign in (1, -1):
            array[...] = old + np.float32(sign * 0.002) * direction
            found.append(_total(model, x, dy, step))
        array[...] = old
        expected = (found[0] - found[1]) / 0.004
        assert float((gradient * direction).sum()) == pytest.approx(expected, rel=3e-3, abs=3e-3)


def test_names_parameters_and_states() -> None:
    model = _mixed()
    names = ["0.weight", "0.bias", "1.inner.0.weight", "1.inner.1.up.weight", "1.inner.1.down.weight", "2.0.weight"]
    assert [each.name for each in model.parameters()] == [*names, "2.0.bias", "2.1.weight", "2.1.bias"]
    tied = Tied()
    assert [*tied.state_dict()] == ["enc.weight", "enc.bias", "dec.bias"]
    other = _mixed()
    other.load_state_dict(model.state_dict())
    x = np.ones((2, 8), np.float32)
    assert np.array_equal(other(x), model(x))


def test_what_is_kept_is_freed_on_the_way_back() -> None:
    run, kept = lt.Pass(), []

    class Counted(lt.Linear):
        def backward(self, dy: Any, run: lt.Pass) -> Any:
            kept.append(len(run._kept))
            return super().backward(dy, run)

    model = lt.Chain(*(Counted(4, 4, **CPU) for _ in range(3)))
    y = model.forward(np.ones((2, 4), np.float32), run)
    model.backward(y, run)
    assert kept == [3, 2, 1]
    assert not run._kept


class _Wrong(lt.Block):
    """A block whose backward does not fit its forward."""

    def __init__(self, takes: int, calls: int = 1) -> None:
        self.takes, self.calls, self.part = takes, calls, lt.Linear(4, 4, **CPU)

    def forward(self, x: Any, run: lt.Pass) -> Any:
        run.keep(x)
        return self.part.forward(x, run)

    def backward(self, dy: Any, run: lt.Pass) -> Any:
        for _ in range(self.calls):
            self.part.backward(dy, run)
        for _ in range(self.takes):
            run.take()
        return dy


@pytest.mark.parametrize(
    ("block", "match"),
    [
        (lambda: _Wrong(0), r"1 \(_Wrong\).backward has left 1 of what its forward kept"),
        (lambda: _Wrong(2), "a backward takes more than its forward kept"),
        (lambda: _Wrong(1, 2), r"1.part \(Linear\).backward was called, but 0 \(LayerNorm\).backward is due"),
        (lambda: _Wrong(1, 0), r"1 \(_Wrong\).backward has not called 1.part \(Linear\).backward"),
    ],
)
def test_a_backward_that_does_not_fit(block: Callable[[], lt.Block], match: str) -> None:
    model, run = lt.Chain(lt.LayerNorm(4, **CPU), block()), lt.Pass()
    model.parameters()
    y = model.forward(np.ones((2, 4), np.float32), run)
    with pytest.raises(ArgumentError, match=match):
        model.backward(y, run)


class _View(lt.Block):
    """A block that gives views of its inputs and gradients."""

    def forward(self, x: Any, run: lt.Pass) -> Any:
        return x[:]

    def backward(self, dy: Any, run: lt.Pass) -> Any:
        return dy[:]


def test_a_residual_block_writes_neither_over_its_inputs_nor_over_gradients() -> None:
    model, run, x = lt.Residual(_View()), lt.Pass(), np.ones((2, 4), np.float32)
    assert np.array_equal(model(x), 2 * x)
    y = model.forward(x, run)
    assert np.array_equal(model.backward(x, run), y)
    assert np.array_equal(x, np.ones((2, 4), np.float32))


def test_models_that_cannot_be() -> None:
    with pytest.raises(ShapeError, match=r"block 1 \(Linear\) takes 16 columns, block 0 \(Linear\) gives 12"):
        lt.Chain(lt.Linear(8, 12, **CPU), lt.Linear(16, 8, **CPU))
    with pytest.raises(ShapeError, match="the block of a Residual takes 8 columns and gives 4"):
        lt.Residual(lt.Linear(8, 4, **CPU))
    with pytest.raises(ShapeError, match=r"a layer from 8 to 4 columns takes \(4, 8\)"):
        lt.Linear(8, 4, weight=lt.Linear(8, 4, **CPU).weight.T)
    with pytest.raises(ShapeError, match=r"the towers give \[4, 5\] columns"):
        lt.Parallel(lt.Linear(8, 4, **CPU), lt.Linear(8, 5, **CPU), join="sum")
    with pytest.raises(ArgumentError, match="Dropout has no parameters"):
        _ = lt.Dropout(0.5).device
    with pytest.raises(KindError, match=r"Linear was called with run 3; it must be the lt.Pass of its model"):
        lt.Linear(8, 4, **CPU).forward(np.ones((1, 8), np.float32), 3)  # type: ignore[arg-type]
    run = lt.Pass(trains=False)
    y = lt.Linear(4, 4, **CPU).forward(np.ones((1, 4), np.float32), run)
    with pytest.raises(ArgumentError, match="was called in a pass for inference"):
        lt.Linear(4, 4, **CPU).backward(y, run)


@pytest.mark.parametrize("name", ["mixed", "tied", "towers", "swiglu"])
def test_a_step_trains_any_model(name: str) -> None:
    model, generator = MODELS[name](), np.random.default_rng(3)
    step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=1e-2), loss="mse", batch_size=4)
    x = generator.standard_normal((4, 3, 8)).astype(np.float32)
    target = np.zeros_like(model(x))
    losses = [float(step(x, target)) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    assert np.isfinite(losses).all()
    assert lt.evaluate(model, [(x, target)], loss="mse").loss < losses[0]


def test_two_inputs_and_frozen_parts() -> None:
    first, second = lt.Linear(8, 4, **CPU), lt.Linear(6, 4, **CPU)
    model = lt.Chain(lt.Parallel(first, second), lt.Linear(8, 2, **CPU))
    trained = [each for each in model.parameters() if not each.name.startswith("0.0")]
    step = lt.TrainStep(model, lt.AdamW(trained, lr=1e-2), loss="mse", accumulate=2)
    generator = np.random.default_rng(3)
    xs = tuple(generator.standard_normal((4, width)).astype(np.float32) for width in (8, 6))
    before = first.weight.data.copy()
    losses = [float(step(xs, np.zeros((4, 2), np.float32))) for _ in range(10)]
    assert losses[-1] < losses[0]
    assert np.array_equal(before, first.weight.data)
    assert not first.weight.grad.any()
    with pytest.raises(ShapeError, match="x has 1 arrays; the batches before had 2"):
        step(xs[0], np.zeros((4, 2), np.float32))
    with pytest.raises(ShapeError, match=r"x\[1\] has 2 rows, x\[0\] has 4"):
        step((xs[0], xs[1][:2]), np.zeros((4, 2), np.float32))
