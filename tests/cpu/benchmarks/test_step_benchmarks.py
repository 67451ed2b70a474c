"""Rows of the suites that measure training steps, on the pretended GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import options_of
from benchmarks.copies import Ceiling
from tests.support.fake_gpu import FakeGpu


@pytest.fixture
def steps(
    hurried: FakeGpu, benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """The module `steps`, whose turns make one step and take no time."""
    made, rng = benchmark_module("steps"), np.random.default_rng(0)

    def normal(shape: tuple[int, ...], dtype: str) -> Any:
        return hurried.cp.asarray(rng.standard_normal(shape).astype(dtype))

    def once(replays: Callable[[int], object]) -> Callable[[], float]:
        def turn() -> float:
            replays(1)
            hurried.synchronize_all()
            return 2.0

        return turn

    monkeypatch.setattr(made, "normal", normal)
    monkeypatch.setattr(made, "synchronize", hurried.synchronize_all)
    monkeypatch.setattr(made, "graph_turn", lambda contender, *_: once(contender.replays))
    monkeypatch.setattr(made, "timed_calls", lambda calls, *_: once(calls))
    monkeypatch.setattr(made, "memory_of", lambda *_: 100)
    monkeypatch.setattr(made.Setup, "restore", lambda setup: None)  # the pretended CuPy copies no memory
    return made


@pytest.mark.parametrize("form", ["feed_forward", "mixture", "dqn"])
def test_a_step_of_a_model_runs(
    hurried: FakeGpu, steps: Any, benchmark_module: Callable[[str], ModuleType], form: str
) -> None:
    models = benchmark_module("models")
    setup = steps.Setup(models.case(form, 16, 8, 16, 8, tokens=4 if form == "feed_forward" else 1), None)
    step = setup.step()
    losses = []
    for _ in range(8):
        loss = step(setup.x, setup.target)
        hurried.synchronize_all()
        losses.append(float(hurried.host_of(loss)))
    assert losses[-1] < losses[0]
    assert (step.ema is None) == (form != "dqn")


@pytest.mark.parametrize(
    ("suite", "names"),
    [
        ("steps", {"lt", "lt_untuned", "lt_call"}),
        ("models", {"lt", "lt_call"}),
        ("narrow", {"lt", "lt_one_kernel", "lt_layers"}),
        ("growth", {"lt"}),
    ],
)
def test_a_row_has_our_contenders_and_tells_which_peers_are_missing(
    hurried: FakeGpu,
    steps: Any,
    benchmark_module: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    suite: str,
    names: set[str],
) -> None:
    module: Any = benchmark_module(suite)
    options, stream = options_of([suite, "--rounds", "1"]), hurried.cp.cuda.Stream()
    case = steps.StepCase("small", "bf16", 64, (16, 16, 3), "relu", "mse")
    if suite == "models":
        case = module.case("towers", 16, 8, 16, 8)
        monkeypatch.setattr(module, "memory_of", lambda *_: 100)
    elif suite == "narrow":
        monkeypatch.setattr(module, "measured_copies", lambda _: Ceiling("fast", 4000.0, {}))
        monkeypatch.setattr(module.report, "machine", lambda: {"gpu": "NVIDIA H200"})
    if suite == "growth":
        row = module.measure(module.PARAMETERS, case, options, stream)
    else:
        row = (module.measure_case if suite == "steps" else module.measure)(case, options, stream)
    found = row.as_json()
    assert {*found["us"]} == names
    assert {name.split("_")[0] for name in found["left_out"]} == {"torch"}
    assert found["first_loss"]["lt"] > 0
    assert found["rows"] == case.rows
    assert found["flops"] == case.flops
    assert found.get("memory_bytes") == ({"lt": 100} if suite in ("steps", "models") else None)
    assert ("peak" in found.get("floors_us", {})) == (suite == "narrow")


def test_initial_values_are_repeated_and_have_the_range_of_drawn_ones(
    steps: Any, benchmark_module: Callable[[str], ModuleType]
) -> None:
    with benchmark_module("buffers").repeated_values():
        first, other = (np.random.default_rng(seed).uniform(-2.0, 2.0, (3, 1 << 19)) for seed in (0, 1))
    assert np.random.default_rng(0).random() != np.random.default_rng(1).random()
    assert first.dtype == np.float32
    assert (first != other).mean() > 0.99
    assert (first[2] == first[0]).all(), "it repeats after 2^20"
    np.testing.assert_allclose([first.min(), first.max(), first.std()], [-2.0, 2.0, 2 / 3**0.5], rtol=0.01)


def test_a_step_of_a_group_of_one_is_timed_beside_the_step_alone(
    hurried: FakeGpu,
    steps: Any,
    benchmark_module: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    scaling: Any = benchmark_module("scaling")
    monkeypatch.setattr(scaling, "graph_turn", steps.graph_turn)
    monkeypatch.setattr(hurried.cp.cuda.runtime, "getDeviceCount", lambda: 1, raising=False)
    case = scaling.GroupCase("small", "bf16", 64, (16, 16, 3), "relu", "mse")
    row = scaling.measure(case, options_of(["scaling", "--rounds", "1"]), str(tmp_path), hurried.cp.cuda.Stream())
    assert ({*row.timings}, {*row.left_out}) == ({"lt", "lt_group_of_one"}, {"lt_two"})
