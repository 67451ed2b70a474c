"""Which of the algorithms that the heuristic offers to take for a product that nobody has measured.

The library's kernels for Hopper work on D in rounds, one tile to a multiprocessor. A round takes as long as the loads
of a tile or its multiplications, whichever is longer, and some time to begin and to end; with an epilogue, tiles of
more than 64 rows take longer to end. The heuristic's first stays unless another is estimated to be faster by a tenth.

The constants are of an H200 (cuBLASLt 13.1), fitted as those of `cost` are, to products of few columns above all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from lt_runtime.epilogue import Epilogue
from lt_runtime.problem import MatmulProblem

_HOPPER: Final = 66
"""The id of the kernels that are estimated; of all others too little was measured."""
_LAUNCH_US: Final = 3.0
_ROUND_US: Final = 0.4
_EPILOGUE_US: Final = 1.5
"""Microseconds that an epilogue adds to a round of tiles of more than `_ROWS` rows."""
_ROWS: Final = 64
_LOADED: Final = 90e3
"""Bytes that a multiprocessor loads in a microsecond."""
_MULTIPLIED: Final = 7.5e6
"""Multiply-adds of a multiprocessor in a microsecond, times the bytes of an operand's element."""
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


def most_promising(problem: MatmulProblem, offers: Sequence[Offered]) -> int:
    """The number of the algorithm to take of those that the heuristic offers, the first if nothing speaks against it.

    Epilogues that differentiate or sum are left to the heuristic: their time is not that of the tiles.
    """
    estimates = [_estimated_us(problem, each) for each in offers]
    if math.isinf(estimates[0]) or problem.epilogue.is_derivative or problem.epilogue.has_bias_gradient:
        return 0
    least = min(estimates)
    return estimates.index(least) if least < _WORTH * estimates[0] else 0


def _estimated_us(problem: MatmulProblem, offered: Offered) -> float:
    """Microseconds; infinitely many where there is no estimate. The sums of a split K would take time of their own."""
    if offered.algo_id != _HOPPER or offered.tile is None or offered.splitk > 1 or not offered.waves:
        return math.inf
    (rows, cols), terms = offered.tile, problem.k * problem.dtype.itemsize
    us = _ROUND_US + max((rows + cols) * terms / _LOADED, rows * cols * terms / _MULTIPLIED)
    if problem.epilogue is not Epilogue.NONE and rows > _ROWS:
        us += _EPILOGUE_US
    return _LAUNCH_US + math.ceil(offered.waves) * us
