"""What the benchmarks use of the package's private parts, on the pretended GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest

from tests.support.fake_gpu import FakeGpu


@pytest.fixture
def internals(gpu: FakeGpu) -> Iterator[ModuleType]:
    """The module, imported on top of the pretended GPU's package."""
    others = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "benchmarks"}
    for name in others:
        del sys.modules[name]
    yield import_module("benchmarks.internals")
    for name in [each for each in sys.modules if each.split(".")[0] == "benchmarks"]:
        del sys.modules[name]
    sys.modules.update(others)


def test_a_step_is_launched_by_its_graph_and_its_memory_is_counted(
    gpu: FakeGpu, internals: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with internals.one_kernel_a_pass(False):
        model = gpu.lt.MLP([16, 32, 8], dtype="bfloat16", device="cuda")
        optimizer = gpu.lt.AdamW(model.parameters())
        step = gpu.lt.TrainStep(model, optimizer, loss="mse", batch_size=64, tune=False)
        step(*(gpu.cp.ones((64, size), model.dtype.numpy) for size in (16, 8)))
        internals.launch_of(step)(gpu.cp.cuda.Stream().ptr)
    gpu.synchronize_all()
    assert optimizer.steps.item() == 2
    monkeypatch.setattr(
        step._gpu._pool, "total_bytes", lambda: 1 << 20, raising=False
    )  # which the pretended pool lacks
    assert internals.memory_of_step(step) >= 1 << 20
