"""An autoencoder with tied weights: the decoder's weight is the encoder's, transposed, and has one gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import lt_runtime as lt

CODE, STEPS, BATCH = 24, 150, 128


def gradients(w: lt.Parameter, biases: list[lt.Parameter], x: Any) -> Any:
    """Trains on a batch and returns its loss; both uses of the weight add to its gradient."""
    code, ctx1 = lt.linear_fwd(x, w.data, biases[0].data, activation="tanh")
    again, ctx2 = lt.linear_fwd(code, w.data.T, biases[1].data)
    loss, dy = lt.mse_loss(again, x)
    # The decoder's gradient is the gradient of the transposed weight, and is added to a transposed view of the same
    # buffer.
    dz, *_ = lt.linear_bwd(dy, ctx2, through=ctx1, out_dw=w.grad.T, out_db=biases[1].grad, out_db_below=biases[0].grad)
    lt.linear_bwd(dz, ctx1, before_activation=True, need_dx=False, need_db=False, accumulate=True, out_dw=w.grad)
    return loss


def main(xp: Any) -> dict[str, float]:
    """Trains the autoencoder.

    Returns the first and last loss, and how far the tied gradient is from the sum of two untied weights' gradients.
    """
    data = (load_digits().data / 16).astype(np.float32)
    rng = np.random.default_rng(0)
    weight = xp.asarray(rng.normal(0, 64**-0.5, (CODE, 64)), np.float32)
    w = lt.Parameter(weight, xp.zeros_like(weight), name="tied")
    biases = [lt.Parameter(xp.zeros(n, np.float32), xp.zeros(n, np.float32), name=f"bias{n}") for n in (CODE, 64)]
    optimizer = lt.AdamW([w, *biases], lr=5e-3, weight_decay=0)
    losses = []
    for _ in range(STEPS):
        losses.append(gradients(w, biases, xp.asarray(data[rng.integers(0, len(data), BATCH)])))
        optimizer.step()
    return {"first": float(losses[0]), "last": float(losses[-1]), "error": _error(w, biases, xp.asarray(data[:BATCH]))}


def _error(w: lt.Parameter, biases: list[lt.Parameter], x: Any) -> float:
    """Computes the encoder's and the decoder's gradient separately, in float64, by the chain rule in NumPy."""
    gradients(w, biases, x)
    arrays = w.data, w.grad, x, *(each.data for each in biases)
    weight, found, rows, b1, b2 = (np.asarray(a.get() if hasattr(a, "get") else a, np.float64) for a in arrays)
    code = np.tanh(rows @ weight.T + b1)
    dy = 2 * (code @ weight + b2 - rows) / rows.size
    decoder, encoder = code.T @ dy, ((dy @ weight.T) * (1 - code**2)).T @ rows
    return float(np.abs(found - (decoder + encoder)).max() / np.abs(found).max())
