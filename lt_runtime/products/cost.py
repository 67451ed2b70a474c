"""Estimates the time of a matrix product by each method from its sizes, without calling cuBLASLt.

An estimate is the sum of the launch time, the time of the multiply-adds, and the time to move operands and result once;
padded copies add launches and bytes. The constants hold for an H200 (cuBLASLt 13.1). They were fitted to the benchmark
suite `parts` and to half of the suite `wide`, whose rows hold the time of each product by each method.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels import tile_matmul
from lt_runtime.kernels.tiling import OCTET, VECTOR_BYTES, are_whole
from lt_runtime.layout import Order
from lt_runtime.problem import DType, MatmulProblem
from lt_runtime.products.matmul import rounds_before_epilogue
from lt_runtime.products.offered import MULTIPROCESSORS, SHORT_K
from lt_runtime.products.padded import copies_of, on_tensor_cores, padded_problem


class _Rates(NamedTuple):
    """Linear model of a kernel's time: fixed launch time + multiply-adds / rate + bytes / rate.

    Attributes:
        launch_us: fixed time of a launch in microseconds.
        multiplied: multiply-adds per microsecond.
        moved: bytes per microsecond.
    """

    launch_us: float
    multiplied: float
    moved: float

    def us(self, problem: MatmulProblem) -> float:
        """Estimated microseconds of a product."""
        m, n, k = problem.m, problem.n, problem.k
        moved = (m * k + k * n) * problem.dtype.itemsize + m * n * problem.d_dtype.itemsize
        return self.launch_us + m * n * k / self.multiplied + moved / self.moved


# Rates of cuBLASLt: it uses kernels for Hopper if no operand is ragged, and kernels for older GPUs otherwise.
_WHOLE_16_BITS: Final = _Rates(2.2, 570e6, 3.2e6)
_RAGGED_16_BITS: Final = _Rates(6.0, 60e6, 2.2e6)
_RAGGED_16_BITS_SHORT_K: Final = _Rates(3.4, 45e6, 1.3e6)
"""Rates for ragged products whose K is too short for split-K in cuBLASLt; see `most_promising`."""
_PAIRED_16_BITS: Final = _Rates(8.0, 150e6, 4.4e6)
_PAIRED_16_BITS_SHORT_K: Final = _Rates(3.4, 90e6, 2.6e6)
"""Rates for ragged products whose rows all begin at multiples of 4 bytes, so that cuBLASLt loads elements in pairs."""
_WHOLE_TF32: Final = _Rates(5.2, 150e6, 2.8e6)
_K_MAJOR_TF32: Final = _Rates(5.3, 150e6, 3.3e6)
_RAGGED_TF32: Final = _Rates(3.5, 44e6, 1.8e6)
_RAGGED_TF32_LONG_K: Final = _Rates(6.5, 44e6, 1.8e6)
_LONG_K: Final = 384
"""Above this K cuBLASLt mostly splits K of ragged TF32 products among blocks, and adds up partial sums."""
_RAGGED_TF32_OVER_ROWS: Final = _Rates(8.0, 44e6, 2.7e6)
"""Rates for a product that sums over rows of both operands, such as a weight gradient: cuBLASLt splits the sum."""
_FP32: Final = _Rates(2.9, 18e6, 4e6)
_FP32_OVER_ROWS: Final = _Rates(6.0, 18e6, 4e6)
_NARROW: Final = _Rates(1.8, 11e6, 2.8e6)
_NARROW_OF_OCTETS: Final = _NARROW._replace(multiplied=2e6)
"""Rates of our kernel for narrow products with more than eight columns, which it pads to 16."""
_NARROW_BUT_WIDE: Final = _NARROW._replace(multiplied=1e6)
_WIDE: Final = 13
"""Number of columns of a narrow product from which on `_NARROW_BUT_WIDE` applies."""
_NARROW_BUT_WIDE_AND_RAGGED: Final = {2: 8.0, 4: 4.5}
"""Launch time in microseconds of our narrow kernels for ragged rows and at least `_WIDE` columns, by element size in
bytes.

The launch time is long because the kernel reads the elements of ragged rows one by one."""
_TILE_US: Final = 2.3
"""Launch time in microseconds of our kernel for ragged rows."""
_TILES: Final = 180.0
"""Pairs of tiles of A and B that our kernel for ragged rows multiplies in a microsecond."""
_TILE_MOVED: Final = 4e6
"""Bytes that our kernel for ragged rows moves in a microsecond."""
_SHARED_US: Final = 1.2
"""Microseconds that our kernel for ragged rows takes longer with each doubling of the blocks that share a sum over
K."""
_ADDED_UP: Final = 15.0
"""Number of blocks whose partial column sums (a bias gradient) our kernel for ragged rows adds up per microsecond."""
_RAGGED_SUMMED: Final = 24.0
"""Number of ragged 16-bit rows that cuBLASLt's epilogues for bias gradients sum per microsecond."""
_SUMMED: Final = 1e3
"""Number of rows that our narrow kernel sums per microsecond in a product over rows, such as a weight gradient."""
_SUMMED_OCTETS: Final = {2: 1.9e6, 4: 3.5e6}
"""Multiply-adds per microsecond of our narrow kernel for a weight gradient with over eight columns, by element size."""
_PASS_US: Final = 2.0
"""Launch time in microseconds of an elementwise kernel of ours."""
_COPY_US: Final = 1.4
"""Launch time in microseconds of a kernel that copies operands or a result."""
_PASS_MOVED: Final = 3.7e6
"""Bytes that an elementwise or copying kernel reads and writes in a microsecond."""
_FILLED: Final = 112
"""Number of tiles of 64x128 elements that keeps all multiprocessors busy."""
_LEAST_BUSY: Final = 0.15
"""Smallest share of multiprocessors that cuBLASLt keeps busy for copies contiguous along K: with few tiles it splits K.
"""
_FP32_AND_BACK: Final = 8
"""Additional bytes moved for each element if a product is written in FP32 and read again by our pass, instead of being
written in 16 bits.
"""


def narrow_us(problem: MatmulProblem) -> float:
    """Estimated microseconds of a product with one tiny dimension by our narrow kernels."""
    width = min(problem.m, problem.n, problem.k)
    is_wide = width >= _WIDE
    rates = _NARROW_BUT_WIDE if is_wide else _NARROW_OF_OCTETS if width > OCTET else _NARROW
    if _goes_over_rows(problem):
        rates = rates if width <= OCTET else _NARROW._replace(multiplied=_SUMMED_OCTETS[problem.dtype.itemsize])
        return rates.us(problem) + problem.k / _SUMMED
    is_whole = are_whole(problem.dtype, problem.a, problem.b)
    if is_wide and not is_whole:
        rates = rates._replace(launch_us=_NARROW_BUT_WIDE_AND_RAGGED[problem.dtype.itemsize])
    return rates.us(problem)


def tile_us(problem: MatmulProblem) -> float:
    """Estimated microseconds of a product of 16-bit matrices with ragged rows by our kernel `tile_matmul`."""
    shares = tile_matmul.shares_of(problem, MULTIPROCESSORS)
    matrices = (problem.a, problem.b, problem.d, *([problem.aux] if problem.aux else []))
    moved = sum(each.layout.size for each in matrices) * problem.dtype.itemsize
    us = _TILE_US + shares.products / _TILES + moved / _TILE_MOVED + _SHARED_US * math.log2(shares.parts)
    return us + (shares.down / _ADDED_UP if problem.epilogue is Epilogue.DGELU_BGRAD else 0.0)


def _goes_over_rows(problem: MatmulProblem) -> bool:
    """Whether A is column-major, as in a weight gradient: the sum over K then goes down the rows in memory."""
    return problem.a.layout.order is Order.COLUMN


def _begin_at_multiples(problem: MatmulProblem, size: int) -> bool:
    """Whether all rows (or columns, if column-major) of A, B and D begin and end at multiples of `size` bytes."""
    numbers = size // problem.dtype.itemsize
    specs = problem.a, problem.b, problem.d
    lengths = [each.layout.cols if each.layout.order is Order.ROW else each.layout.rows for each in specs]
    pitches = [each.layout.leading_dimension for each in specs]
    return all(each % numbers == 0 for each in lengths + pitches) and all(each.alignment >= size for each in specs)


def library_us(problem: MatmulProblem) -> float:
    """Estimated microseconds by cuBLASLt on operands that are not copied; 0 in FP64 and FP8: no method competes."""
    if not on_tensor_cores(problem):
        rates = _FP32_OVER_ROWS if _goes_over_rows(problem) else _FP32
        return rates.us(problem) if problem.dtype is DType.FLOAT32 else 0.0
    is_16_bits = problem.dtype.itemsize == 2
    if _begin_at_multiples(problem, VECTOR_BYTES):
        if is_16_bits:
            return _WHOLE_16_BITS.us(problem)
        lies_along_k = (problem.a.layout.order, problem.b.layout.order) == (Order.ROW, Order.COLUMN)
        return (_K_MAJOR_TF32 if lies_along_k else _WHOLE_TF32).us(problem)
    if not is_16_bits:
        plain = _RAGGED_TF32_LONG_K if problem.k > _LONG_K else _RAGGED_TF32
        return (_RAGGED_TF32_OVER_ROWS if _goes_over_rows(problem) else plain).us(problem)
    of_long_k, of_short_k = _RAGGED_16_BITS, _RAGGED_16_BITS_SHORT_K
    if _begin_at_multiples(problem, 2 * problem.dtype.itemsize):
        of_long_k, of_short_k = _PAIRED_16_BITS, _PAIRED_16_BITS_SHORT_K
    us = (of_short_k if problem.k <= SHORT_K else of_long_k).us(problem)
    if problem.epilogue.sums_operand:
        us += problem.k / _RAGGED_SUMMED
    # cuBLASLt would round the product before the epilogue. So the product is written in FP32, and a pass of ours
    # applies the epilogue.
    if rounds_before_epilogue(problem):
        us += _PASS_US + problem.d.layout.size * _FP32_AND_BACK / _PASS_MOVED
    return us


def copies_us(problem: MatmulProblem, *, k_major: bool = False) -> float:
    """Estimated microseconds by cuBLASLt on padded copies, including the time of copying.

    One kernel makes all copies of operands, and another copies the result back without padding. The products dx and dw
    share a copy of dz, see `sharing_copy`, so that half of its cost counts for each. The estimate takes every product
    with a row-major B for dx or dw, because B is column-major in a layer's forward pass.
    """
    padded = padded_problem(problem, k_major=k_major)
    assert padded is not None, f"nothing is copied for {problem}"
    copies, is_gradient = copies_of(problem, padded), problem.b.layout.order is Order.ROW
    elements = {name: each.source.size + each.target.size for name, each in copies.items()}
    if is_gradient and "a" in elements:
        elements["a"] //= 2
    moved = sum(elements.values()) * problem.dtype.itemsize
    us = library_us(padded)
    if k_major:  # For copies along K, cuBLASLt splits K only with very few tiles, and few tiles fill few SMs.
        tiles = math.ceil(problem.m / 64) * math.ceil(problem.n / 128)
        busy = min(max(tiles / _FILLED, _LEAST_BUSY), 1.0)
        us += problem.m * problem.n * problem.k / _K_MAJOR_TF32.multiplied * (1 / busy - 1)
    return us + len({name == "d" for name in copies}) * _COPY_US + moved / _PASS_MOVED
