"""Inference keeps weights in FP8 between calls, and they follow whatever is written into the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu
from tests.support.fp8_layers import BF16

ROWS = 32


def made(gpu: FakeGpu, seed: int = 4) -> Any:
    return gpu.lt.MLP([32, 64, 48], "relu", dtype="bfloat16", seed=seed, device="cuda", precision=gpu.lt.FP8())


def inputs(gpu: FakeGpu, seed: int = 1) -> Any:
    return gpu.cp.asarray(np.random.default_rng(seed).standard_normal((ROWS, 32)).astype(BF16))


class Inference:
    """A model in use, whose calls are eager, or launches of a captured graph."""

    def __init__(self, gpu: FakeGpu, *, captured: bool) -> None:
        self.gpu, self.model, self.x = gpu, made(gpu), inputs(gpu)
        self.run = lambda: self.model(self.x, stream=gpu.stream)
        for _ in range(2):  # the first call finds the scales
            self.run()
        if captured:
            gpu.stream.begin_capture()
            y = self.run()
            graph = gpu.stream.end_capture()
            self.run = lambda: (graph.launch(gpu.stream), y)[1]

    def outputs(self) -> bytes:
        self.gpu.synchronize_all()
        y = self.run()
        self.gpu.synchronize_all()
        return self.gpu.host_of(y).tobytes()

    def fresh_outputs(self) -> bytes:
        """Of a model that is made for this call, with the present weights and scales."""
        fresh = made(self.gpu, seed=9)
        fresh.load_state_dict(self.model.state_dict())
        for layer, source in zip(fresh.layers, self.model.layers, strict=True):
            layer.scales.load_state_dict(source.scales.state_dict(), like=layer.weight.data)
        y = fresh(self.x)
        self.gpu.synchronize_all()
        return self.gpu.host_of(y).tobytes()


Change = Callable[[Inference, Path], object]


def _assign(use: Inference, path: Path) -> None:
    use.model.layers[0].weight.assign(np.full((64, 32), 0.01))


def _load_state_dict(use: Inference, path: Path) -> None:
    use.model.load_state_dict(made(use.gpu, seed=5).state_dict())


def _copy_averages(use: Inference, path: Path) -> None:
    use.gpu.lt.EMA(made(use.gpu, seed=5)).copy_to(use.model)


def _load_file(use: Inference, path: Path) -> None:
    other = made(use.gpu, seed=5)
    other(inputs(use.gpu, 2))
    use.gpu.lt.save_model(path / "file", other)
    use.gpu.lt.load_checkpoint(path / "file", use.model)


def _load(use: Inference, path: Path) -> None:
    use.gpu.lt.save(path / "file", model=made(use.gpu, seed=5))
    use.gpu.lt.load(path / "file", model=use.model)


def _scale(use: Inference, path: Path) -> None:
    """Makes the scale of a weight so small that most of its digits are lost."""
    state = use.model.layers[0].scales.state_dict()
    state["slots"][1, :2] = 4, 1 / 4
    use.model.layers[0].scales.load_state_dict(state)


def _write(use: Inference, path: Path) -> None:
    weight = use.model.layers[0].weight
    weight.data[...] = 0.01
    weight.renew_copies()


def _step(use: Inference, path: Path) -> None:
    optimizer = _optimizer(use)
    for _ in range(2):
        optimizer.step(stream=use.gpu.stream)


def _replay_steps(use: Inference, path: Path) -> None:
    optimizer = _optimizer(use)
    optimizer.step(stream=use.gpu.stream)
    use.gpu.stream.begin_capture()
    optimizer.step(stream=use.gpu.stream)
    graph = use.gpu.stream.end_capture()
    use.outputs()
    graph.launch(use.gpu.stream)


def _optimizer(use: Inference) -> Any:
    for each in use.model.parameters():
        each.grad[...] = 1
    return use.gpu.lt.AdamW(use.model.parameters(), lr=0.1)


def _train(use: Inference, path: Path) -> None:
    optimizer = use.gpu.lt.AdamW(use.model.parameters(), lr=0.01)
    step = use.gpu.lt.TrainStep(use.model, optimizer, loss="mse", tune=False)
    target = use.gpu.cp.asarray(np.ones((ROWS, 48), BF16))
    for _ in range(4):
        step(use.x, target)
        use.gpu.lt.evaluate(use.model, [(use.x, target)], loss="mse")


CHANGES: list[Change] = [
    _assign,
    _load_state_dict,
    _copy_averages,
    _load_file,
    _load,
    _scale,
    _write,
    _step,
    _replay_steps,
    _train,
]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_outputs_follow(gpu: FakeGpu, tmp_path: Path, change: Change, captured: bool) -> None:
    use = Inference(gpu, captured=captured)
    before = use.outputs()
    assert before == use.fresh_outputs()
    gpu.synchronize_all()
    change(use, tmp_path)
    assert before != use.outputs() == use.fresh_outputs()


def test_outputs_follow_other_arrays_and_loops_of_ones_own(gpu: FakeGpu) -> None:
    use = Inference(gpu, captured=False)
    weight = use.model.layers[0].weight
    weight.data = gpu.cp.asarray(np.full((64, 32), 0.01, BF16))
    assert use.outputs() == use.fresh_outputs()
    run = gpu.lt.Pass()
    use.model.backward(use.model.forward(use.x, run), run)
    weight.data[...] = 0.5  # as an optimizer of one's own does after backward
    assert use.outputs() == use.fresh_outputs()
    assert copy.deepcopy(use.model.layers[0].scales.kept) is None  # nothing would renew a copied model's


def casts(gpu: FakeGpu, run: Callable[[], object]) -> int:
    """Number of casts that a call launches."""
    gpu.kernels.launched.clear()
    run()
    gpu.synchronize_all()
    return gpu.kernels.launched.count("cast_fp8")


@pytest.mark.parametrize("captured", [False, True])
def test_inference_casts_only_inputs_until_an_optimizer_is_made(gpu: FakeGpu, captured: bool) -> None:
    use = Inference(gpu, captured=captured)
    assert casts(gpu, lambda: use.model(inputs(gpu, 2))) == 2
    optimizer = gpu.lt.AdamW(use.model.parameters())
    assert [layer.scales.kept.w8 is not None for layer in use.model.layers] == 2 * [captured]  # only graphs read it
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
    # The first call finds the scales, and the second one makes the copy.
    assert [casts(gpu, lambda: layer.forward(x, run)) for _ in range(3)] == [4, 2, 1]
    gpu.lt.AdamW(layer.parameters())
    assert casts(gpu, lambda: layer.forward(x, run)) == 0
