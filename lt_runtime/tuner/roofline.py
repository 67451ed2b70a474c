"""The least time that a problem can take: what it computes and moves against what a GPU can.

`_RATES` holds floating-point operations per clock and multiprocessor: dense, a multiply-add counted as two, accumulated
in FP32. Those of the CUDA cores are from the table "Throughput of Native Arithmetic Instructions" in NVIDIA's CUDA C++
Programming Guide. Those of the tensor cores follow from the peak rates in NVIDIA's architecture papers, divided by
multiprocessors and boost clock. The peak rates in TFLOP/s are:

- Turing (T4): 65 in FP16.
- A100: 312 in FP16 and BF16, 156 in TF32, 19.5 in FP64.
- GA102 (A40): 149.7 in FP16 and BF16, 74.8 in TF32.
- AD102 (L40S): 362 in FP16 and BF16, 183 in TF32.
- H100 SXM: 989.4 in FP16 and BF16, 494.7 in TF32, 66.9 in FP64.
- B200: 2250 in FP16 and BF16, 1100 in TF32, 37 in FP64.
- GB202 (RTX PRO 6000): 504 in FP16 and BF16, 252 in TF32.

GeForce boards of these architectures have half the rate where sums are in FP32, and cannot be told apart here. The peak
assumes the highest clock, which few GPUs hold under load: 75 % of it is good for a matrix product.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from lt_runtime.problem import BackwardProblem, Compute, Derivative, DType, ForwardProblem, MatmulProblem, Saved, Spec
from lt_runtime.store.keys import Problem

_BITS: Final = 8
_DATA_RATE: Final = 2  # transfers per clock of the memory


_RATES: Final = {
    75: (1024, 0, 128, 4),
    80: (2048, 1024, 128, 128),
    86: (1024, 512, 256, 4),
    89: (1024, 512, 256, 4),
    90: (4096, 2048, 256, 256),
    100: (8192, 4096, 256, 128),
    120: (1024, 512, 256, 4),
}
"""By compute capability, major·10 + minor: of 16-bit types, TF32, FP32 and FP64; 0 where the hardware has no unit."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a GPU's peaks follow from.

    Attributes:
        capability: compute capability, major·10 + minor.
        multiprocessors: their number.
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
        """Peak rate of reads and writes together; 0.0 if the driver does not tell the clock."""
        return _DATA_RATE * self.memory_clock_khz * 1e3 * self.bus_bits / _BITS

    def flops_per_s(self, dtype: DType, compute: Compute) -> float:
        """Peak rate of computing; 0.0 if it is not known, or the hardware has no unit for the type."""
        sixteen_bits, tf32, fp32, fp64 = _RATES.get(self.capability, (0, 0, 0, 0))
        rate = {DType.FLOAT64: fp64, DType.FLOAT32: fp32}.get(dtype, sixteen_bits)
        return float(tf32 if compute is Compute.TF32 else rate) * self.multiprocessors * self.clock_khz * 1e3


@dataclass(frozen=True, slots=True)
class Work:
    """The least that a problem takes: operations of its products, and bytes of its operands, each moved once."""

    flops: int
    bytes: int


def least_us(problem: Problem, hardware: Hardware) -> float | None:
    """The least time of a problem in microseconds: computing or moving data, whichever takes longer.

    None where the GPU's peaks are not known.
    """
    peak = hardware.flops_per_s(problem.dtype, problem.compute)
    if not peak or not hardware.bytes_per_s:
        return None
    work = work_of(problem)
    return 1e6 * max(work.flops / peak, work.bytes / hardware.bytes_per_s)


def work_of(problem: Problem) -> Work:
    """The work of a problem, however it is split."""
    match problem:
        case MatmulProblem():
            return _of_product(problem)
        case ForwardProblem():
            return _of_forward(problem)
        case BackwardProblem():
            return _of_backward(problem)


def _of_product(problem: MatmulProblem) -> Work:
    batch, result = problem.batch, problem.d_dtype.itemsize
    operands = sum(_elements(each, batch) for each in (problem.a, problem.b)) * problem.dtype.itemsize
    results = sum(_elements(each, batch) for each in (problem.d, problem.c) if each) * result
    aux_bits = 0
    if problem.aux is not None:
        is_mask = problem.epilogue.activation == "relu"
        aux_bits = _elements(problem.aux, batch) * (1 if is_mask else _BITS * result)
    has_vector = problem.epilogue.has_bias or problem.epilogue.has_bias_gradient
    vector = problem.n * result if has_vector else 0
    return Work(2 * batch * problem.m * problem.n * problem.k, operands + results + aux_bits // _BITS + vector)


def _elements(spec: Spec, batch: int) -> int:
    return spec.layout.size * (batch if spec.batch_stride else 1)


def _of_forward(problem: ForwardProblem) -> Work:
    (m, n), k, size = problem.y.layout.shape, problem.x.layout.cols, problem.dtype.itemsize
    bias = n if problem.bias is not None else 0
    return Work(2 * m * n * k, size * (_sum(problem.x, problem.w, problem.y, problem.preactivation) + bias))


def _of_backward(problem: BackwardProblem) -> Work:
    (m, n), k, size = problem.dy.layout.shape, problem.x.layout.cols, problem.dtype.itemsize
    products = (problem.dx is not None) + (problem.dw is not None)
    read = _sum(problem.dy, problem.w if problem.dx else None, problem.x if problem.dw else None)
    accumulated = problem.dw if problem.accumulate else None
    written = _sum(problem.dx, problem.dw, problem.dz, accumulated)
    derivatives = _of_derivative(problem.own, n, size)
    if problem.through is not None:
        derivatives += _of_derivative(problem.through, k, size)
    return Work(2 * m * n * k * products, size * (read + written) + derivatives)


def _of_derivative(derivative: Derivative, cols: int, size: int) -> int:
    """Bytes of what was saved and of the bias gradient."""
    saved = derivative.saved_spec.layout.size if derivative.saved_spec else 0
    saved_bytes = saved // _BITS if derivative.saved is Saved.MASK else saved * size
    return saved_bytes + (cols * size if derivative.db is not None else 0)


def _sum(*specs: Spec | None) -> int:
    """Elements of the matrices that there are."""
    present: Iterable[Spec] = (each for each in specs if each is not None)
    return sum(each.layout.size for each in present)
