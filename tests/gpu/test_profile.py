"""Profiles on a GPU: events in graphs, kernels by CUPTI, and their agreement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from tests.support.gpu_arrays import to_host

ROWS, DIMS = 2048, (768, 3072, 768, 3072, 768)
LAYERS = [(f"layer{i}", "forward") for i in range(4)] + [(f"layer{i}", "backward") for i in (3, 2, 1, 0)]


def training(*, graph: bool = True, dims: tuple[int, ...] = DIMS, rows: int = ROWS, seed: int = 0) -> Any:
    model = lt.MLP(dims, activation="gelu", dtype="bfloat16", dropout=0.1, device="cuda", seed=seed)
    step = lt.TrainStep(model, lt.AdamW(model.parameters()), loss="mse", batch_size=rows, graph=graph)
    random = cp.random.RandomState(7)
    x, y = (random.standard_normal((rows, n)).astype(cp.float32).astype(model.dtype.numpy) for n in (dims[0], dims[-1]))
    return model, lambda: step(x, y)


@pytest.mark.parametrize("graph", [True, False])
def test_the_whole_report(tmp_path: Path, *, graph: bool) -> None:
    _, step = training(graph=graph)
    for _ in range(3):
        step()
    with lt.profile(timed=20, traced=20) as prof:
        for _ in range(42):
            step()
    assert prof.report.notes == []
    found = {(layer.name, layer.phase): layer for layer in prof.layers()}
    assert [key for key in found if key[0]] == LAYERS
    for key in LAYERS:
        assert found[key].us > 0
        assert found[key].kernel_us > 0
        assert found[key].fraction > 0
        assert found[key].flops > 0
        assert found[key].strategy
    totals = prof.totals()
    assert totals.unattributed_us <= 0.01 * totals.kernel_us
    # Eager steps wait for the host, so that the medians of the layers' times need not add up to the median of the
    # steps. Other programs on the GPU may lengthen some layers of some steps.
    if graph:
        assert sum(layer.us for layer in prof.layers()) == pytest.approx(totals.step_us, rel=0.1)
    names = " ".join(kernel.name.lower() for kernel in prof.kernels())
    assert "transpose" not in names
    assert "pow" not in names
    prof.to_csv(tmp_path)
    prof.save(tmp_path / "a.json")
    prof.save_trace(tmp_path / "trace.json")
    prof.plot(tmp_path / "plot.png")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_profile_changes_no_bit() -> None:
    results = []
    for is_watched in (False, True):
        model, step = training(dims=(256, 512, 64), rows=128)
        step()
        if is_watched:
            with lt.profile(timed=4, traced=4):
                for _ in range(10):
                    step()
        else:
            for _ in range(10):
                step()
        cp.cuda.Device().synchronize()
        results.append([to_host(each.data).astype(np.float32) for each in model.parameters()])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
