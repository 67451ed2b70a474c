"""The benchmark suites on small cases give complete rows, and all contenders of a case compute the same results."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
import pytest

from benchmarks import buffers, cold, fp8, growth, host, kernels, models, narrow, splits, steps, tuning
from benchmarks.__main__ import options_of
from benchmarks.copies import Ceiling
from benchmarks.host import HostCase
from benchmarks.internals import forget_plans
from benchmarks.kernels import Case
from benchmarks.layers import Arrays, Block, arrays, blocks, measure_block, run_block, tune
from benchmarks.steps import Setup, StepCase
from benchmarks.suite import TORCH_COMPILE, plan_cache
from benchmarks.timing import measure
from lt_runtime.problem import Activation
from lt_runtime.reference import activate, derivative
from tests.support.gpu_arrays import to_host

HAS = {name: importlib.util.find_spec(name) is not None for name in ("torch", "jax")}
with_torch = pytest.mark.skipif(not HAS["torch"], reason="a peer, where it is installed")
COPIES = Ceiling("copy", 4000.0, {})
SHAPES = ((64, 33), (7,), (4097,))
KERNELS: list[Case] = [
    kernels.epilogue_backward(64, 48),
    kernels.epilogue_backward(64, 48, 0.1),
    kernels.epilogue_forward(64, 48, 0.1),
    kernels.gated(64, 48, 0.1),
    kernels.gated(64, 48, backward=True),
    kernels.gated(64, 48, 0.1, backward=True),
    *(kernels.norm("layer_norm", 64, 48, backward=backward) for backward in (False, True)),
    *(kernels.norm("rms_norm", 64, 48, backward=backward, adds=True) for backward in (False, True)),
    kernels.cast_fp8(64, 128),
    *(make(64, 128, backward=each) for make in (kernels.epilogue_fp8, kernels.gated_fp8) for each in (False, True)),
    *(kernels.adamw_fp8(64, 128, masters=masters) for masters in (False, True)),
    kernels.dropout("float32", 64, 48),
    kernels.dropout("bfloat16", 64, 48),
    kernels.adamw_step("small", SHAPES, "float32"),
    kernels.adamw_step("small", SHAPES, "bfloat16", 1.0),
    kernels.cross_entropy(32, 50),
    kernels.cross_entropy(32, 50, weighted=True),
    kernels.elementwise_loss("bce_with_logits", 32, 50, weighted=True),
    kernels.inference(8, 64, 48),
]
BLOCKS = [Block("small", 96, 64, 40, kind, activation) for kind in ("bf16", "tf32") for activation in ("gelu", "relu")]
CLASSES = StepCase("small", "tf32", 64, (48, 32, 16), "relu", "cross_entropy")
STEPS = [CLASSES, replace(CLASSES, kind="bf16"), replace(CLASSES, kind="bf16", activation="gelu", loss="mse")]
MODELS = [
    models.case("stack", 256, 64, 96, layers=2),
    models.case("towers", 256, 32, 64, 16),
    models.case("feed_forward", 256, 64, 96, layers=2, tokens=32),
    models.case("autoencoder", 256, 64, 32),
    models.case("mixture", 256, 64, 32),
    models.case("dqn", 256, 64, 32, 8),
]
NARROW = StepCase("narrow", "bf16", 256, (16, 16, 3), "relu", "mse")


def name_of(case: Any) -> str:
    return f"{case.name} {case.loss}" if isinstance(case, StepCase) else case.name


def asked(suite: str, *options: str) -> argparse.Namespace:
    return options_of([suite, "--rounds", "2", *options])


@pytest.fixture
def stream() -> Any:
    return cp.cuda.Stream(non_blocking=True)


# Tests that measure whole rows, from the case to the result.


@pytest.mark.parametrize("case", KERNELS, ids=name_of)
def test_every_contender_of_a_kernel_is_measured(case: Case, stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "measured_copies", lambda _: COPIES)
    row = kernels.measure_case(case, asked("kernels"), stream)
    names = {name for name in case.builders(1) if name != TORCH_COMPILE}  # the real measurement takes a minute
    assert {*row.left_out} == (set() if HAS["torch"] else {name for name in names if name.startswith("torch")})
    assert {*row.timings, *row.left_out} == names
    assert row.as_json()["fraction_of_copy"] > 0


@pytest.mark.parametrize("case", host.CASES, ids=name_of)
# PyTorch warns that the thread of its backward pass has no CUDA context.
@pytest.mark.filterwarnings("ignore:.*no current CUDA context.*:UserWarning")
def test_every_contender_of_the_host_is_measured(case: HostCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "GPT2", SHAPES)
    row = host.measure(case, asked("host"))
    missing = {name for name in row.left_out if not HAS.get(name.partition("_")[0], True)}
    assert {*row.left_out} == missing, row.left_out
    assert all(timing.median > 0 for timing in row.timings.values())


def test_a_row_of_layers(stream: Any) -> None:
    row = measure_block(BLOCKS[0], asked("layers"), stream).as_json()
    ours = {"lt", "lt_priors", "lt_fused_top1", "lt_split_top1"}
    assert {*row["us"]} == ours | ({"torch_graph"} if HAS["torch"] else set())
    assert row["chosen_vs_best"] >= 1.0
    assert row["candidates"]
    assert row["tuning_s"] > 0
    assert {*measure_block(BLOCKS[1], asked("layers", "--ours"), stream).as_json()["us"]} == {"lt"}
    compared = measure_block(BLOCKS[1], asked("layers", "--jax"), stream, strategies=False)
    assert {*compared.timings} == {
        "lt",
        *(name for name, has in (("torch_graph", "torch"), ("jax", "jax")) if HAS[has]),
    }


def test_rows_of_growth(stream: Any) -> None:
    cases = {growth.ROWS: BLOCKS[0], growth.PARAMETERS: STEPS[2], growth.LAYERS: STEPS[2]}
    for (quantity, case), size in zip(cases.items(), (96, STEPS[2].parameters, 2), strict=True):
        row = growth.measure(quantity, case, asked("growth"), stream).as_json()
        theirs = {"torch_graph"} if HAS["torch"] and quantity != growth.LAYERS else set()
        assert ({*row["us"]}, row["size"]) == ({"lt"} | theirs, size)


def test_a_row_of_steps(stream: Any) -> None:
    row = steps.measure_case(STEPS[2], asked("steps"), stream).as_json()
    theirs = {f"torch_graph{call}{way}" for call in ("", "_call") for way in ("", "_autocast", "_bf16")}
    assert {*row["us"]} == {"lt", "lt_untuned", "lt_call"} | (theirs if HAS["torch"] else set())
    assert row["memory_bytes"]["lt"] > 0
    assert {*steps.measure_calls(STEPS[1], asked("steps", "--ours"), stream).as_json()["us"]} == {"lt_call"}
    prefetched = steps.measure_prefetch(STEPS[2], asked("steps"), stream).as_json()
    assert {*prefetched["us"]} == {"gpu_batches", "prefetch"}


@pytest.mark.parametrize("case", MODELS, ids=name_of)
def test_a_row_of_models(case: models.ModelCase, stream: Any) -> None:
    row = models.measure(case, asked("models", "--ours"), stream).as_json()
    assert {*row["us"]} == {"lt", "lt_call"}, row.get("left_out")
    assert row["memory_bytes"]["lt"] > 2 * 3 * case.parameters
    setup = Setup(case, stream)
    made = {"lt": steps.contender(setup)}
    for name, build in models.peers(setup, asked("models", "--jax")):
        if name != TORCH_COMPILE and HAS[name.partition("_")[0]]:  # compiling takes a minute
            made[name] = build()
    for each in made.values():
        assert each.first_loss == pytest.approx(made["lt"].first_loss, rel=0.02)
        each.replays(2)
        each.calls(2)
        stream.synchronize()


def test_a_row_of_narrow(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "measured_copies", lambda _: COPIES)
    row = narrow.measure(NARROW, asked("narrow", "--jax"), stream).as_json()
    theirs = {name for name, has in (("torch_graph", "torch"), ("jax", "jax")) if HAS[has]}
    assert all(loss == pytest.approx(row["first_loss"]["lt"], rel=0.02) for loss in row["first_loss"].values())
    assert {*row["us"]} == {"lt", "lt_one_kernel", "lt_layers"} | theirs
    assert row["floors_us"]["copy"] == pytest.approx(narrow.least_bytes(NARROW) / 4000e3, abs=1e-4)


@pytest.mark.usefixtures("fp8_products")
def test_rows_of_fp8(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "SUSTAINED_US", 1e4)
    case = fp8.case((64, 128, 64), 256)
    row = fp8.measure_compared(case, asked("fp8", "--ours"), stream).as_json()
    assert {*row["us"]} == {*row["sustained_us"]} == {"lt", "lt_bf16", "lt_exact_backward"}
    assert row["memory_ratio"] > 0
    assert {*fp8.measure(case, asked("fp8"), stream).timings} == {"lt", "lt_bf16"}
    inference = fp8.measure_inference(case, asked("fp8"), stream)
    assert {*inference.timings, *inference.left_out} == {"lt", "lt_bf16"}
    setup = Setup(case, stream)
    ours, build = steps.contender(setup), dict(fp8.peers(setup, asked("fp8")))["torch_bf16_graph"]
    if HAS["torch"]:
        assert build().first_loss == pytest.approx(ours.first_loss, rel=0.02)


def test_rows_of_tuning(tmp_path: Path, stream: Any) -> None:
    (tmp_path / "first").mkdir()
    row = tuning.measure(BLOCKS[0], asked("tuning"), str(tmp_path / "first"), stream).as_json()
    assert row["tuning_s"] > 0
    block = next(block for block in blocks() if block.layer == (64, 64, 64))
    with plan_cache(str(tmp_path)):
        tune(block)
        second = tuning.measure_second_process([block.name], str(tmp_path), None).as_json()
    assert (second["measurements"], second["known"], len(second["plans_us"])) == (0, 4, 4)


@pytest.mark.large
def test_rows_of_cold() -> None:
    tuned, untuned = cold.measuring("mnist MLP BF16, batch 256")
    assert tuned["us"]["first"] > untuned["us"]["first"] > untuned["us"]["step"] > 0
    for task in cold.NAMES:
        row = cold.row_of_firsts(task, [cold.pair(task)])
        assert {*row.timings} == {"lt", "lt_empty_cache", "lt_second"}


# Tests that all contenders of a case compute the same.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buffers_hold_normal_numbers_that_differ(dtype: str) -> None:
    first, second = (to_host(buffers.normal((512, 512), dtype)) for _ in range(2))
    assert abs(first.mean()) < 0.02
    assert abs(first.std() - 1) < 0.02
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.02


@with_torch
def test_pytorch_s_kernels_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.peers import torch_kernels

    def close(ours: Any, theirs: Any) -> None:
        np.testing.assert_allclose(to_host(ours), theirs.detach().float().cpu().numpy(), rtol=0.05, atol=1e-3)

    handle, made = cp.cuda.get_current_stream().ptr, buffers.matrices((64, 48), "bfloat16", 1, 3)
    kernels.epilogue_backward_pass(made)().run(0, handle)
    close(made[0][2], torch_kernels.epilogue_backward(made).run(0, handle)[0])

    logits, targets = buffers.matrices((32, 50), "bfloat16", 1, 2), buffers.labels(32, 50)
    weights = {"row_weights": abs(buffers.normal((32,), "float32"))}
    weights["class_weights"] = abs(buffers.normal((50,), "float32"))
    for given, others in (({}, (torch_kernels.log_softmax_gradient,)), (weights, ())):
        kernels.our_loss("cross_entropy", logits, targets, **given).run(0, handle)
        for contender in (partial(torch_kernels.cross_entropy, **given), *others):
            close(logits[0][1], contender(logits, targets).run(0, handle)[1])

    layer = [tuple(buffers.normal(shape, "bfloat16") for shape in ((8, 48), (64, 48), (64,)))]
    plain, fused = (each(layer).run(0, 0) for each in (torch_kernels.linear, torch_kernels.addmm_activation))
    np.testing.assert_allclose(plain.float().cpu().numpy(), fused.float().cpu().numpy(), rtol=0.02, atol=0.05)

    monkeypatch.setattr(torch_kernels, "_compiled", lambda task: task)
    for dtype, max_norm in (("float32", None), ("bfloat16", 1.0)):
        builders = {"flat": partial(torch_kernels.flat_adamw, SHAPES, dtype, max_norm)}
        assert not measure(builders, 1, 2, 1, cp.cuda.Stream(non_blocking=True)).left_out


def results(at: host.Layer, *names: str) -> list[Any]:
    cp.cuda.Device().synchronize()
    return [to_host(getattr(at, name)) for name in names]


def test_calls_of_the_host_compute_the_same() -> None:
    at = host.layer(64, 48, 40)
    host.both(at)()
    y, z, *gradients = results(at, "y", "z", "dx", "dw", "db")
    inference = partial(host.forward, at, "y", operation="linear")
    for build in (partial(host.forward, at, "y"), inference, partial(host.bound, at)):
        at.y[...] = 0
        build()()
        np.testing.assert_allclose(*results(at, "y"), y, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(*results(at, "z"), z, rtol=0.02, atol=0.02)
    theirs: list[Any] = []
    if HAS["torch"]:
        from benchmarks.peers import torch_host

        theirs = [torch_host.linear_forward(at)(), *torch_host.linear_both(at)()]
    for ours, other in zip((y, *gradients), theirs, strict=bool(theirs)):
        values = other.detach().float().cpu().numpy()
        assert np.linalg.norm(ours - values) <= 0.03 * np.linalg.norm(values)


def expected(block: Block, at: Arrays) -> dict[str, Any]:
    """Computes a block's results in float64; each pass uses the stored results of earlier passes as its inputs."""
    with np.errstate(invalid="ignore"):  # A buffer that a split does not use has arbitrary contents.
        have = {name: to_host(array).astype(np.float64) for name, array in at._asdict().items()}
    activation = Activation(block.activation)
    z = have["x"] @ have["w1"].T + have["b1"]
    return {
        "y1": activate(z, activation),
        "y2": have["y1"] @ have["w2"].T + have["b2"],
        "dw2": have["dy"].T @ have["y1"],
        "db2": have["dy"].sum(0),
        "dz1": (have["dy"] @ have["w2"]) * derivative(z, activation),
        "db1": have["dz1"].sum(0),
        "dw1": have["dz1"].T @ have["x"],
        "dx": have["dz1"] @ have["w1"],
    }


@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
def test_all_splits_of_a_block_compute_the_block(block: Block) -> None:
    chain = splits.chain_of(block)
    fused, _ = splits.fused_first(chain)
    for plans in (fused, splits.split_first(chain), splits.by_priors(chain), None):
        at, handle = arrays(block), cp.cuda.get_current_stream().ptr
        if plans is None:
            run_block(block, at, handle)
        else:
            plans.run(Arrays(*(array.data.ptr for array in at)), handle)
        for name, wanted in expected(block, at).items():
            far = np.abs(to_host(getattr(at, name)).astype(np.float64) - wanted) > 0.02 * np.abs(wanted).max()
            # Rounding may move a pre-activation near 0 across ReLU's corner.
            assert far.mean() <= 0.002, (name, plans and splits.split_of(plans))
    others: list[list[Any]] = []
    if HAS["torch"]:
        from benchmarks.peers import torch_kernels

        y, gradients = torch_kernels.block(block, [at]).run(0, handle)
        others.append([each.double().cpu().numpy() for each in (y, *gradients)])
    if HAS["jax"]:
        from benchmarks.peers import jax_layers

        state: Any = jax_layers.block(block, [at]).capture(lambda *_: None, 2, 1, None)()
        y, gradients = state[1][0]
        others.append([np.asarray(each, np.float64) for each in (y, *gradients)])
    for theirs in others:
        for name, values in zip(("y2", "dx", "dw1", "db1", "dw2", "db2"), theirs, strict=True):
            ours = to_host(getattr(at, name)).astype(np.float64)
            off = np.linalg.norm(values - ours) / np.linalg.norm(ours)
            assert off <= (0.1 if block.activation == "relu" else 0.03), (name, off)


@pytest.mark.parametrize("case", STEPS, ids=name_of)
def test_all_steps_begin_with_the_same_loss(case: StepCase, stream: Any) -> None:
    with plan_cache():
        setup = Setup(case, stream)
        made = [steps.contender(setup) for _ in range(2)]
        assert made[0].first_loss == made[1].first_loss, "the initial parameters are put back"
        assert tune(case).seconds > 0
        forget_plans(case)
        made.append(steps.contender(setup))
    before = to_host(setup.model.layers[0].weight.data)
    made[0].replays(3)
    made[1].calls(2)
    stream.synchronize()
    assert setup.optimizer.steps.item() == 8
    assert not np.array_equal(before, to_host(setup.model.layers[0].weight.data))
    if HAS["torch"]:
        from benchmarks.peers import torch_steps

        made += [torch_steps.contender(setup, way) for way in case.ways]
    if HAS["jax"]:
        from benchmarks.peers import jax

        made.append(jax.step(setup))
        assert made[-1].turn is not None
        assert made[-1].turn() > 0
    for each in made[1:]:
        assert each.first_loss == pytest.approx(made[0].first_loss, rel=0.02)
    for each in made[3:]:
        assert each.memory > sum(array.nbytes for array in (setup.x, setup.target))
        each.replays(2)
        each.calls(2)
        stream.synchronize()
