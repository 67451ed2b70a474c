"""Linear layers in FP8: on NumPy arrays against the layer in its own type, on the pretended GPU against NumPy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
import lt_runtime.ops.fp8.gradients as lt_gated
import lt_runtime.ops.fp8.linear as lt_operations
from lt_runtime.errors import ArgumentError, LtError
from lt_runtime.ops.fp8.state import arrays_of
from lt_runtime.reference.fp8 import AMAX, update_fp8_scales
from tests.support.fake_gpu import FakeGpu
from tests.support.fp8_layers import BF16, CASES, FP16, Fp8Case, Fp8Layer, GatedLayers, K, M, N, decibels
from tests.support.over_fake_gpu import own

GROWING = (1.0, 4.0, 16.0)
Make = Callable[[Fp8Case], Fp8Layer]


@pytest.fixture(params=["on NumPy arrays", "on a GPU"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes a layer on NumPy arrays or on the pretended GPU."""
    if request.param == "on NumPy arrays":
        return lambda case: Fp8Layer(case, lt)
    gpu: FakeGpu = request.getfixturevalue("gpu")
    return lambda case: Fp8Layer(case, gpu.lt, gpu)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_on_numpy_arrays_as_precise_as_the_types(case: Fp8Case) -> None:
    """Against a layer without FP8, products of two E4M3 operands have a ratio of signal to error of about 28 dB.

    Products of an E4M3 and an E5M2 operand have one of about 24 dB.
    """

    class Plain:
        Philox, linear_bwd = lt.Philox, staticmethod(lt.linear_bwd)
        FP8, FP8State = lt.FP8, lt.FP8State

        @staticmethod
        def linear_fwd(*arrays: Any, precision: Any, **options: Any) -> Any:
            arrays_of(precision, arrays[0])
            return lt.linear_fwd(*arrays, **options)

    found, wanted = Fp8Layer(case, lt).step(0), Fp8Layer(case, Plain).step(0)
    limits = {"y": 26.0, "z": 26.0, "dx": 22.0, "dw": 22.0, "db": 22.0}
    for name in wanted.keys() & limits.keys():
        assert decibels(found[name], wanted[name]) > limits[name], name


@pytest.mark.parametrize("all_threads", [False, True])
def test_products_of_other_threads_are_recorded_for_the_tuner_if_asked_for(gpu: FakeGpu, all_threads: bool) -> None:
    layer = Fp8Layer(next(iter(CASES.values())), gpu.lt, gpu)
    with own("nn.run").Met(all_threads=all_threads) as met:
        thread = threading.Thread(target=layer.step, args=(0,))
        thread.start()
        thread.join()
    products = [each for each in met.to_tune() if type(each).__name__ == "MatmulProblem"]
    assert len(products) == 3 * all_threads  # y, dx and dw
    assert all(each.dtype.is_float8 for each in products)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_on_a_gpu_as_on_numpy_arrays(gpu: FakeGpu, case: Fp8Case) -> None:
    with gpu.others_package() as package:
        on_host = Fp8Layer(case, package)
        expected = [on_host.step(number, scale) for number, scale in enumerate(GROWING)]
    on_gpu = Fp8Layer(case, gpu.lt, gpu)
    for number, (scale, wanted) in enumerate(zip(GROWING, expected, strict=True)):
        found = on_gpu.step(number, scale)
        assert wanted.keys() == found.keys()
        for name in ("slots", "history"):
            np.testing.assert_allclose(found.pop(name), wanted.pop(name), rtol=2.0**-7)
        for name, values in wanted.items():
            assert decibels(found[name], values) > 40.0, (number, name)


PASSES = {
    "after an activation": (Fp8Case(), ["cast_fp8"]),
    "without activation": (Fp8Case(activation="none"), ["cast_fp8"]),
    "dropout alone": (Fp8Case(activation="none", dropout=0.5), ["cast_fp8"]),
    "current": (Fp8Case(recipe=lt.FP8(recipe="current")), ["cast_fp8", "fp8_scales", "cast_fp8"]),
    "rowwise": (Fp8Case(recipe=lt.FP8(recipe="rowwise")), ["epilogue_bwd", "cast_fp8", "cast_fp8"]),
    "float16": (Fp8Case(FP16), ["epilogue_bwd", "cast_fp8"]),
    "only a bias gradient": (Fp8Case(needs=(False, False, True)), ["epilogue_bwd"]),
}


@pytest.mark.parametrize(("case", "passes"), PASSES.values(), ids=PASSES)
def test_passes_of_backward(gpu: FakeGpu, case: Fp8Case, passes: list[str]) -> None:
    """In BF16 a single kernel computes dz, its casts to FP8 and the bias gradient."""
    layer = Fp8Layer(case, gpu.lt, gpu)
    layer.step(0)
    gpu.synchronize_all()  # runs the launches of step 0, which the pretended GPU runs only when it is waited for
    gpu.kernels.launched.clear()
    layer.step(1, update=False)
    forward = len(gpu.kernels.launched) - len(passes)
    assert gpu.kernels.launched[forward:] == passes
    assert not {"epilogue_bwd"} & {*gpu.kernels.launched[:forward]}


@pytest.mark.parametrize("where", ["numpy", "gpu"])
@pytest.mark.parametrize("recipe", ["rowwise", "current"])
def test_rows_of_all_magnitudes_keep_their_accuracy(gpu: FakeGpu, recipe: Any, where: str) -> None:
    """Rows of x and dy differ by 2^24, more than one scale can hold, and a column of x is 2^12 times the others."""
    generator, sizes = np.random.default_rng(3), np.exp2(np.linspace(-12, 12, M))[:, None]
    x, w, dy = (generator.standard_normal(shape).astype(np.float32) for shape in ((M, K), (N, K), (M, N)))
    x, dy = (np.float32(sizes) * each for each in (x, dy))
    x[:, 5] *= 2.0**12
    put, get = (gpu.cp.asarray, gpu.host_of) if where == "gpu" else (np.copy, np.asarray)
    state = gpu.lt.FP8State(gpu.lt.FP8(recipe=recipe, gradients="e4m3", fast_accumulation="never"))
    y, ctx = gpu.lt.linear_fwd(put(x), put(w), precision=state)
    dx, dw, _ = gpu.lt.linear_bwd(put(dy), ctx)
    gpu.synchronize()
    x, w, dy = (each.astype(np.float64) for each in (x, w, dy))
    pairs = (get(y), x @ w.T), (get(dx), dy @ w), (get(dw).T, x.T @ dy)
    rows = [each for pair in pairs for each in zip(*pair, strict=True)]
    worst = min(decibels(found.astype(np.float64), wanted) for found, wanted in rows)
    assert worst > 22.0 if recipe == "rowwise" else worst < 6.0


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_overflows_are_counted_and_scales_recover(make: Make, recipe: Any) -> None:
    """x grows by 2¹⁰ at once: a delayed scale, with room for a factor of 4 at most, saturates one step."""
    layer = make(Fp8Case(recipe=lt.FP8(recipe=recipe), activation="none"))
    for number, scale in enumerate((1.0, 1024.0, 1024.0, 1024.0)):
        layer.step(number, scale)
    assert layer.state.overflows == {"x": int(recipe == "delayed"), "w": 0, "dy": 0}
    assert layer.state.scales["x"] <= 0.25


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_scale_of_zeros_is_1(make: Make, recipe: Any) -> None:
    """The first batch is zero, so that its scale is 1, with which the recipe "delayed" casts the second batch."""
    layer = make(Fp8Case(recipe=lt.FP8(recipe=recipe), activation="none", bias=False))
    assert not layer.step(0, 0.0)["y"].any()
    assert layer.state.scales["x"] == 1.0
    assert decibels(layer.step(1)["y"], make(layer.case).step(1)["y"]) > 25.0
    assert layer.state.overflows == {"x": 0, "w": 0, "dy": 0}


def test_a_scale_follows_the_largest_magnitude_of_the_history() -> None:
    layer = Fp8Layer(Fp8Case(recipe=lt.FP8(history=2, headroom=1.0)), lt)
    scales = []
    for number, size in enumerate((1.0, 64.0, 1.0, 1.0)):
        layer.step(number, size)
        scales.append(layer.state.scales["x"])
    assert scales[1] == scales[2] < scales[3]  # the magnitude 64 drops out of the history of two steps


def test_a_skipped_step_changes_no_scale(make: Make) -> None:
    layer = make(Fp8Case())
    layer.step(0)
    before = layer.state.scales
    layer.step(1, 1024.0, update=False)
    layer.state.update(skipped=layer.put(np.ones(1, np.uint32)))
    assert layer.state.scales == before
    assert layer.state.overflows["x"] == 1
    layer.step(2, 1024.0, update=False)
    layer.state.update(skipped=layer.put(np.zeros((), np.uint32)))
    assert layer.state.scales["x"] < before["x"]


def test_a_restored_state_continues_bit_for_bit(make: Make) -> None:
    unbroken, first, second = (make(Fp8Case()) for _ in range(3))
    assert first.state.state_dict() == {}
    for number in range(2):
        unbroken.step(number)
        first.step(number)
    second.state.load_state_dict(first.state.state_dict(), like=second.put(np.zeros(1, np.float32)))
    wanted, found = unbroken.step(2), second.step(2)
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_layers_with_the_same_inputs_can_share_their_cast(gpu: FakeGpu, recipe: Any, on_gpu: bool) -> None:
    """Results and scales equal those of layers that cast x themselves."""
    operations = own("ops.fp8.linear") if on_gpu else lt_operations
    package, put, host = (gpu.lt, gpu.cp.asarray, gpu.host_of) if on_gpu else (lt, np.copy, np.array)
    generator = np.random.default_rng(0)
    x, *ws = (put(generator.standard_normal((n, 32)).astype(BF16)) for n in (48, 64, 64))
    dy, made = put(generator.standard_normal((48, 64)).astype(BF16)), []
    for shares in (False, True):
        states, arrays = [package.FP8State(package.FP8(recipe)) for _ in ws], list[Any]()
        for is_calibrated in (False, recipe == "delayed"):
            gpu.kernels.launched.clear()
            source = None
            for state, w in zip(states, ws, strict=True):
                given = (x, w, None, None, None, None), ("none", 0.01, 0.0, "float32", False, True), None, None
                call = operations.LinearCall(*given, keeps_x8=shares and source is None, same_x=source)
                y, ctx = operations.forward_in_fp8(state, call)
                source = ctx if shares else None
                arrays += [y, *package.linear_bwd(dy, ctx)[:2]]
            for state in states:
                state.update()
            gpu.synchronize_all()
            # Casts of x, w and dy of each layer; a tensor whose scale is not known is read once more.
            assert gpu.kernels.launched.count("cast_fp8") == on_gpu * (6 - shares) * (1 if is_calibrated else 2)
        made.append([*map(host, arrays), *(state.state_dict()["slots"] for state in states)])
    for alone, shared in zip(*made, strict=True):
        np.testing.assert_array_equal(alone, shared)


def test_contexts_keep_the_scales_of_their_own_call() -> None:
    """With the recipe "current", a second forward call computes other scales before the first call's backward."""
    state = lt.FP8State(lt.FP8(recipe="current"))
    generator = np.random.default_rng(0)
    xs = [(size * generator.standard_normal((32, 32))).astype(np.float32) for size in (1.0, 1000.0)]
    w, dy = (generator.standard_normal((32, 32), np.float32) for _ in range(2))
    contexts = [lt.linear_fwd(x, w, precision=state)[1] for x in xs]
    for x, ctx in zip(xs, contexts, strict=True):
        assert decibels(lt.linear_bwd(dy, ctx).dw, (dy.T @ x).astype(np.float64)) > 22.0


def test_other_sizes_stay_in_their_type() -> None:
    state, x, w = lt.FP8State(), np.ones((20, 32), np.float32), np.ones((16, 32), np.float32)
    y, ctx = lt.linear_fwd(x, w, precision=state)
    assert state.slots is None
    assert ctx.state is None
    assert state.fallback == "M, N or K is no positive multiple of 16"
    np.testing.assert_array_equal(y, x @ w.T)


def test_a_layer_that_is_slower_in_fp8_stays_in_its_type(gpu: FakeGpu) -> None:
    """Results of forward and backward equal those of a layer without a precision."""
    case, found = Fp8Case(recipe=lt.FP8(fallback=True)), []
    for state in (gpu.lt.FP8State(gpu.lt.FP8(fallback=True)), None):
        layer = Fp8Layer(case, gpu.lt, gpu)
        x, w, dy = (layer.put(np.full(shape, 0.5, case.dtype)) for shape in ((48, 32), (64, 32), (48, 64)))
        y, ctx = gpu.lt.linear_fwd(x, w, activation="gelu", precision=state)
        gradients = gpu.lt.linear_bwd(dy, ctx)
        gpu.synchronize()
        found.append([layer.get(each) for each in (y, gradients.dx, gradients.dw)])
        assert ctx.state is None
        if state is not None:
            assert state.slots is None
            assert "48 rows of 32-64: FP8 is expected to save" in state.fallback
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_arrays_on_the_host_do_not_fall_back() -> None:
    state = lt.FP8State(lt.FP8(fallback=True))
    lt.linear_fwd(X, W, precision=state)
    assert (state.fallback, state.calibrated) == (None, {0, 1})


X, W = np.ones((16, 16), np.float32), np.ones((16, 16), np.float32)
STATE = {"slots": 0, "history": 0, "calibrated": 0}
GAPS = np.ones((16, 24), np.float32)[:, :16]
REFUSED = {
    "no state": (lambda: lt.linear_fwd(X, W, precision=lt.FP8()), "it must be None or an lt.FP8State"),
    "no recipe": (lambda: lt.FP8State("delayed"), "recipe is 'delayed'; it must be an lt.FP8"),
    "recipe": (lambda: lt.FP8(recipe="blocks"), "recipe is 'blocks'; accepted are delayed, current, rowwise"),
    "gradients": (lambda: lt.FP8(gradients="bf16"), "gradients is 'bf16'"),
    "history": (lambda: lt.FP8(history=0), r"history is 0; it must be in \[1, 1024\]"),
    "fallback": (lambda: lt.FP8(fallback="no"), "fallback is 'no'"),
    "headroom": (lambda: lt.FP8(headroom=0.5), "headroom is 0.5; it must be finite and at least 1"),
    "scales too early": (lambda: lt.FP8State().scales, "the state has no scales yet"),
    "no device": (lambda: lt.FP8State().load_state_dict(STATE), "like is None"),
    "no mapping": (lambda: lt.FP8State().load_state_dict([1]), r"state is \[1\]; it must be a state_dict"),
    "entries": (lambda: lt.FP8State().load_state_dict({}), "it must have calibrated, history and slots"),
    "other types": (lambda: _load(lt.FP8(gradients="e4m3"), lt.FP8()), "has scales of other FP8 types"),
    "calibrated": (lambda: lt.FP8State().load_state_dict(STATE, like=X), r"state\['calibrated'\] has shape \(\)"),
    "another recipe's state": (lambda: _load(lt.FP8(history=4), lt.FP8()), r"has shape \(3, 4\); it must be \(3, 16\)"),
    "odd rows": (lambda: lt.linear_fwd(X, W, precision=lt.FP8State(), out=GAPS), "out has strides"),
    "through": (lambda: _through(), "through is given"),
    "dx that forward did not expect": (lambda: _unexpected("dx"), "need_dx is True, but needs_dx of the precision was"),
    "dw that forward did not expect": (lambda: _unexpected("dw"), "need_dw is True, but needs_dw of the precision was"),
}


def test_a_layer_that_has_not_run_in_fp8_has_no_overflows() -> None:
    assert lt.FP8State().overflows == {"x": 0, "w": 0, "dy": 0}


def _load(saved: lt.FP8, recipe: lt.FP8) -> None:
    states = lt.FP8State(saved), lt.FP8State(recipe)
    for each in states:
        lt.linear_fwd(X, W, precision=each)
    states[1].load_state_dict(states[0].state_dict())


def _through() -> None:
    y, below = lt.linear_fwd(X, W)
    _, ctx = lt.linear_fwd(y, W, precision=lt.FP8State())
    lt.linear_bwd(X, ctx, through=below)


def _unexpected(gradient: str) -> None:
    state = lt.FP8State()
    setattr(state, f"needs_{gradient}", False)
    lt.linear_bwd(X, lt.linear_fwd(X, W, precision=state)[1])


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(call: Any, message: str) -> None:
    with pytest.raises(LtError, match=message):
        call()


def test_a_refused_call_calibrates_nothing() -> None:
    state = lt.FP8State()
    with pytest.raises(ArgumentError):
        lt.linear_fwd(X, W, activation="tanhh", precision=state)
    assert state.calibrated == set()
    lt.linear_fwd(X, W, precision=state)
    assert state.calibrated == {0, 1}


def test_a_capture_outlives_what_it_does_not_allow(gpu: FakeGpu) -> None:
    """Scales are neither made nor read, and no product is measured, while a stream is being captured."""
    state, (x, w) = gpu.lt.FP8State(), (gpu.cp.asarray(np.ones((16, 16), BF16)) for _ in range(2))

    def capture(call: Callable[[], object], error: str = "") -> None:
        gpu.synchronize_all()
        gpu.stream.begin_capture()
        with gpu.stream, pytest.raises(gpu.lt.errors.CaptureError, match=error) if error else nullcontext():
            call()
        gpu.stream.end_capture().launch(gpu.stream)
        gpu.synchronize_all()

    def forward() -> object:
        return gpu.lt.linear_fwd(x, w, precision=state, stream=gpu.stream)

    capture(forward, "run the layer once before the capture")
    forward()
    capture(lambda: state.scales, "slots cannot be read")
    with gpu.lt.tuning():
        capture(forward)  # with known scales this is another call than the first
        state.recipe = replace(state.recipe, fallback=True)  # now the choice of the type is open
        capture(forward, "no plan yet")


@pytest.mark.parametrize(("recipe", "scale", "steps"), [("delayed", 128.0, 16), ("current", 256.0, 1)])
def test_only_delayed_scales_have_headroom_and_a_history(recipe: Any, scale: float, steps: int) -> None:
    state = lt.FP8State(lt.FP8(recipe))
    lt.linear_fwd(X, W, precision=state)
    assert state.scales["x"] == scale  # 448 is the largest number of E4M3, 1 the largest of X
    assert state.history.shape == (3, steps)


def test_a_state_that_is_refused_leaves_nothing() -> None:
    state = lt.FP8State()
    with pytest.raises(LtError):
        state.load_state_dict(STATE, like=X)
    assert state.slots is None


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("on", ["NumPy arrays", "a GPU"])
def test_gradients_of_a_gate_are_cast_for_two_layers(request: pytest.FixtureRequest, on: str, dropout: float) -> None:
    layers = GatedLayers(lt, lt_gated, dropout)
    if on == "a GPU":
        gpu: FakeGpu = request.getfixturevalue("gpu")
        layers = GatedLayers(gpu.lt, own("ops.fp8.gradients"), dropout, gpu)
    for step in range(3):
        found, expected = layers.step(step)
        assert (found is None) == (step == 0)  # the first step finds the scales
        assert found in (None, expected)


def test_one_kernel_sets_the_scales_of_many_layers(gpu: FakeGpu) -> None:
    update_scales = own("ops.fp8.state").update_scales
    maxima = np.random.default_rng(0).uniform(0, 100, (34, 3)).astype(np.float32)
    recipes = [gpu.lt.FP8(history=2)] * 33 + [gpu.lt.FP8(history=4)]
    states = [gpu.lt.FP8State(each) for each in recipes]
    expected = []
    for state, found in zip(states, maxima, strict=True):
        own("ops.fp8.state").arrays_of(state, gpu.cp.zeros((1, 1), np.float32))
        expected += [gpu.cp.asnumpy(array).copy() for array in (state.slots, state.history)]
        expected[-2][:, AMAX] = found
        state.slots[...] = gpu.cp.asarray(expected[-2])
        update_fp8_scales(expected[-2], expected[-1], state.recipe.headroom)
    gpu.synchronize_all()
    gpu.kernels.launched.clear()
    update_scales(states)
    gpu.synchronize_all()
    assert gpu.kernels.launched == ["fp8_scales"] * 3  # 32 layers and one more of one recipe, and one of another
    for array, wanted in zip((each for s in states for each in (s.slots, s.history)), expected, strict=True):
        np.testing.assert_array_equal(gpu.cp.asnumpy(array), wanted)
