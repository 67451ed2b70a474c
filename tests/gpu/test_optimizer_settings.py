"""Settings changed in the middle of a captured run, and averages in a step's graph: the bits of eager steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt

ROWS, DIMS = 96, [40, 64, 72, 10]

CHANGES: dict[int, Callable[[lt.TrainStep], None]] = {
    2: lambda step: setattr(step.optimizer, "lr", 0.25),
    3: lambda step: setattr(step.optimizer, "weight_decay", 0.5),
    4: lambda step: setattr(step.optimizer, "schedule", lt.schedules.warmup_linear(2, 9)),
    5: lambda step: setattr(step.model.layers[1].weight, "lr_scale", 0.125),
    6: lambda step: setattr(step.model.layers[0].bias, "weight_decay", 0.25),
    8: lambda step: setattr(step.optimizer, "schedule", None),
    10: lambda step: setattr(step.optimizer, "lr", 0),
}


def _step(dtype: str, **options: Any) -> lt.TrainStep:
    model = lt.MLP(DIMS, "gelu", dtype=dtype, dropout=0.2, seed=3, device="cuda")
    scaler = lt.GradScaler(1024.0, growth_interval=3) if dtype == "float16" else None
    schedule = lt.schedules.warmup_cosine(3, 40)
    optimizer = lt.AdamW(model.parameters(), lr=1e-2, schedule=schedule, scaler=scaler, max_norm=1.0)
    return lt.TrainStep(model, optimizer, ema=lt.EMA(model, 0.9), **options)


def _batch(i: int, dtype: Any) -> tuple[Any, Any]:
    generator = np.random.default_rng(i)
    x = cp.asarray(generator.standard_normal((ROWS, DIMS[0])).astype(dtype))
    return x, cp.asarray(generator.integers(0, DIMS[-1], ROWS).astype(np.int32))


def _bits(step: lt.TrainStep) -> list[bytes]:
    cp.cuda.Device().synchronize()
    arrays = [array for each in step.model.parameters() for array in (each.data, each.master) if array is not None]
    arrays += [*step.ema.averages.values(), *(moment for moments in step.optimizer.moments for moment in moments)]
    return [cp.asnumpy(array).tobytes() for array in arrays]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_graph_and_eager_agree_bitwise_when_settings_change(dtype: str, accumulate: int) -> None:
    steps = [_step(dtype, graph=graph, accumulate=accumulate) for graph in (True, False)]
    bits: list[list[bytes]] = []
    batches = [_batch(i, steps[0].model.dtype.numpy) for i in range(12)]
    for step in steps:
        for i, batch in enumerate(batches):  # the host does not wait between steps
            CHANGES.get(i, id)(step)
            step(*batch)
        bits.append(_bits(step))
    assert bits[0] == bits[1]
    parameters = [each.data.copy() for each in steps[0].model.parameters()]
    steps[0](*batches[0])
    for each, before in zip(steps[0].model.parameters(), parameters, strict=True):
        assert (each.data == before).all()  # the learning rate is 0


def test_steps_under_way_keep_their_settings() -> None:
    together, waiting = (_step("float32") for _ in range(2))
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    batches = [_batch(i, np.float32) for i in range(20)]
    cp.cuda.Device().synchronize()
    for step in (together, waiting):
        for i, batch in enumerate(batches):
            step.optimizer.lr = 0.5 ** (i % 7)
            step(*batch, stream=streams[i % 2])
            if step is waiting:
                cp.cuda.Device().synchronize()
            step.optimizer.lr = 3.0  # no step is launched with this rate
    assert _bits(together) == _bits(waiting)
