"""The functions of benchmarks/internals.py, which call private parts of the package, on the pretended GPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import ml_dtypes  # noqa: F401  NumPy knows the name "bfloat16" once this is imported.
import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu


@pytest.fixture
def internals(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("internals")


def test_a_step_is_launched_by_its_graph(gpu: FakeGpu, internals: ModuleType) -> None:
    with internals.one_kernel_a_pass(False):
        model = gpu.lt.MLP([16, 32, 8], dtype="bfloat16", device="cuda")
        optimizer = gpu.lt.AdamW(model.parameters())
        step = gpu.lt.TrainStep(model, optimizer, loss="mse", batch_size=64, tune=False)
        step(*(gpu.cp.ones((64, size), model.dtype.numpy) for size in (16, 8)))
        gpu.synchronize()
        internals.launch_of(step)(gpu.cp.cuda.Stream().ptr)
    gpu.synchronize_all()
    assert optimizer.steps.item() == 2


def test_the_memory_of_a_step_is_its_arena_and_its_pool(
    gpu: FakeGpu, internals: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arena holds y in BF16, and the transposes of x and dy in FP8.

    It holds no weight in FP8: the graph reads the copy that the optimizer's update writes, outside of the arena.
    """
    precision = gpu.lt.FP8(fallback=False)
    model = gpu.lt.MLP([1024, 2048], dtype="bfloat16", device="cuda", precision=precision)
    optimizer = gpu.lt.AdamW(model.parameters())
    with internals.own_training_stream() as held:
        step = gpu.lt.TrainStep(model, optimizer, loss="mse", batch_size=32, tune=False)
        step(*(gpu.cp.ones((32, size), model.dtype.numpy) for size in (1024, 2048)))
        gpu.synchronize_all()
        # The pretended GPU's memory pool has no `total_bytes`, so that the test adds it.
        monkeypatch.setattr(step._gpu._pool, "total_bytes", lambda: 1000, raising=False)
        assert held(step) == 1000 + 32 * (2 * 2048 + 1024 + 2048) + 2 * 256  # 256 bytes each for scales and the loss
        del step


def test_epilogue_kernels_run_alone(gpu: FakeGpu, internals: ModuleType) -> None:
    rng, bf16 = {"seed": 1, "layer": 2, "step": 3}, np.dtype("bfloat16")
    dy, z, dz = (gpu.cp.ones((16, 24), bf16) for _ in range(3))
    internals.backward_pass((16, 24), 0.0, rng, db=True, transposed=False)(dy.data.ptr, z.data.ptr, dz.data.ptr, 0)
    internals.forward_pass((16, 24), 0.5, rng)(z.data.ptr, dy.data.ptr, 0)
    gpu.synchronize_all()
    np.testing.assert_allclose(gpu.host_of(dz).astype(np.float32), 1.0830, rtol=1e-2)  # This is GELU'(1).
    # With p = 0.5, y is 2 · GELU(1) for elements that dropout keeps, and 0 for dropped ones.
    assert {*np.unique(gpu.host_of(dy).astype(np.float32)).round(1)} == {0.0, np.float32(1.7)}


@pytest.mark.parametrize("masters", [False, True])
def test_an_update_writes_fp8(gpu: FakeGpu, internals: ModuleType, masters: bool) -> None:
    bf16, weights = np.dtype("bfloat16"), []
    for casts in (False, True):
        weight, grad = gpu.cp.ones((32, 256), bf16), gpu.cp.ones((32, 256), bf16)
        gpu.kernels.launched.clear()
        internals.fp8_update(weight, grad, masters=masters, casts=casts)(0)
        gpu.synchronize_all()
        assert gpu.kernels.launched == (["optimizer", "cast_fp8"] if casts else ["optimizer_fp8", "optimizer"])
        weights.append(gpu.host_of(weight).tobytes())
    assert weights[0] == weights[1]


def test_the_epilogues_in_fp8_run_alone(gpu: FakeGpu, internals: ModuleType) -> None:
    z, dy = (gpu.cp.ones((16, 32), np.dtype("bfloat16")) for _ in range(2))
    out = gpu.cp.ones((16, 32), np.uint8).view("float8_e4m3fn")
    turned = [gpu.cp.ones((32, 16), np.uint8).view(each) for each in ("float8_e4m3fn", "float8_e5m2")]
    internals.fp8_pass((16, 32), backward=False)(z.data.ptr, out.data.ptr, turned[0].data.ptr, 0)
    internals.fp8_pass((16, 32), backward=True)(z.data.ptr, dy.data.ptr, turned[1].data.ptr, 0)
    gpu.synchronize_all()
    # GELU(1) = 0.841 and GELU'(1) = 1.083, rounded
    for found, value in ((out, 0.8125), (turned[0], 0.8125), (turned[1], 1.0)):
        assert (gpu.host_of(found).astype(np.float32) == value).all()


def test_gated_activations_in_fp8_run_alone(gpu: FakeGpu, internals: ModuleType) -> None:
    h, dy = (gpu.cp.ones((16, cols), np.dtype("bfloat16")) for cols in (64, 32))
    y, dh = (
        [gpu.cp.ones(each, np.uint8).view(dtype) for each in (shape, shape[::-1])]
        for shape, dtype in (((16, 32), "float8_e4m3fn"), ((16, 64), "float8_e5m2"))
    )
    for given, results in (((h,), y), ((h, dy), dh)):
        run = internals.gated_fp8_pass((16, 32), backward=len(given) > 1)
        run(*(each.data.ptr for each in (*given, *results)), 0)
    gpu.synchronize_all()
    # SiLU(1) = 0.731 and SiLU'(1) = 0.928, rounded to E4M3 in y and to E5M2 in dh
    assert all((gpu.host_of(each).astype(np.float32) == 0.75).all() for each in y)
    rows, turned = (gpu.host_of(each).astype(np.float32) for each in dh)
    assert (rows == turned.T).all()
    assert [{*each.flat} for each in (rows[:, :32], rows[:, 32:])] == [{0.875}, {0.75}]


def test_a_second_process_counts_its_plans(gpu: FakeGpu, internals: ModuleType) -> None:
    process = internals.SecondProcess()
    process.build(import_module("benchmarks.layers").Block("test", 16, 24, 8, "bf16", "gelu"))
    assert (len(process.us), process.known, process.measurements) == (4, 0, 0)


# The tensor that forward saves differs between these activations.
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_all_splits_of_a_block_compute_the_same(gpu: FakeGpu, internals: ModuleType, activation: str) -> None:
    layers, generator = import_module("benchmarks.layers"), np.random.default_rng(0)

    def random(shape: tuple[int, ...], dtype: str) -> Any:
        return gpu.cp.asarray(generator.standard_normal(shape).astype(dtype))

    block = layers.Block("test", 24, 16, 8, "fp32", activation)
    at = layers.arrays(block, random)
    ours, candidates, facts = layers._others(block, [at])
    assert {*facts["splits"]} == {"lt", *ours} == {"lt", "lt_priors", "lt_fused_top1", "lt_split_top1"}
    results = []
    for build in (*ours.values(), *candidates.values()):
        build().run(0, 0)
        gpu.synchronize_all()
        results.append([gpu.host_of(array).copy() for array in (at.y2, at.dx, at.dw1, at.db1, at.dw2, at.db2)])
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            np.testing.assert_allclose(first, second, rtol=1e-3, atol=1e-3)
