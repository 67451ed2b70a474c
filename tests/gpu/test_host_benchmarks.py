"""The suite of host times in small: every contender can be called, and computes what the others do."""

from __future__ import annotations

import importlib.util
from typing import Any

import cupy as cp
import numpy as np
import pytest

from benchmarks import cold, host, host_builders, host_lt
from benchmarks.cases import AdamWStep
from benchmarks.host_cases import HOST, HostCase
from lt_runtime.problem import DType
from tests.gpu.helpers import to_host

HAS = {name: importlib.util.find_spec(name) is not None for name in ("torch", "nvmath")}
# PyTorch's remark on the thread that does its backward pass.
pytestmark = pytest.mark.filterwarnings("ignore:.*no current CUDA context.*:UserWarning")


@pytest.fixture(autouse=True)
def small_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    case = AdamWStep("small", ((64, 33), (7,), (4097,)), DType.FLOAT32)
    monkeypatch.setattr(host_builders, "ADAMW", case)


def is_missing(name: str, case: HostCase) -> bool:
    library = name.partition("_")[0]
    on_tensors = library == "nvmath" and case.kind == "linear_fwd"
    return not HAS.get(library, True) or (on_tensors and not HAS["torch"])


@pytest.mark.parametrize("case", HOST, ids=lambda case: case.name)
def test_every_contender_is_measured(case: HostCase) -> None:
    row = host.measure(case, 2)
    names = {*row.timings, *row.left_out}
    assert set(row.left_out) == {name for name in names if is_missing(name, case)}, row.left_out
    assert all(timing.median > 0 for timing in row.timings.values())
    assert set(row.setting["until_done_us"]) == set(row.timings)


def results(at: host_lt.Layer, *names: str) -> list[Any]:
    cp.cuda.Device().synchronize()
    return [to_host(getattr(at, name)) for name in names]


def test_our_forward_contenders_agree() -> None:
    at = host_lt.layer(64, 48, 40)
    host_lt.linear_forward_buffers(at)()
    y, z = results(at, "y", "z")
    for contender in (host_lt.linear_forward, host_lt.linear_inference, host_lt.linear_plan):
        at.y[...] = 0
        contender(at)()
        np.testing.assert_allclose(*results(at, "y"), y, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(*results(at, "z"), z, rtol=0.02, atol=0.02)


@pytest.mark.skipif(not HAS["torch"], reason="a peer, where it is installed")
def test_pytorch_computes_the_same() -> None:
    from benchmarks import host_torch

    at = host_lt.layer(64, 48, 40)
    host_lt.linear_both(at)()
    theirs = [host_torch.linear_forward(at)(), *host_torch.linear_both(at)()]
    for ours, other in zip(results(at, "y", "dx", "dw", "db"), theirs, strict=True):
        values = other.detach().float().cpu().numpy()
        assert np.linalg.norm(ours - values) <= 0.03 * np.linalg.norm(values)


@pytest.mark.skipif(not all(HAS.values()), reason="peers, where they are installed")
def test_nvmath_computes_the_same() -> None:
    from benchmarks import host_nvmath

    at = host_lt.layer(64, 48, 40)
    host_lt.linear_forward(at)()
    values = host_nvmath.linear_forward(at)().T.float().cpu().numpy()
    np.testing.assert_allclose(*results(at, "y"), values, rtol=0.02, atol=0.02)


def test_a_profile_of_our_calls() -> None:
    assert "matmul" in host.profile(HOST[0])


@pytest.mark.large
@pytest.mark.parametrize("task", cold.NAMES)
def test_a_second_process_finds_what_the_first_compiled(task: str) -> None:
    row = cold.row_of_firsts(task, [cold.pair(task)])
    assert set(row.timings) == {"lt", "lt_empty_cache", "lt_second"}
