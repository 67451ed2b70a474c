"""Calls like one made before: they do the same with less, and look again where they have to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.arrays.operand import HOST
from lt_runtime.errors import ArgumentError, CaptureError, OverlapError, ShapeError
from lt_runtime.gpu.bound import BoundPlan
from lt_runtime.ops import call as call_module
from lt_runtime.plans import cache

M, N, K = 96, 64, 80
REPEATS = 4  # the first looks, the second is like it, the third repeats and is bound, the fourth is bound


class Layer:
    """Operands on the GPU, and the results of a layer with GELU by NumPy's reference."""

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
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with every call on a GPU that is looked at."""
    seen: list[Any] = []

    def prepare(*arguments: Any) -> Any:
        known = original(*arguments)
        if known.device != HOST:  # what is expected may be computed by the same calls on NumPy arrays
            seen.append(known)
        return known

    original = call_module.prepare
    monkeypatch.setattr(call_module, "prepare", prepare)
    return seen


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[BoundPlan]:
    """Grows with every launch of a bound plan."""
    seen: list[BoundPlan] = []
    original = BoundPlan.__call__

    def call(self: BoundPlan) -> None:
        seen.append(self)
        original(self)

    monkeypatch.setattr(BoundPlan, "__call__", call)
    return seen


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_repeats_agree_with_the_reference_and_are_looked_at_once(
    buffers: bool, dtype: str, looks: list[Any], launches: list[BoundPlan]
) -> None:
    layer = Layer(dtype=dtype)
    for turn in range(REPEATS):
        for array in (layer.y, layer.z, *layer.out.values()):
            array.fill(np.nan)
        results = layer.run(buffers=buffers)
        assert_close(results, layer.expected(), 1e-4 if dtype == "float32" else 0.15)
        assert len(looks) == 2, turn
    if buffers:
        assert len(launches) == 2 * (REPEATS - 3)


@pytest.mark.parametrize("buffers", [True, False])
def test_repeats_of_tensors(buffers: bool, looks: list[Any], launches: list[BoundPlan]) -> None:
    torch = pytest.importorskip("torch")
    layer = Layer(15)
    for name in ("x", "w", "bias", "dy", "y", "z"):
        setattr(layer, name, torch.from_dlpack(getattr(layer, name)))
    layer.out = {name: torch.from_dlpack(array) for name, array in layer.out.items()}
    cp.cuda.Device().synchronize()
    for turn in range(REPEATS):
        results = layer.run(buffers=buffers)
        cp.cuda.Device().synchronize()
        assert all(type(each) is torch.Tensor for each in results)
        assert_close([cp.from_dlpack(each) for each in results], layer.expected())
        assert len(looks) == 2, turn
    if buffers:
        assert len(launches) == 2 * (REPEATS - 3)


def test_what_is_looked_at_is_what_arrays_hold_now(looks: list[Any]) -> None:
    layer, other = Layer(1), Layer(2)
    for _ in range(REPEATS):
        layer.run(buffers=True)
    for mine, new in zip((layer.x, layer.w, layer.bias, layer.dy), other.host, strict=True):
        mine.set(new)
    assert_close(layer.run(buffers=True), other.expected())
    assert len(looks) == 2


def test_other_arrays_that_look_the_same(looks: list[Any]) -> None:
    layers = [Layer(seed) for seed in range(5)]
    for layer in (*layers, *layers, *layers):
        assert_close(layer.run(buffers=True), layer.expected())
    assert len(looks) == 2


@pytest.mark.parametrize("change", ["shape", "dtype", "alignment", "order", "stream"])
def test_what_differs_is_told_apart(change: str) -> None:
    layer = Layer(3)
    for _ in range(REPEATS):
        layer.run(buffers=True)
    other, stream = (
        Layer(4, m=M + 1 if change == "shape" else M, dtype="float16" if change == "dtype" else "float32"),
        None,
    )
    if change == "alignment":
        buffer = cp.empty(other.x.size + 1, cp.float32)
        shifted = buffer[1:].reshape(other.x.shape)
        shifted[...] = other.x
        other.x = shifted
    if change == "order":
        other.w = cp.asfortranarray(other.w)
    if change == "stream":
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.get_current_stream().synchronize()
    results = other.run(buffers=True, stream=stream)
    cp.cuda.Device().synchronize()
    assert_close(results, other.expected(), 1e-4 if change != "dtype" else 0.05)


def test_outputs_that_meet_inputs_are_refused_each_time() -> None:
    layer = Layer(5)
    for _ in range(REPEATS):
        layer.run(buffers=True)
    square = cp.ones((M, M), cp.float32)
    for _ in range(REPEATS):
        lt.linear_fwd(square, square.copy(), out=cp.empty((M, M), cp.float32))
        with pytest.raises(OverlapError, match="out shares memory with x"):
            lt.linear_fwd(square, square.copy(), out=square)
        with pytest.raises(ShapeError, match="out has shape"):
            lt.linear_fwd(layer.x, layer.w, out=square)


def test_gradients_are_added_up_each_time() -> None:
    layer = Layer(6)
    expected = layer.expected()
    _, ctx = lt.linear_fwd(layer.x, layer.w, layer.bias, activation="gelu")
    layer.out["out_dw"].fill(0)
    layer.out["out_db"].fill(0)
    for _ in range(2 * REPEATS):
        lt.linear_bwd(layer.dy, ctx, accumulate=True, **layer.out)
    sums = [layer.out["out_dw"] / (2 * REPEATS), layer.out["out_db"] / (2 * REPEATS)]
    assert_close(sums, expected[2:])


def test_masks_differ_from_step_to_step() -> None:
    layer, step = Layer(7), cp.zeros(1, cp.uint32)
    seen = set()
    for turn in range(2 * REPEATS):
        for count in (turn, step):
            step.fill(turn)
            y, _ = lt.linear_fwd(
                layer.x, layer.w, layer.bias, dropout=0.5, rng=lt.Philox(1, 2, count), out=layer.y, out_z=layer.z
            )
            seen.add(cp.asnumpy(y).tobytes())
    assert len(seen) == 2 * REPEATS


def test_a_capture_gets_the_launches_themselves(launches: list[BoundPlan]) -> None:
    layer, stream = Layer(8), cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    for _ in range(REPEATS):
        layer.run(buffers=True, stream=stream)
    stream.synchronize()
    before = len(launches)
    stream.begin_capture()
    layer.run(buffers=True, stream=stream)
    graph = stream.end_capture()
    assert len(launches) == before + 2
    other = Layer(9)
    for mine, new in zip((layer.x, layer.w, layer.bias, layer.dy), other.host, strict=True):
        mine.set(new)
    cp.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert_close([layer.y, *layer.out.values()], other.expected())


def test_what_is_planned_anew_is_looked_at_anew(looks: list[Any]) -> None:
    layer = Layer(10)
    for _ in range(REPEATS):
        layer.run(buffers=True)
    cache.forget([looks[0].plan.problem], 0)
    assert_close(layer.run(buffers=True), layer.expected())
    assert looks[2].plan is not looks[0].plan


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


def test_threads_that_share_a_stream() -> None:
    layers, stream = [Layer(20 + i) for i in range(4)], cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()

    def work(layer: Layer) -> None:
        for _ in range(30):
            layer.run(buffers=True, stream=stream)

    threads = [threading.Thread(target=work, args=(layer,)) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.synchronize()
    for layer in layers:
        assert_close([layer.y, *layer.out.values()], layer.expected())


def test_a_thread_that_synchronises_is_not_disturbed(launches: list[BoundPlan]) -> None:
    """While a stream is captured cuCtxSynchronize fails in every thread: nothing is captured that nobody asked for."""
    layers, ends, failed = [Layer(seed) for seed in range(50)], threading.Event(), list[Exception]()
    layers[0].run(buffers=True)  # the plans are made

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


def test_products() -> None:
    generator = np.random.default_rng(0)
    a, b, c = (generator.standard_normal(shape).astype(np.float32) for shape in ((M, K), (K, N), (M, N)))
    on_gpu, d = [cp.asarray(each) for each in (a, b, c)], cp.zeros((M, N), cp.float32)
    for turn in range(2 * REPEATS):
        alpha, beta = float(turn % 3), float(turn % 2)
        expected = alpha * (a @ b) + beta * c
        made = lt.matmul(*on_gpu, alpha=alpha, beta=beta, out=d if turn % 4 < 2 else None)
        np.testing.assert_allclose(cp.asnumpy(made), expected, rtol=1e-4, atol=1e-4)
    d.set(c)
    for turn in range(REPEATS):
        lt.matmul(*on_gpu[:2], d, out=d)
        np.testing.assert_allclose(cp.asnumpy(d), c + (turn + 1) * (a @ b), rtol=1e-4, atol=1e-3)


def test_bound_calls() -> None:
    layer, d = Layer(11), cp.empty((M, N), cp.float32)
    _, ctx = lt.linear_fwd(layer.x, layer.w, layer.bias, activation="gelu", out=layer.y, out_z=layer.z)
    forward = lt.bind(lt.linear_fwd, layer.x, layer.w, layer.bias, activation="gelu", out=layer.y, out_z=layer.z)
    backward = lt.bind(lt.linear_bwd, layer.dy, ctx, **layer.out)
    product = lt.bind(lt.matmul, layer.x, layer.w.T, out=d)
    for seed in range(3):
        other = Layer(30 + seed)
        for mine, new in zip((layer.x, layer.w, layer.bias, layer.dy), other.host, strict=True):
            mine.set(new)
        for call in (forward, backward, product):
            call()
        assert_close([layer.y, *layer.out.values()], other.expected())
        assert_close([d], [other.host[0] @ other.host[1].T])
    inference = lt.bind(lt.linear, layer.x, layer.w, out=d)
    d.fill(0)
    inference()
    assert_close([d], [other.host[0] @ other.host[1].T])


def test_bound_gradients_are_added_up() -> None:
    layer = Layer(12)
    _, ctx = lt.linear_fwd(layer.x, layer.w, layer.bias, activation="gelu")
    for name in ("out_dw", "out_db"):
        layer.out[name].fill(0)
    add = lt.bind(lt.linear_bwd, layer.dy, ctx, accumulate=True, **layer.out)
    for _ in range(3):
        add()
    assert_close([layer.out["out_dw"] / 3, layer.out["out_db"] / 3], layer.expected()[2:])


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


def _bind_while_capturing(layer: Layer) -> None:
    stream = cp.cuda.Stream(non_blocking=True)
    lt.linear(layer.x, layer.w, out=layer.y, stream=stream)
    stream.synchronize()
    stream.begin_capture()
    try:
        lt.bind(lt.linear, layer.x, layer.w, out=layer.y, stream=stream)
    finally:
        stream.end_capture()


REFUSED: dict[str, tuple[type[Exception], str, Callable[[Layer], Any]]] = {
    "no out": (ArgumentError, "out is None", lambda at: lt.bind(lt.linear, at.x, at.w)),
    "no out_z": (
        ArgumentError,
        "out_z is None",
        lambda at: lt.bind(lt.linear_fwd, at.x, at.w, activation="gelu", out=at.y),
    ),
    "no out_dx": (
        ArgumentError,
        "out_dx is None",
        lambda at: lt.bind(lt.linear_bwd, at.dy, lt.linear_fwd(at.x, at.w)[1]),
    ),
    "no product": (ArgumentError, "out is None", lambda at: lt.bind(lt.matmul, at.x, at.w.T)),
    "operation": (ArgumentError, "accepted are lt.linear_fwd", lambda at: lt.bind(lt.contiguous, at.x)),
    "overlap": (OverlapError, "out shares memory", lambda at: lt.bind(lt.linear, at.y, at.w[:, :N], out=at.y)),
    "capture": (CaptureError, "captured", _bind_while_capturing),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_bound(case: str) -> None:
    kind, message, call = REFUSED[case]
    layer = Layer(13)
    with pytest.raises(kind, match=message):
        call(layer)
    assert_close(layer.run(buffers=True), layer.expected())
