"""Loses the CUDA context in the replay of a training step: a kernel of the step's own loss writes to a bad address.

`python -m tests.support.lost_context` runs this on a GPU, and fails unless the first error names the step and later
calls say that the context is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np

import lt_runtime as lt
from lt_runtime.errors import GpuError

_WRITE = cp.RawKernel('extern "C" __global__ void write_to(int** address) { **address = 1; }', "write_to")
_BAD = 16


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except GpuError as error:
        return str(error)
    raise AssertionError("nothing has failed")


def main() -> None:
    """Runs the program: loses the context, and checks the errors of the calls."""
    good, number = cp.zeros(1, np.int32), cp.zeros((), np.float32)
    address = cp.asarray([good.data.ptr])

    def loss(outputs: Any, target: Any, gradient: Any, stream: int) -> Any:
        _WRITE((1,), (1,), (address,))
        return number

    model = lt.MLP([64, 32, 16], dtype="float32", device="cuda")
    step = lt.TrainStep(model, lt.AdamW(model.parameters()), loss=loss, tune=False)
    x, target = cp.zeros((8, 64), np.float32), cp.zeros((8, 16), np.float32)
    step(x, target)
    cp.cuda.runtime.deviceSynchronize()
    address.set(np.array([_BAD]))
    step(x, target)
    first = _message(step.metrics)
    print(first)
    assert first.startswith("TrainStep("), first
    later = {
        "step": lambda: step(x, target),
        "another batch size": lambda: step(x[:4], target[:4]),
        "metrics": step.metrics,
        "linear_fwd": lambda: lt.linear_fwd(x, model.layers[0].weight.data),
        "bind": lambda: lt.bind(lt.dropout, x, 0.5, rng=lt.Philox(1), out=x),
    }
    for name, call in later.items():
        message = _message(call)
        print(f"{name}: {message}")
        assert "the CUDA context is lost since" in message, f"{name}: {message}"


if __name__ == "__main__":
    main()
