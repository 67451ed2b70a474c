"""A mixture of two experts with a soft gate: a block of your own over other blocks, with CUDA kernels of its own.

On the CPU, NumPy computes the block's formulas. On a GPU, CuPy would read and write arrays in each operation of a
formula; two kernels, which CuPy compiles at their first call, read and write each array once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

import lt_runtime as lt

INPUTS, OUTPUTS, BATCH, STEPS = 16, 4, 256, 200

KERNELS = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>

struct alignas(PACK * sizeof(SCALAR)) Pack { SCALAR v[PACK]; };  // what a thread moves at once

// A warp takes a row: p = softmax(logits), y = the sum of p[i] * made[i].
extern "C" __global__ void mix(const SCALAR* logits, const Pack* made, float* p, Pack* y, int rows, int packs) {
  const long long row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  float weights[EXPERTS], most = logits[row * EXPERTS], total = 0;
  for (int i = 0; i < EXPERTS; ++i) most = fmaxf(most, weights[i] = logits[row * EXPERTS + i]);
  for (int i = 0; i < EXPERTS; ++i) total += weights[i] = expf(weights[i] - most);
  for (int i = 0; i < EXPERTS; ++i) p[row * EXPERTS + i] = weights[i] /= total;
  for (int at = threadIdx.x; at < packs; at += 32) {
    Pack out;
    float sums[PACK] = {};
    for (int i = 0; i < EXPERTS; ++i) {
      const Pack expert = made[(row * EXPERTS + i) * packs + at];
      for (int j = 0; j < PACK; ++j) sums[j] += weights[i] * float(expert.v[j]);
    }
    for (int j = 0; j < PACK; ++j) out.v[j] = SCALAR(sums[j]);
    y[row * packs + at] = out;
  }
}

// The gradients of the logits and of the experts' outputs.
extern "C" __global__ void unmix(
    const float* p, const Pack* made, const Pack* dy, SCALAR* dlogits, Pack* dmade, int rows, int packs) {
  const long long row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  float dp[EXPERTS] = {}, mean = 0;
  for (int at = threadIdx.x; at < packs; at += 32) {
    const Pack gradient = dy[row * packs + at];
    for (int i = 0; i < EXPERTS; ++i) {
      const long long place = (row * EXPERTS + i) * packs + at;
      Pack expert = made[place];
      for (int j = 0; j < PACK; ++j) {
        dp[i] += float(gradient.v[j]) * float(expert.v[j]);
        expert.v[j] = SCALAR(p[row * EXPERTS + i] * float(gradient.v[j]));
      }
      dmade[place] = expert;
    }
  }
  for (int i = 0; i < EXPERTS; ++i) {
    for (int lanes = 16; lanes > 0; lanes /= 2) dp[i] += __shfl_xor_sync(~0u, dp[i], lanes);
    mean += p[row * EXPERTS + i] * dp[i];
  }
  for (int i = 0; i < EXPERTS; ++i) dlogits[row * EXPERTS + i] = SCALAR(p[row * EXPERTS + i] * (dp[i] - mean));
}
"""


class Mixture(lt.Block):
    """y = Σ pᵢ · expertᵢ(x), where p = softmax(gate(x)) weighs the experts for each row."""

    def __init__(self, gate: lt.Block, *experts: lt.Block) -> None:
        self.gate, self.experts = gate, lt.Parallel(*experts, split=False)
        self.inputs, self.outputs = gate.inputs, experts[0].outputs

    def forward(self, x: Any, run: lt.Pass) -> Any:
        """Computes the experts' outputs side by side and the gate, and keeps both."""
        made, logits = self.experts.forward(x, run), self.gate.forward(x, run)
        with run.array_module(made) as xp:  # NumPy or CuPy, with CuPy's current stream set to that of the pass
            made = made.reshape(*logits.shape, -1)
            p, y = xp.empty(logits.shape, xp.float32), xp.empty((*x.shape[:-1], made.shape[-1]), made.dtype)
            if hasattr(xp, "RawModule"):  # CuPy
                launch(xp, "mix", made, logits, made, p, y)
            else:
                p[...] = xp.exp(logits - logits.max(-1, keepdims=True))
                p /= p.sum(-1, keepdims=True)
                y[...] = (p[..., None] * made).sum(-2)
        run.keep(p, made)
        return y

    def backward(self, dy: Any, run: lt.Pass) -> Any:
        """Takes the gradient through the sum, then runs the gate and the experts back."""
        p, made = run.take()
        with run.array_module(dy) as xp:
            dlogits, dmade = xp.empty(p.shape, made.dtype), xp.empty(made.shape, made.dtype)
            if hasattr(xp, "RawModule"):
                launch(xp, "unmix", made, p, made, xp.ascontiguousarray(dy), dlogits, dmade)
            else:
                dp = (dy[..., None, :] * made).sum(-1)
                dlogits[...] = p * (dp - (p * dp).sum(-1, keepdims=True))
                dmade[...] = p[..., None] * dy[..., None, :]
        del made, dy  # their memory is free for later gradients
        dx = self.gate.backward(dlogits, run)
        more = self.experts.backward(dmade.reshape(*dmade.shape[:-2], -1), run)
        return None if dx is None else lt.add(dx, more, stream=run.stream)  # None if x is the model's input


@functools.cache
def compiled(xp: Any, kind: str, experts: int, pack: int) -> Any:
    """The kernels for a type, a number of experts, and columns that a thread moves at once."""
    scalar = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}[kind]
    return xp.RawModule(code=KERNELS, options=(f"-DSCALAR={scalar}", f"-DEXPERTS={experts}", f"-DPACK={pack}"))


def launch(xp: Any, name: str, made: Any, *arrays: Any) -> None:
    """Launches a kernel over the rows of the experts' outputs (..., experts, columns)."""
    *axes, experts, columns = made.shape
    rows, pack = math.prod(axes), math.gcd(columns, 16 // made.itemsize)
    kernel = compiled(xp, made.dtype.name, experts, pack).get_function(name)
    kernel((-(-rows // 8),), (32, 8), (*arrays, np.int32(rows), np.int32(columns // pack)))


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
