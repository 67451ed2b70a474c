"""Repeated, bound, chained and captured calls on the pretended GPU, on one stream and on several."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from lt_runtime import reference
from lt_runtime.epilogue import Epilogue
from lt_runtime.problem import ACTIVATIONS, Activation, DType, Philox
from tests.host_kernels.arrays import assert_close
from tests.support.chains import LayerChain
from tests.support.fake_gpu import FakeGpu
from tests.support.layer_checks import Layer, LayerData, dz_tolerance, layer_case
from tests.support.matmul_checks import Product, matmul_case
from tests.support.placed import COLUMNS, FLAT, ODD, Placed, host_of
from tests.support.strategies import LinearCase

_CALLS = 5  # the second call finds the first's `PreparedCall`, the third is captured, the fourth launches the graph

_REPEATED = {
    "gelu": layer_case(),
    "relu": layer_case(activation="relu"),
    "none": layer_case(activation="none"),
    "accumulate": layer_case(accumulate=True),
    "accumulate dx": layer_case(accumulate_dx=True),
    "add": layer_case(add=FLAT, activation="none"),
    "add after gelu": layer_case(add=FLAT),
    "float16": layer_case(dtype=DType.FLOAT16),
    "dropout": layer_case(dropout=0.5),
    "no bias": layer_case(bias=False, activation="relu"),
    "odd sizes": layer_case(m=17, n=19, k=23, activation="relu"),
}
_repeated = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in _REPEATED.items()])


@_repeated
def test_same_buffers_with_other_contents(gpu: FakeGpu, case: LinearCase) -> None:
    layer = Layer(gpu, case, gpu.stream)
    for seed in range(_CALLS):
        layer.refill(seed)
        layer.check()


@_repeated
def test_other_arrays_that_look_the_same(gpu: FakeGpu, case: LinearCase) -> None:
    layers = [Layer(gpu, case, gpu.stream, LayerData(case, seed)) for seed in range(3)]
    for _ in range(3):  # calls with the arrays of one layer alternate with calls with the arrays of other layers
        for seed, layer in enumerate(layers):
            layer.refill(seed)
            layer.check()


def forget_calls() -> None:
    """Forgets repeated calls: operands of earlier tests may have had the addresses of this test's operands."""
    importlib.import_module("lt_runtime.plans.cache").repeats.clear()


class Repeated:
    """Repeats a product whose plan exists, with the same operands or with others."""

    def __init__(self, gpu: FakeGpu) -> None:
        forget_calls()
        self._gpu, self._w = gpu, gpu.cp.ones((4, 16), "float32")
        self.x, self._y = self.other_x(), gpu.cp.ones((8, 4), "float32")
        self(self.other_x())
        gpu.calls.begin()

    def other_x(self) -> Any:
        return self._gpu.cp.ones((8, 16), "float32")

    def __call__(self, x: Any = None, times: int = 1) -> None:
        for _ in range(times):
            host_of(self._gpu, self._y)[...] = 0
            self._gpu.lt.linear(self.x if x is None else x, self._w, out=self._y, stream=self._gpu.stream)
            self._gpu.synchronize(self._gpu.stream.ptr)
            assert (host_of(self._gpu, self._y) == 16).all()

    def count(self, name: str) -> int:
        """Counts how often a function of the driver was called since the plan was made."""
        return self._gpu.calls.names.count(name)


@pytest.mark.parametrize(
    ("name", "captures"), [("a reader of batches", 0), ("lt_runtime prefetch", 1), ("tqdm_monitor", 1)]
)
def test_nothing_is_captured_unasked_beside_a_thread_of_the_caller(gpu: FakeGpu, name: str, captures: int) -> None:
    """A thread of the caller might call cuCtxSynchronize, which fails in every thread while a stream is captured."""
    call, ends = Repeated(gpu), threading.Event()
    thread = threading.Thread(target=ends.wait, name=name)
    thread.start()
    try:
        call(times=_CALLS)
        assert call.count("cuStreamBeginCapture") == captures
    finally:
        ends.set()
        thread.join()
    call(times=1001)
    assert call.count("cuStreamBeginCapture") == 1, "tried again once the thread has ended"


def test_repeated_calls_are_bounded_and_those_made_once_make_room(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = importlib.import_module("lt_runtime.plans.cache")
    monkeypatch.setattr("lt_runtime.ops.call._MOST_REPEATS", 8)
    monkeypatch.setattr(cache, "repeats", {})
    call = Repeated(gpu)
    call(times=3)
    others = [call.other_x() for _ in range(20)]
    for times in (1, 3):
        for x in others:
            call(x, times)
            assert len(cache.repeats) <= 8
        if times == 1:
            call()
            assert (call.count("cuStreamBeginCapture"), call.count("cuGraphLaunch")) == (1, 2), "still a graph"


def test_captures_take_a_small_share_of_the_time(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = importlib.import_module("lt_runtime.ops.call")
    monkeypatch.setattr(calls, "_CAPTURE_SHARE", 0.0)
    monkeypatch.setattr(calls, "_MOST_CAPTURE_S", 1e-6)
    monkeypatch.setattr(calls, "allowance", calls._Allowance())
    call = Repeated(gpu)
    others = [call.other_x() for _ in range(10)]
    for x in others:
        call(x, times=3)
    assert call.count("cuStreamBeginCapture") == 1, "which took all the time that there was"
    monkeypatch.setattr(calls, "_CAPTURE_SHARE", 1e9)
    call(others[-1], times=2)
    assert call.count("cuStreamBeginCapture") == 2, "one more after a while"


def test_a_repeated_call_that_cannot_be_captured_stays_as_it_was(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise importlib.import_module("lt_runtime.errors").GpuError("no memory")

    call = Repeated(gpu)
    call()
    monkeypatch.setattr("lt_runtime.gpu.memory.BoundPlan.__init__", fail)
    with pytest.warns(UserWarning, match=r"could not be bound and stays as it was \(no memory\)"):
        call()
    call(times=3)
    assert call.count("cuGraphLaunch") == 0


def test_a_second_call_does_no_more_than_its_products(gpu: FakeGpu) -> None:
    """The second call of a product with a bias, and of a layer without activation, makes no library call besides the
    products: it sets no attribute of a descriptor, and no kernel computes dz, which equals dy."""
    forget_calls()
    product = Product(gpu, matmul_case(epilogue=Epilogue.BIAS), gpu.stream)
    layer = Layer(gpu, layer_case(activation="none", bias=False), gpu.stream)
    for check, products in ((product.check, 1), (layer.check, 3)):
        check()
        gpu.calls.begin()
        check()
        queries = ("cuCtxGetDevice", "cuStreamIsCapturing")
        assert [name for name in gpu.calls.names if name not in queries] == ["cublasLtMatmul"] * products


def test_the_layer_below_has_made_x(gpu: FakeGpu) -> None:
    lt, ones = gpu.lt, [gpu.cp.ones(shape, "float32") for shape in ((8, 24), (16, 24), (12, 16), (8, 12))]
    y, below = lt.linear_fwd(ones[0], ones[1], activation="gelu")
    for _ in range(3):  # in later rounds the call has been prepared, so that its checks are skipped
        for x, is_same in ((y, True), (y.reshape(8, 16), True), (gpu.cp.ones((8, 16), "float32"), False)):
            _, above = lt.linear_fwd(x, ones[2])
            if is_same:
                lt.linear_bwd(ones[3], above, through=below)
                continue
            with pytest.raises(ValueError, match="whose y is not the x of ctx"):
                lt.linear_bwd(ones[3], above, through=below)
            lt.linear_bwd(ones[3], above, through=below, require_same=False)
    gpu.synchronize_all()


def test_remembered_calls_are_bounded(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    # Modules of the package's copy that runs on the pretended GPU.
    cache = importlib.import_module("lt_runtime.plans.cache")
    monkeypatch.setattr("lt_runtime.ops.call._MOST_CALLS", 4)
    w = gpu.cp.ones((8, 16), "float32")
    for rows in range(1, 12):
        gpu.lt.linear(gpu.cp.ones((rows, 16), "float32"), w)
        assert 0 < len(cache.calls) <= 4
    gpu.synchronize(0)


def test_what_is_asked_is_told_apart(gpu: FakeGpu) -> None:
    """Calls with the same arrays that differ in one option alternate, several times."""
    layer = Layer(gpu, layer_case(), gpu.stream)
    bias, added = layer.bias, Placed(gpu, layer.data.y.astype(np.float32))
    options: list[dict[str, Any]] = [
        {},
        {"activation": "relu"},
        {"activation": "none"},
        {"activation": "leaky_relu"},
        {"dropout": 0.5},
        {"bias": False},
        {"accumulate": True},
        {"accumulate_dx": True},
        {"activation": "none", "add": FLAT},
        {"need": (True, False, True)},
        {"need": (False, True, False)},
        {"need": (True, True, False)},
    ]
    for _ in range(_CALLS):
        for changes in options:
            layer.case = layer_case(**changes)
            layer.bias, layer.add = bias if layer.case.bias else None, added if layer.case.add else None
            layer.refill(0)
            layer.check()
            if not (layer.case.accumulate or layer.case.accumulate_dx):
                y, ctx = layer.forward(into_buffers=False)
                layer.check_forward(y)
                layer.check_backward(layer.backward(ctx, into_buffers=False))
    for slope in (0.5, 0.125, 0.5):
        layer.case = dataclasses.replace(layer_case(), activation=Activation("leaky_relu", slope))
        layer.bias = bias
        layer.refill(1)
        layer.check()


def test_epilogues_are_told_apart(gpu: FakeGpu) -> None:
    products = [
        Product(gpu, matmul_case(**changes), gpu.stream)
        for changes in (
            {"epilogue": Epilogue.BIAS},
            {"epilogue": Epilogue.RELU_BIAS},
            {"epilogue": Epilogue.GELU_BIAS},
            {},
            {"with_c": True, "beta": 0.0},
            {"with_c": True, "beta": 1.0},
            {"with_c": True, "beta": 1.0, "c": COLUMNS},
            {"with_c": True, "beta": 1.0, "in_place": True},
            {"dtype": DType.BFLOAT16},
            {"dtype": DType.BFLOAT16, "d_dtype": DType.FLOAT32},
        )
    ]
    shared = {name: products[0].operands[name] for name in ("a", "b", "out")}
    for _ in range(3):
        for product in products:
            if product.case.dtype is DType.FLOAT32 and not product.case.in_place:
                product.operands |= shared
                product.out = products[0].out
            if product.case.in_place:
                assert product.c is not None
                product.out.fill(product.c)
            product.check()


def test_precision_is_told_apart(gpu: FakeGpu) -> None:
    generator = np.random.default_rng(0)
    x, w = (generator.standard_normal(shape).astype(np.float32) for shape in ((16, 64), (24, 64)))
    x[3, 5] = np.nan
    arrays, out = (gpu.cp.asarray(x), gpu.cp.asarray(w)), gpu.cp.asarray(np.zeros((16, 24), np.float32))
    exact = np.maximum(np.delete(x, 3, axis=0).astype(np.float64) @ w.T, 0.0)
    for _ in range(_CALLS):
        for compute, propagates in (("float32", False), ("tf32", False), ("float32", True)):
            options = {"activation": "relu", "compute": compute, "propagate_nan": propagates}
            gpu.lt.linear_fwd(*arrays, **options, out=out, stream=gpu.stream)
            gpu.synchronize(gpu.stream.ptr)
            error = np.abs(np.delete(host_of(gpu, out), 3, axis=0) - exact).max()
            assert (error < 2e-5) == (compute == "float32")
            np.testing.assert_array_equal(host_of(gpu, out)[3], np.nan if propagates else 0.0)
            product = gpu.lt.matmul(arrays[0], arrays[1].T, compute=compute, stream=gpu.stream)
            gpu.synchronize(gpu.stream.ptr)
            error = np.abs(np.maximum(np.delete(host_of(gpu, product), 3, axis=0), 0.0) - exact).max()
            assert (error < 2e-5) == (compute == "float32")


def test_same_buffers_on_other_streams(gpu: FakeGpu) -> None:
    layer = Layer(gpu, layer_case())
    for seed, stream in enumerate([gpu.stream] * _CALLS + [gpu.other_stream, None, gpu.stream] * _CALLS):
        layer.stream = stream
        layer.refill(seed)
        layer.check()


@_repeated
def test_new_arrays_for_results(gpu: FakeGpu, case: LinearCase) -> None:
    case = dataclasses.replace(case, accumulate=False, accumulate_dx=False)
    layer, kept = Layer(gpu, case, gpu.stream), []
    # The pool reuses addresses, as CuPy's own pool does.
    with gpu.cp.cuda.using_allocator(gpu.cp.cuda.MemoryPool().malloc):
        for seed in range(4 * _CALLS):
            layer.refill(seed)
            y, ctx = layer.forward(into_buffers=False)
            layer.check_forward(y)
            result = layer.backward(ctx, into_buffers=False)
            layer.check_backward(result)
            # The list keeps earlier results alive, so that the next results have other addresses.
            if seed % _CALLS == 0:
                kept.append((y, result))


@pytest.mark.parametrize("name", ["x", "w", "y", "dy", "dx", "dw"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16])
def test_other_alignments(gpu: FakeGpu, name: str, dtype: DType) -> None:
    aligned = layer_case(activation="relu", dtype=dtype)
    shifted = dataclasses.replace(aligned, **{name: dataclasses.replace(FLAT, offset=1)})
    for case in (aligned, shifted, aligned, shifted):
        Layer(gpu, case, gpu.stream).check()


def test_gradients_are_added_up(gpu: FakeGpu) -> None:
    layer = Layer(gpu, layer_case(accumulate=True, accumulate_dx=True), gpu.stream)
    _, ctx = layer.forward()
    for count in range(1, _CALLS):
        layer.check_backward(layer.backward(ctx), accumulations=count)


def test_masks_differ_from_step_to_step_and_layer_to_layer(gpu: FakeGpu) -> None:
    case = layer_case(dropout=0.5, keep_z=True)  # the calls allocate no array, so that they have the same addresses
    layer = Layer(gpu, case, gpu.stream)
    for rng in (Philox(7, 2, 5), Philox(7, 2, 6), Philox(7, 3, 6), Philox(8, 3, 6)) * 2:
        layer.case = dataclasses.replace(case, rng=rng)
        layer.refill(0)
        layer.check()


@pytest.mark.parametrize("on_device", [True, False])
def test_calls_with_dropout_are_captured_if_their_step_is_on_the_device(
    gpu: FakeGpu, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step draws its own mask, with a graph or without one; so do two layers that differ only in their numbers."""
    monkeypatch.setattr("lt_runtime.ops.call._Allowance.is_left", lambda _: True)
    forget_calls()
    case, step = layer_case(dropout=0.5, keep_z=True), gpu.cp.asarray(np.zeros(1, np.uint32))
    layer = Layer(gpu, case, gpu.stream)
    for number in range(_CALLS):
        host_of(gpu, step)[...] = number
        for other in (2, 3):
            layer.case = drawn_on_host = dataclasses.replace(case, rng=Philox(7, other, number))
            layer.refill(number)
            layer.case = dataclasses.replace(case, rng=Philox(7, other, step)) if on_device else layer.case
            result = layer.backward(layer.forward()[1])
            layer.case = drawn_on_host
            layer.check_forward()
            layer.check_backward(result)
        if number == 0:
            gpu.calls.begin()  # the first calls make plans, for which cuBLASLt's algorithms are captured
    assert gpu.calls.names.count("cuStreamBeginCapture") == (4 if on_device else 0)
    if on_device:
        kept = weakref.ref(step)
        del step, result
        gc.collect()
        assert kept() is None, "the remembered calls keep the step, at whose address no later call's step can lie then"


def test_a_step_on_the_device_is_read_when_the_kernel_runs(gpu: FakeGpu) -> None:
    case = layer_case(dropout=0.5)
    step = gpu.cp.asarray(np.zeros(1, np.uint32))
    rng = gpu.lt.Philox(case.rng.seed, case.rng.layer, step)
    for number in (3, 4, 9, 4):
        layer = Layer(gpu, dataclasses.replace(case, rng=Philox(case.rng.seed, case.rng.layer, number)), gpu.stream)
        arrays, asked = (layer.x.array, layer.w.array, layer.bias), layer.settings() | {"rng": rng}
        _, ctx = gpu.lt.linear_fwd(*arrays, **asked, out=layer.y.array, stream=gpu.stream)
        result = layer.backward(ctx)
        host_of(gpu, step)[...] = number
        layer.check_forward()
        layer.check_backward(result)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_the_current_stream_is_the_librarys(gpu: FakeGpu, activation: str) -> None:
    with gpu.stream:
        Layer(gpu, layer_case(activation=activation)).check()


def test_outputs_that_meet_inputs_are_refused_each_time(gpu: FakeGpu) -> None:
    layer = Layer(gpu, layer_case(m=32, n=32, k=32), gpu.stream)
    for seed in range(_CALLS):
        layer.refill(seed)
        layer.check()
        arrays = (layer.x.array, layer.w.array, layer.bias)
        with pytest.raises(gpu.lt.errors.OverlapError, match="out shares memory with w"):
            gpu.lt.linear_fwd(*arrays, **layer.settings(), out=layer.w.array, stream=gpu.stream)


def test_streams_take_turns(gpu: FakeGpu) -> None:
    case, streams = layer_case(dropout=0.5), (gpu.stream, gpu.other_stream)
    layers = [Layer(gpu, dataclasses.replace(case, data_seed=i), streams[i % 2]) for i in range(4)]
    contexts = [layer.forward()[1] for layer in layers]
    results = [layer.backward(ctx) for layer, ctx in zip(layers, contexts, strict=True)]
    for layer, result in reversed([*zip(layers, results, strict=True)]):
        layer.check_forward()
        layer.check_backward(result)


def test_inference(gpu: FakeGpu) -> None:
    for case in (layer_case(), layer_case(activation="relu"), layer_case(m=17, n=19, activation="silu")):
        layer = Layer(gpu, case, gpu.stream)
        asked = {name: value for name, value in layer.settings().items() if name not in ("dropout", "rng")}
        gpu.lt.linear(layer.x.array, layer.w.array, layer.bias, **asked, out=layer.y.array, stream=gpu.stream)
        layer.check_forward()


@pytest.mark.parametrize("activation", ["gelu", "relu", "none"])
def test_the_gradient_before_the_activation(gpu: FakeGpu, activation: str) -> None:
    case = layer_case(activation=activation, dropout=0.5 if activation == "gelu" else 0.0)
    layer = Layer(gpu, case, gpu.stream)
    dz = Placed(gpu, np.zeros((case.m, case.n), np.float32), ODD)
    _, ctx = layer.forward()
    exact, limit = layer.data.gradients, dz_tolerance(case, layer.data)
    for _ in range(_CALLS):
        layer.dy.fill(layer.data.dy)
        layer.check_backward(layer.backward(ctx, out_dz=dz.array))
        assert_close("dz", dz.values(), exact.dz, limit + 2.0**-22)
        layer.check_backward(layer.backward(ctx))
        layer.dy.fill(exact.dz.astype(np.float32))
        layer.check_backward(layer.backward(ctx, before_activation=True))


@pytest.mark.parametrize(
    ("activation", "changes"),
    [
        ("relu", {}),
        ("relu", {"m": 17, "n": 21}),
        ("gelu", {}),
        ("gelu", {"dropout": 0.5}),
        ("gelu", {"m": 17, "n": 21}),
        ("none", {}),
        ("tanh", {}),
    ],
)
def test_backward_through_the_layer_below(gpu: FakeGpu, activation: str, changes: dict[str, Any]) -> None:
    below = layer_case(activation=activation, **changes)
    above = layer_case(m=below.m, n=24, k=below.n, activation="gelu", data_seed=2)
    chain = LayerChain(gpu, below, above, need_db_below=activation != "tanh")
    for _ in range(_CALLS if activation == "relu" else 1):
        chain.check()


def test_gradients_of_the_layer_below_are_told_apart(gpu: FakeGpu) -> None:
    below, above = layer_case(activation="relu"), layer_case(n=24, k=32, data_seed=2)
    chain = LayerChain(gpu, below, above)
    for _ in range(_CALLS):
        for chain.need_db_below in (True, False):
            chain.check()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_raw_addresses(gpu: FakeGpu, activation: str) -> None:
    index = ACTIVATIONS.index(activation)
    m, k, n = (
        32,
        64,
        16 + index % 2,
    )  # rows are aligned for the same activations as in test_fake_gpu_layers.py, so that fewer kernels are built
    trans_a, trans_b, with_bias = index % 2 == 1, index // 2 % 2 == 1, activation != "sigmoid"
    generator = np.random.default_rng(7)
    a, b, bias, g = (generator.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n), (n,), (m, n)))
    at_a, at_b = (gpu.cp.asarray(np.ascontiguousarray(v.T if t else v)) for v, t in ((a, trans_a), (b, trans_b)))
    at_bias, at_g = gpu.cp.asarray(bias), gpu.cp.asarray(g)
    y, z, gc, gbias = (gpu.cp.asarray(np.full(s, np.nan, np.float32)) for s in ((m, n), (m, n), (m, n), (n,)))
    ga, gb = (gpu.cp.asarray(np.full(each.shape, np.nan, np.float32)) for each in (at_a, at_b))
    sizes, asked = (m, k, n, trans_a, trans_b), (activation, with_bias, 0.2)
    inputs = (at_a.data.ptr, at_b.data.ptr)
    for _ in range(2):
        gpu.lt.raw.forward_raw(
            *inputs, at_bias.data.ptr, y.data.ptr, *sizes, *asked, True, z.data.ptr, gpu.stream.ptr
        )  # fmt: skip
        gpu.lt.raw.backward_raw(
            *inputs, 0, at_g.data.ptr, z.data.ptr, *(each.data.ptr for each in (ga, gb, gc, gbias)), *sizes, *asked,
            gpu.stream,
        )  # fmt: skip
    gpu.synchronize(gpu.stream.ptr)
    act = Activation(activation, 0.2)
    expected_y, expected_z = reference.linear_fwd(a, b.T, bias if with_bias else None, act)
    exact = reference.linear_bwd(g, a, b.T, expected_z, act)
    results = {"y": (y, expected_y), "z": (z, expected_z), "gc": (gc, exact.dz), "ga": (ga, exact.dx)}
    results["gb"] = (gb, exact.dw.T)
    for name, (array, expected) in results.items():
        host = host_of(gpu, array)
        turned = host.T if (name == "ga" and trans_a) or (name == "gb" and trans_b) else host
        np.testing.assert_allclose(turned, expected, atol=1e-5, rtol=1e-4, err_msg=name)
    if with_bias:
        np.testing.assert_allclose(host_of(gpu, gbias), exact.db, atol=1e-5, rtol=1e-4)
    else:
        assert np.isnan(host_of(gpu, gbias)).all()


def test_bound_layers(gpu: FakeGpu) -> None:
    case = layer_case(keep_z=True)
    layer, other = Layer(gpu, case, gpu.stream), Layer(gpu, case, gpu.stream, LayerData(case, 9))
    assert layer.z is not None
    arrays, buffers = (layer.x.array, layer.w.array, layer.bias), {"out": layer.y.array, "out_z": layer.z.array}
    _, ctx = layer.forward()
    gradients = {"out_dx": layer.dx.array, "out_dw": layer.dw.array, "out_db": layer.db}
    forward = gpu.lt.bind(gpu.lt.linear_fwd, *arrays, **layer.settings(), **buffers, stream=gpu.stream)
    backward = gpu.lt.bind(gpu.lt.linear_bwd, layer.dy.array, ctx, **gradients, stream=gpu.stream)
    results = gpu.lt.linear_bwd(layer.dy.array, ctx, **gradients, stream=gpu.stream)
    layer.wait()
    for seed in range(3):
        layer.refill(seed)
        other.check()  # calls that use the plans of the bound calls, with other addresses
        forward()
        backward()
        layer.check_forward()
        layer.check_backward(results)


@pytest.mark.parametrize(
    "changes",
    [
        {"epilogue": Epilogue.BIAS},
        {"epilogue": Epilogue.BIAS, "d": COLUMNS, "c": COLUMNS},
        {"c": COLUMNS},
        {"epilogue": Epilogue.DGELU_BGRAD, "d": COLUMNS, "c": COLUMNS},
        {"epilogue": Epilogue.BGRADA, "a": COLUMNS},
    ],
)
def test_bound_products(gpu: FakeGpu, changes: dict[str, Any]) -> None:
    case = matmul_case(with_c=True, alpha=2.0, beta=-0.5, **changes)
    product, other = Product(gpu, case, gpu.stream), Product(gpu, dataclasses.replace(case, data_seed=2), gpu.stream)
    bound = gpu.lt.bind(gpu.lt.matmul, **product.operands, stream=gpu.stream)
    for _ in range(2):
        other.check()
        bound()
        product.check_results()


def test_products_again_with_other_scalars(gpu: FakeGpu) -> None:
    product = Product(gpu, matmul_case(with_c=True), gpu.stream)
    fresh, kept = {name: value for name, value in product.operands.items() if name != "out"}, []
    with gpu.cp.cuda.using_allocator(gpu.cp.cuda.MemoryPool().malloc):
        for alpha, beta in ((1.0, 1.0), (2.0, -0.5), (-0.5, -0.5), (2.0, -0.5), (2.0, 2.0), (1.0, 1.0), (1.0, 0.0)):
            product.rescale(alpha, beta)
            for _ in range(_CALLS):
                product.check()
                d = gpu.lt.matmul(**fresh | {"alpha": alpha, "beta": beta}, stream=gpu.stream)
                product.check_results(d)
            kept.append(d)  # the list keeps earlier D alive, so that the next results have other addresses


def test_a_capture_reads_what_is_there_at_each_replay(gpu: FakeGpu) -> None:
    case = matmul_case(with_c=True, alpha=2.0, beta=-0.5, device_scalars=True, epilogue=Epilogue.GELU_AUX_BIAS)
    layer, product = Layer(gpu, layer_case(), gpu.stream), Product(gpu, case, gpu.stream)
    # After these calls the package launches graphs for them, but in the caller's capture it must launch kernels.
    for _ in range(_CALLS):
        layer.check()
        product.check()
    gpu.stream.begin_capture()
    _, ctx = layer.forward()
    result = layer.backward(ctx)
    product.run()
    with pytest.raises(gpu.lt.errors.CaptureError, match="bind a call to it before the capture"):
        gpu.lt.bind(gpu.lt.matmul, **product.operands, stream=gpu.stream)
    graph = gpu.stream.end_capture()
    for seed, (alpha, beta) in enumerate(((2.0, -0.5), (1.0, 1.0), (-0.5, 2.0))):
        layer.refill(seed)
        product.overwrite_scalars(alpha, beta)
        graph.launch(gpu.stream)
        layer.check_forward()
        layer.check_backward(result)
        product.check_results()


class Foreign:
    """An array of an unknown library, with `__cuda_array_interface__`."""

    def __init__(self, array: Any, stream: int | None = None) -> None:
        self._array, self.dtype = array, array.dtype
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream}


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_arrays_by_their_interface(gpu: FakeGpu, dtype: DType) -> None:
    case = layer_case(activation="relu", dtype=dtype, x=ODD)
    layer = Layer(gpu, case, gpu.stream)
    arrays = [Foreign(each) for each in (layer.x.array, layer.w.array, layer.bias)]
    y, ctx = gpu.lt.linear_fwd(*arrays, **layer.settings(), stream=gpu.stream)
    layer.check_forward(y)
    dy = Foreign(layer.dy.array)
    layer.check_backward(gpu.lt.linear_bwd(dy, ctx, stream=gpu.stream))


def test_the_stream_of_an_interface_is_waited_for(gpu: FakeGpu) -> None:
    x, w = gpu.cp.zeros((8, 8), np.float32), gpu.cp.ones((8, 8), np.float32)
    with gpu.other_stream:
        x.set(np.ones((8, 8), np.float32))
    y = gpu.lt.linear(Foreign(x, gpu.other_stream.ptr), w, stream=gpu.stream)
    gpu.synchronize(gpu.stream.ptr)
    assert (host_of(gpu, y) == 8).all()


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("axes", [(24,), (2, 3, 4)])
def test_tensors(gpu: FakeGpu, dtype: DType, axes: tuple[int, ...]) -> None:
    """Calls on tensors return tensors, made on the call's stream."""
    layer, tensor = Layer(gpu, layer_case(activation="relu", dtype=dtype), gpu.stream), gpu.torch.Tensor
    arrays = [tensor(each) for each in (layer.x.array.reshape(*axes, 40), layer.w.array, layer.bias)]
    for seed in range(_CALLS):
        layer.refill(seed)
        y, ctx = gpu.lt.linear_fwd(*arrays, **layer.settings(), stream=gpu.stream)
        gradients = gpu.lt.linear_bwd(tensor(layer.dy.array.reshape(*axes, 32)), ctx, stream=gpu.stream)
        assert {type(each) for each in (y, *gradients)} == {tensor}
        assert (y.shape, gradients.dx.shape) == ((*axes, 32), (*axes, 40))
        layer.check_forward(y.array.reshape(24, 32))
        dx, *others = (each.array for each in gradients)
        layer.check_backward(type(gradients)(dx.reshape(24, 40), *others))


_ROWS_APART = {
    "flat": layer_case(),
    "gaps": layer_case(x=ODD, y=ODD, dy=ODD, dx=ODD, keep_z=True, dropout=0.5),
    "columns": layer_case(x=COLUMNS, y=COLUMNS, dy=COLUMNS, dx=COLUMNS),
    "ragged": layer_case(n=33),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in _ROWS_APART.items()])
def test_leading_axes_are_rows(gpu: FakeGpu, case: LinearCase) -> None:
    """Arrays with leading axes are read and written where they lie, from the first call to the replayed one."""
    layer, rows = Layer(gpu, case, gpu.stream), (4, 6)
    for placed in (layer.x, layer.y, layer.z, layer.dy, layer.dx):
        if placed is not None:
            placed.array = placed.array.reshape(*rows, placed.array.shape[1])
    for seed in range(_CALLS):
        layer.refill(seed)
        layer.check()
        z = layer.forward()[1].preactivation  # z is column-major if y is
        layer.wait()
        np.testing.assert_allclose(host_of(gpu, z), layer.data.z.reshape(*rows, case.n), rtol=1e-5, atol=1e-5)
        y, ctx = layer.forward(into_buffers=False)
        assert (y.shape, ctx.shape) == ((*rows, case.n), (24, case.n, 40))
        assert ctx.preactivation.shape == y.shape
        result = layer.backward(ctx, into_buffers=False)
        assert result.dx.shape == (*rows, 40)
        layer.check_forward(y.reshape(24, case.n))
        layer.check_backward(result._replace(dx=result.dx.reshape(24, 40)))


def test_refused_epilogues_are_our_passes(gpu: FakeGpu) -> None:
    refused = gpu.library.refused
    gpu.library.refused = frozenset(range(2, 1024))
    try:
        for activation in ("relu", "gelu", "none"):
            Layer(gpu, layer_case(m=26, activation=activation), gpu.stream).check()
        for epilogue in (Epilogue.BIAS, Epilogue.RELU_AUX_BIAS, Epilogue.DGELU_BGRAD):
            Product(gpu, matmul_case(m=26, epilogue=epilogue), gpu.stream).check()
    finally:
        gpu.library.refused = refused
