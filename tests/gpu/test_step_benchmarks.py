"""The steps' suite in small: rows end to end, and all contenders begin with the same loss."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import replace
from typing import Any

import cupy as cp
import numpy as np
import pytest

from benchmarks import narrow, steps, suite
from benchmarks.__main__ import options_of
from benchmarks.copies import Ceiling
from benchmarks.internals import one_kernel_a_pass
from benchmarks.layers import tune
from benchmarks.narrow import least_bytes
from benchmarks.steps import Setup, StepCase, measure_calls, measure_case, measure_prefetch, measure_soak, pinned
from benchmarks.suite import plan_cache
from lt_runtime.training.staging import is_pinned
from tests.support.gpu_arrays import to_host

HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_JAX = importlib.util.find_spec("jax") is not None
CLASSES = StepCase("small", "tf32", 64, (48, 32, 16), "relu", "cross_entropy", 1.0)
SMALL = [CLASSES, replace(CLASSES, kind="bf16"), replace(CLASSES, kind="bf16", activation="gelu", loss="mse")]
FORBIDDEN = ("memcpy", "mem_alloc", "mem_free", "host")


def asked(*options: str) -> argparse.Namespace:
    return options_of(["steps", "--rounds", "3", *options])


@pytest.fixture
def stream() -> Any:
    return cp.cuda.Stream(non_blocking=True)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.name} {case.loss}")
def test_a_step_of_ours(case: StepCase, stream: Any) -> None:
    setup = Setup(case, stream)
    assert len(setup.values) == 4
    made = [steps.contender(setup) for _ in range(2)]
    assert made[0].first_loss == made[1].first_loss, "the initial parameters are put back"
    assert made[0].nodes["kernel"] >= 4, "a narrow one's are its pass, its gradients, the optimizer and the tally"
    assert not set(FORBIDDEN) & set(made[0].nodes)
    before = to_host(setup.model.layers[0].weight.data)
    made[0].replays(3)
    made[1].calls(2)
    stream.synchronize()
    assert setup.optimizer.steps.item() == 7
    assert not np.array_equal(before, to_host(setup.model.layers[0].weight.data))


def test_a_narrow_step_in_one_kernel_a_pass_and_by_its_layers(stream: Any) -> None:
    case = StepCase("narrow", "bf16", 256, (16, 16, 16, 16, 3), "relu", "mse", 1.0)
    with plan_cache():
        setup, kernels = Setup(case, stream), []
        for fused in (True, False, True):
            with one_kernel_a_pass(fused):
                kernels.append(steps.contender(setup).nodes["kernel"])
    assert kernels[0] == kernels[2] < kernels[1]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.name} {case.loss}")
def test_a_tuned_step_follows_what_was_measured(case: StepCase, stream: Any) -> None:
    with plan_cache() as directory:
        setup = Setup(case, stream)
        untuned = steps.contender(setup)
        assert tune(case).seconds > 0
        tuned, unmeasured = steps.tuned_contender(setup, directory)
    assert unmeasured == 0
    assert tuned.first_loss == pytest.approx(untuned.first_loss, rel=0.02)


@pytest.mark.skipif(not HAS_TORCH, reason="a peer, where it is installed")
@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.name} {case.loss}")
def test_pytorch_begins_with_the_same_loss(case: StepCase, stream: Any) -> None:
    from benchmarks.peers import torch_steps

    setup = Setup(case, stream)
    ours = steps.contender(setup)
    for way in case.ways:
        theirs = torch_steps.contender(setup, way)
        assert theirs.first_loss == pytest.approx(ours.first_loss, rel=0.02)
        assert theirs.nodes["kernel"] > ours.nodes["kernel"]
        assert theirs.memory > sum(each.nbytes for each in (setup.x, setup.target))
        theirs.replays(2)
        theirs.calls(2)
        stream.synchronize()


@pytest.mark.skipif(not HAS_JAX, reason="a peer, where it is installed")
@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.name} {case.loss}")
def test_jax_begins_with_the_same_loss(case: StepCase, stream: Any) -> None:
    from benchmarks.peers import jax

    setup = Setup(case, stream)
    theirs = jax.step(setup)
    assert theirs.first_loss == pytest.approx(steps.contender(setup).first_loss, rel=0.02)
    assert theirs.memory > 0
    assert theirs.turn is not None
    assert theirs.turn() > 0
    theirs.calls(2)


def test_a_row(stream: Any) -> None:
    row = measure_case(SMALL[2], asked(), stream).as_json()
    theirs = {f"torch_graph{call}{way}" for call in ("", "_call") for way in ("", "_autocast", "_bf16")}
    assert set(row["us"]) == {"lt", "lt_untuned", "lt_call"} | (theirs if HAS_TORCH else set())
    assert row["unmeasured_problems"] == 0
    assert set(row["memory_bytes"]) == {"lt", *(name for name in theirs if HAS_TORCH and name in row["nodes"])}
    assert suite.is_done(row)


def test_a_narrow_row(stream: Any) -> None:
    case = StepCase("narrow", "bf16", 256, (16, 16, 3), "relu", "mse", 1.0)
    options = options_of(["narrow", "--rounds", "3"])
    row = narrow.measure(case, options, lambda _: Ceiling("copy", 4000.0, {}), stream).as_json()
    theirs = {"torch_graph_bf16"} if HAS_TORCH else set()
    assert set(row["us"]) == {"lt", "lt_one_kernel", "lt_layers"} | theirs
    assert row["floors_us"]["copy"] == pytest.approx(least_bytes(case) / 4000e3, abs=1e-4)
    assert 0 < row["fraction_of_copy"] < 1


def test_a_row_of_public_calls_alone(stream: Any) -> None:
    assert set(measure_calls(SMALL[1], asked("--ours"), stream).as_json()["us"]) == {"lt_call"}


def test_batches_in_page_locked_memory() -> None:
    _, target = steps.batch(SMALL[2])
    host = pinned(target)
    assert is_pinned(host)
    np.testing.assert_array_equal(host, cp.asnumpy(target))


def test_training_that_goes_on(stream: Any) -> None:
    row = measure_prefetch(SMALL[2], asked(), stream).as_json()
    assert set(row["us"]) == {"gpu_batches", "prefetch"}
    # What other processes on the GPU take meanwhile counts as well.
    rows = [measure_soak(SMALL[1], asked("--soak", "300"), stream).as_json() for _ in range(3)]
    assert min(row["gained"]["gpu"] for row in rows) == 0
    for row in rows:
        assert (row["replays"], row["gained"]["pool"]) == (300, 0)
        assert np.isfinite(row["mean_loss"])
