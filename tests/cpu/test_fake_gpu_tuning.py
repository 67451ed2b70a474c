"""Tuning on the pretended GPU runs and verifies every candidate, and layers are right with the chosen plans."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.memory import stream_memory
from lt_runtime.tuner.operands import Memory
from lt_runtime.tuner.product_search import afresh
from lt_runtime.tuner.timing import Bench
from tests.host_kernels.harness import HostKernels
from tests.support.chains import LayerChain
from tests.support.fake_gpu import FakeGpu
from tests.support.layer_checks import Layer, layer_case
from tests.support.matmul_checks import Product, matmul_case
from tests.support.placed import COLUMNS, FLAT, host_of
from tests.support.strategies import LinearCase, MatmulCase

_TICK_S = 0.01
"""Seconds by which each reading advances the clock, so that the tuner's budget ends after the same candidates on every
machine.
"""


@pytest.fixture
def hurried(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Yields the pretended GPU, with a clock that advances at each reading."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: _TICK_S * next(ticks))
    monkeypatch.setattr(gpu.streams, "costs_us", {})
    return gpu


def _check_chain(gpu: FakeGpu) -> None:
    """Checks two stacked layers forward, and backward with the gradient passed from the upper to the lower layer."""
    below = layer_case(m=16, n=32, k=40, activation="relu")
    LayerChain(gpu, below, layer_case(m=16, n=24, k=32, activation="none", data_seed=2)).check()


def test_a_stack(hurried: FakeGpu, host: HostKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With fewer columns, which the tests' environment may set, rich would fold cells of the printed report.
    monkeypatch.setenv("COLUMNS", "160")
    gpu = FakeGpu(host, tmp_path)
    gpu.streams.costs_us["kernel"] = 20.0
    with gpu.active():
        report = gpu.lt.tune([40, 32, 24], 16, activation="relu", progress=False)
        assert "derivative by epilogue" in str(report)
        gpu.kernels.launched.clear()
        _check_chain(gpu)
        gpu.settle()
        first = [*gpu.kernels.launched]
    another = FakeGpu(host, tmp_path)  # simulates another process, which finds the plans on disk
    with another.active():
        _check_chain(another)
        another.settle()
    # Our own kernels compute only bias gradients: the last layer's, and the lower layer's, which cuBLASLt was not
    # asked to compute.
    assert another.kernels.launched == first
    assert len(first) <= 2


@pytest.mark.parametrize(
    "case",
    [
        layer_case(m=20, accumulate_dx=True),
        layer_case(m=20, activation="relu", accumulate=True, add=FLAT),
        layer_case(m=20, activation="none", add=FLAT, add_over_out=True),
    ],
)
def test_a_layer_that_is_met_is_tuned_although_it_ran_before(hurried: FakeGpu, case: LinearCase) -> None:
    layer = Layer(hurried, case, hurried.stream)
    for _ in range(4):  # the last call replays a graph
        layer.refill(0)
        layer.check()
    with hurried.lt.tuning():
        layer.refill(0)
        layer.check()
    hurried.calls.begin()
    layer.refill(0)
    layer.check()
    assert "cuGraphLaunch" not in hurried.calls.names, "the graph of the plan before is not used any more"


@pytest.mark.parametrize(
    "case",
    [
        matmul_case(m=20, epilogue=Epilogue.GELU_AUX_BIAS),
        matmul_case(m=20, epilogue=Epilogue.DRELU_BGRAD, d=COLUMNS),
        matmul_case(m=20, n=31, k=33, with_c=True, alpha=2.0, beta=-0.5, compute="tf32"),
    ],
)
def test_a_product_that_is_met(hurried: FakeGpu, case: MatmulCase) -> None:
    with hurried.lt.tuning():
        Product(hurried, case, hurried.stream).check()
    Product(hurried, case, hurried.stream).check()


def test_what_is_verified_finds_nothing_of_use_in_its_workspace(gpu: FakeGpu) -> None:
    memory = stream_memory(0, gpu.stream.ptr)
    found = gpu.cp.asarray(np.zeros(memory.workspace_size, np.uint8))

    def launch(_: int, stream: int) -> None:
        call("cuMemcpyDtoDAsync", found.data.ptr, memory.workspace, found.nbytes, stream)

    afresh(launch, Bench(0, SimpleNamespace(stream=gpu.stream.ptr), Memory(0, gpu.stream.ptr)))()  # type: ignore[arg-type]
    gpu.synchronize(gpu.stream.ptr)
    assert (host_of(gpu, found) == 0xFF).all()
