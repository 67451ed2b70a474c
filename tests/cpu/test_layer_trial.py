"""Operands of a layer's trial over NumPy: where they lie, what is shared, what counts as the same result."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lt_runtime import reference
from lt_runtime.plans.backward import BackwardPlan
from lt_runtime.plans.forward import ForwardPlan
from lt_runtime.plans.strategies import backward_strategies, forward_strategies
from lt_runtime.problem import Activation, BackwardProblem, Compute, DType, Saved, Spec
from lt_runtime.tuner.layer_trial import LayerTrial, disagreement
from lt_runtime.tuner.links import Link, with_saved
from lt_runtime.tuner.stacks import Stack
from lt_runtime.tuner.trial import NORMAL
from tests.support.calls import addresses

STACK = Stack(32, (40, 24, 16), Activation("relu"), DType.BFLOAT16, Compute.FLOAT32)
LINK = Link(STACK.forward(0), STACK.backward(1), "through")


def filled(link: Link) -> LayerTrial:
    trial = LayerTrial(np, link)
    trial.fill(NORMAL, 0)
    return trial


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Addresses that plans were run with."""
    calls: list[Any] = []
    monkeypatch.setattr(ForwardPlan, "_own_pass", lambda _: None)
    monkeypatch.setattr(BackwardPlan, "_pass", lambda *_, **__: None)
    monkeypatch.setattr(ForwardPlan, "run", lambda _, call: calls.append(call))
    monkeypatch.setattr(BackwardPlan, "run", lambda _, call: calls.append(call))
    return calls


def choose(problem: Any, _: int) -> Any:
    return SimpleNamespace(problem=problem)


def backward_call(trial: LayerTrial, problem: BackwardProblem, ran: list[Any]) -> Any:
    strategy = next(backward_strategies(problem))
    trial.run(BackwardPlan(problem, 0, strategy, choose), 7)
    call = ran.pop()
    assert call.stream == 7
    own, below = call.dropouts
    return SimpleNamespace(**addresses(problem, call), dropout=own, dropout_below=below)


def address(trial: LayerTrial, name: str) -> int:
    return trial._buffers[name].address


def test_backward_reads_what_forward_writes(ran: list[Any]) -> None:
    assert LINK.forward is not None
    assert LINK.backward is not None
    trial = filled(LINK)
    for strategy in forward_strategies(LINK.forward):
        trial.run(ForwardPlan(LINK.forward, 0, strategy, choose), 7)
        call = ran.pop()
        x, w, bias, y, kept = call.addresses
        assert (x, w, bias, y) == tuple(address(trial, name) for name in ("x", "w", "bias", "y"))
        assert kept == (address(trial, "kept mask") if strategy.saved is Saved.MASK else 0)
        assert (call.dropouts, call.stream) == ((None, None), 7)
        below = with_saved(LINK.backward, "through", LINK.forward, strategy.saved)
        call = backward_call(trial, below, ran)
        assert call.x == y
        assert call.saved_below == (kept or y)
        assert call.w == address(trial, "w above") != w
        assert 0 not in (call.dx, call.dw, call.db, call.db_below)
        assert call.saved == call.dz == 0


def test_a_layers_own_backward_shares_its_operands(ran: list[Any]) -> None:
    layers = Stack(32, (40, 24), Activation("gelu"), DType.FLOAT32, Compute.FLOAT32, dropout=True, chained=False)
    layers = replace(layers, dims=(40, 24, 8))
    link = Link(layers.forward(0), layers.backward(0), "own")
    trial = filled(link)
    call = backward_call(trial, layers.backward(0), ran)
    assert (call.x, call.w) == (address(trial, "x"), address(trial, "w"))
    assert call.saved == address(trial, "kept preactivation")
    assert call.dropout is not None
    assert trial.outputs == ("y", "dw", "db")


def test_backward_alone_has_operands_of_its_own(ran: list[Any]) -> None:
    problem = STACK.backward(1, saved=[Saved.MASK, Saved.NOTHING])
    trial = filled(Link(None, problem))
    call = backward_call(trial, problem, ran)
    assert call.saved_below == address(trial, "saved through")
    assert trial.outputs == ("dx", "dw", "db", "db_below")


def test_addresses_have_no_more_alignment_than_the_problem_says() -> None:
    forward = STACK.forward(0)
    forward = replace(forward, x=Spec(forward.x.layout, 16), bias=2)
    trial = LayerTrial(np, Link(forward))
    for name, offset in (("x", 16), ("bias", 2), ("y", 0)):
        assert address(trial, name) - trial._buffers[name].flat.ctypes.data == offset


def test_data_for_comparison_gets_no_other_sign_by_rounding() -> None:
    """The product rounded to BF16 before the bias is added, or only afterwards."""
    layers = Stack(64, (768, 96), Activation("relu"), DType.BFLOAT16, Compute.FLOAT32)
    trial = LayerTrial(np, Link(layers.forward(0)))
    trial.prepare()
    trial.outputs = ("x", "w", "bias")
    data = trial.results()
    product, bias = data["x"][0] @ data["w"][0].T, data["bias"][0]
    rounded = product.astype(DType.BFLOAT16.numpy).astype(np.float64)
    assert (np.sign(product + bias) == np.sign(rounded + bias)).all()
    assert (product != rounded).any()
    assert 0.5 < np.std(product) < 4.0


def test_what_is_not_written_shows() -> None:
    trial = LayerTrial(np, LINK)
    trial.prepare()
    assert all(np.isnan(values).all() for values in trial.results().values())
    assert LINK.backward is not None
    trial = LayerTrial(np, Link(None, replace(LINK.backward, accumulate=True)))
    trial.prepare()
    found = trial.results()
    assert np.isnan(found["dx"]).all()
    assert not any(np.isnan(found[name]).any() for name in ("dw", "db", "db_below"))


def outputs() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    return {"y": generator.standard_normal((1, 50, 40)), "dx": generator.standard_normal((1, 50, 60))}


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_results_that_were_rounded_three_times_agree(dtype: DType) -> None:
    wanted = outputs()
    rounded = {name: (1 + 0.9e-3) * values for name, values in wanted.items()}
    for scale in (1.37, 1 / 1.37, 1.0):
        rounded = {name: (values * scale).astype(dtype.numpy).astype(float) / scale for name, values in rounded.items()}
    assert disagreement(rounded, wanted, dtype) is None


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_results_that_do_not_agree(dtype: DType) -> None:
    wanted = outputs()
    for name in wanted:
        off = wanted | {name: wanted[name] * 1.03}
        found = disagreement(off, wanted, dtype)
        assert found is not None
        assert found[0] == name
        nan = wanted | {name: np.where(np.arange(wanted[name].shape[-1]) == 3, np.nan, wanted[name])}
        assert disagreement(nan, wanted, dtype) is not None
        one = {key: values.copy() for key, values in wanted.items()}
        one[name][0, 3, 3] += 4.0
        assert disagreement(one, wanted, dtype) is not None


def test_a_forgotten_bias_is_found() -> None:
    layers = Stack(64, (768, 96), Activation("gelu"), DType.BFLOAT16, Compute.FLOAT32)
    trial = LayerTrial(np, Link(layers.forward(0)))
    trial.prepare()
    trial.outputs = ("x", "w", "bias")
    data = trial.results()
    gelu = Activation("gelu")
    with_bias, _ = reference.linear_fwd(data["x"][0], data["w"][0], data["bias"][0, 0], gelu)
    without, _ = reference.linear_fwd(data["x"][0], data["w"][0], None, gelu)
    assert disagreement({"y": without}, {"y": with_bias}, DType.BFLOAT16) is not None
