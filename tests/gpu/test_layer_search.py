"""The tuner of layers on a GPU: tuned layers are right, planted faults are rejected, and nothing is measured twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.kernels.call import Call
from lt_runtime.plans.cache import forget
from lt_runtime.plans.layers import BackwardPlan
from lt_runtime.problem import Activation, Compute, DType
from lt_runtime.tuner.chain import LayerChain, Part
from lt_runtime.tuner.report import Tuned
from lt_runtime.tuner.search import tune_chains
from tests.support.chain_problems import by_themselves
from tests.support.gpu_arrays import to_host
from tests.support.gpu_memory import memory_taken

FP32, BF16 = DType.FLOAT32, DType.BFLOAT16
TOLERANCE = {FP32: 2e-3, BF16: 3e-2}
"""Tolerance of a result, relative to an output's norm: the roundings of two layers and the error of cuBLASLt's GELU."""


class Case(NamedTuple):
    """A test case: an MLP of two layers that is tuned."""

    rows: int
    dims: tuple[int, int, int]
    activation: Activation
    dtype: DType
    compute: Compute = Compute.FLOAT32
    dropout: bool = False

    @property
    def chain(self) -> LayerChain:
        rows, dims, activation, dtype, compute, dropout = self
        return LayerChain.of_mlp(rows, dims, activation, dtype, compute, dropout=dropout)


GELU, RELU, SILU = Activation("gelu"), Activation("relu"), Activation("silu")
CASES = {
    "bf16 gelu": Case(256, (96, 384, 96), GELU, BF16),
    "bf16 relu": Case(128, (200, 264, 72), RELU, BF16),
    "tf32 relu": Case(64, (128, 256, 64), RELU, FP32, Compute.TF32),
    "fp32 silu dropout": Case(64, (128, 96, 32), SILU, FP32, dropout=True),
}
CHAINS = {name: case.chain for name, case in CASES.items()}
CHAINS["bf16 gelu, each by itself"] = by_themselves(
    LayerChain.of_mlp(128, (96, 192, 96), GELU, BF16, Compute.FLOAT32, output_activation=GELU)
)


def tune(chain: LayerChain, **options: Any) -> list[Tuned]:
    return [*tune_chains([chain], 0, **options)]


@pytest.fixture(autouse=True)
def own_plan_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr("lt_runtime.store.plan_store.plans_directory", lambda: tmp_path)
    yield
    for chain in CHAINS.values():
        forget(chain.problems, 0)


@pytest.mark.parametrize("name", CHAINS)
def test_layers_are_decided_once(name: str) -> None:
    chain = CHAINS[name]
    told: list[tuple[int, int]] = []
    tuned = tune(chain, progress=lambda done, total, _: told.append((done, total)))
    assert told[-1][0] == told[-1][1] == len(tuned)
    assert {problem for each in tuned for problem in each.problems} == set(chain.problems)
    for each in tuned:
        assert each.measured > 0
        assert each.after_us > 0.0
        assert not any("wrong:" in reason or "two runs" in reason for reason in each.rejected)
    again = tune(chain)
    assert [each.measured for each in again] == [0] * len(tuned)
    assert [each.strategy for each in again] == [each.strategy for each in tuned]


def arrays(case: Case) -> dict[str, Any]:
    """Draws data for which the first layer's sums are exact and never 0, so that every split has the same derivative of
    ReLU.
    """
    generator = np.random.default_rng(0)
    inner = case.dims[1]
    shapes = {"x": (case.rows, case.dims[0]), "w0": (inner, case.dims[0]), "b0": (inner,)}
    shapes |= {"w1": (case.dims[2], inner), "b1": (case.dims[2],), "dy": (case.rows, case.dims[2])}
    drawn = {
        name: generator.integers(-16, 17, shape) / (8 if name in ("x", "dy") else 128) for name, shape in shapes.items()
    }
    drawn["b0"] += 1 / 2048  # the terms of all sums are multiples of 1/1024
    return {name: values.astype(case.dtype.numpy) for name, values in drawn.items()}


def expected(case: Case, at: dict[str, Any]) -> dict[str, Any]:
    exact = {name: each.astype(np.float64) for name, each in at.items()}
    hidden, z0 = reference.linear_fwd(exact["x"], exact["w0"], exact["b0"], case.activation)
    y, z1 = reference.linear_fwd(hidden, exact["w1"], exact["b1"])
    above = reference.linear_bwd(exact["dy"], hidden, exact["w1"], z1)
    below = reference.linear_bwd(above.dx, exact["x"], exact["w0"], z0, case.activation)
    return {"y": y, "dw1": above.dw, "db1": above.db, "dz0": below.dz, "db0": below.db, "dw0": below.dw}


def computed(case: Case, at: dict[str, Any]) -> dict[str, Any]:
    on = {name: cp.asarray(each) for name, each in at.items()}
    options: dict[str, Any] = {"compute": "tf32"} if case.compute is Compute.TF32 else {}
    hidden, below = lt.linear_fwd(on["x"], on["w0"], on["b0"], activation=case.activation.name, **options)
    y, above = lt.linear_fwd(hidden, on["w1"], on["b1"], **options)
    dz, dw1, db1, db0 = lt.linear_bwd(on["dy"], above, through=below)
    _, dw0, _ = lt.linear_bwd(dz, below, before_activation=True, need_dx=False, need_db=False)
    found = {"y": y, "dw1": dw1, "db1": db1, "dz0": dz, "db0": db0, "dw0": dw0}
    return {name: to_host(each) for name, each in found.items()}


@pytest.mark.parametrize("name", ["bf16 gelu", "bf16 relu", "tf32 relu"])
def test_tuned_layers_agree_with_the_reference(name: str) -> None:
    case = CASES[name]
    tune(case.chain)
    at = arrays(case)
    found = computed(case, at)
    for output, wanted in expected(case, at).items():
        off = np.linalg.norm(found[output] - wanted) / np.linalg.norm(wanted)
        assert off <= TOLERANCE[case.dtype], (output, off)


def test_a_wrong_split_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test, plans with dw beside dx launch nothing: they would be the fastest, but dx is wrong."""
    run, planted = BackwardPlan.run, set[Any]()

    def run_or_skip(plan: BackwardPlan, call: Call) -> None:
        if plan.strategy.dw_concurrent:
            planted.add(plan.strategy)
        else:
            run(plan, call)

    monkeypatch.setattr(BackwardPlan, "run", run_or_skip)
    tuned = tune(CHAINS["bf16 gelu"].cut(Part(0, 1)))
    assert planted
    assert "beside" not in tuned[0].strategy
    wrong = [reason for reason in tuned[0].rejected if "wrong: dx" in reason]
    assert wrong
    assert all("beside" in reason for reason in wrong)


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Memory that streams and libraries keep is not counted as a leak: the first run allocates it."""
    chain = Case(2048, (768, 1024, 768), RELU, BF16).chain.cut(Part(0, 1))
    numbers = itertools.count()

    def tune_anew() -> None:
        directory = tmp_path / str(next(numbers))
        monkeypatch.setattr("lt_runtime.store.plan_store.plans_directory", lambda: directory)
        tune(chain)

    assert memory_taken(tune_anew, times=6) < 8 << 20
