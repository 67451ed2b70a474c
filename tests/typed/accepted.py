"""User code without type errors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import lt_runtime as lt


def own_loss(outputs: Any, target: Any, gradient: Any, stream: int | None) -> Any:
    """Computes a user's loss by one of the package's losses."""
    made: lt.Loss = lt.mse_loss(outputs, target, out_gradient=gradient, stream=stream)
    return made.loss


def train(model: lt.MLP, batches: list[tuple[Any, Any]]) -> lt.Metrics:
    """Every setting that may change is set between steps."""
    optimizer = lt.AdamW(model.parameters(), moments="bfloat16", schedule=lt.schedules.warmup_cosine(1, 20))
    ema = lt.EMA(model)
    step = lt.TrainStep(model, optimizer, loss=own_loss, ema=ema)
    prefetched: lt.Prefetcher = lt.prefetch(batches, device=model.device)
    with prefetched:
        for x, target in prefetched:
            step(x, target)
            optimizer.lr, optimizer.weight_decay, optimizer.schedule = 1e-4, 0.0, lt.Schedule()
            optimizer.parameters[0].lr_scale = 0.5
    with lt.range("evaluation"):
        return lt.evaluate(model, batches, loss="mse")


def models() -> list[lt.MLP]:
    """Element types and activations in every spelling."""
    return [
        lt.MLP([2, 3], dtype="bfloat16", compute="float32"),
        lt.MLP([2, 3], dtype=np.float16, activation=lt.Activation("leaky_relu", 0.1)),
        lt.MLP([2, 3], dtype=np.dtype("float32"), compute="tf32", output_activation="sigmoid"),
        lt.MLP([2, 3, 4], ["relu", "tanh"], dtype=ml_dtypes.bfloat16),
        lt.MLP([2, 3], {"name": "leaky_relu", "negative_slope": 0.1}),
    ]


def layer(x: Any, w: Any, dy: Any) -> tuple[Any, ...]:
    """Calls forward and backward in every accepted way."""
    ctx: lt.LinearContext
    y, ctx = lt.linear_fwd(x, w, activation="gelu_erf", compute="tf32")
    dx, dw, db = lt.linear_bwd(dy, ctx, accumulate=True, out_dw=w)
    dz, dw, db, db_below = lt.linear_bwd(dy, ctx, through=ctx, need_db=False)
    gated: lt.GatedContext
    out, gated = lt.gated_fwd(y, activation="silu", dropout=0.5, rng=lt.Philox(1))
    dy = lt.gated_bwd(out, gated, out=y)
    return y, dx, dw, db, dz, db_below, lt.linear_bwd(dy, ctx).dw, lt.linear_bwd(dy, ctx, through=ctx).dz_below
