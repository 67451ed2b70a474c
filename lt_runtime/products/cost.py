"""What a product takes in each of the ways to make it, estimated from its sizes; nothing is asked of the library.

A way takes a launch, the time of its multiplications, and the time to move its operands and its result once; copies
take launches and time of their own. The constants are of an H200 (cuBLASLt 13.1). They were fitted to the rows of the
suite `parts`, and to the half of the suite `wide` that is for fitting: these rows hold each product's time by each way.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import Final, NamedTuple

from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels import narrow, tile_matmul
from lt_runtime.kernels.tiling import OCTET, are_whole
from lt_runtime.layout import Order
from lt_runtime.problem import MatmulProblem
from lt_runtime.products.matmul import rounds_before_epilogue
from lt_runtime.products.offered import MULTIPROCESSORS, SHORT_K
from lt_runtime.products.padded import copies_of, on_tensor_cores, padded_problem


class Way(Enum):
    """On what a product is made, and by whom."""

    PLAIN = auto()
    """By the library on the operands as they are."""
    PADDED = auto()
    K_MAJOR = auto()
    """By the library on copies; see `PaddedPlan`."""
    NARROW = auto()
    """By our kernel for products with one tiny dimension."""
    TILE = auto()
    """By our kernel for 16-bit matrices whose rows are no whole vectors."""


class _Rates(NamedTuple):
    """Microseconds until a kernel has begun and ended; multiply-adds and bytes in a microsecond."""

    launch_us: float
    multiplied: float
    moved: float

    def us(self, problem: MatmulProblem) -> float:
        """Microseconds of a product."""
        m, n, k = problem.m, problem.n, problem.k
        moved = (m * k + k * n) * problem.dtype.itemsize + m * n * problem.d_dtype.itemsize
        return self.launch_us + m * n * k / self.multiplied + moved / self.moved


# The library's kernels are Hopper's own where all rows are whole vectors, and otherwise those of older GPUs.
_WHOLE_16_BITS: Final = _Rates(2.2, 570e6, 3.2e6)
_RAGGED_16_BITS: Final = _Rates(6.0, 60e6, 2.2e6)
_RAGGED_16_BITS_SHORT_K: Final = _Rates(3.4, 45e6, 1.3e6)
"""The rates where sums are not split, see `most_promising`."""
_WHOLE_TF32: Final = _Rates(5.2, 150e6, 2.8e6)
_K_MAJOR_TF32: Final = _Rates(5.3, 150e6, 3.3e6)
_RAGGED_TF32: Final = _Rates(3.5, 44e6, 1.8e6)
_RAGGED_TF32_OVER_ROWS: Final = _Rates(8.0, 44e6, 2.7e6)
"""Where sums go over the rows of both operands, as those of a weight gradient do: they are split, and added up then."""
_NARROW: Final = _Rates(1.8, 11e6, 2.8e6)
_NARROW_OF_OCTETS: Final = _NARROW._replace(multiplied=2e6)
"""With more than eight columns, for which our kernel is that of 16."""
_NARROW_BUT_WIDE: Final = _NARROW._replace(multiplied=1e6)
_WIDE: Final = 13
"""Columns from which on our kernel makes as few products in a microsecond as that."""
_NARROW_BUT_WIDE_AND_RAGGED: Final = {2: 8.0, 4: 4.5}
"""Microseconds until our kernel has begun and ended with so many columns, by the bytes of an element.

They hold for ragged rows, whose elements it reads one by one."""
_TILE_US: Final = 2.3
"""Microseconds until our kernel for ragged rows has begun and ended."""
_TILES: Final = 180.0
"""Products of tiles that it makes in a microsecond."""
_TILE_MOVED: Final = 4e6
"""Bytes that it moves in a microsecond."""
_SHARED_US: Final = 1.2
"""Microseconds for each doubling of the blocks that share a sum."""
_ADDED_UP: Final = 15.0
"""Blocks whose sums of columns it adds up in a microsecond."""
_RAGGED_SUMMED: Final = 24.0
"""Rows that the library's kernels add up in a microsecond, where rows are no whole vectors of 16-bit numbers."""
_SUMMED: Final = 1e3
"""Rows that our kernel adds up in a microsecond, where a sum goes over rows, as that of a weight gradient does."""
_PASS_US: Final = 2.0
"""Microseconds until an elementwise kernel of ours has begun and ended."""
_COPY_US: Final = 1.4
"""Microseconds until a kernel that copies operands or a result has begun and ended."""
_PASS_MOVED: Final = 3.7e6
"""Bytes that such a kernel reads and writes in a microsecond."""
_MARGIN_US: Final = 1.6
"""Microseconds by which copies must be faster; estimates of small products are no better.

It is fitted to whole passes. Ragged products beside each other can take longer than one after the other: the backward
pass through 2590x12x832 takes 29.5 µs on the operands as they are and 15.5 on copies, although its two products take
15.0 and 16.7 one by one.
"""
_ROOM_US: Final = 4.0
"""Microseconds by which our kernel for ragged rows must be faster where it makes no more than a product."""
_FP32_AND_BACK: Final = 8
"""Bytes an element that it adds to write a result in FP32, to read it, and to write it in 16 bits."""


def fastest_first(problem: MatmulProblem) -> list[Way]:
    """The ways to try untuned, in their order.

    An epilogue that the library is not asked for, since it would round the product before, is left to a pass of ours
    where nothing is faster than that and the plain product; so is the sum of an operand that the library refuses.
    Copies have to be faster by more than a little: each is a kernel more. So has our kernel for ragged rows where there
    is no epilogue to gain from: it leaves no room for a weight gradient beside it, and shares no copy with it.
    """
    estimates = estimated_us(problem)
    for way in estimates.keys() & {Way.PADDED, Way.K_MAJOR}:
        estimates[way] += _MARGIN_US
    if problem.epilogue is Epilogue.NONE:
        if Way.TILE in estimates:
            estimates[Way.TILE] += _ROOM_US
        return sorted(estimates, key=estimates.__getitem__)
    ways = sorted(estimates, key=estimates.__getitem__)
    plain = ways.index(Way.PLAIN)
    has_pass = problem.epilogue.sums_operand or rounds_before_epilogue(problem)
    return ways[: plain + 1] + [way for way in ways[plain:] if way in (Way.NARROW, Way.TILE) and not has_pass]


def estimated_us(problem: MatmulProblem) -> dict[Way, float]:
    """Microseconds of each way that there is. Off the tensor cores, where nothing is known, the library comes first."""
    own = {Way.NARROW: _narrow_us(problem)} if narrow.supports(problem) else {}
    if not on_tensor_cores(problem):
        return {Way.PLAIN: 0.0} | own
    found = {Way.PLAIN: _library_us(problem)} | own
    if tile_matmul.supports(problem):
        found[Way.TILE] = _tile_us(problem)
    padded = padded_problem(problem)
    if padded is not None:
        found[Way.PADDED] = _library_us(padded) + _copies_us(problem, padded)
        along_k = padded_problem(problem, k_major=True)
        if along_k is not None:
            found[Way.K_MAJOR] = _library_us(along_k) + _copies_us(problem, along_k)
    return found


def _narrow_us(problem: MatmulProblem) -> float:
    width = min(problem.m, problem.n, problem.k)
    is_wide = width >= _WIDE
    rates = _NARROW_BUT_WIDE if is_wide else _NARROW_OF_OCTETS if width > OCTET else _NARROW
    if _goes_over_rows(problem):
        return rates.us(problem) + problem.k / _SUMMED
    is_whole = are_whole(problem.dtype, problem.a, problem.b)
    if is_wide and not is_whole:
        rates = rates._replace(launch_us=_NARROW_BUT_WIDE_AND_RAGGED[problem.dtype.itemsize])
    return rates.us(problem)


def _tile_us(problem: MatmulProblem) -> float:
    shares = tile_matmul.shares_of(problem, MULTIPROCESSORS)
    matrices = (problem.a, problem.b, problem.d, *([problem.aux] if problem.aux else []))
    moved = sum(each.layout.size for each in matrices) * problem.dtype.itemsize
    us = _TILE_US + shares.products / _TILES + moved / _TILE_MOVED + _SHARED_US * math.log2(shares.parts)
    return us + (shares.down / _ADDED_UP if problem.epilogue is Epilogue.DGELU_BGRAD else 0.0)


def _goes_over_rows(problem: MatmulProblem) -> bool:
    """Whether the product sums over the rows of A as it lies in memory, as a weight gradient does."""
    return problem.a.layout.order is Order.COLUMN


def _library_us(problem: MatmulProblem) -> float:
    specs, is_16_bits = (problem.a, problem.b, problem.d), problem.dtype.itemsize == 2
    if are_whole(problem.dtype, *specs):
        if is_16_bits:
            return _WHOLE_16_BITS.us(problem)
        lies_along_k = (problem.a.layout.order, problem.b.layout.order) == (Order.ROW, Order.COLUMN)
        return (_K_MAJOR_TF32 if lies_along_k else _WHOLE_TF32).us(problem)
    if not is_16_bits:
        return (_RAGGED_TF32_OVER_ROWS if _goes_over_rows(problem) else _RAGGED_TF32).us(problem)
    us = (_RAGGED_16_BITS_SHORT_K if problem.k <= SHORT_K else _RAGGED_16_BITS).us(problem)
    if problem.epilogue.sums_operand:
        us += problem.k / _RAGGED_SUMMED
    if rounds_before_epilogue(problem):  # The product is written in FP32, and a pass of ours reads that.
        us += _PASS_US + problem.d.layout.size * _FP32_AND_BACK / _PASS_MOVED
    return us


def _copies_us(problem: MatmulProblem, padded: MatmulProblem) -> float:
    """One kernel fills all copies that are read, and another trims the result.

    Input and weight gradient share a copy of the gradient that both multiply, see `sharing_copy`: half of it counts for
    each. B lies in rows there, and not in a layer's forward pass.
    """
    copies, is_gradient = copies_of(problem, padded), problem.b.layout.order is Order.ROW
    elements = {name: each.source.size + each.target.size for name, each in copies.items()}
    if is_gradient and "a" in elements:
        elements["a"] //= 2
    moved = sum(elements.values()) * problem.dtype.itemsize
    return len({name == "d" for name in copies}) * _COPY_US + moved / _PASS_MOVED
