"""A user's mistakes, each in a line that ends with a mark: a type checker has to see them all, and no others."""

from __future__ import annotations

from typing import Any

import lt_runtime as lt


def names(model: lt.MLP, x: Any, w: Any) -> None:
    """Uses names that do not exist."""
    lt.no_such_thing()  # refused
    lt.schedules.warmup_cosin(1, 2)  # refused
    lt.linear_fwd(x, w, activation="gelu_tanh")  # refused
    lt.gated_fwd(x, activation="swiglu")  # refused
    lt.linear(x, w, compute="fp32")  # refused
    lt.matmul(x, w, compute="fp32")  # refused
    lt.Activation("rellu")  # refused
    lt.MLP([2, 3], activation="rellu")  # refused
    lt.MLP([2, 3, 4], ["relu", "tahn"])  # refused
    lt.MLP([2, 3], output_activation="softmax")  # refused
    lt.MLP([2, 3], dtype="bfloat61")  # refused
    lt.MLP([2, 3], compute="fp32")  # refused
    lt.AdamW(model.parameters(), moments="float16")  # refused
    lt.TrainStep(model, lt.AdamW(model.parameters()), loss="cross-entropy")  # refused
    lt.evaluate(model, [], loss="l2")  # refused
    lt.tune(2, 3, 4, dtype="half")  # refused


def settings(step: lt.TrainStep, optimizer: lt.AdamW, ema: lt.EMA) -> None:
    """Sets attributes that are read-only or do not exist."""
    optimizer.betas = (0.9, 0.99)  # refused
    optimizer.moments = []  # refused
    optimizer.lr = "1e-3"  # refused
    step.batchsize = 3  # refused
    step.batch_size = 3  # refused
    ema.decay = 0.99  # refused


def results(step: lt.TrainStep, x: Any, ctx: lt.LinearContext) -> None:
    """Reads attributes that a result does not have."""
    print(lt.linear_bwd(x, ctx).dz_below)  # refused
    print(lt.linear_bwd(x, ctx, through=ctx).dx)  # refused
    lt.linear_bwd(x, ctx, need_dq=True)  # refused
    print(step.metrics().acuracy)  # refused
    print(lt.mse_loss(x, x).grad)  # refused
