"""The peak rates of a GPU's arithmetic and memory.

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

Tensor cores that support FP8 have twice their FP16 rate in FP8.

GeForce boards of the same compute capabilities have half the rate if sums are in FP32, and cannot be distinguished
here. The peak assumes the highest clock, which few GPUs hold under load: 75 % of it is good for a matrix product.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from lt_runtime.gpu.devices import device_attributes, device_info
from lt_runtime.problem import Compute, DType

_BITS: Final = 8
# Transfers per clock cycle of the GPU's memory.
_DATA_RATE: Final = 2

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
        """Peak rate of products in FLOP/s; 0.0 if `_RATES` has none.

        FP8 is taken as twice the 16-bit rate on every GPU, although GPUs before Ada have no FP8.
        """
        sixteen_bits, tf32, fp32, fp64 = _RATES.get(self.capability, (0, 0, 0, 0))
        rate = {DType.FLOAT64: fp64, DType.FLOAT32: fp32}.get(
            dtype, 2 * sixteen_bits if dtype.is_float8 else sixteen_bits
        )
        return float(tf32 if compute is Compute.TF32 else rate) * self.multiprocessors * self.clock_khz * 1e3


def hardware(device: int) -> Hardware:
    """Clocks and widths of the GPU with the ordinal `device`."""
    info = device_info(device)
    highest = device_attributes(device, "CLOCK_RATE", "MEMORY_CLOCK_RATE", "GLOBAL_MEMORY_BUS_WIDTH")
    return Hardware(info.capability, info.multiprocessors, *highest)
