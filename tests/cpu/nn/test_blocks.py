"""Blocks of models on the host: parameter names, forward and backward, training, and models that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, KindError, OperandError, ShapeError

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


TRAINED: dict[str, Callable[[], lt.Block]] = {
    "mixed": _mixed,
    "tied": Tied,
    "towers": lambda: lt.Parallel(lt.Linear(8, 4, **CPU), lt.Residual(lt.LayerNorm(8, **CPU)), split=False),
    "swiglu": lambda: lt.SwiGLU(8, 6, dropout=0.25, **CPU),
}


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
    """A block whose backward returns a gradient of another shape than forward's input."""

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
        (lambda: _Wrong(2), r"1 \(_Wrong\).backward takes more than its forward kept"),
        (lambda: _Wrong(1, 2), r"1.part \(Linear\).backward was called, but 0 \(LayerNorm\).backward is due"),
        (lambda: _Wrong(0, 0), r"1 \(_Wrong\).backward has not called 1.part \(Linear\).backward"),
        (lambda: _Wrong(1, 0), r"1 \(_Wrong\).backward takes what 1.part \(Linear\).forward kept: call 1.part"),
    ],
)
def test_a_backward_that_does_not_fit(block: Callable[[], lt.Block], match: str) -> None:
    model, run = lt.Chain(lt.LayerNorm(4, **CPU), block()), lt.Pass()
    model.parameters()
    y = model.forward(np.ones((2, 4), np.float32), run)
    with pytest.raises(ArgumentError, match=match):
        model.backward(y, run)


def test_an_error_of_python_s_own_names_the_innermost_block() -> None:
    class Unpacks(lt.Block):
        def forward(self, x: Any, run: lt.Pass) -> Any:
            run.keep(x, x)
            return x

        def backward(self, dy: Any, run: lt.Pass) -> Any:
            first, _second, _third = run.take()
            return first

    model, run = lt.Chain(lt.LayerNorm(4, **CPU), Unpacks()), lt.Pass()
    model.parameters()
    y = model.forward(np.ones((2, 4), np.float32), run)
    with pytest.raises(ValueError, match="unpack") as raised:
        model.backward(y, run)
    assert raised.value.__notes__ == ["in 1 (Unpacks)"]


class _Returns(lt.Block):
    """A block whose forward returns its outputs or None, and whose backward returns None."""

    def __init__(self, *, y: bool) -> None:
        self.y, self.part = y, lt.Linear(4, 4, **CPU)

    def forward(self, x: Any, run: lt.Pass) -> Any:
        y = self.part.forward(x, run)
        return y if self.y else None

    def backward(self, dy: Any, run: lt.Pass) -> Any:
        self.part.backward(dy, run)


def test_a_block_that_returns_nothing_is_named() -> None:
    x, target = np.ones((2, 4), np.float32), np.ones((2, 4), np.float32)
    for y, kind in ((True, OperandError), (False, ArgumentError)):
        model = lt.Chain(lt.LayerNorm(4, **CPU), lt.Residual(_Returns(y=y)), lt.RMSNorm(4, **CPU))
        step = lt.TrainStep(model, lt.AdamW(model.parameters()), loss="mse")
        with pytest.raises(kind) as raised:
            step(x, target)
        told = str(raised.value), *raised.value.__notes__
        assert any("1.inner (_Returns)." in each and "ward has returned None" in each for each in told), told


@pytest.mark.parametrize("name", ["blocks", "parts", "parameters"])
def test_an_attribute_that_would_hide_what_finds_parts_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"_View.{name} would hide lt.Block.{name}; take another name"):
        setattr(_View(), name, ["cpu"])


def test_a_part_that_no_optimizer_could_train_is_refused() -> None:
    class Hidden(_Returns):
        """Keeps its part in a set, where `parameters` does not look."""

        def __init__(self) -> None:
            super().__init__(y=True)
            self.seen, self.part = lt.Linear(4, 4, **CPU), {self.part}  # type: ignore[assignment]

        def forward(self, x: Any, run: lt.Pass) -> Any:
            (part,) = self.part  # type: ignore[misc]
            return part.forward(self.seen.forward(x, run), run)

        def backward(self, dy: Any, run: lt.Pass) -> Any:
            (part,) = self.part  # type: ignore[misc]
            return self.seen.backward(part.backward(dy, run), run)

    model, x = Hidden(), np.ones((2, 4), np.float32)
    step = lt.TrainStep(model, lt.AdamW(model.parameters()), loss="mse")
    with pytest.raises(ArgumentError, match=r"Linear has a parameter of shape \(4, 4\), which the step did not find"):
        step(x, x)


def test_a_gradient_that_a_step_does_not_write_is_zero() -> None:
    class Sometimes(_View):
        """Skips its layer in some steps."""

        def __init__(self) -> None:
            self.layer, self.is_used = lt.Linear(4, 4, **CPU), True

        def forward(self, x: Any, run: lt.Pass) -> Any:
            return self.layer.forward(x, run) if self.is_used else x

        def backward(self, dy: Any, run: lt.Pass) -> Any:
            return self.layer.backward(dy, run) if self.is_used else dy

    block, x = Sometimes(), np.ones((2, 4), np.float32)
    model = lt.Chain(lt.Linear(4, 4, **CPU), block)
    step = lt.TrainStep(model, lt.Optimizer([(model.parameters(), lt.rules.SGD(0.5))]), loss="mse", accumulate=2)
    step(x, 0 * x)
    weights = [model.sequence[0].weight.data, block.layer.weight.data]
    before, block.is_used = [each.copy() for each in weights], False
    step(x, 0 * x)
    assert [bool((each != old).any()) for each, old in zip(weights, before, strict=True)] == [True, False]


def test_a_block_may_not_contain_itself() -> None:
    model = lt.Chain(inner := _Returns(y=True))
    inner.around = {"up": model}
    with pytest.raises(ArgumentError, match=r"0.around.up is Chain, which contains it"):
        model.parameters()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ones((2, 5), np.float32), r"x has shape \(2, 5\); the model takes \(..., 4\)"),
        (np.ones(4, np.float32), r"x has shape \(4,\); the model takes \(..., 4\)"),
        (np.ones((2, 4)), "x is float64; the model takes float32"),
        ([[1.0] * 4], "x is a list"),
    ],
)
def test_a_model_refuses_inputs_by_their_own_name(x: Any, message: str) -> None:
    chain = lt.Chain(lt.RMSNorm(4, **CPU), lt.Linear(4, 4, **CPU))
    for model in (chain, lt.MLP([4, 4], **CPU), lt.SwiGLU(4, 8, **CPU)):
        with pytest.raises(OperandError, match=message):
            model(x)


class _View(lt.Block):
    """A block whose forward and backward return views of their arguments."""

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


@pytest.mark.parametrize("name", TRAINED)
def test_a_step_trains_any_model(name: str) -> None:
    model, generator = TRAINED[name](), np.random.default_rng(3)
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
