"""Which of the algorithms that the heuristic offers to take for a product that nobody has measured.

The heuristic's first stays, but for what it is known to misjudge:

- The library's kernels for Hopper work on D in rounds, one tile to a multiprocessor. A round takes as long as the loads
  of a tile or its multiplications, whichever is longer, and some time to begin and to end; with an epilogue, tiles of
  more than 64 rows take longer to end. Another is taken if it is estimated to be faster by a tenth.
- Kernels with the ids 20, 41 and 42 are hardly ever the fastest. The id 20 takes 5 times as long as the best of the
  others, in the median of 334 TF32 products; 41 and 42 take 24 and 42 times as long, of 146 and 281 BF16 ones.
- A short K is not worth splitting: BF16 3904x24x21 takes 5.9 µs in six parts, and 2.6 whole.
- Large TF32 products are Hopper's own kernels': 7456x2840x464 takes 150 µs by the first, 84 by the one after it.
- A gradient's product in TF32 takes as long as the multiprocessor that loads or multiplies the most: 1024x512x2048 in
  64 tiles of 64x128 elements takes 33 µs, in 32 of 128x128 with sums in four parts 20. A tenth is asked for here too.
  The same holds for other TF32 products with a short K: 65536x40x24 takes 15.4 µs by the first, 9.4 in smaller tiles.
- TF32 products with a short K and ragged rows are fastest by the id 55: 541x619x23 takes 6.9 µs by the first, 3.5. But
  with an input gradient by it, a weight gradient beside that takes longer: together 14.8 µs by the first, 15.6 or more.
- TF32 sums are not split so often that a part has few terms: 21x24x3904 takes 11.7 µs in 132 parts, 7.6 in 32.

The constants are of an H200 (cuBLASLt 13.1), fitted as those of `cost` are, to products of few columns above all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels.tiling import are_whole
from lt_runtime.layout import Order
from lt_runtime.problem import Compute, DType, MatmulProblem
from lt_runtime.products.library_terms import library_shape

_HOPPER: Final = 66
"""The id of the kernels that are estimated besides those of TF32 gradients; of all others too little was measured."""
_HOPPER_TF32: Final = 43
_OLDER_TF32: Final = 21
_SELDOM_FAST: Final = (20, 41, 42)
"""Ids of kernels that are taken only if there is no other. In full FP32 the id 20 is often the fastest."""
SHORT_K: Final = 128
"""Terms of a sum up to which it is not worth splitting."""
_SHORT_TF32: Final = 55
_FEWEST_TERMS: Final = 64
"""Terms of a part of a TF32 sum, at least."""
_LARGE: Final = 1e9
"""Multiply-adds from which on a product is large."""
MULTIPROCESSORS: Final = 132
"""Multiprocessors of an H200."""
_LAUNCH_US: Final = 3.0
_ROUND_US: Final = 0.4
_EPILOGUE_US: Final = 1.5
"""Microseconds that an epilogue adds to a round of tiles of more than `_ROWS` rows."""
_ROWS: Final = 64
_LOADED: Final = 90e3
"""Bytes that a multiprocessor loads in a microsecond."""
_MULTIPLIED: Final = 7.5e6
"""Multiply-adds of a multiprocessor in a microsecond, times the bytes of an operand's element."""
_GRADIENT_US: Final = {_HOPPER_TF32: 9.0, _OLDER_TF32: 5.0}
"""Microseconds that a gradient's product in TF32 takes besides loads and multiplications, by the id of the kernel."""
_GRADIENT_MULTIPLIED: Final = {_HOPPER_TF32: 1e6, _OLDER_TF32: 0.7e6}
"""Multiply-adds of a multiprocessor in a microsecond, in such products."""
_GRADIENT_LOADED: Final = 14e3
"""Numbers that a multiprocessor loads in a microsecond, in such products."""
_SPLIT_US: Final = 1.0
"""Microseconds that the addition of partial sums takes at least."""
_ADDED: Final = 0.5e6
"""Partial sums of a split K that are added up in a microsecond."""
_WORTH: Final = 0.9
"""The part of the first's time that another may take to be chosen."""


class Offered(NamedTuple):
    """What an estimate needs of an algorithm.

    Attributes:
        algo_id: CONFIG_ID.
        tile: rows and columns of D, as the library sees it, that a block works on; None if they are not known.
        splitk: SPLITK_NUM.
        waves: how many times its blocks fill the GPU; 0.0 if that is not known.
    """

    algo_id: int
    tile: tuple[int, int] | None
    splitk: int
    waves: float


def is_split_for_nothing(problem: MatmulProblem, offered: Offered) -> bool:
    """Whether an algorithm splits sums that are short."""
    return problem.k <= SHORT_K and offered.splitk > 1


def is_large(problem: MatmulProblem) -> bool:
    """Whether the multiplications of a product take much longer than a launch."""
    return problem.m * problem.n * problem.k >= _LARGE


def most_promising(problem: MatmulProblem, offers: Sequence[Offered]) -> int:
    """The number of the algorithm to take of those that are offered: the first, if nothing speaks against it."""
    seldom_fast = () if problem.dtype is DType.FLOAT32 and problem.compute is Compute.FLOAT32 else _SELDOM_FAST
    some = [i for i, each in enumerate(offers) if each.algo_id not in seldom_fast] or [*range(len(offers))]
    return some[_most_promising(problem, [offers[i] for i in some])]


def _most_promising(problem: MatmulProblem, offers: Sequence[Offered]) -> int:
    """The number of the algorithm to take, where kernels that are hardly ever fast are offered only if all are."""
    first, is_tf32 = offers[0], problem.compute is Compute.TF32
    lies_along_k = problem.b.layout.order is Order.COLUMN  # as weights do in a forward pass
    is_ragged = not are_whole(problem.dtype, problem.a, problem.b, problem.d)
    if is_tf32 and lies_along_k and is_ragged and problem.k <= SHORT_K:
        return next((i for i, each in enumerate(offers) if each.algo_id == _SHORT_TF32), 0)
    if is_split_for_nothing(problem, first):
        return next((i for i, each in enumerate(offers) if each.splitk <= 1), 0)
    # Epilogues that differentiate or sum are left to the heuristic: their time is not that of the tiles.
    if problem.epilogue.is_derivative or problem.epilogue.has_bias_gradient:
        return 0
    usual = _usual(problem, offers)
    estimate_us = _gradient_us if is_tf32 and (not lies_along_k or problem.k <= SHORT_K) else _estimated_us
    estimates = [estimate_us(problem, each) for each in offers]
    least = min(estimates)
    is_worth_it = not math.isinf(estimates[usual]) and least < _WORTH * estimates[usual]
    return estimates.index(least) if is_worth_it else usual


def _usual(problem: MatmulProblem, offers: Sequence[Offered]) -> int:
    """The number of the algorithm to take if no other is estimated to be faster."""
    is_tf32 = problem.compute is Compute.TF32
    if is_tf32 and is_large(problem):
        return next((i for i, each in enumerate(offers) if each.algo_id == _HOPPER_TF32), 0)
    if is_tf32 and offers[0].splitk * _FEWEST_TERMS > problem.k:
        return next((i for i, each in enumerate(offers) if each.splitk * _FEWEST_TERMS <= problem.k), 0)
    return 0


def _estimated_us(problem: MatmulProblem, offered: Offered) -> float:
    """Microseconds; infinitely many where there is no estimate. The sums of a split K would take time of their own."""
    if offered.algo_id != _HOPPER or offered.tile is None or offered.splitk > 1 or not offered.waves:
        return math.inf
    (rows, cols), terms = offered.tile, problem.k * problem.dtype.itemsize
    us = _ROUND_US + max((rows + cols) * terms / _LOADED, rows * cols * terms / _MULTIPLIED)
    if problem.epilogue is not Epilogue.NONE and rows > _ROWS:
        us += _EPILOGUE_US
    return _LAUNCH_US + math.ceil(offered.waves) * us


def _gradient_us(problem: MatmulProblem, offered: Offered) -> float:
    """Microseconds of a gradient's product in TF32; infinitely many where there is no estimate."""
    if offered.algo_id not in _GRADIENT_US or offered.tile is None or not offered.waves:
        return math.inf
    (rows, cols), parts = offered.tile, max(offered.splitk, 1)
    m, n = library_shape(problem)
    tiles = -(-m // rows) * -(-n // cols)
    if offered.algo_id == _HOPPER_TF32:  # Its blocks share out tiles and, where that is fairer, parts of their sums.
        of_each = max(1.0, tiles / (MULTIPROCESSORS * min(offered.waves, 1.0)))
    else:
        of_each = math.ceil(tiles * parts / MULTIPROCESSORS)
    a_term = max((rows + cols) / _GRADIENT_LOADED, rows * cols / _GRADIENT_MULTIPLIED[offered.algo_id])
    added = _SPLIT_US + parts * m * n / _ADDED if parts > 1 else 0.0
    return _GRADIENT_US[offered.algo_id] + of_each * problem.k / parts * a_term + added
