"""A two-tower model: dense features of a user and of an item, each through a tower, and the chance of a click."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import lt_runtime as lt

USER, ITEM, BATCH, STEPS = 24, 16, 128, 200


def batches() -> Iterator[tuple[tuple[Any, Any], Any]]:
    """Pairs of a user and an item. The user clicks if a bilinear form of both is positive."""
    rng = np.random.default_rng(0)
    taste = rng.standard_normal((USER, 2)) @ rng.standard_normal((2, ITEM))
    for _ in range(STEPS):
        user, item = rng.standard_normal((BATCH, USER), np.float32), rng.standard_normal((BATCH, ITEM), np.float32)
        yield (user, item), (((user @ taste) * item).sum(1, keepdims=True) > 0).astype(np.float32)


def main(device: object = "auto") -> list[float]:
    """Trains the model; prints and returns the mean losses of groups of steps."""
    towers = (lt.MLP([inputs, 64, 32], "gelu", seed=inputs, device=device) for inputs in (USER, ITEM))
    model = lt.Chain(lt.Parallel(*towers), lt.MLP([64, 64, 1], "gelu", seed=0, device=device))
    step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=3e-3), loss="bce_with_logits", batch_size=BATCH)
    losses = []
    for i, (pair, clicked) in enumerate(lt.prefetch(batches(), device=model.device), 1):
        step(pair, clicked)
        if i % 40 == 0:
            losses.append(step.metrics().loss)
            print(f"step {i}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
