"""Groups on GPUs through NCCL: one process, whose sums stay in its graph, and two processes on two GPUs."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.gpu.graphs import node_type, nodes_of
from tests.support.together import DTYPES, ROWS, STEPS, run, trained, weights

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nccl") is None, reason="needs nccl4py")
with_torchrun = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torchrun")


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """A group that consists of this process alone."""
    group = lt.group()
    assert (group.rank, group.size) == (0, 1)
    yield group
    group.close()


def _node_types(step: Any) -> Counter[str]:
    (buffers,) = step._gpu._buffers.values()
    return Counter(map(node_type, nodes_of(buffers.graph.template)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_group_of_one_gives_the_bits_of_no_group(alone: Any, dtype: str) -> None:
    (step, loss), (other, other_loss) = (trained(group, parts=1, dtype=dtype) for group in (None, alone))
    assert loss == other_loss
    ours, theirs = weights(step), weights(other)
    assert {name: each.tobytes() for name, each in ours.items()} == {n: each.tobytes() for n, each in theirs.items()}
    # In a group of one process, each sum over the processes is a copy in the graph: of a gradient, or of the loss.
    more = _node_types(other) - _node_types(step)
    assert more["MEMCPY"] == len(step.model.parameters()) + 1


def test_many_replays(alone: Any) -> None:
    step, _ = trained(alone, parts=1, dtype="bfloat16")
    x, target = (cp.zeros((ROWS, columns), step.model.dtype.numpy) for columns in (48, 24))
    for _ in range(10_000):
        step(x, target)
    assert step.metrics().steps == 10_000 + STEPS
    assert np.isfinite(weights(step)["layer0.weight"]).all()


@with_torchrun
@pytest.mark.two_gpus
@pytest.mark.parametrize("case", ["train", "infinite"])
def test_two_processes_train_as_one_that_accumulates(tmp_path: Path, case: str) -> None:
    done = run(case, tmp_path)
    assert done.returncode == 0, done.stderr
    found = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(2)]
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name], name)  # all bits
    dtype, bad_step = DTYPES.get(case, "bfloat16"), 4 if case == "infinite" else None
    step, loss = trained(None, parts=2, dtype=dtype, bad_step=bad_step)
    expected = weights(step)
    assert found[0]["loss"] == pytest.approx(loss, rel=1e-4 if dtype == "float32" else 1e-2)
    assert found[0]["skipped"] == expected["skipped"] == int(case == "infinite")
    assert found[0]["steps"] == expected["steps"]
    for name in [each.name for each in step.model.parameters()]:
        # The sums are rounded in another order, to which AdamW is sensitive where a gradient is almost zero.
        error = np.quantile(np.abs(found[0][name] - expected[name]), 0.99)
        assert error < (1e-5 if dtype == "float32" else 2e-3), name


@with_torchrun
@pytest.mark.two_gpus
@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("hangs", f"rank 0 of 2 ends all processes: its step {STEPS + 1} has not ended for 5 s"),
        ("killed", "SIGKILL"),
        ("one-gpu", "ranks 0 and 1 have the same GPU"),
    ],
)
def test_failures_end_all_processes(tmp_path: Path, case: str, told: str) -> None:
    done = run(case, tmp_path)
    assert done.returncode != 0
    assert told in done.stderr
