"""The suite of host times in small: every contender can be called, and computes what the others do."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import cupy as cp
import numpy as np
import pytest

from benchmarks import cold, host
from benchmarks.__main__ import options_of
from benchmarks.host import CASES, HostCase
from benchmarks.internals import linear_plan
from tests.support.gpu_arrays import to_host

HAS = {name: importlib.util.find_spec(name) is not None for name in ("torch", "nvmath")}
# PyTorch's remark on the thread that does its backward pass.
pytestmark = pytest.mark.filterwarnings("ignore:.*no current CUDA context.*:UserWarning")


@pytest.fixture(autouse=True)
def small_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "GPT2", ((64, 33), (7,), (4097,)))


def is_missing(name: str, case: HostCase) -> bool:
    library = name.partition("_")[0]
    on_tensors = library == "nvmath" and case.name.startswith("linear_fwd")
    return not HAS.get(library, True) or (on_tensors and not HAS["torch"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_contender_is_measured(case: HostCase) -> None:
    row = host.measure(case, options_of(["host", "--rounds", "2"]))
    names = {*row.timings, *row.left_out}
    assert set(row.left_out) == {name for name in names if is_missing(name, case)}, row.left_out
    assert all(timing.median > 0 for timing in row.timings.values())
    assert set(row.setting["until_done_us"]) == set(row.timings)


def results(at: host.Layer, *names: str) -> list[Any]:
    cp.cuda.Device().synchronize()
    return [to_host(getattr(at, name)) for name in names]


def test_our_forward_contenders_agree() -> None:
    at = host.layer(64, 48, 40)
    host.linear_forward(at)()
    y, z = results(at, "y", "z")

    def alone(at: host.Layer) -> Any:
        return linear_plan(at.x, at.w, at.bias, at.y, at.z)

    for contender in (
        partial(host.linear_forward, keeps=False),
        host.linear_inference,
        host.linear_bound,
        alone,
    ):
        at.y[...] = 0
        contender(at)()
        np.testing.assert_allclose(*results(at, "y"), y, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(*results(at, "z"), z, rtol=0.02, atol=0.02)


@pytest.mark.skipif(not HAS["torch"], reason="a peer, where it is installed")
def test_pytorch_computes_the_same() -> None:
    from benchmarks.peers import torch_host

    at = host.layer(64, 48, 40)
    host.linear_both(at)()
    theirs = [torch_host.linear_forward(at)(), *torch_host.linear_both(at)()]
    for ours, other in zip(results(at, "y", "dx", "dw", "db"), theirs, strict=True):
        values = other.detach().float().cpu().numpy()
        assert np.linalg.norm(ours - values) <= 0.03 * np.linalg.norm(values)


@pytest.mark.skipif(not all(HAS.values()), reason="peers, where they are installed")
def test_nvmath_computes_the_same() -> None:
    from benchmarks.peers import nvmath

    at = host.layer(64, 48, 40)
    host.linear_forward(at)()
    values = nvmath.linear_forward(at)().T.float().cpu().numpy()
    np.testing.assert_allclose(*results(at, "y"), values, rtol=0.02, atol=0.02)


def test_a_profile_of_our_calls(capsys: pytest.CaptureFixture[str]) -> None:
    host.print_profiles("^matmul")
    assert capsys.readouterr().out.count("function calls") == 1


@pytest.mark.large
def test_a_process_that_measures_before_its_first_step() -> None:
    tuned, untuned = cold.measuring("mnist MLP BF16, batch 256")
    assert tuned["us"]["first"] > untuned["us"]["first"] > untuned["us"]["step"] > 0


@pytest.mark.large
@pytest.mark.parametrize("task", cold.NAMES)
def test_a_second_process_finds_what_the_first_compiled(task: str) -> None:
    row = cold.row_of_firsts(task, [cold.pair(task)])
    assert set(row.timings) == {"lt", "lt_empty_cache", "lt_second"}
