"""The ceiling for anything that streams through memory: the best copy that can be written, read and write counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import cupy as cp
import numpy as np

from benchmarks.buffers import normal
from benchmarks.graphs import Contender, Run, capture, measure
from benchmarks.timing import Timing, repetitions
from lt_runtime.problem import DType

SIZE: Final = 1 << 30  # bytes of each buffer, twenty times the L2 cache

SOURCE: Final = r"""
// A thread has kLoads 16-byte loads in flight, a block's width apart.
template <int kLoads, bool kStreaming>
__global__ void __launch_bounds__(1024) copy(const uint4* __restrict__ in, uint4* __restrict__ out, long long size) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x * kLoads;
  long long at = static_cast<long long>(blockIdx.x) * blockDim.x * kLoads + threadIdx.x;
  for (; at < size; at += step) {
    uint4 held[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const long long i = at + u * blockDim.x;
      if (i < size) held[u] = kStreaming ? __ldcs(in + i) : in[i];
    }
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const long long i = at + u * blockDim.x;
      if (i >= size) continue;
      if (kStreaming) {
        __stcs(out + i, held[u]);
      } else {
        out[i] = held[u];
      }
    }
  }
}
"""
_LOADS: Final = (1, 2, 4, 8)
_THREADS: Final = (256, 512, 1024)
NAMES: Final = {
    (loads, streaming): f"copy<{loads}, {'true' if streaming else 'false'}>"
    for loads in _LOADS
    for streaming in (False, True)
}
"""The instances of the kernel, by loads in flight and whether caches are told that nothing is used again."""


class Ceiling(NamedTuple):
    """The best copy: its name, its bandwidth in GB/s (10⁹ bytes), and the times of all that were tried."""

    best: str
    gb_s: float
    timings: dict[str, Timing]


def measure_copies(rounds: int, stream: Any, advance: Callable[[], None] = lambda: None) -> Ceiling:
    """Lets every copy take turns; two buffers of `SIZE` bytes each."""
    source, target = (normal((SIZE // 4,), DType.FLOAT32) for _ in range(2))
    made = {name: partial(Contender, run, capture) for name, run in _copies(source, target).items()}
    timings, left_out = measure(made, 1, repetitions(2 * SIZE, 1), rounds, stream, advance)
    assert not left_out, left_out
    best = min(timings, key=lambda name: timings[name].median)
    return Ceiling(best, 2 * SIZE / timings[best].median / 1e3, timings)


def _copies(source: Any, target: Any) -> dict[str, Run]:
    """Every kernel in every shape of launch, and the driver's own copy."""
    module = cp.RawModule(code=SOURCE, options=("-std=c++17",), name_expressions=tuple(NAMES.values()))
    processors = cp.cuda.Device().attributes["MultiProcessorCount"]
    arguments = source, target, np.int64(SIZE // 16)
    runs: dict[str, Run] = {"cudaMemcpyAsync": partial(_copy_by_driver, source, target)}
    for (loads, streaming), threads, persistent in itertools.product(NAMES, _THREADS, (False, True)):
        blocks = processors * (2048 // threads) if persistent else -(-SIZE // (16 * threads * loads))
        hint, grid = "streaming" if streaming else "plain", "persistent" if persistent else "one pass"
        launch = partial(_launch, module.get_function(NAMES[loads, streaming]), blocks, threads, arguments)
        runs[f"{loads} loads, {threads} threads, {hint}, {grid}"] = launch
    return runs


def _copy_by_driver(source: Any, target: Any, _: int, stream: int) -> None:
    target.data.copy_from_device_async(source.data, SIZE, cp.cuda.ExternalStream(stream))


def _launch(kernel: Any, blocks: int, threads: int, arguments: tuple[Any, ...], *_: int) -> None:
    """CuPy launches on its current stream, which is the one being captured."""
    kernel((blocks,), (threads,), arguments)
