"""norm.cu: layer normalisation and root-mean-square normalisation of the rows of a matrix, and their gradients."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple, TypeAlias

from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.devices import device_attributes
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.kernel import Entry, Launches, Matrix, define
from lt_runtime.kernels.tiling import OCTET, VECTOR_BYTES, WARP, Tiling, are_aligned, next_power_of_two, wave_of
from lt_runtime.problem import DType, Spec

NORM_FWD: Final = Entry("norm_fwd", "norm.cu")
NORM_BWD: Final = Entry("norm_bwd", "norm.cu")
NORM_SUMS: Final = Entry("norm_sums", "norm.cu")

# Octets of a row that a thread holds, as in norm.cu: four in norm_fwd if rows are aligned, and in norm_bwd if rows are
# also long and their elements have 16 bits; otherwise two.
_OCTETS: Final = 2
_MANY_OCTETS: Final = 4
# Largest number of threads of a block, one for each `Width`: of norm_fwd, for aligned and other rows, and of norm_bwd.
# The launch bounds in norm.cu limit registers so that a multiprocessor runs at least the largest of these blocks.
_FORWARD_THREADS: Final = {True: (128, 512, 512), False: (256, 512, 256)}
_BACKWARD_THREADS: Final = (256, 512, 512)
# Rows in shared memory when norm_bwd prefetches: the present and the next row of x, and the same of dy.
_AHEAD: Final = 4
# Threads in x and y of a block that adds up partial sums: 32 columns, so that a warp reads whole lines of 128 bytes.
_SUMS_BLOCK: Final = (4, 64)
# Bytes of static shared memory of norm_bwd, which the column sums of long rows must leave free.
_STATIC_SHARED: Final = 1 << 10


Matrices: TypeAlias = tuple[Spec | None, ...]


class Width(enum.IntEnum):
    """Class of row lengths: rows that the registers of a small block hold, of a large block, or of no block (LONG)."""

    SHORT = 0
    WIDE = 1
    LONG = 2


class Norm(NamedTuple):
    """Kind of normalisation and its types.

    Attributes:
        dtype: type of all matrices. weight: type of weight and bias, and of their gradients.
        has_mean: whether it is LayerNorm, which subtracts a row's mean, and not RMSNorm.
    """

    dtype: DType
    weight: DType
    has_mean: bool

    @property
    def sums(self) -> int:
        """Number of gradients that are sums over rows: the gradients of weight and, in LayerNorm, bias."""
        return 1 + self.has_mean


def norm_macros(norm: Norm, *, aligned: bool, width: Width) -> Macros:
    """The preprocessor definitions of norm.cu."""
    types = define(SCALAR=norm.dtype, WEIGHT=norm.weight, MEAN=norm.has_mean)
    threads = define(FORWARD_THREADS=_FORWARD_THREADS[aligned][width], BACKWARD_THREADS=_BACKWARD_THREADS[width])
    return types + define(ALIGNED=aligned, LONG=width is Width.LONG) + threads


class _Rows:
    """How a pass divides the rows of a matrix among blocks and threads.

    In a forward pass each block computes its rows and ends. A backward pass has one wave of blocks, which loop over the
    rows, because a block adds up the gradients of weight and bias over its rows.

    Args:
        matrices: specs, as `NormForwardPass` or `NormBackwardPass` takes them.
        vectors: alignment of the addresses of weight and bias.
        forward: whether it is the forward pass.

    Attributes:
        shape: rows and columns.
        pitch: number of columns, rounded up to a multiple of the columns that a block's threads hold at a time.
        ahead_bytes: shared memory of a backward pass for rows of x and dy that are loaded ahead.
    """

    def __init__(self, norm: Norm, matrices: Matrices, vectors: int, device: int, *, forward: bool) -> None:
        layout = next(each.layout for each in matrices if each is not None)
        self.shape = layout.shape
        aligned = are_aligned(norm.dtype, *matrices) and vectors % VECTOR_BYTES == 0
        threads = _FORWARD_THREADS[aligned] if forward else _BACKWARD_THREADS
        octets_of_row = -(-layout.cols // OCTET)
        is_short = aligned and norm.dtype.itemsize == 2
        octets = _MANY_OCTETS if forward and aligned else _OCTETS
        fitting = [each for each in Width if octets_of_row <= octets * threads[each] or each is Width.LONG]
        self.width = width = fitting[0]
        most = threads[max(width, Width.WIDE)]
        if width is Width.LONG and is_short:
            octets = _MANY_OCTETS
        lanes = min(-(-octets_of_row // octets), most)
        lanes = next_power_of_two(lanes) if lanes <= WARP else -(-lanes // WARP) * WARP
        share = -(-layout.rows // wave_of(device, 1))
        rows = max(1, WARP // lanes, min(next_power_of_two(threads[0] // lanes + 1) // 2, next_power_of_two(share)))
        blocks = -(-layout.rows // rows)
        wave = blocks if forward else wave_of(device, most // (lanes * rows))
        self.tiling = Tiling((min(wave, blocks), 1), (lanes, rows))
        self.macros = norm_macros(norm, aligned=aligned, width=width)
        held = lanes * OCTET * octets
        self.pitch = -(-layout.cols // held) * held
        self.ahead_bytes = (is_short and width is not Width.LONG) * _AHEAD * _OCTETS * VECTOR_BYTES * lanes * rows


class NormForwardPass:
    """Computes y = norm(x) and the statistics of x's rows, and before that the sum of x and another matrix if wanted.

    Args:
        matrices: specs of x, of the matrix that is added to x, of the sum, and of y; None for an absent one.
        vectors: alignment of the addresses of weight and bias.
    """

    scratch_bytes = 0

    def __init__(self, norm: Norm, matrices: Matrices, vectors: int, eps: float, device: int) -> None:
        rows = _Rows(norm, matrices, vectors, device, forward=True)
        params = NORM_FWD.params(*map(Matrix.of, matrices))
        params.rows, params.cols, params.eps = *rows.shape, eps
        self._launches = Launches(NORM_FWD, rows.macros, device, rows.tiling, params)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`.

        Args:
            call: holds the addresses of x, weight, bias, add, y, the sum, row means and reciprocal standard deviations
                (rstd).
        """
        params, launch = self._launches[memory.stream]
        params.x.data, params.weight, params.bias, params.add.data, *results = call.addresses
        params.out.data, params.total.data, params.mean, params.rstd = results
        launch()


class NormBackwardPass:
    """Computes dx and the gradients of weight and bias.

    Args:
        matrices: specs of dy, of x, of the matrix that is added to dx, and of dx; None for an absent one.
        vectors: alignment of the weight's address.
        sums: whether the gradient of weight or bias is wanted.
        accumulate: whether the gradients of weight and bias are added to the present values of their buffers.

    Attributes:
        scratch_bytes: bytes of scratch memory for the partial sums of the blocks.
    """

    def __init__(self, norm: Norm, matrices: Matrices, vectors: int, sums: bool, accumulate: bool, device: int) -> None:
        rows = _Rows(norm, matrices, vectors, device, forward=False)
        (blocks, _), pitch, (_, cols) = rows.tiling.grid, rows.pitch, rows.shape
        own_bytes = 4 * norm.sums * pitch
        self.scratch_bytes = own_bytes * blocks * sums
        room = device_attributes(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")[0] - _STATIC_SHARED
        holds = sums and rows.width is Width.LONG and own_bytes <= room
        params = NORM_BWD.params(*map(Matrix.of, matrices), pitch=pitch, holds_sums=holds)
        params.rows, params.cols = rows.shape
        shared = own_bytes if holds else rows.ahead_bytes
        # For a matrix without rows norm_bwd is not launched, and NORM_SUMS writes zeros as gradients of weight and
        # bias.
        self._launches = Launches(NORM_BWD, rows.macros, device, rows.tiling, params, shared=shared) if blocks else None
        adding = NORM_SUMS.params(parts=blocks, cols=cols, pitch=pitch, accumulate=accumulate)
        grid = -(-cols // (OCTET * _SUMS_BLOCK[0])), norm.sums
        self._sums = Launches(NORM_SUMS, rows.macros, device, Tiling(grid, _SUMS_BLOCK), adding) if sums else None

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`.

        Args:
            call: holds the addresses of dy, x, weight, row means, reciprocal standard deviations (rstd), add, dx, and
                the gradients of weight and bias; 0 for a result that is not wanted.
        """
        *operands, dweight, dbias = call.addresses
        partial = memory.scratch(self.scratch_bytes) if self.scratch_bytes else 0
        if self._launches is not None:
            params, launch = self._launches[memory.stream]
            params.dy.data, params.x.data, params.weight, params.mean, params.rstd = operands[:5]
            params.add.data, params.dx.data, params.partial = *operands[5:], partial
            launch()
        if self._sums is not None:
            params, launch = self._sums[memory.stream]
            params.partial, params.dweight, params.dbias = partial, dweight, dbias
            launch()
