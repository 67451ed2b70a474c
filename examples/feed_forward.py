"""A transformer's feed-forward stack, RMSNorm, SwiGLU and residual connections, on tokens (batch, tokens, width)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import lt_runtime as lt

WIDTH, HIDDEN, LAYERS, BATCH, TOKENS, STEPS = 32, 88, 2, 8, 16, 150


def batches() -> Iterator[tuple[Any, Any]]:
    """Random tokens; the target is a fixed function of each token."""
    rng = np.random.default_rng(0)
    mix = rng.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32)
    for _ in range(STEPS):
        x = rng.standard_normal((BATCH, TOKENS, WIDTH), np.float32)
        yield x, np.tanh(x @ mix)


def main(device: object = "auto") -> list[float]:
    """Trains the stack; prints and returns the mean losses of groups of steps."""

    def layer(i: int) -> lt.Block:
        return lt.Residual(lt.Chain(lt.RMSNorm(WIDTH, device=device), lt.SwiGLU(WIDTH, HIDDEN, seed=i, device=device)))

    last = lt.RMSNorm(WIDTH, device=device), lt.Linear(WIDTH, WIDTH, seed=LAYERS, device=device)
    model = lt.Chain(*map(layer, range(LAYERS)), *last)
    step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=1e-2), loss="mse", batch_size=BATCH)
    losses = []
    for i, (x, target) in enumerate(lt.prefetch(batches(), device=model.device), 1):
        step(x, target)
        if i % 30 == 0:
            losses.append(step.metrics().loss)
            print(f"step {i}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
