"""Inference keeps FP8 copies of weights between calls, and makes them anew when the weights have been written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu
from tests.support.fp8_layers import BF16
from tests.support.kept_weights import CHANGES, Change, Inference, check_that_outputs_follow, inputs


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_outputs_follow(gpu: FakeGpu, tmp_path: Path, change: Change, captured: bool) -> None:
    check_that_outputs_follow(gpu, change, tmp_path, captured=captured)


def test_outputs_follow_other_arrays_and_loops_of_ones_own(gpu: FakeGpu) -> None:
    use = Inference(gpu, captured=False)
    weight = use.model.layers[0].weight
    weight.data = gpu.cp.asarray(np.full((64, 32), 0.01, BF16))
    assert use.outputs() == use.fresh_outputs()
    run = gpu.lt.Pass()
    use.model.backward(use.model.forward(use.x, run), run)
    weight.data.set(np.full((64, 32), 0.5, BF16))  # written in place, as a user's own optimizer does after backward
    assert use.outputs() == use.fresh_outputs()
    # A copied model has no FP8 copy of the weight, because nothing would renew the FP8 copy.
    assert copy.deepcopy(use.model.layers[0].scales.kept) is None


def test_outputs_follow_a_step_whose_optimizer_has_parameters_of_its_own(gpu: FakeGpu) -> None:
    use = Inference(gpu, captured=False)
    parameters = [gpu.lt.Parameter(each.data, each.grad, each.master) for each in use.model.parameters()]
    step = gpu.lt.TrainStep(use.model, gpu.lt.AdamW(parameters, lr=0.1), loss="mse", tune=False)
    target = gpu.cp.zeros((use.x.shape[0], use.model.outputs), BF16)
    for _ in range(3):
        gpu.synchronize_all()
        step(use.x, target)
        assert use.outputs() == use.fresh_outputs()


def casts(gpu: FakeGpu, run: Callable[[], object]) -> int:
    """The number of casts to FP8 that a call launches."""
    gpu.synchronize_all()  # runs earlier launches, which the pretended GPU runs only when it is waited for
    gpu.kernels.launched.clear()
    run()
    gpu.synchronize_all()
    return gpu.kernels.launched.count("cast_fp8")


@pytest.mark.parametrize("captured", [False, True])
def test_inference_casts_only_inputs_until_an_optimizer_is_made(gpu: FakeGpu, captured: bool) -> None:
    use = Inference(gpu, captured=captured)
    assert casts(gpu, lambda: use.model(inputs(gpu, 2))) == 2
    optimizer = gpu.lt.AdamW(use.model.parameters())
    # After an optimizer was made, only a captured graph goes on reading the FP8 copies of the weights (`w8`).
    assert [layer.scales.kept.w8 is not None for layer in use.model.layers] == 2 * [captured]
    assert casts(gpu, lambda: use.model(inputs(gpu, 3))) == 4
    assert casts(gpu, optimizer.step) == 2 * captured


def test_a_capture_without_kept_weights_casts_them(gpu: FakeGpu) -> None:
    use = Inference(gpu, captured=True)
    use.model.layers[0].weight.data = gpu.cp.asarray(np.ones((64, 32), BF16))
    gpu.stream.begin_capture()
    gpu.kernels.launched.clear()
    use.model(use.x, stream=gpu.stream)
    gpu.stream.end_capture()
    assert gpu.kernels.launched.count("cast_fp8") == 3
    gpu.synchronize_all()


def test_few_rows_are_in_fp8_if_the_weight_is_kept(gpu: FakeGpu) -> None:
    layer = gpu.lt.Linear(4096, 2048, dtype="bfloat16", seed=4, device="cuda", precision="fp8")
    x = gpu.cp.asarray(np.random.default_rng(3).standard_normal((16, 4096)).astype(BF16))
    run = gpu.lt.Pass(trains=False)
    # The first call computes the scales, and the second one makes the FP8 copy.
    assert [casts(gpu, lambda: layer.forward(x, run)) for _ in range(3)] == [4, 2, 1]
    gpu.lt.AdamW(layer.parameters())
    assert casts(gpu, lambda: layer.forward(x, run)) == 0
