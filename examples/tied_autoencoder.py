"""A tied autoencoder: the decoder's weight is the encoder's, transposed. Both uses add to one gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import lt_runtime as lt

WIDTH, CODE, BATCH, STEPS = 64, 8, 128, 200


class TiedAutoencoder(lt.Block):
    """Encodes rows of WIDTH columns in CODE numbers, and decodes them."""

    def __init__(self, device: object) -> None:
        self.encoder = lt.Linear(WIDTH, CODE, seed=0, device=device)
        self.decoder = lt.Linear(CODE, WIDTH, weight=self.encoder.weight.T, seed=1)

    def forward(self, x: Any, run: lt.Pass) -> Any:
        """Runs both layers."""
        return self.decoder.forward(self.encoder.forward(x, run), run)

    def backward(self, dy: Any, run: lt.Pass) -> Any:
        """Runs both layers back, the last first."""
        return self.encoder.backward(self.decoder.backward(dy, run), run)


def batches() -> Iterator[Any]:
    """Rows that vary in CODE directions, with a little noise."""
    rng = np.random.default_rng(0)
    directions = rng.standard_normal((CODE, WIDTH), np.float32) / CODE**0.5
    for _ in range(STEPS):
        noise = 0.05 * rng.standard_normal((BATCH, WIDTH), np.float32)
        yield rng.standard_normal((BATCH, CODE), np.float32) @ directions + noise


def main(device: object = "auto") -> list[float]:
    """Trains the autoencoder; prints and returns the mean losses of groups of steps."""
    model = TiedAutoencoder(device)
    optimizer = lt.AdamW(model.parameters(), lr=1e-2, weight_decay=0)  # the shared weight is one of three parameters
    step = lt.TrainStep(model, optimizer, loss="mse", batch_size=BATCH)
    losses = []
    for i, x in enumerate(lt.prefetch(batches(), device=model.device), 1):
        step(x, x)
        if i % 40 == 0:
            losses.append(step.metrics().loss)
            print(f"step {i}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
