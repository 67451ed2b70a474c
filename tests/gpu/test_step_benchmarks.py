"""The steps' suite in small: rows end to end, and all contenders begin with the same loss."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import cupy as cp
import numpy as np
import pytest

from benchmarks import step_lt, steps
from benchmarks.fresh import fresh_plans
from benchmarks.step_cases import StepCase
from benchmarks.step_lt import Setup
from benchmarks.step_row import measure_case
from benchmarks.step_runs import measure_prefetch, measure_soak, pinned
from lt_runtime.training.staging import is_pinned
from tests.gpu.helpers import to_host

HAS_TORCH = importlib.util.find_spec("torch") is not None
CLASSES = StepCase("small", "tf32", 64, (48, 32, 16), "relu", "cross_entropy", 1.0)
SMALL = [CLASSES, replace(CLASSES, kind="bf16"), replace(CLASSES, kind="bf16", activation="gelu", loss="mse")]
FORBIDDEN = ("memcpy", "mem_alloc", "mem_free", "host")


@pytest.fixture
def stream() -> Any:
    return cp.cuda.Stream(non_blocking=True)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.name} {case.loss}")
def test_a_step_of_ours(case: StepCase, stream: Any) -> None:
    setup = Setup(case, stream)
    assert len(setup.values) == 4
    made = [step_lt.contender(setup) for _ in range(2)]
    assert made[0].first_loss == made[1].first_loss, "the initial parameters are put back"
    assert made[0].nodes["kernel"] > 5
    assert not set(FORBIDDEN) & set(made[0].nodes)
    before = to_host(setup.model.layers[0].weight.data)
    made[0].replays(3)
    made[1].calls(2)
    stream.synchronize()
    assert setup.optimizer.steps.item() == 7
    assert not np.array_equal(before, to_host(setup.model.layers[0].weight.data))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.name} {case.loss}")
def test_a_tuned_step_follows_what_was_measured(case: StepCase, stream: Any) -> None:
    with fresh_plans() as directory:
        setup = Setup(case, stream)
        untuned = step_lt.contender(setup)
        assert step_lt.tune(case)["tuning_s"] > 0
        tuned, unmeasured = step_lt.tuned_contender(setup, directory)
    assert unmeasured == 0
    assert tuned.first_loss == pytest.approx(untuned.first_loss, rel=0.02)


@pytest.mark.skipif(not HAS_TORCH, reason="a peer, where it is installed")
@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.name} {case.loss}")
def test_pytorch_begins_with_the_same_loss(case: StepCase, stream: Any) -> None:
    from benchmarks import step_torch

    setup = Setup(case, stream)
    ours = step_lt.contender(setup)
    for way in case.ways:
        theirs = step_torch.contender(setup, way)
        assert theirs.first_loss == pytest.approx(ours.first_loss, rel=0.02)
        assert theirs.nodes["kernel"] > ours.nodes["kernel"]
        theirs.replays(2)
        theirs.calls(2)
        stream.synchronize()


def test_a_row(stream: Any) -> None:
    row = measure_case(SMALL[2], 3, stream).as_json()
    theirs = {f"torch_graph{call}{way}" for call in ("", "_call") for way in ("", "_autocast", "_bf16")}
    assert set(row["us"]) == {"lt", "lt_untuned", "lt_call"} | (theirs if HAS_TORCH else set())
    assert row["unmeasured_problems"] == 0
    assert steps.missing(["small BF16"], {"small BF16": row}, max_autotune=False) == []


def test_batches_in_page_locked_memory() -> None:
    _, target = step_lt.batch(SMALL[2])
    host = pinned(target)
    assert is_pinned(host)
    np.testing.assert_array_equal(host, cp.asnumpy(target))


def test_training_that_goes_on(stream: Any) -> None:
    row = measure_prefetch("prefetch", SMALL[2], 2, stream).as_json()
    assert set(row["us"]) == {"gpu_batches", "prefetch"}
    row = measure_soak("soak", SMALL[1], 300, stream).as_json()
    assert (row["replays"], row["gained"]["gpu"], row["gained"]["pool"]) == (300, 0, 0)
    assert np.isfinite(row["mean_loss"])
