"""Decides whether layers run in FP8 or in their own type: by a measurement, or else by a rule from peak rates."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Final

from lt_runtime.fp8 import UNIT, Fp8ChainProblem
from lt_runtime.gpu.peaks import Hardware, hardware
from lt_runtime.plans import cache
from lt_runtime.plans.cache import IN_FP8, known_layer
from lt_runtime.problem import Compute, DType
from lt_runtime.products.matmul import lacks_scale_vectors
from lt_runtime.store.plan_store import plan_store

# Fractions of the peak rates that are reached on an H200 by products of 16-bit matrices, products in FP8, and casts.
_OWN, _FP8, _CASTS = 0.75, 0.65, 0.7
# Forward and backward in FP8 launch four operations more than in the layer's own type. To find scales from the present
# values takes three more for each of the three tensors.
_LAUNCHES: Final = 4
_CALIBRATION: Final = 9
_LAUNCH_US: Final = 1.5

NO_MULTIPLE: Final = f"M, N or K is no positive multiple of {UNIT}"


def against_fp8(problem: Fp8ChainProblem, device: int) -> str | None:
    """Why layers are computed in their own type; None if their products are to be computed in FP8."""
    if not problem.fits:
        return NO_MULTIPLE
    return _slower_in_fp8(problem, device, cache.generation) if problem.recipe.fallback else None


@functools.lru_cache(maxsize=1024)
def _slower_in_fp8(problem: Fp8ChainProblem, device: int, generation: object) -> str | None:
    """Why FP8 is slower for these layers, which may run in both types; None if it is faster.

    If these layers were not measured, a measurement of the same layers counts in which forward casts all weights.

    Results are cached by the arguments. Every measurement changes `generation`, so that older results are not used.
    """
    if problem.recipe.by_rows and (lack := lacks_scale_vectors(device)):
        return lack
    store = plan_store(device)
    entry = known_layer(problem, store) or known_layer(replace(problem, written=()), store)
    if entry is None:
        return expected_slower_in_fp8(problem, device)
    if entry.strategy[IN_FP8]:
        return None
    found = [f"FP8 takes {each.us:.1f} µs, and {problem.dtype.value} {entry.us:.1f}" for each in entry.alternatives]
    found += [f"FP8 is {each.reason}" for each in entry.rejected]
    return f"{_sizes(problem)}: {'; '.join(found) or 'FP8 was measured to be slower'}"


def expected_slower_in_fp8(problem: Fp8ChainProblem, device: int) -> str | None:
    """A reason why layers should be slower in FP8; None if they should be faster, or if peak rates are not known.

    Compares the time that FP8 saves in the products with the time that the casts of x, w and dy take. A weight that an
    optimizer's update writes in FP8 has no cast; the time to write it counts instead, see `update_us`.
    """
    peaks, dtype = hardware(device), problem.dtype
    own, fp8 = peaks.flops_per_s(dtype, problem.compute), peaks.flops_per_s(DType.FLOAT8_E4M3FN, Compute.FLOAT32)
    if not (own and fp8 and peaks.bytes_per_s):
        return None
    is_current, dx = problem.recipe.recipe != "delayed", problem.dx
    flops = moved = launches = 0
    written = problem.written or (False,) * len(problem.activations)
    layers = zip(itertools.pairwise(problem.dims), problem.activations, written, strict=True)
    for (k, n), activation, is_written in layers:
        flops += 2 * (2 + dx) * problem.rows * n * k
        casts_dz = activation.name == "none" or problem.recipe.by_rows
        moved += _cast_bytes(problem, n, k, casts_w=not is_written, casts_dz=casts_dz)
        launches += _LAUNCHES - is_written + _CALIBRATION * is_current
        dx = True
    saved_us = 1e6 * flops * (1 / (_OWN * own) - 1 / (_FP8 * fp8))
    casts_us = 1e6 * moved / (_CASTS * peaks.bytes_per_s) + _LAUNCH_US * launches + update_us(problem, peaks)
    if saved_us > casts_us:
        return None
    words = f"to save {saved_us:.1f} µs of products and to add {casts_us:.1f} of casts"
    return f"{_sizes(problem)}: FP8 is expected {words}"


def _cast_bytes(problem: Fp8ChainProblem, n: int, k: int, *, casts_w: bool, casts_dz: bool) -> int:
    """Bytes that a layer in FP8 reads and writes more than in its own type.

    With another recipe than "delayed", each cast first reads its tensor once more to find scales.

    Args:
        casts_w: whether a pass of its own casts the weight.
        casts_dz: whether a pass of its own casts dz. With an activation, a layer in either type needs a pass that
            computes dz from dy; if dz has one scale, this pass also casts dz.
    """
    m, size, reads_twice = problem.rows, problem.dtype.itemsize, problem.recipe.recipe != "delayed"
    cast = m * k + n * k * casts_w + m * n * casts_dz
    return (size + 2) * cast + reads_twice * size * (m * k + n * k + m * n)


def update_us(problem: Fp8ChainProblem, peaks: Hardware) -> float:
    """Microseconds in which an optimizer's update writes weights in FP8.

    It writes a byte for each element of a weight, and another for its transpose. 0.0 if the peak rate of memory is not
    known.
    """
    sizes = zip(problem.written, itertools.pairwise(problem.dims), strict=False)
    written = sum(2 * inputs * outputs for is_written, (inputs, outputs) in sizes if is_written)
    return 1e6 * written / (_CASTS * peaks.bytes_per_s) if peaks.bytes_per_s else 0.0


def _sizes(problem: Fp8ChainProblem) -> str:
    return f"{problem.rows} rows of {'-'.join(map(str, problem.dims))}"


@functools.lru_cache(maxsize=1024)
def slower_for_inference(
    shape: tuple[int, int, int], dtype: DType, compute: Compute, device: int, *, keeps_w: bool, is_current: bool
) -> bool:
    """Whether y is expected to be computed more slowly with the product in FP8; False if peaks are not known.

    A product takes as long as its arithmetic, or with few rows as long as reading its operands: the weight in FP8 has
    half the bytes.

    Args:
        shape: (M, N, K).
        keeps_w: whether the weight is in FP8 already, so that only x is cast.
        is_current: whether each cast has to find its scale first, in a read of its own.
    """
    peaks = hardware(device)
    own, fp8 = peaks.flops_per_s(dtype, compute), peaks.flops_per_s(DType.FLOAT8_E4M3FN, Compute.FLOAT32)
    if not (own and fp8 and peaks.bytes_per_s):
        return False
    (m, n, k), size, per_us = shape, dtype.itemsize, 1e-6 * _CASTS * peaks.bytes_per_s
    flops, y, read = 2e6 * m * n * k, size * m * n, m * k + n * k
    own_us = max(flops / (_OWN * own), (size * read + y) / per_us)
    fp8_us = max(flops / (_FP8 * fp8), (read + y) / per_us)
    cast, launches = (m * k, 1) if keeps_w else (read, 2)
    moved = (size + 1) * cast + is_current * size * cast
    return own_us < fp8_us + moved / per_us + _LAUNCH_US * (launches + _CALIBRATION / 3 * launches * is_current)
