"""The rule that decides, from peak rates and without measuring, whether a layer runs in FP8 or in its own type."""

from __future__ import annotations

import functools
from typing import Final

from lt_runtime.gpu.peaks import hardware
from lt_runtime.problem import Compute, DType

# Fractions of the peak rates that are reached on an H200 by products of 16-bit matrices, products in FP8, and casts.
_OWN, _FP8, _CASTS = 0.75, 0.65, 0.7
# Forward and backward in FP8 launch four operations more than in the layer's own type; finding the scale of each of the
# three tensors from its present values takes three more.
_LAUNCHES: Final = 4
_CALIBRATION: Final = 9
_LAUNCH_US: Final = 1.5


@functools.lru_cache(maxsize=1024)
def slower_in_fp8(
    shape: tuple[int, int, int],
    dtype: DType,
    compute: Compute,
    device: int,
    *,
    needs_dx: bool,
    is_linear: bool,
    is_current: bool,
) -> str | None:
    """A reason why a layer should be slower in FP8; None if it should be faster, or if peak rates are not known.

    Compares the time that FP8 saves in the products with the time that the casts of x, w and dy take.

    Args:
        shape: (M, N, K).
        needs_dx: whether backward computes dx.
        is_linear: whether the layer has no activation. With an activation both types need a pass over dy, and that pass
            casts dy.
        is_current: whether scales come from the present values ("current" recipe), so that each cast first reads its
            tensor once more to find the scale.
    """
    peaks = hardware(device)
    own, fp8 = peaks.flops_per_s(dtype, compute), peaks.flops_per_s(DType.FLOAT8_E4M3FN, Compute.FLOAT32)
    if not (own and fp8 and peaks.bytes_per_s):
        return None
    m, n, k = shape
    flops, size = 2 * (2 + needs_dx) * m * n * k, dtype.itemsize
    moved = (size + 2) * (m * k + n * k + m * n * is_linear) + is_current * size * (m * k + n * k + m * n)
    saved_us = 1e6 * flops * (1 / (_OWN * own) - 1 / (_FP8 * fp8))
    casts_us = 1e6 * moved / (_CASTS * peaks.bytes_per_s) + _LAUNCH_US * (_LAUNCHES + _CALIBRATION * is_current)
    if saved_us > casts_us:
        return None
    expected = f"FP8 is expected to save {saved_us:.1f} µs of products and to add {casts_us:.1f} of casts"
    return f"with M, N, K = {shape} {expected}"
