"""The kernels' suite in small: every contender can be captured, and does what the others do."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import cupy as cp
import numpy as np
import pytest

from benchmarks import buffers, kernels
from benchmarks.copies import Ceiling
from benchmarks.kernels import Case, measure_case
from benchmarks.suite import TORCH_COMPILE
from benchmarks.timing import cache_size, measure
from tests.support.gpu_arrays import to_host

HAS_TORCH = importlib.util.find_spec("torch") is not None
SHAPES = ((64, 33), (7,), (4097,))
CASES: list[Case] = [
    kernels.epilogue_backward(64, 48),
    kernels.epilogue_backward(64, 48, 0.1),
    kernels.epilogue_forward(64, 48, 0.1),
    kernels.dropout("float32", 64, 48),
    kernels.dropout("bfloat16", 64, 48),
    kernels.adamw_step("small", SHAPES, "float32"),
    kernels.adamw_step("small", SHAPES, "bfloat16", 1.0),
    kernels.cross_entropy(32, 50),
    kernels.inference(8, 64, 48),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_contender_is_measured(case: Case) -> None:
    builders = {name: build for name, build in case.builders(3).items() if name != TORCH_COMPILE}  # takes a minute
    timings, left_out = measure(builders, 3, 6, rounds=2, stream=cp.cuda.Stream(non_blocking=True))
    assert set(left_out) == (set() if HAS_TORCH else {name for name in builders if name.startswith("torch")})
    assert all(timing.median > 0 for timing in timings.values())


def test_a_row() -> None:
    case = replace(CASES[0], rotated=False)
    row = measure_case(case, 3, lambda _: Ceiling("copy", 4000.0, {}), cp.cuda.Stream(non_blocking=True))
    assert row.fraction_of_copy is not None
    assert row.as_json()["buffer_sets"] == 1
    assert cache_size() > 1 << 20


def test_a_contender_that_cannot_be_built_or_run_is_left_out() -> None:
    def build() -> Any:
        raise ValueError("no such thing\nat all")

    good = CASES[3].builders(1)["lt"]
    stream = cp.cuda.Stream(non_blocking=True)
    timings, left_out = measure({"bad": build, "good": good}, 1, 1, rounds=1, stream=stream)
    assert left_out == {"bad": "ValueError: no such thing"}
    assert set(timings) == {"good"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buffers_hold_normal_numbers_that_differ(dtype: str) -> None:
    first, second = (to_host(buffers.normal((512, 512), dtype)) for _ in range(2))
    assert abs(first.mean()) < 0.02
    assert abs(first.std() - 1) < 0.02
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.02


@pytest.mark.skipif(not HAS_TORCH, reason="a peer, where it is installed")
@pytest.mark.parametrize(("dtype", "max_norm"), [("float32", None), ("bfloat16", 1.0)])
def test_what_is_compiled_for_adamw_can_be_captured_as_it_is(
    dtype: str, max_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.peers import torch_kernels

    monkeypatch.setattr(torch_kernels, "_compiled", lambda task: task)
    builders = {"flat": lambda: torch_kernels.flat_adamw(SHAPES, dtype, max_norm)}
    timings, left_out = measure(builders, 1, 2, rounds=1, stream=cp.cuda.Stream(non_blocking=True))
    assert (set(timings), left_out) == ({"flat"}, {})


@pytest.mark.skipif(not HAS_TORCH, reason="a peer, where it is installed")
def test_pytorch_s_fused_layer_does_the_same() -> None:
    from benchmarks.peers import torch_kernels

    shapes = (8, 48), (64, 48), (64,)
    made = [tuple(buffers.normal(shape, "bfloat16") for shape in shapes)]
    plain, fused = (each(made).run(0, 0) for each in (torch_kernels.linear, torch_kernels.addmm_activation))
    np.testing.assert_allclose(plain.float().cpu().numpy(), fused.float().cpu().numpy(), rtol=0.02, atol=0.05)


@pytest.mark.skipif(not HAS_TORCH, reason="a peer, where it is installed")
def test_pytorch_does_the_same() -> None:
    from benchmarks.peers import torch_kernels

    stream, made = cp.cuda.get_current_stream(), buffers.matrices((64, 48), "bfloat16", 1, 3)
    kernels.epilogue_backward_pass(made).run(0, stream.ptr)
    dz, _ = torch_kernels.epilogue_backward(made).run(0, stream.ptr)
    np.testing.assert_allclose(to_host(made[0][2]), dz.float().cpu().numpy(), rtol=0.02, atol=1e-3)

    logits, targets = buffers.matrices((32, 50), "bfloat16", 1, 2), buffers.labels(32, 50)
    kernels.our_cross_entropy(logits, targets).run(0, stream.ptr)
    for contender in (torch_kernels.cross_entropy, torch_kernels.log_softmax_gradient):
        _, gradient = contender(logits, targets).run(0, stream.ptr)
        np.testing.assert_allclose(to_host(logits[0][1]), gradient.float().cpu().numpy(), rtol=0.05, atol=1e-3)
