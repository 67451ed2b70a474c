"""Our contenders of the suite `models` on the pretended GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu


@pytest.mark.parametrize("form", ["feed_forward", "mixture", "dqn"])
def test_a_step_of_a_model_runs(
    hurried: FakeGpu, benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    models, steps, rng = benchmark_module("models"), benchmark_module("steps"), np.random.default_rng(0)

    def normal(shape: tuple[int, ...], dtype: str) -> Any:
        return hurried.cp.asarray(rng.standard_normal(shape).astype(dtype))

    monkeypatch.setattr(steps, "normal", normal)
    monkeypatch.setattr(steps, "synchronize", hurried.synchronize_all)
    setup = steps.Setup(models.case(form, 16, 8, 16, 8, tokens=4 if form == "feed_forward" else 1), None)
    step = setup.step()
    losses = []
    for _ in range(8):
        loss = step(setup.x, setup.target)
        hurried.synchronize_all()
        losses.append(float(hurried.host_of(loss)))
    assert losses[-1] < losses[0]
    assert (step.ema is None) == (form != "dqn")
