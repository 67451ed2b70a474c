"""The layers' suite in small: a row end to end, and all contenders compute the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
import pytest

from benchmarks import splits, suite, tuning
from benchmarks.__main__ import options_of
from benchmarks.layers import Arrays, Block, arrays, blocks, measure_block, run_block, tune
from benchmarks.splits import chain_of, entries_of
from benchmarks.suite import plan_cache
from lt_runtime.problem import Activation
from lt_runtime.reference import activate, derivative
from tests.support.gpu_arrays import to_host

HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_JAX = importlib.util.find_spec("jax") is not None
SMALL = [Block("small", 96, 64, 40, kind, activation) for kind in ("bf16", "tf32") for activation in ("gelu", "relu")]


def expected(block: Block, at: Arrays) -> dict[str, Any]:
    """The results in float64, each from what the passes before it have left, as stored."""
    with np.errstate(invalid="ignore"):  # what a split has no use for is as it was allocated
        have = {name: to_host(array).astype(np.float64) for name, array in at._asdict().items()}
    activation = Activation(block.activation)
    z = have["x"] @ have["w1"].T + have["b1"]
    dz1 = (have["dy"] @ have["w2"]) * derivative(z, activation)
    return {
        "y1": activate(z, activation),
        "y2": have["y1"] @ have["w2"].T + have["b2"],
        "dw2": have["dy"].T @ have["y1"],
        "db2": have["dy"].sum(0),
        "dz1": dz1,
        "db1": have["dz1"].sum(0),
        "dw1": have["dz1"].T @ have["x"],
        "dx": have["dz1"] @ have["w1"],
    }


@pytest.mark.skipif(not HAS_JAX, reason="a peer, where it is installed")
@pytest.mark.parametrize("block", SMALL, ids=lambda block: block.name)
def test_jax_does_as_many_blocks_as_are_asked_for(block: Block) -> None:
    from benchmarks.peers import jax

    at = arrays(block)
    x, dy = at.x, at.dy
    contender = jax.block(block, [at])
    for count in (1, 2):
        y2, dx, _ = contender.capture(contender.run, count, 1, None)()
        w1, w2 = (to_host(at.w1) * block.k**-0.5, to_host(at.w2) * (2 / block.n) ** 0.5)
        scaled = at._replace(x=x, dy=dy, w1=cp.asarray(w1.astype(at.w1.dtype)), w2=cp.asarray(w2.astype(at.w2.dtype)))
        run_block(block, scaled)
        for actual, ours in ((y2, at.y2), (dx, at.dx)):
            wanted = to_host(ours).astype(np.float64)
            # In 16 bits a pre-activation near 0 may be on either side of ReLU's corner: single elements are far off.
            off = np.linalg.norm(np.asarray(actual, np.float64) - wanted)
            assert off <= 0.15 * np.linalg.norm(wanted)
        x, dy = at.y2.copy(), at.dx.copy()


@pytest.mark.parametrize("block", SMALL, ids=lambda block: block.name)
def test_all_contenders_compute_the_block(block: Block) -> None:
    chain = chain_of(block)
    fused, _ = splits.fused_first(chain)
    for plans in (fused, splits.split_first(chain), splits.by_priors(chain), None):
        at, stream = arrays(block), cp.cuda.get_current_stream().ptr
        if plans is None:
            run_block(block, at, stream)
        else:
            plans.run(Arrays(*(array.data.ptr for array in at)), stream)
        for name, wanted in expected(block, at).items():
            actual = to_host(getattr(at, name)).astype(np.float64)
            far = np.abs(actual - wanted) > 0.02 * np.abs(wanted).max()
            # So close to 0 that rounding decides its sign, a pre-activation may be on either side of ReLU's corner.
            assert far.mean() <= 0.002, (name, plans and splits.split_of(plans))


@pytest.mark.skipif(not HAS_TORCH, reason="a peer, where it is installed")
@pytest.mark.parametrize("block", SMALL, ids=lambda block: block.name)
def test_pytorch_computes_the_same(block: Block) -> None:
    from benchmarks.peers import torch_layers

    at = arrays(block)
    stream = cp.cuda.get_current_stream().ptr
    run_block(block, at, stream)
    cp.cuda.Device().synchronize()
    y, gradients = torch_layers.eager(block, [at]).run(0, stream)
    for name, theirs in zip(("y2", "dx", "dw1", "db1", "dw2", "db2"), (y, *gradients), strict=True):
        ours = to_host(getattr(at, name)).astype(np.float64)
        # By the whole: a pre-activation that rounds to the other side of ReLU's corner changes a row of dx.
        off = np.linalg.norm(theirs.double().cpu().numpy() - ours) / np.linalg.norm(ours)
        assert off <= (0.1 if block.activation == "relu" else 0.03), (name, off)


def test_a_row() -> None:
    options = options_of(["layers", "--rounds", "3"])
    row = measure_block(SMALL[0], options, cp.cuda.Stream(non_blocking=True)).as_json()
    ours = {"lt", "lt_priors", "lt_fused_top1", "lt_split_top1"}
    assert set(row["us"]) == ours | ({"torch_graph"} if HAS_TORCH else set())
    assert row["chosen_vs_best"] >= 1.0
    assert row["candidates"]
    assert row["tuning_s"] > 0
    assert suite.is_done(row)


def test_a_row_of_public_calls_alone() -> None:
    options = options_of(["layers", "--rounds", "3", "--ours"])
    row = measure_block(SMALL[1], options, cp.cuda.Stream(non_blocking=True)).as_json()
    assert set(row["us"]) == {"lt"}


def test_a_second_process_builds_plans_without_measuring(tmp_path: Path) -> None:
    block = next(block for block in blocks() if block.layer == (64, 64, 64))
    with plan_cache(str(tmp_path)):
        tune(block)
        assert entries_of(chain_of(block))
        row = tuning.measure_second_process([block.name], str(tmp_path), None).as_json()
        assert sum(each.measured for each in tune(block).report) == 0
    assert (row["measurements"], row["known"], len(row["plans_us"])) == (0, 4, 4)


def test_a_row_of_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "is_searched_deeply", lambda _: True)
    options = options_of(["tuning", "--rounds", "3"])
    row = tuning.measure(SMALL[0], options, str(tmp_path), cp.cuda.Stream(non_blocking=True)).as_json()
    assert set(row["us"]) == {"lt", "lt_deep"}
    assert row["deep_s"] > 0
