"""Calls that repeat an earlier call skip its checks and give the same results; calls that differ are checked again."""

from __future__ import annotations

import threading
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.gpu.memory import BoundPlan
from lt_runtime.plans import cache

M, N, K = 96, 64, 80
# The first call is checked, the second reuses its checks, the third is captured, the fourth launches the graph.
REPEATS = 4


class Layer:
    """A layer with GELU: operands on the GPU, and the expected results, computed by the NumPy reference."""

    def __init__(self, seed: int = 0, m: int = M, dtype: str = "float32") -> None:
        generator = np.random.default_rng(seed)
        kind = lt.MLP((1, 1), dtype=dtype, device="cpu").dtype.numpy
        shapes = ((m, K), (N, K), (N,), (m, N))
        self.host = [generator.standard_normal(shape).astype(kind) for shape in shapes]
        self.x, self.w, self.bias, self.dy = map(cp.asarray, self.host)
        self.y, self.z = cp.empty((m, N), kind), cp.empty((m, N), kind)
        self.out = {"out_dx": cp.empty((m, K), kind), "out_dw": cp.empty((N, K), kind), "out_db": cp.empty(N, kind)}

    def expected(self) -> list[np.ndarray[Any, Any]]:
        x, w, bias, dy = self.host
        y, ctx = lt.linear_fwd(x, w, bias, activation="gelu")
        return [y, *lt.linear_bwd(dy, ctx)]

    def run(self, *, buffers: bool, stream: Any = None) -> list[Any]:
        own = {"out": self.y, "out_z": self.z} if buffers else {}
        y, ctx = lt.linear_fwd(self.x, self.w, self.bias, activation="gelu", stream=stream, **own)
        return [y, *lt.linear_bwd(self.dy, ctx, stream=stream, **(self.out if buffers else {}))]


def assert_close(actual: list[Any], expected: list[np.ndarray[Any, Any]], tolerance: float = 1e-4) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(
            cp.asnumpy(got).astype(np.float32), wanted.astype(np.float32), rtol=tolerance, atol=tolerance
        )


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "calls", {})
    monkeypatch.setattr(cache, "repeats", {})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[BoundPlan]:
    """Counts how often plans that are bound to addresses are launched."""
    seen: list[BoundPlan] = []
    original = BoundPlan.__call__

    def call(self: BoundPlan) -> None:
        seen.append(self)
        original(self)

    monkeypatch.setattr(BoundPlan, "__call__", call)
    return seen


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_repeats_agree_with_the_reference_and_are_bound(
    buffers: bool, dtype: str, launches: list[BoundPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Threads that earlier tests left behind, such as those of a compiler, are no reason not to capture here.
    monkeypatch.setattr("lt_runtime.ops.call._is_alone", lambda: True)
    layer = Layer(dtype=dtype)
    for _ in range(REPEATS):
        for array in (layer.y, layer.z, *layer.out.values()):
            array.fill(np.nan)
        results = layer.run(buffers=buffers)
        assert_close(results, layer.expected(), 1e-4 if dtype == "float32" else 0.15)
    if buffers:
        assert len(launches) == 2 * (REPEATS - 3)


def test_a_thread_without_a_context() -> None:
    layer = Layer(16)
    for _ in range(REPEATS):
        layer.run(buffers=True)
    seen: list[list[Any]] = []
    thread = threading.Thread(target=lambda: seen.extend(layer.run(buffers=i % 2 == 0) for i in range(2 * REPEATS)))
    thread.start()
    thread.join()
    cp.cuda.Device().synchronize()
    assert len(seen) == 2 * REPEATS
    for results in seen:
        assert_close(results, layer.expected())


def test_a_bound_call_may_first_be_made_in_a_capture() -> None:
    layer, stream = Layer(17), cp.cuda.Stream(non_blocking=True)
    _, ctx = lt.linear_fwd(layer.x, layer.w, layer.bias, activation="gelu")
    cp.cuda.get_current_stream().synchronize()
    backward = lt.bind(lt.linear_bwd, layer.dy, ctx, stream=stream, **layer.out)
    stream.begin_capture()
    backward()
    graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    assert_close([*layer.out.values()], layer.expected()[1:])


def test_a_thread_that_synchronises_is_not_disturbed(launches: list[BoundPlan]) -> None:
    """While a stream is captured, cuCtxSynchronize fails in every thread, so that the package captures only on
    request.
    """
    layers, ends, failed = [Layer(seed) for seed in range(50)], threading.Event(), list[Exception]()
    layers[0].run(buffers=True)  # the first calls make the plans

    def synchronise() -> None:
        try:
            while not ends.is_set():
                cp.cuda.runtime.deviceSynchronize()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=synchronise)
    thread.start()
    try:
        for _ in range(3):
            for layer in layers:
                for _ in range(REPEATS):
                    layer.run(buffers=True)
    finally:
        ends.set()
        thread.join()
    assert not failed
    assert not launches
    for layer in layers:
        assert_close([layer.y, *layer.out.values()], layer.expected())


def test_a_bound_call_may_be_let_go_of_during_a_capture() -> None:
    layer, stream = Layer(14), cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    bound = [lt.bind(lt.linear, layer.x, layer.w, out=layer.y, stream=stream)]
    bound[0]()
    lt.linear(layer.x, layer.w, out=layer.y, stream=stream)
    stream.synchronize()
    stream.begin_capture(cp.cuda.runtime.streamCaptureModeGlobal)
    bound.clear()
    lt.linear(layer.x, layer.w, out=layer.y, stream=stream)
    graph = stream.end_capture()
    layer.y.fill(0)
    cp.cuda.get_current_stream().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert_close([layer.y], [layer.host[0] @ layer.host[1].T])
