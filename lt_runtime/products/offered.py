"""Chooses among the algorithms that cuBLASLt's heuristic offers for a product that was not measured.

The heuristic's first algorithm is used, except in these cases, which the heuristic is known to misjudge:

- cuBLASLt's kernels for Hopper compute D in rounds, with one tile on each multiprocessor. A round takes as long as the
  loads of a tile or its multiplications, whichever is longer, plus a constant; with an epilogue, tiles of more than 64
  rows take longer to finish. No product takes less time than reading its operands from memory. Another algorithm is
  used if it is estimated to be faster by a tenth.
- Algorithms with the ids (CONFIG_ID) 20, 41 and 42 are hardly ever the fastest. In the median they take 5 times (id 20,
  334 TF32 products), 24 times (41, 146 BF16 products) and 42 times (42, 281 BF16 products) as long as the fastest other
  kernel.
- Splitting a short K does not pay: BF16 3904x24x21 takes 5.9 µs with K split into six parts, and 2.6 µs without.
- Large TF32 products are fastest by kernels for Hopper: 7456x2840x464 takes 150 µs by the first algorithm, 84 by the
  second, which is a kernel for Hopper.
- A TF32 product for a gradient (dx or dw) takes as long as the multiprocessor with the most loads or multiplications:
  1024x512x2048 takes 33 µs in 64 tiles of 64x128 elements, and 20 µs in 32 tiles of 128x128 with K split into four
  parts. Here too another algorithm must be estimated to be faster by a tenth. The estimate also holds for other TF32
  products with a short K: 65536x40x24 takes 15.4 µs by the first algorithm, and 9.4 µs in smaller tiles.
- Small TF32 products with a short K and ragged rows are fastest by the id 55: 541x619x23 takes 6.9 µs by the first
  algorithm, 3.5 by this kernel; but 5384x3397x27 takes 55 by this kernel, 44 by the first algorithm. An input gradient
  takes it for at most 32 terms: 360x1120x15 takes 6.7 µs by the first algorithm, 3.1 by this kernel.
- TF32 sums are split into parts of at least 64 terms: 21x24x3904 takes 11.7 µs in 132 parts, 7.6 in 32. FP32 sums are
  split into parts of at least 8, those of gradients of at least 32: 25x128x192 takes 10.2 µs in 132 parts, 5.6 whole.

The constants are of an H200 (cuBLASLt 13.1). They were fitted to the same rows as those of `cost`, mostly to products
with few columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels.tiling import are_whole
from lt_runtime.layout import Order
from lt_runtime.problem import Compute, DType, MatmulProblem

_HOPPER: Final = 66
"""Id (CONFIG_ID) of the kernels for which `_estimated_us` holds; too few products were measured with other ids."""
_HOPPER_TF32: Final = 43
_OLDER_TF32: Final = 21
_SELDOM_FAST: Final = (20, 41, 42)
"""Ids of kernels that are used only if the heuristic offers no further kernels; in full FP32 they compete equally."""
SHORT_K: Final = 128
"""K up to which splitting K does not pay."""
_TALL: Final = 1 << 15
"""Number of rows or columns of D from which `has_many_tiles` is true for TF32 products with a short K."""
_SHORT_TF32: Final = 55
_SHORTEST_K: Final = 32
"""Largest K of an input gradient for which the kernel with the id `_SHORT_TF32` is used."""
_MOST_SHORT: Final = 1 << 21
"""Largest number of elements of D for which the kernel with the id `_SHORT_TF32` is used."""
_FEWEST_TERMS: Final = {Compute.TF32: (64, 64), Compute.FLOAT32: (32, 8)}
"""The fewest terms that each part of a split K must have in TF32 and FP32: in a gradient, and in a forward product."""
_LARGE: Final = 1e9
"""A product with at least this number of multiply-adds counts as large; see `is_large`."""
MULTIPROCESSORS: Final = 132
"""Multiprocessors of an H200."""
_LAUNCH_US: Final = 3.0
_ROUND_US: Final = 0.4
_EPILOGUE_US: Final = 1.5
"""Microseconds that an epilogue adds to a round (one tile on each multiprocessor) if tiles have more than `_ROWS`
rows."""
_ROWS: Final = 64
_LOADED: Final = 90e3
"""Bytes that a multiprocessor loads in a microsecond."""
_MULTIPLIED: Final = 7.5e6
"""Multiply-adds of a multiprocessor in a microsecond, times the bytes of an operand's element."""
_GRADIENT_US: Final = {_HOPPER_TF32: 9.0, _OLDER_TF32: 5.0}
"""Maps kernel ids to the microseconds that a gradient's product in TF32 takes besides loads and multiplications."""
_GRADIENT_MULTIPLIED: Final = {_HOPPER_TF32: 1e6, _OLDER_TF32: 0.7e6}
"""Maps kernel ids to a multiprocessor's multiply-adds per microsecond in a gradient's product in TF32."""
_GRADIENT_LOADED: Final = 14e3
"""Numbers that a multiprocessor loads in a microsecond in a gradient's product in TF32."""
_READ: Final = 4.2e6
"""Bytes that the GPU reads from its memory in a microsecond."""
_WRITTEN: Final = 12e3
"""Elements of D that a multiprocessor writes per microsecond if K is short, including elements of a tile beyond D's
edge, which take as long.
"""
_SPLIT_US: Final = 1.0
"""Least time in microseconds of adding up the partial sums of a split K."""
_ADDED: Final = 0.5e6
"""Partial sums of a split K that are added up per microsecond."""
_WORTH: Final = 0.9
"""Another algorithm is chosen if its estimated time is below this fraction of the first algorithm's."""


class Offered(NamedTuple):
    """The properties of an offered algorithm from which its time is estimated.

    Attributes:
        algo_id: CONFIG_ID.
        tile: rows and columns of a block's tile of D, as cuBLASLt sees D; None if they are not known.
        splitk: SPLITK_NUM.
        waves: number of its blocks divided by the number that the GPU runs at a time; 0.0 if that is not known.
    """

    algo_id: int
    tile: tuple[int, int] | None
    splitk: int
    waves: float


def library_shape(problem: MatmulProblem) -> tuple[int, int]:
    """Rows and columns of D as cuBLASLt sees D, which is transposed if D is row-major."""
    return (problem.n, problem.m) if problem.d.layout.order is Order.ROW else (problem.m, problem.n)


def is_split_for_nothing(problem: MatmulProblem, offered: Offered) -> bool:
    """Whether an algorithm splits K, although K is too short for splitting to pay."""
    return problem.k <= SHORT_K and offered.splitk > 1


def has_many_tiles(problem: MatmulProblem) -> bool:
    """Whether a TF32 product with a short K has so many rows or columns that the shape of the tiles decides its time.

    If so, further queries for algorithms pay: 262144x40x32 takes 68 µs in tiles of 256x64 elements, 27 µs
    in tiles of 64x128.
    """
    is_tall = max(problem.m, problem.n) >= _TALL
    return problem.compute is Compute.TF32 and problem.k <= SHORT_K and is_tall


def is_large(problem: MatmulProblem) -> bool:
    """Whether the multiplications of a product take much longer than a launch."""
    return problem.m * problem.n * problem.k >= _LARGE


def most_promising(problem: MatmulProblem, offers: Sequence[Offered]) -> int:
    """The index of the algorithm to use, by the rules in this module's docstring."""
    # In full FP32, unlike in other types, the kernels with the id 20 are often the fastest.
    is_fp32 = problem.dtype is DType.FLOAT32 and problem.compute is Compute.FLOAT32
    seldom_fast = () if is_fp32 else _SELDOM_FAST
    some = [i for i, each in enumerate(offers) if each.algo_id not in seldom_fast] or [*range(len(offers))]
    return some[_most_promising(problem, [offers[i] for i in some])]


def _most_promising(problem: MatmulProblem, offers: Sequence[Offered]) -> int:
    """Applies the module's rules to offers from which `most_promising` has removed slow kernels; returns an index."""
    first, is_tf32 = offers[0], problem.compute is Compute.TF32
    lies_along_k = problem.b.layout.order is Order.COLUMN  # B is contiguous along K, as in a forward pass
    is_ragged = not are_whole(problem.dtype, problem.a, problem.b, problem.d)
    sums_over_rows = problem.a.layout.order is Order.COLUMN  # A is contiguous along M, as in a weight gradient
    is_short = problem.k <= (SHORT_K if lies_along_k else _SHORTEST_K) and problem.m * problem.n <= _MOST_SHORT
    if is_tf32 and is_ragged and is_short and not sums_over_rows:
        return next((i for i, each in enumerate(offers) if each.algo_id == _SHORT_TF32), 0)
    if is_split_for_nothing(problem, first):
        return next((i for i, each in enumerate(offers) if each.splitk <= 1), 0)
    # Epilogues with a derivative or a bias gradient have no estimate, because their time does not follow from the
    # tiles.
    if problem.epilogue.is_derivative or problem.epilogue.has_bias_gradient:
        return 0
    usual = _usual(problem, offers, is_gradient=not lies_along_k)
    estimate_us = _gradient_us if is_tf32 and (not lies_along_k or problem.k <= SHORT_K) else _estimated_us
    estimates = [estimate_us(problem, each) for each in offers]
    least = min(estimates)
    is_worth_it = not math.isinf(estimates[usual]) and least < _WORTH * estimates[usual]
    return estimates.index(least) if is_worth_it else usual


def _usual(problem: MatmulProblem, offers: Sequence[Offered], *, is_gradient: bool) -> int:
    """The index of the algorithm that is used unless another one is estimated to be faster."""
    is_tf32 = problem.compute is Compute.TF32
    if is_tf32 and is_large(problem):
        return next((i for i, each in enumerate(offers) if each.algo_id == _HOPPER_TF32), 0)
    fewest = _FEWEST_TERMS[problem.compute][not is_gradient] if problem.dtype is DType.FLOAT32 else 0
    return next((i for i, each in enumerate(offers) if each.splitk * fewest <= problem.k), 0)


def _estimated_us(problem: MatmulProblem, offered: Offered) -> float:
    """Estimated microseconds of a product; infinity if there is no estimate, as for algorithms that split K."""
    if offered.algo_id != _HOPPER or offered.tile is None or offered.splitk > 1 or not offered.waves:
        return math.inf
    (rows, cols), terms = offered.tile, problem.k * problem.dtype.itemsize
    us = _ROUND_US + max((rows + cols) * terms / _LOADED, rows * cols * terms / _MULTIPLIED)
    if problem.epilogue is not Epilogue.NONE and rows > _ROWS:
        us += _EPILOGUE_US
    return max(_LAUNCH_US + math.ceil(offered.waves) * us, (problem.m + problem.n) * terms / _READ)


def _gradient_us(problem: MatmulProblem, offered: Offered) -> float:
    """Estimated microseconds of a gradient's product in TF32; infinity without an estimate."""
    if offered.algo_id not in _GRADIENT_US or offered.tile is None or not offered.waves:
        return math.inf
    (rows, cols), parts = offered.tile, max(offered.splitk, 1)
    m, n = library_shape(problem)
    tiles = -(-m // rows) * -(-n // cols)
    # The blocks of a kernel share its tiles evenly, or the parts of K of each tile if K is split.
    if offered.algo_id == _HOPPER_TF32:
        of_each = max(1.0, tiles / (MULTIPROCESSORS * min(offered.waves, 1.0)))
    else:
        of_each = math.ceil(tiles * parts / MULTIPROCESSORS)
    a_term = max((rows + cols) / _GRADIENT_LOADED, rows * cols / _GRADIENT_MULTIPLIED[offered.algo_id])
    added = _SPLIT_US + parts * m * n / _ADDED if parts > 1 else 0.0
    written = of_each * rows * cols / _WRITTEN if problem.k <= SHORT_K else 0.0
    return _GRADIENT_US[offered.algo_id] + of_each * problem.k / parts * a_term + added + written
