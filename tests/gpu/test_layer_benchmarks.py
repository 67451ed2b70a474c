"""The layers' suite in small: a row end to end, and all contenders compute the same."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
import pytest

from benchmarks import block_lt, layers, resumable
from benchmarks.block_entries import entries_of
from benchmarks.blocks import Block, blocks
from benchmarks.fresh import fresh_plans
from benchmarks.layer_row import measure_block, tune
from lt_runtime.problem import Activation
from lt_runtime.reference import activate, derivative
from tests.gpu.helpers import to_host

HAS_TORCH = importlib.util.find_spec("torch") is not None
ROOT = Path(__file__).parents[2]
SMALL = [Block("small", 96, 64, 40, kind, activation) for kind in ("bf16", "tf32") for activation in ("gelu", "relu")]


def expected(block: Block, at: block_lt.Arrays) -> dict[str, Any]:
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


@pytest.mark.parametrize("block", SMALL, ids=lambda block: block.name)
def test_all_contenders_compute_the_block(block: Block) -> None:
    stack = block.stack
    fused, _ = block_lt.fused_first(stack)
    for plans in (fused, block_lt.split_first(stack), block_lt.by_priors(stack)):
        at = block_lt.arrays(block)
        addresses = block_lt.Arrays(*(array.data.ptr for array in at))
        plans.run(addresses, cp.cuda.get_current_stream().ptr)
        for name, wanted in expected(block, at).items():
            actual = to_host(getattr(at, name)).astype(np.float64)
            far = np.abs(actual - wanted) > 0.02 * np.abs(wanted).max()
            # So close to 0 that rounding decides its sign, a pre-activation may be on either side of ReLU's corner.
            assert far.mean() <= 0.002, (name, block_lt.split_of(plans))


@pytest.mark.skipif(not HAS_TORCH, reason="a peer, where it is installed")
@pytest.mark.parametrize("block", SMALL, ids=lambda block: block.name)
def test_pytorch_computes_the_same(block: Block) -> None:
    from benchmarks import block_torch

    at = block_lt.arrays(block)
    stream = cp.cuda.get_current_stream().ptr
    block_lt.split_first(block.stack).run(block_lt.Arrays(*(array.data.ptr for array in at)), stream)
    cp.cuda.Device().synchronize()
    y, gradients = block_torch.eager(block, [at]).run(0, stream)
    for name, theirs in zip(("y2", "dx", "dw1", "db1", "dw2", "db2"), (y, *gradients), strict=True):
        ours = to_host(getattr(at, name)).astype(np.float64)
        # By the whole: a pre-activation that rounds to the other side of ReLU's corner changes a row of dx.
        off = np.linalg.norm(theirs.double().cpu().numpy() - ours) / np.linalg.norm(ours)
        assert off <= (0.1 if block.activation == "relu" else 0.03), (name, off)


def test_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = measure_block(SMALL[0], 3, cp.cuda.Stream(non_blocking=True)).as_json()
    ours = {"lt", "lt_priors", "lt_fused_top1", "lt_split_top1"}
    assert set(row["us"]) == ours | ({"torch_graph"} if HAS_TORCH else set())
    assert row["chosen_vs_best"] >= 1.0
    assert row["candidates"]
    assert row["tuning_s"] > 0
    assert {"forward", "last forward", "backward preactivation", "last backward"} <= set(row["entries"])
    file = tmp_path / "layers.json"
    layers.save({row["case"]: row}, file)
    assert layers.is_done(resumable.kept_rows(file)[row["case"]], max_autotune=False)


def test_a_second_process_builds_plans_without_measuring() -> None:
    block = next(block for block in blocks() if block.layer == (64, 64, 64))
    with fresh_plans():
        tune(block.stack)
        assert entries_of(block.stack)
        command = [sys.executable, "-m", "benchmarks.warm_start", block.name]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        assert sum(each.measured for each in tune(block.stack).groups) == 0
    found = json.loads(done.stdout)
    assert (found["measurements"], found["known"], len(found["us"])) == (0, 4, 4)
