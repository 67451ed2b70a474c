"""Inference in FP8 that keeps its weights between calls, and changes of the weights, for every kind of GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.fp8_layers import BF16

ROWS = 32


def made(gpu: Any, seed: int = 4) -> Any:
    return gpu.lt.MLP([32, 64, 48], "relu", dtype="bfloat16", seed=seed, device="cuda", precision=gpu.lt.FP8())


def inputs(gpu: Any, seed: int = 1) -> Any:
    return gpu.cp.asarray(np.random.default_rng(seed).standard_normal((ROWS, 32)).astype(BF16))


class Inference:
    """A model in use, whose calls are eager, or launches of a captured graph."""

    def __init__(self, gpu: Any, *, captured: bool) -> None:
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
        """The outputs of a new model, without kept FP8 weights, that is given the present weights and scales."""
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
    weight.data.set(np.full((64, 32), 0.01, BF16))
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
        each.grad.set(np.ones(each.grad.shape, BF16))
    return use.gpu.lt.AdamW(use.model.parameters(), lr=0.1)


def _train(use: Inference, path: Path) -> None:
    optimizer = use.gpu.lt.AdamW(use.model.parameters(), lr=0.01)
    step = use.gpu.lt.TrainStep(use.model, optimizer, loss="mse", tune=False)
    target = use.gpu.cp.asarray(np.ones((ROWS, 48), BF16))
    for _ in range(4):
        step(use.x, target)
        use.gpu.lt.evaluate(use.model, [(use.x, target)], loss="mse")


CHANGES: dict[str, Change] = {
    "assign": _assign,
    "load state dict": _load_state_dict,
    "copy averages": _copy_averages,
    "load file": _load_file,
    "load": _load,
    "scale": _scale,
    "write": _write,
    "step": _step,
    "replay steps": _replay_steps,
    "train": _train,
}


def check_that_outputs_follow(gpu: Any, change: Change, path: Path, *, captured: bool) -> None:
    use = Inference(gpu, captured=captured)
    before = use.outputs()
    assert before == use.fresh_outputs()
    gpu.synchronize_all()
    change(use, path)
    assert before != use.outputs() == use.fresh_outputs()
