"""The kernels' suite in small: every contender can be captured, and does what the others do."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import replace
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from benchmarks import buffers, kernel_cases, kernel_lt
from benchmarks.cases import AdamWStep, Case, CrossEntropy, Dropout, EpilogueBackward, EpilogueForward
from benchmarks.graphs import measure
from benchmarks.kernels import measure_case
from lt_runtime.problem import DType
from tests.gpu.helpers import to_host

HAS_TORCH = importlib.util.find_spec("torch") is not None
CLIPS = "max_norm" in inspect.signature(lt.AdamW).parameters
SHAPES = ((64, 33), (7,), (4097,))
CASES: list[Case] = [
    EpilogueBackward(64, 48),
    EpilogueBackward(64, 48, 0.1),
    EpilogueForward(64, 48, 0.1),
    Dropout(DType.FLOAT32, 64, 48),
    Dropout(DType.BFLOAT16, 64, 48),
    AdamWStep("small", SHAPES, DType.FLOAT32),
    AdamWStep("small", SHAPES, DType.BFLOAT16, 1.0 if CLIPS else None),
    CrossEntropy(32, 50),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_contender_is_measured(case: Case) -> None:
    builders = kernel_cases.builders(case, 3)
    timings, left_out = measure(builders, 3, 6, rounds=2, stream=cp.cuda.Stream(non_blocking=True))
    assert set(left_out) == (set() if HAS_TORCH else {name for name in builders if name.startswith("torch")})
    assert all(timing.median > 0 for timing in timings.values())


def test_a_row() -> None:
    case = replace(CASES[0], rotated=False)
    row = measure_case(case, 3, 4000.0, cp.cuda.Stream(non_blocking=True))
    assert row.fraction_of_copy is not None
    assert row.as_json()["buffer_sets"] == 1


def test_a_contender_that_cannot_be_built_or_run_is_left_out() -> None:
    def build() -> Any:
        raise ValueError("no such thing\nat all")

    good = kernel_cases.builders(CASES[3], 1)["lt"]
    stream = cp.cuda.Stream(non_blocking=True)
    timings, left_out = measure({"bad": build, "good": good}, 1, 1, rounds=1, stream=stream)
    assert left_out == {"bad": "ValueError: no such thing"}
    assert set(timings) == {"good"}


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_buffers_hold_normal_numbers_that_differ(dtype: DType) -> None:
    first, second = (to_host(buffers.normal((512, 512), dtype)) for _ in range(2))
    assert abs(first.mean()) < 0.02
    assert abs(first.std() - 1) < 0.02
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.02


@pytest.mark.skipif(not HAS_TORCH, reason="a peer, where it is installed")
def test_pytorch_does_the_same() -> None:
    from benchmarks import kernel_torch

    stream = cp.cuda.get_current_stream()
    backward, made = EpilogueBackward(64, 48), buffers.matrices((64, 48), DType.BFLOAT16, 1, 3)
    kernel_lt.epilogue_backward(backward, 0.0, made).run(0, stream.ptr)
    dz, _ = kernel_torch.epilogue_backward(backward, made).run(0, stream.ptr)
    np.testing.assert_allclose(to_host(made[0][2]), dz.float().cpu().numpy(), rtol=0.02, atol=1e-3)

    logits, targets = buffers.matrices((32, 50), DType.BFLOAT16, 1, 2), buffers.labels(32, 50)
    kernel_lt.cross_entropy(logits, targets).run(0, stream.ptr)
    for contender in (kernel_torch.cross_entropy, kernel_torch.log_softmax_gradient):
        _, gradient = contender(logits, targets).run(0, stream.ptr)
        np.testing.assert_allclose(to_host(logits[0][1]), gradient.float().cpu().numpy(), rtol=0.05, atol=1e-3)
