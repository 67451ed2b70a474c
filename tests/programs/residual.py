"""A residual block with a handwritten norm and both passes: y = x + W2 · gelu(W1 · norm(x) + b1) + b2."""

from __future__ import annotations

from typing import Any

import numpy as np

import lt_runtime as lt


class Block:
    """A block of two layers of `lt`, a norm over each row, and the residual sum."""

    def __init__(self, xp: Any, width: int, hidden: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shapes = (width,), (hidden, width), (hidden,), (width, hidden), (width,)
        drawn = (xp.asarray(rng.normal(0, shape[-1] ** -0.5, shape), np.float32) for shape in shapes)
        self.xp, (self.scale, self.w1, self.b1, self.w2, self.b2) = xp, drawn

    def forward(self, x: Any) -> tuple[Any, Any]:
        """Runs forward; returns the outputs, and the arrays that the backward pass needs."""
        spread = self.xp.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
        normed = (x - x.mean(axis=1, keepdims=True)) / spread
        hidden, ctx1 = lt.linear_fwd(normed * self.scale, self.w1, self.b1, activation="gelu")
        y, ctx2 = lt.linear_fwd(hidden, self.w2, self.b2)
        return x + y, (normed, spread, ctx1, ctx2)

    def backward(self, dy: Any, kept: Any) -> dict[str, Any]:
        """Runs backward; returns the gradients of x and of all parameters."""
        normed, spread, ctx1, ctx2 = kept
        dz, dw2, db2, db1 = lt.linear_bwd(dy, ctx2, through=ctx1)
        dscaled, dw1, _ = lt.linear_bwd(dz, ctx1, before_activation=True, need_db=False)
        dnormed = dscaled * self.scale
        inner = dnormed.mean(axis=1, keepdims=True) + normed * (dnormed * normed).mean(axis=1, keepdims=True)
        dx = dy + (dnormed - inner) / spread
        return {"x": dx, "scale": (dscaled * normed).sum(0), "w1": dw1, "b1": db1, "w2": dw2, "b2": db2}


def main(xp: Any) -> dict[str, float]:
    """Returns for each gradient its largest error against central differences, relative to the largest difference."""
    rng, block = np.random.default_rng(1), Block(xp, 16, 32, seed=0)
    x, weights = (xp.asarray(rng.normal(size=(8, 16)), np.float32) for _ in range(2))
    errors, (_, kept) = {}, block.forward(x)
    for name, gradient in block.backward(weights, kept).items():  # the gradient, with respect to y, of sum(weights * y)
        array = x if name == "x" else getattr(block, name)
        found, wanted = [], []
        for place in rng.choice(array.size, min(12, array.size), replace=False):
            index, sums = np.unravel_index(place, array.shape), []
            before = array[index].copy()
            for step in (1e-2, -1e-2):
                array[index] = before + step
                sums.append(float((block.forward(x)[0].astype(np.float64) * weights).sum()))
            array[index] = before
            found.append(float(gradient[index]))
            wanted.append((sums[0] - sums[1]) / 2e-2)
        errors[name] = float(np.abs(np.subtract(found, wanted)).max() / np.abs(wanted).max())
    return errors
