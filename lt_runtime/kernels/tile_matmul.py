"""tile_matmul.cu: products of 16-bit matrices with ragged rows, with epilogues, on tensor cores."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.epilogue import ACTIVATION_NAMES
from lt_runtime.kernels.kernel import Entry, Launches, Matrix, define
from lt_runtime.kernels.tiling import MAX_GRID_Y, THREADS, Tiling, are_whole, wave_of
from lt_runtime.layout import Order
from lt_runtime.problem import DType, MatmulProblem, Spec

CAPABILITY: Final = 80
"""The least compute capability of a GPU that has the instructions in mma.cuh."""
TYPES: Final = (DType.FLOAT16, DType.BFLOAT16)
# Rows and columns of a tile of D.
_SIDE: Final = 64
# Blocks that a multiprocessor holds.
_BLOCKS: Final = 3
# Largest number of parts of K whose partial sums a single block adds up. More parts are added up in groups first.
_ONE_GROUP: Final = 16
# Products with more multiply-adds than this are left to cuBLASLt.
_MOST: Final = 1 << 30
EPILOGUES: Final = (
    *(Epilogue.NONE, Epilogue.BIAS, Epilogue.RELU, Epilogue.RELU_BIAS, Epilogue.GELU, Epilogue.GELU_BIAS),
    *(Epilogue.GELU_AUX, Epilogue.GELU_AUX_BIAS, Epilogue.DGELU, Epilogue.DGELU_BGRAD, Epilogue.BGRADA),
)


TILE_MATMUL: Final = Entry("tile_matmul", "tile_matmul.cu")


def supports(problem: MatmulProblem) -> bool:
    """Whether the kernel can compute a product, which must have 16-bit matrices with ragged rows."""
    if problem.dtype is not problem.d_dtype or problem.batch != 1 or problem.device_scalars:
        return False
    if problem.epilogue not in EPILOGUES or not is_preferred(problem.dtype, problem.a, problem.b, problem.d):
        return False
    if problem.aux is not None and problem.aux.layout.order is not Order.ROW:
        return False
    return lies_right(problem.b.layout.order, problem.epilogue)


def lies_right(b: Order, epilogue: Epilogue) -> bool:
    """Whether the kernel supports this order of B. With the epilogues of gradients B must be row-major."""
    return b is Order.ROW or not (epilogue.sums_operand or epilogue.is_derivative)


def is_preferred(dtype: DType, a: Spec, b: Spec, d: Spec) -> bool:
    """Whether the kernel is meant for a product: 16-bit, with ragged rows, at most `_MOST` multiply-adds."""
    (m, k), n = a.layout.shape, b.layout.cols
    fits = 0 < m * n * k <= _MOST and n < _SIDE * MAX_GRID_Y
    return fits and dtype in TYPES and not are_whole(dtype, a, b, d)


class Shares(NamedTuple):
    """How blocks of the grid share a product.

    Attributes:
        down, across: numbers of blocks over the rows and over the columns of D; each computes one or several tiles.
        part: number of terms along K that a block sums.
        parts: number of blocks that share K.
        products: number of products of a tile of A and a tile of B, over all blocks.
    """

    down: int
    across: int
    part: int
    parts: int
    products: int


def shares_of(problem: MatmulProblem, multiprocessors: int) -> Shares:
    """How blocks share a product: K is split if D has fewer tiles than the GPU runs blocks at a time."""
    wave, columns = multiprocessors * _BLOCKS, problem.n + problem.epilogue.sums_operand
    down, across, steps = (-(-size // _SIDE) for size in (problem.m, columns, problem.k))
    products, steps_of_a_part = down * across * steps, -(-steps // max(1, min(wave // (down * across), steps)))
    # With this epilogue the blocks of a column of tiles add up their column sums, so that few blocks should share one.
    if problem.epilogue is Epilogue.DGELU_BGRAD:
        down = min(down, max(1, wave // across))
    return Shares(down, across, _SIDE * steps_of_a_part, -(-steps // steps_of_a_part), products)


class TileMatmulPass:
    """Computes a product that `supports` accepts, with its epilogue, in one kernel.

    Attributes:
        scratch_bytes: bytes for partial sums over parts of K, and column sums of each row of tiles, in the stream's
            workspace.
        tickets: number of counters for blocks that share sums.
    """

    def __init__(self, problem: MatmulProblem, device: int) -> None:
        epilogue = problem.epilogue
        self._has_c, self._has_aux = problem.c is not None, problem.aux is not None
        self._has_bias, self._has_sums = epilogue.has_bias, epilogue.has_bias_gradient
        shares = shares_of(problem, wave_of(device, 1))
        parts, tiles = shares.parts, (shares.down, shares.across)
        group = parts if parts <= _ONE_GROUP else math.isqrt(parts - 1) + 1
        slots, level = 0, parts
        while level > 1:
            slots, level = slots + level, -(-level // group)
        # If K is split, a block whose part another block adds up returns from the kernel at once, inside the loop over
        # its tiles, and would skip further ones. So blocks that share K must have one tile each.
        assert parts == 1 or shares.down * _SIDE >= problem.m, "a block of a split K has one tile"
        adds_up = epilogue is Epilogue.DGELU_BGRAD and shares.down > 1
        columns = shares.down * problem.n if adds_up else 0
        self.scratch_bytes = 4 * (math.prod(tiles) * slots * _SIDE * _SIDE + columns)
        self.tickets = math.prod(tiles) * slots + (shares.across if adds_up else 0)
        aux = problem.aux
        params = TILE_MATMUL.params(*(Matrix.of(each) for each in (problem.a, problem.b, problem.c, problem.d, aux)))
        params.rows, params.cols, params.depth = problem.m, problem.n, problem.k
        params.part, params.group, params.slots = shares.part, group, slots
        macros = tile_macros(problem.dtype, problem.a.layout.order, problem.b.layout.order, epilogue)
        self._launches = Launches(TILE_MATMUL, macros, device, Tiling(tiles, (THREADS, 1)), params, batch=parts)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the product on `memory.stream`; the caller must hold `memory.lock`."""
        params, launch = self._launches[memory.stream]
        (a, b, c, vector, aux, d), (alpha, beta) = call.addresses, call.scalars
        params.a.data, params.b.data, params.d.data = a, b, d
        params.c.data = c if self._has_c and beta else 0
        params.aux.data = aux if self._has_aux else 0
        params.bias = vector if self._has_bias else 0
        params.sums = vector if self._has_sums else 0
        params.alpha, params.beta = alpha, beta
        params.partial, params.tickets = memory.workspace, memory.tickets
        launch()


def tile_macros(dtype: DType, a: Order, b: Order, epilogue: Epilogue) -> Macros:
    """The preprocessor definitions of tile_matmul.cu; `a` and `b` are the orders of A and B."""
    of_operands = define(SCALAR=dtype, A_ALONG_K=a is Order.ROW, B_ALONG_K=b is Order.COLUMN)
    activation = ACTIVATION_NAMES[epilogue.activation]
    return (*of_operands, *define(ACTIVATION=activation, DERIVATIVE=epilogue.is_derivative))
