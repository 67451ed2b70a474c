"""scale.cu: FP32 numbers times a factor, rounded to another type."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int64, c_void_p
from typing import Final

from lt_runtime.kernels.blocks import SCALAR, fields
from lt_runtime.kernels.kernel import Entry, Launches
from lt_runtime.kernels.tiling import THREADS, Tiling
from lt_runtime.problem import DType

_MOST_BLOCKS: Final = 1 << 16


class ScaleParams(Structure):
    """`lt::ScaleParams`."""

    _fields_ = fields(("source target scale", c_void_p), ("size", c_int64), ("share", c_float))


SCALE: Final = Entry("scale", "scale.cu", ScaleParams)


def launch_scale(
    source: int, target: int, size: int, dtype: DType, scale: int, share: float, device: int, stream: int
) -> None:
    """Puts the computation of `target` = `source` · `share` on a stream; the device is current.

    Args:
        source: address of `size` FP32 numbers without gaps.
        target: address of as many numbers of the type; it may be the source if the type is FP32.
        scale: address of an FP32 number on the device that is another factor; 0 if there is none.
    """
    blocks = min(max(1, -(-size // THREADS)), _MOST_BLOCKS)
    params = ScaleParams(source, target, scale, size, share)
    _, launch = Launches(SCALE, (("SCALAR", SCALAR[dtype]),), device, Tiling((blocks, 1), (THREADS, 1)), params)[stream]
    launch()
