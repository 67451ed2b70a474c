"""What is tuned is what runs: a training step meets the problems of its stack, and finds what was decided."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import cupy as cp
import pytest

import lt_runtime as lt
from lt_runtime.environment import RECORD_VARIABLE
from lt_runtime.ops import first_use
from lt_runtime.paths import CACHE_VARIABLE
from lt_runtime.plans import cache
from lt_runtime.problem import Activation, Compute, DType
from lt_runtime.store.keys import problem_key
from lt_runtime.store.recording import read_recorded
from lt_runtime.tuner.chain import LayerChain, chains_of

DIMS = (64, 100, 72, 10)


@pytest.fixture
def met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of problems that are met, by a process that has made no plan yet and whose plan cache is empty."""
    monkeypatch.setenv(RECORD_VARIABLE, str(tmp_path / "met.jsonl"))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_plans", {})
    cache.calls.clear()
    monkeypatch.setattr(first_use, "_seen", set())
    return tmp_path / "met.jsonl"


@pytest.mark.parametrize(
    ("activation", "dropout", "dtype"),
    [*itertools.product(("relu", "gelu", "tanh", "none"), (0.0, 0.2), ("float32", "bfloat16"))],
)
def test_a_training_step_asks_for_the_problems_of_its_stack(
    met: Path, activation: str, dropout: float, dtype: str
) -> None:
    model = lt.MLP(DIMS, activation=activation, dtype=dtype, dropout=dropout, device="cuda")
    kind = model.dtype.numpy
    y, contexts = model.forward(cp.ones((48, DIMS[0]), kind), 1)
    model.backward(cp.ones_like(y), contexts)
    chain = LayerChain.of_mlp(48, DIMS, Activation(activation), DType(dtype), Compute.FLOAT32, dropout=dropout > 0)
    met_as = chain.keeping({index: ctx.saved_as for index, ctx in enumerate(contexts)})
    assert {problem_key(each) for each in read_recorded(met)} == {problem_key(each) for each in met_as.problems}
    assert chains_of(read_recorded(met)) == [met_as]


def _layer() -> tuple[Any, Any]:
    generator = cp.random.default_rng(3)
    x, w, bias = (generator.standard_normal(shape, cp.float32) for shape in ((96, 64), (80, 64), (80,)))
    y, ctx = lt.linear_fwd(x, w, bias, activation="gelu")
    return y, lt.linear_bwd(cp.ones_like(y), ctx)


def test_what_is_tuned_at_first_use_gives_the_same_and_is_known_from_then_on(met: Path) -> None:
    y, gradients = _layer()
    with lt.tuning():
        tuned_y, tuned_gradients = _layer()
    for tuned, untuned in zip((tuned_y, *tuned_gradients), (y, *gradients), strict=True):
        cp.testing.assert_allclose(tuned, untuned, rtol=1e-4, atol=1e-4)
    assert all(first_use.is_measured(each, 0) for each in read_recorded(met))


def test_tune_report_and_explanation(met: Path) -> None:
    stack = {"activation": "gelu", "dtype": "bfloat16", "device": 0}
    first, second = (lt.tune([256, 512, 256], 256, **stack) for _ in range(2))  # type: ignore[arg-type]
    print(first)
    assert all(each.measured and each.before_us > 0 for each in first)
    assert not any(each.measured for each in second)
    found = lt.explain([256, 512, 256], 256, **stack)  # type: ignore[arg-type]
    assert all(each.us is not None for each in found)
    assert all(0 < each.roofline_fraction < 1 for each in found if each.roofline_fraction is not None)
    assert "by the priors" not in str(found)
