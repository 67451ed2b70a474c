"""The least time that a problem can take, from its operations and bytes and the GPU's peak rates.

`_RATES` holds floating-point operations per clock and multiprocessor: dense, a multiply-add counted as two, accumulated
in FP32. The CUDA cores' rates are from the table "Throughput of Native Arithmetic Instructions" in NVIDIA's CUDA C++
Programming Guide. The tensor cores' rates are the peak rates in NVIDIA's architecture papers, divided by the number of
multiprocessors and the boost clock. The peak rates in TFLOP/s are:

- Turing (T4): 65 in FP16.
- A100: 312 in FP16 and BF16, 156 in TF32, 19.5 in FP64.
- GA102 (A40): 149.7 in FP16 and BF16, 74.8 in TF32.
- AD102 (L40S): 362 in FP16 and BF16, 183 in TF32.
- H100 SXM: 989.4 in FP16 and BF16, 494.7 in TF32, 66.9 in FP64.
- B200: 2250 in FP16 and BF16, 1100 in TF32, 37 in FP64.
- GB202 (RTX PRO 6000): 504 in FP16 and BF16, 252 in TF32.

In FP8 the rates of the tensor cores that have it are twice those in FP16.

GeForce boards of the same compute capabilities have half the rate if sums are in FP32, and cannot be distinguished
here. The peak assumes the highest clock, which few GPUs hold under load: 75 % of it is good for a matrix product.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final, NamedTuple

from lt_runtime.gpu.devices import device_attributes, device_info
from lt_runtime.plans.cache import LayerProblem
from lt_runtime.problem import BackwardProblem, Compute, DType, MatmulProblem, MLPProblem, Spec
from lt_runtime.store.keys import Remembered
from lt_runtime.tuner.chain_operands import tensors_of
from lt_runtime.tuner.operands import operands_of

_BITS: Final = 8
# Transfers of the GPU's memory in a clock cycle.
_DATA_RATE: Final = 2
# Least time of a kernel in a graph: half of what an H200 needs.
_LAUNCH_US: Final = 0.75
_CACHED: Final = 4.0

_RATES: Final = {
    75: (1024, 0, 128, 4),
    80: (2048, 1024, 128, 128),
    86: (1024, 512, 256, 4),
    89: (1024, 512, 256, 4),
    90: (4096, 2048, 256, 256),
    100: (8192, 4096, 256, 128),
    120: (1024, 512, 256, 4),
}
"""Operations per clock and multiprocessor in 16-bit types, TF32, FP32 and FP64, by compute capability, which is
major·10 + minor; 0 where the hardware has no unit."""


class Hardware(NamedTuple):
    """Clocks and widths of a GPU, from which its peak rates follow.

    Attributes:
        capability: compute capability, major·10 + minor.
        multiprocessors: number of multiprocessors.
        clock_khz, memory_clock_khz: the highest clocks.
        bus_bits: width of the bus to memory.
    """

    capability: int
    multiprocessors: int
    clock_khz: int
    memory_clock_khz: int
    bus_bits: int

    @property
    def bytes_per_s(self) -> float:
        """Peak rate of reads and writes together, in bytes/s; 0.0 if the driver does not report the memory's clock."""
        return _DATA_RATE * self.memory_clock_khz * 1e3 * self.bus_bits / _BITS

    def flops_per_s(self, dtype: DType, compute: Compute) -> float:
        """Peak rate of products in FLOP/s; 0.0 if it is not known, or if the hardware has no unit for the type."""
        sixteen_bits, tf32, fp32, fp64 = _RATES.get(self.capability, (0, 0, 0, 0))
        rate = {DType.FLOAT64: fp64, DType.FLOAT32: fp32}.get(
            dtype, 2 * sixteen_bits if dtype.is_float8 else sixteen_bits
        )
        return float(tf32 if compute is Compute.TF32 else rate) * self.multiprocessors * self.clock_khz * 1e3


class Work(NamedTuple):
    """Floating-point operations of a problem's products, and bytes of its operands, each moved once."""

    flops: int
    bytes: int


def hardware(device: int) -> Hardware:
    """Clocks and widths of a GPU, which is given by its ordinal."""
    info = device_info(device)
    highest = device_attributes(device, "CLOCK_RATE", "MEMORY_CLOCK_RATE", "GLOBAL_MEMORY_BUS_WIDTH")
    return Hardware(info.capability, info.multiprocessors, *highest)


def floor_us(problems: Iterable[Remembered], device: int) -> float:
    """Lower bound of the microseconds that problems take one after the other: a shorter measurement is an error.

    Each problem launches at least one kernel. Operands may lie in the L2 cache, from which an H200 reads about twice as
    fast as from memory. A quarter of the time at the peak rates is a safe limit on other GPUs too.
    """
    peaks = hardware(device)
    return sum(max(_LAUNCH_US, (least_us(each, peaks) or 0.0) / _CACHED) for each in problems)


def least_us(problem: Remembered, hardware: Hardware) -> float | None:
    """Microseconds of a problem at the GPU's peak rates: the longer of the times to compute and to move the data.

    None if the peak rates are not known.
    """
    peak = hardware.flops_per_s(problem.dtype, problem.compute)
    if not peak or not hardware.bytes_per_s:
        return None
    work = work_of(problem)
    return 1e6 * max(work.flops / peak, work.bytes / hardware.bytes_per_s)


def work_of(problem: Remembered) -> Work:
    """The work of a problem, which does not depend on its strategy."""
    if isinstance(problem, MLPProblem):
        return _work_of_mlp(problem)
    if isinstance(problem, MatmulProblem):
        flops, batch, moved = 2 * problem.batch * problem.m * problem.n * problem.k, problem.batch, operands_of(problem)
    else:
        batch, moved = 1, _moved(problem)
        products = (problem.dx, problem.dw) if isinstance(problem, BackwardProblem) else (problem.y,)
        flops = 2 * problem.x.layout.size * problem.w.layout.rows * sum(each is not None for each in products)
    sizes = [(spec.layout.size * (batch if spec.batch_stride else 1), dtype) for spec, dtype in moved.values()]
    return Work(flops, sum(size * (_BITS * dtype.itemsize if dtype else 1) for size, dtype in sizes) // _BITS)


def _work_of_mlp(problem: MLPProblem) -> Work:
    """The work of a narrow MLP: its products, and the bytes of inputs, outputs and parameters.

    In training the gradients of outputs and parameters are moved as well; there is no gradient of the inputs.
    """
    products = [above * below for above, below in itertools.pairwise(problem.dims)]
    weights, biases = sum(products), sum(itertools.compress(problem.dims[1:], problem.biases))
    inputs, outputs = problem.dims[0], problem.dims[-1]
    passes = 3 * weights - products[0] if problem.backward else weights
    each = 1 + problem.backward  # the gradients of outputs and parameters are moved too
    moved = problem.rows * (inputs + each * outputs) + each * (weights + biases)
    return Work(2 * problem.rows * passes, problem.dtype.itemsize * moved)


def _moved(problem: LayerProblem) -> dict[str, tuple[Spec, DType | None]]:
    """Spec and type of each operand that a layer's problem reads or writes, by name; see `operands_of`."""
    tensors = tensors_of(0, problem)
    moved = {name: (each.spec, None if each.is_mask else problem.dtype) for name, each in tensors.items()}
    if isinstance(problem, BackwardProblem):
        unread = {"x": problem.dw, "w": problem.dx}
        moved = {name: each for name, each in moved.items() if unread.get(name, each) is not None}
        for name, accumulates in (("dw", problem.accumulate), ("dx", problem.accumulate_dx)):
            if accumulates and name in moved:
                moved[f"{name} before"] = moved[name]
    return moved
