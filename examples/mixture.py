"""A mixture of two experts with a soft gate: a block of your own, over other blocks and NumPy's or CuPy's functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import lt_runtime as lt

INPUTS, OUTPUTS, BATCH, STEPS = 16, 4, 256, 200


class Mixture(lt.Block):
    """y = Σ pᵢ · expertᵢ(x), where p = softmax(gate(x)) weighs the experts for each row."""

    def __init__(self, gate: lt.Block, *experts: lt.Block) -> None:
        self.gate, self.experts = gate, experts
        self.inputs, self.outputs = gate.inputs, experts[0].outputs

    def forward(self, x: Any, run: lt.Pass) -> Any:
        """Computes the experts' outputs and the gate, and keeps both."""
        made = [expert.forward(x, run) for expert in self.experts]
        logits = self.gate.forward(x, run)
        with run.array_module(logits) as xp:  # NumPy or CuPy, with CuPy's current stream set to that of the pass
            p = xp.exp((logits - logits.max(axis=-1, keepdims=True)).astype(xp.float32))
            p = (p / p.sum(axis=-1, keepdims=True)).astype(logits.dtype)
            y = p[..., :1] * made[0]
            for i, each in enumerate(made[1:], 1):
                y += p[..., i : i + 1] * each
        run.keep(p, made)
        return y

    def backward(self, dy: Any, run: lt.Pass) -> Any:
        """Takes the gradient through the sum, then runs the gate and the experts back, the last first."""
        p, made = run.take()
        with run.array_module(dy) as xp:
            dp = xp.empty(p.shape, xp.float32)
            for i, each in enumerate(made):
                dp[..., i] = (dy * each).sum(axis=-1, dtype=xp.float32)
            dlogits = (p * (dp - (p * dp).sum(axis=-1, keepdims=True))).astype(p.dtype)
            parts = [p[..., i : i + 1] * dy for i in range(len(made))]
        dx = self.gate.backward(dlogits, run)
        for expert in reversed(self.experts):
            more = expert.backward(parts.pop(), run)
            dx = None if more is None else lt.add(dx, more, stream=run.stream)  # None if x is the model's input
        return dx


def batches() -> Iterator[tuple[Any, Any]]:
    """Rows of two kinds, told apart by the sign of a column; each kind has a linear function of its own."""
    rng = np.random.default_rng(0)
    functions = rng.normal(0, INPUTS**-0.5, (2, INPUTS, OUTPUTS)).astype(np.float32)
    for _ in range(STEPS):
        x = rng.standard_normal((BATCH, INPUTS), np.float32)
        yield x, np.where(x[:, :1] > 0, x @ functions[0], x @ functions[1])


def main(device: object = "auto") -> list[float]:
    """Trains the mixture; prints and returns the mean losses of groups of steps."""
    experts = (lt.Linear(INPUTS, OUTPUTS, seed=i, device=device) for i in range(2))
    model = Mixture(lt.Linear(INPUTS, 2, seed=2, device=device), *experts)
    step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=3e-2), loss="mse", batch_size=BATCH)
    losses = []
    for i, (x, target) in enumerate(lt.prefetch(batches(), device=model.device), 1):
        step(x, target)
        if i % 40 == 0:
            losses.append(step.metrics().loss)
            print(f"step {i}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
