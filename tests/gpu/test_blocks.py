"""Models made of blocks on a GPU: a captured step against single launches and against the host."""

from __future__ import annotations

from collections import Counter
from runpy import run_path
from typing import Any

import cupy as cp
import numpy as np
import pytest
from hypothesis import given, settings

import lt_runtime as lt
from tests.programs.checks import EXAMPLES
from tests.support.block_trees import Tree, trees
from tests.support.real_gpu import RealGpu
from tests.support.strategies import COMPILING
from tests.support.tree_checks import SMOOTH, check_steps

WIDTH, HIDDEN, ROWS, OUTPUTS = 256, 384, 512, 64
(MIXTURE,) = (path for path in EXAMPLES if path.stem == "mixture")


def _model(device: str, dtype: str) -> lt.Block:
    options: dict[str, Any] = {"device": device, "dtype": dtype}

    def layer(seed: int) -> lt.Block:
        gated = lt.SwiGLU(WIDTH, HIDDEN, dropout=0.125, seed=seed, **options)
        return lt.Residual(lt.Chain(lt.RMSNorm(WIDTH, **options), gated))

    towers = (lt.Linear(WIDTH, WIDTH // 2, activation="gelu", seed=i, **options) for i in (3, 4))
    parts = [layer(1), layer(2), lt.Parallel(*towers, split=False), lt.LayerNorm(WIDTH, **options)]
    return lt.Chain(*parts, lt.Linear(WIDTH, OUTPUTS, seed=5, **options))


def _train(model: lt.Block, dtype: str, *, on_gpu: bool = True, **options: Any) -> list[Any]:
    """The losses of three steps, then the parameters' values."""
    generator, kind = np.random.default_rng(7), lt.Linear(1, 1, dtype=dtype, device="cpu").weight.data.dtype
    step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=1e-3), loss="mse", **options)
    losses = []
    for _ in range(3):
        x, target = (generator.standard_normal((8, ROWS // 8, n)).astype(kind) for n in (WIDTH, OUTPUTS))
        losses.append(float(step(*((cp.asarray(x), cp.asarray(target)) if on_gpu else (x, target)))))
    values = [each.data for each in model.parameters()]
    return [np.array(losses), *((cp.asnumpy(each) if on_gpu else each).astype(np.float32) for each in values)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_captured_step_has_the_bits_of_single_launches_and_the_host_s_values(dtype: str) -> None:
    graph = _train(_model("cuda", dtype), dtype)
    eager = _train(_model("cuda", dtype), dtype, graph=False)
    assert all(map(np.array_equal, graph, eager))
    host = _train(_model("cpu", dtype), dtype, on_gpu=False)
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    for found, expected in zip(graph, host, strict=True):
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=4e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 1e-2), ("bfloat16", 1e-1)])
@settings(COMPILING, max_examples=8)
@given(tree=trees(widths=(64, 64, 64, 20), **SMOOTH))
def test_random_trees(gpu: RealGpu, dtype: str, tolerance: float, tree: Tree, examples: Counter[str]) -> None:
    check_steps(gpu, tree, dtype, tolerance, cp.get_default_memory_pool().used_bytes)
    examples["trees of blocks on the GPU"] += 1


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 1e-2), ("bfloat16", 5e-2)])
def test_the_kernels_of_the_example_of_a_mixture_compute_its_formulas(dtype: str, tolerance: float) -> None:
    rng, mixture = np.random.default_rng(0), run_path(str(MIXTURE))["Mixture"]
    kind = lt.Linear(1, 1, dtype=dtype, device="cpu").weight.data.dtype
    x, dy = (rng.standard_normal((2, 19, width)).astype(kind) for width in (16, 20))

    def results(device: str, place: Any, back: Any) -> list[Any]:
        layers = [lt.Linear(16, width, seed=width, dtype=dtype, device=device) for width in (3, 20, 20, 20)]
        model, run = mixture(*layers), lt.Pass()
        arrays = [model.forward(place(x), run), model.backward(place(dy), run)]
        run.finish()
        return [back(each).astype(np.float32) for each in [*arrays, *(each.grad for each in model.parameters())]]

    for found, expected in zip(
        results("cuda", cp.asarray, cp.asnumpy), results("cpu", np.asarray, np.asarray), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
