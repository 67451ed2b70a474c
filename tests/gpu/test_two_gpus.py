"""Operands on one GPU with a stream of another: an error names the GPU, nothing is written, both GPUs stay usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import DeviceError

pytestmark = pytest.mark.two_gpus

_SENTINEL = 7.0


class _Operands:
    """The arrays of a layer, the model and the training step on one of the two GPUs."""

    def __init__(self, device: int) -> None:
        generator = np.random.default_rng(0)
        with cp.cuda.Device(device):
            shapes = ((32, 48), (16, 48), (16,), (32, 16))
            self.x, self.w, self.b, self.dy = (cp.asarray(generator.standard_normal(s, np.float32)) for s in shapes)
            self.y = cp.full((32, 16), _SENTINEL, cp.float32)
            self.model = lt.MLP([48, 16], device=device)
            self.optimizer = lt.AdamW(self.model.parameters())
            self.step = lt.TrainStep(self.model, self.optimizer, loss="mse")

    def linear(self, stream: Any) -> None:
        lt.linear(self.x, self.w, self.b, activation="gelu", out=self.y, stream=stream)

    def linear_fwd(self, stream: Any) -> None:
        lt.linear_fwd(self.x, self.w, self.b, activation="relu", out=self.y, stream=stream)

    def linear_bwd(self, stream: Any) -> None:
        _, context = lt.linear_fwd(self.x, self.w, self.b, activation="relu")
        lt.linear_bwd(self.dy, context, stream=stream)

    def matmul(self, stream: Any) -> None:
        lt.matmul(self.x, self.w.T, out=self.y, stream=stream)

    def mse_loss(self, stream: Any) -> None:
        lt.mse_loss(self.y, self.dy, stream=stream)

    def train_step(self, stream: Any) -> None:
        self.step(self.x, self.dy, stream=stream)

    def adamw(self, stream: Any) -> None:
        self.optimizer.step(stream=stream)


_CALLS: list[Callable[[_Operands, Any], None]] = [
    _Operands.linear,
    _Operands.linear_fwd,
    _Operands.linear_bwd,
    _Operands.matmul,
    _Operands.mse_loss,
    _Operands.train_step,
    _Operands.adamw,
]


@pytest.mark.parametrize("call", _CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("as_handle", [False, True], ids=["object", "handle"])
def test_stream_of_another_gpu(call: Callable[[_Operands, Any], None], as_handle: bool) -> None:
    operands = _Operands(0)
    with cp.cuda.Device(1):
        foreign = cp.cuda.Stream(non_blocking=True)
    stream = foreign.ptr if as_handle else foreign
    for current in (0, 1):
        with cp.cuda.Device(current), pytest.raises(DeviceError, match="of GPU 1"):
            call(operands, stream)
    with cp.cuda.Device(0):
        cp.cuda.Device(0).synchronize()
        assert bool((operands.y == _SENTINEL).all())
        call(operands, None)
        cp.cuda.Device(0).synchronize()
    with cp.cuda.Device(1):
        foreign.synchronize()
        call(_Operands(1), foreign)
        foreign.synchronize()


@pytest.mark.parametrize("current", [0, 1])
def test_results_are_those_of_the_operands_gpu(current: int) -> None:
    found = []
    for device in (0, 1):
        operands = _Operands(device)
        with cp.cuda.Device(current):
            operands.linear(None)
        cp.cuda.Device(device).synchronize()
        assert operands.y.device.id == device
        found.append(operands.y.get().tobytes())
    assert found[0] == found[1]


def test_operands_on_two_gpus() -> None:
    first, second = _Operands(0), _Operands(1)
    with pytest.raises(DeviceError, match="GPU 1"):
        lt.linear(first.x, second.w, first.b, out=first.y)
