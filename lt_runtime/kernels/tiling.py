"""Launch geometry of passes over a matrix: alignment of accesses, threads of a block, blocks of a grid."""

from __future__ import annotations

import enum
import math
from typing import Final, NamedTuple, TypeAlias

from lt_runtime.errors import ShapeError
from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.devices import device_info
from lt_runtime.gpu.memory import MAX_TICKETS
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import DType, Spec

THREADS: Final = 256
"""Largest number of threads of a block, unless a kernel has a limit of its own."""
WARP: Final = 32
OCTET: Final = 8
"""Elements of an octet: consecutive elements, whatever their type, that a thread moves at once."""
VECTOR_BYTES: Final = 16
"""Bytes of the widest access to memory."""
MAX_GRID_Y: Final = 65535
MAX_GRID_Z: Final = 65535

# Limits of a matrix for Access.FLAT, which reads all rows as one long row, so that an octet may reach into the next
# row: the fewest rows and columns, and the most columns. Within these limits a block has 8 to 64 rows of threads, and
# the column sums have enough counters of finished blocks.
_FEWEST_FLAT: Final = (OCTET, 2 * OCTET + 1)
_MOST_FLAT: Final = 1 << 18
# The row index, of 32 bits, must not overflow where a kernel loads rows up to four steps ahead.
_MAX_ROWS: Final = 2**32 - 4 * MAX_GRID_Y * THREADS
_OCTETS_A_THREAD: Final = 2
_FOLDED_ROW: Final = 2048  # An elementwise pass divides contiguous arrays into rows of at most this many elements.
# In a small matrix, one block sums all rows of a strip (a few octets of columns), without waiting for other blocks: the
# strip's width in octets, the most threads down the rows, and the most rows of such a matrix.
_STRIP_OCTETS: Final = 2
_STRIP_THREADS: Final = 128
_STRIP_ROWS: Final = 4 * _STRIP_THREADS
_UPRIGHT_BLOCK: Final = (8, 32)  # has 32 rows, because a pass that transposes writes lines of 32 elements
_SQUARE_BLOCK: Final = (16, 16)
# Column sums of matrices of at most so many elements are computed by upright or square blocks. These divide the columns
# among more blocks than wide ones do, so that fewer partial sums of each column remain to be added: on an H200 in BF16,
# an activation's derivative with its column sum over 8192x3072 takes 38.1 µs with square blocks and 39.4 µs with blocks
# as wide as a warp, over 8192x768 11.2 and 14.3 µs. Larger matrices have fewer partial sums for each column anyway, and
# there blocks that read longer pieces of a row are faster.
_UPRIGHT_ELEMENTS: Final = 1 << 21
_SQUARE_ELEMENTS: Final = 1 << 25
_TILE: Final = 128
# Upper limit of the blocks in y of a pass over square tiles that sums over rows: the last block reads a partial sum of
# each of them.
_MOST_PARTS: Final = 64
# Threads in x and y of a block that transposes a column-major matrix: a warp reads eight consecutive elements of a
# column, in FP32 a whole sector of 32 bytes.
_TURNING_BLOCK: Final = (4, 64)


Pair: TypeAlias = tuple[int, int]
"""Numbers of blocks or threads in x (columns) and in y (rows)."""


class Tiling(NamedTuple):
    """Launch dimensions: blocks of the grid and threads of a block."""

    grid: Pair
    block: Pair

    @property
    def sums_bytes(self) -> int:
        """Bytes of FP32 sums of columns, one for each row of blocks, if a thread has eight columns."""
        (columns, parts), (x, _) = self
        return 4 * parts * columns * x * OCTET


def moves_vectors(spec: Spec, dtype: DType) -> bool:
    """Whether every line of a matrix (row, or column of a column-major matrix) begins at a multiple of 16 bytes."""
    layout = spec.layout
    lines = layout.rows if layout.order is Order.ROW else layout.cols
    pitch = layout.leading_dimension * dtype.itemsize if lines > 1 else 0
    return spec.alignment % VECTOR_BYTES == 0 and pitch % VECTOR_BYTES == 0


def are_whole(dtype: DType, *specs: Spec) -> bool:
    """Whether every line (row or, if column-major, column) of all matrices is whole octets and aligned to 16 bytes."""
    lengths = (each.layout.cols if each.layout.order is Order.ROW else each.layout.rows for each in specs)
    return all(length % OCTET == 0 for length in lengths) and all(moves_vectors(each, dtype) for each in specs)


class Access(enum.IntEnum):
    """How a pass loads and stores octets; see sweep.cuh."""

    ANY = 0
    ALIGNED = 1
    FLAT = 2

    @classmethod
    def of(cls, *operands: tuple[DType, Spec | None]) -> Access:
        """The fastest way to load and store octets that is possible for matrices of one shape.

        None stands for an absent matrix.
        """
        matrices = [(dtype, spec) for dtype, spec in operands if spec is not None]
        if all(are_aligned(dtype, spec) for dtype, spec in matrices):
            return cls.ALIGNED
        return cls.FLAT if all(_is_flat(spec) for _, spec in matrices) else cls.ANY

    def macros(self, blocks: int) -> Macros:
        """The macros for how a kernel loads and stores octets, and for the blocks that a multiprocessor must hold.

        The compiler limits a thread's registers so that this many blocks fit on a multiprocessor. Kernels for operands
        that are not aligned have no limit of registers: they use as many registers as they need.
        """
        return ("ALIGNED", str(int(self))), ("BLOCKS", str(blocks if self else 1))


def _is_flat(spec: Spec) -> bool:
    """Whether a matrix has no gaps between its rows and is large enough for Access.FLAT."""
    layout, (rows, cols) = spec.layout, _FEWEST_FLAT
    is_large = layout.rows >= rows and cols <= layout.cols <= _MOST_FLAT
    has_no_gaps = layout.order is Order.ROW and layout.leading_dimension == layout.cols
    return is_large and has_no_gaps and spec.alignment % VECTOR_BYTES == 0


def are_aligned(dtype: DType, *specs: Spec | None) -> bool:
    """Whether the rows of all matrices are whole octets and begin at multiples of 16 bytes.

    None stands for an absent matrix.

    The fast path of the kernels requires this alignment.
    """
    present = [spec for spec in specs if spec is not None]
    return all(spec.layout.order is Order.ROW for spec in present) and are_whole(dtype, *present)


def folded(*specs: Spec) -> list[Spec]:
    """Reshapes contiguous operands of an elementwise pass to rows of a length that suits the kernels.

    If any operand is column-major or not contiguous, all are returned as they are. Each element keeps its row-major
    index, by which dropout draws its random number. The results have one shape, which is a single row if the number of
    elements has no suitable divisor.
    """
    if any(spec.layout.order is not Order.ROW or spec.layout.extent != spec.layout.size for spec in specs):
        return list(specs)
    size = specs[0].layout.size
    cols = math.gcd(size, _FOLDED_ROW)
    return [Spec(packed(size // cols, cols) if cols >= OCTET else packed(1, size), spec.alignment) for spec in specs]


def tile(rows: int, cols: int) -> Pair:
    """Threads of a block in x (eight columns each) and y (rows): as wide as the matrix, up to a warp."""
    octets = -(-cols // OCTET)
    x = min(WARP, next_power_of_two(octets))
    y = min(THREADS // x, next_power_of_two(rows))
    return min(THREADS // y, next_power_of_two(octets)), y


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def wave_of(device: int, blocks: int) -> int:
    """Blocks that the GPU runs at a time (a wave) if a multiprocessor holds `blocks` blocks."""
    return device_info(device).multiprocessors * blocks


def grid_for(layout: Layout) -> Tiling:
    """The grid of an elementwise pass over a matrix: one octet for each thread, or more if there are too many."""
    return _cover(layout, tile(layout.rows, layout.cols), MAX_GRID_Y)


def sweep(layout: Layout, wave: int | None) -> Tiling:
    """The grid of an elementwise pass over a matrix: at most `wave` blocks or, if it is None, 16 elements a thread.

    Raises:
        ShapeError: more rows than a kernel can count.
    """
    _check_rows(layout)
    block = tile(layout.rows, layout.cols)
    columns, rows = _cover(layout, block, layout.rows).grid
    blocks = max(1, -(-rows // _OCTETS_A_THREAD) if wave is None else wave // columns)
    return _cover(layout, block, min(blocks, MAX_GRID_Y))


def square_tiles(layout: Layout, *, sums: bool = False) -> Tiling:
    """The grid of a pass over tiles of 128 rows and columns; see fp8.cuh.

    Args:
        sums: whether the pass sums over rows. Blocks that share a column of the grid then need a counter for it, and
            the pass may need one more. If there are not as many counters, one block sums all rows of its columns.

    Raises:
        ShapeError: more rows than a kernel can count.
    """
    _check_rows(layout)
    columns, tiles = (-(-length // _TILE) for length in (layout.cols, layout.rows))
    most = MAX_GRID_Y if not sums else _MOST_PARTS if columns < MAX_TICKETS else 1
    return Tiling((columns, min(tiles, most)), (_TILE // OCTET, _TILE // OCTET))


def turning(layout: Layout) -> Tiling:
    """The grid of a pass that reads a matrix along its columns, and writes another along its rows."""
    return _cover(layout, _TURNING_BLOCK, MAX_GRID_Y)


def reduction(layout: Layout, wave: int, *, transposes: bool, strips: bool = True) -> Tiling:
    """The grid of a pass that may sum over rows: at most one wave; in a small matrix one block for each strip.

    The order of the sum, and with it the bits of the result, depend on `wave`, which is a property of the GPU.

    Args:
        strips: whether a block may see all rows of a narrow strip of columns, in a small matrix.

    Raises:
        ShapeError: more rows than a kernel can count.
    """
    _check_rows(layout)
    block = _UPRIGHT_BLOCK if transposes else _sum_block(layout)
    if strips and not transposes and layout.rows <= _STRIP_ROWS and -(-layout.cols // (OCTET * _STRIP_OCTETS)) <= wave:
        block = (_STRIP_OCTETS, min(_STRIP_THREADS, next_power_of_two(layout.rows)))
        return _cover(layout, block, 1)
    columns = _cover(layout, block, 1).grid[0]
    return _cover(layout, block, max(1, min(wave // columns, MAX_GRID_Y)))


def _sum_block(layout: Layout) -> Pair:
    """Threads in x and y of a block that sums up columns."""
    for block, most in ((_UPRIGHT_BLOCK, _UPRIGHT_ELEMENTS), (_SQUARE_BLOCK, _SQUARE_ELEMENTS)):
        x, y = block
        if layout.size <= most and layout.cols >= OCTET * x and layout.rows >= y:
            return block
    return tile(layout.rows, layout.cols)


def _cover(layout: Layout, block: Pair, limit: int) -> Tiling:
    """The grid of blocks that covers a matrix, with at most `limit` blocks in y."""
    x, y = block
    return Tiling((-(-layout.cols // (OCTET * x)), min(-(-layout.rows // y), limit)), block)


def _check_rows(layout: Layout) -> None:
    if layout.rows > _MAX_ROWS:
        raise ShapeError(f"a matrix has {layout.rows} rows; at most {_MAX_ROWS} are accepted")
