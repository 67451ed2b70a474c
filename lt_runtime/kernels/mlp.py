"""mlp_fwd.cu, mlp_bwd.cu and mlp_gradients.cu: forward and backward pass of a narrow MLP, one kernel for all layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.devices import device_attributes, device_info
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.epilogue import ACTIVATION_NAMES
from lt_runtime.kernels.kernel import Entry, Launches, Matrix, Struct, define
from lt_runtime.kernels.losses import LOSSES, ElementwiseLoss
from lt_runtime.kernels.tiling import WARP, Tiling
from lt_runtime.layout import Layout
from lt_runtime.problem import DType, MLPProblem, Saved

MAX_WIDTH: Final = 128
"""The largest number of columns of the inputs, of a hidden layer and of the outputs."""
MAX_LAYERS: Final = 16
TYPES: Final = (DType.FLOAT16, DType.BFLOAT16)
# Least compute capability of a GPU that has the tensor-core instructions in mma.cuh.
_CAPABILITY: Final = 80
# Rows of a tile, and the number to whose multiples the kernels pad columns.
_STEP: Final = 16
# Elements of padding behind each row in shared memory.
_SKEW: Final = 8
# FP32 sums in a tile of a weight gradient: 16 outputs by 8 inputs.
_FRAGMENT: Final = 128
# Bytes of a block's shared memory that the driver reserves for itself.
_RESERVED_SHARED: Final = 1024
# Largest width of the hidden layers for which a row warp (see `Block`) has registers for two tiles of rows.
_NARROWER: Final = 64
_FORWARD_WARPS: Final = 4
_FORWARD_BLOCKS: Final = 3  # blocks of mlp_fwd that a multiprocessor holds
_GRADIENTS_BLOCK: Final = (32, 8)
_FROM_OUTPUT: Final = ("relu", "sigmoid", "tanh")
_SAVED: Final = {Saved.NOTHING: 0, Saved.PREACTIVATION: 1, Saved.OUTPUT: 2}
# Registers of each of a multiprocessor's four schedulers; a block's warps are distributed among the schedulers.
_REGISTERS: Final = 1 << 14
_SCHEDULERS: Final = 4
# The largest number of registers that a thread can have.
_MOST_REGISTERS: Final = 255
# Registers that a thread in a sum warp of mlp_bwd needs besides its sums: a number, and some for each layer.
_OTHER_REGISTERS: Final = 30
_LAYER_REGISTERS: Final = 2
# Registers that a thread in a sum warp must leave unused, by the number of sum warps: for other GPUs than Hopper, ptxas
# takes more registers.
_SPARE_REGISTERS: Final = {4: 4, 8: 16}
# If hidden layers are wider than `_WIDE`, each thread of a row warp needs `_WIDE_ROW_REGISTERS` registers, unless the
# launch moves registers between warps (setmaxnreg).
_WIDE: Final = 96
_WIDE_ROW_REGISTERS: Final = 184
# If warps move registers, a thread in a row warp needs at least `_ROW_REGISTERS` registers. It needs `_GELU_REGISTERS`
# for the exact GELU and, with more than two hidden layers, for the tanh form of GELU.
_ROW_REGISTERS: Final = 136
_GELU_REGISTERS: Final = 152
_FEW_LAYERS: Final = 4  # the length of `dims` with two hidden layers: inputs, two hidden layers, outputs
# Threads have registers in units of eight.
_UNIT: Final = 8
# On GPUs of the compute capability `_MOVING`, groups of `_GROUP` warps can give registers to each other. A thread then
# has at most `_MOST_MOVED` registers.
_MOVING: Final = 90
_GROUP: Final = 4
_MOST_MOVED: Final = 232
# A thread's FP32 sums of a weight gradient's tile of 16 outputs and 16 inputs, and of the bias gradient of 16 outputs.
_TILE_SUMS: Final = 8
_BIAS_SUMS: Final = 4
# Largest number of launches of mlp_bwd: if a backward pass needs more, the layers are run one by one, which is faster.
_MOST_PARTS: Final = 3
# How many of a block's partial sums are reserved for the loss; see mlp_sums.cuh.
_LOSS_PLACES: Final = 4


MLP_FWD: Final = Entry("mlp_fwd", "mlp_fwd.cu")
MLP_BWD: Final = Entry("mlp_bwd", "mlp_bwd.cu")
MLP_GRADIENTS: Final = Entry("mlp_gradients", "mlp_gradients.cu")


class Block(NamedTuple):
    """How the warps of a block of mlp_bwd share the work.

    Attributes:
        row_warps: warps that run rows forward through the layers and backward again.
        row_tiles: tiles of 16 rows that a row warp computes at a time: with two, it reads weights half as often.
        sum_warps: warps that compute the gradients of the weights, and keep their sums in registers.
    """

    row_warps: int
    row_tiles: int
    sum_warps: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARP * (self.row_warps + self.sum_warps)

    @property
    def registers(self) -> int:
        """The most registers that a thread may use if the four schedulers are to hold all warps of the block."""
        warps_each = -(-self.threads // (WARP * _SCHEDULERS))
        return min(_REGISTERS // (WARP * warps_each) // _UNIT * _UNIT, _MOST_REGISTERS)

    @property
    def chunk(self) -> int:
        """Rows that a row warp computes at a time."""
        return _STEP * self.row_tiles


_BLOCKS: Final = tuple(Block(*each) for each in ((4, 2, 4), (4, 1, 4), (4, 1, 8), (2, 1, 4), (2, 1, 8)))
"""Ways to try to divide a block's warps between tasks, fastest first.

With eight warps that sum weight gradients a thread has no registers for two tiles of rows.
"""


class LossArguments(NamedTuple):
    """Arguments of a backward pass that begins with a loss.

    Attributes:
        factor: number by which the loss's gradient is multiplied.
        table: device address of a table with the addresses of x and of the targets (`lt::Rows`), which the kernel reads
            when it runs; 0 to use the addresses of the call.
        first: number of the first row to read of the arrays in the table.
    """

    factor: float
    table: int = 0
    first: int = 0


class Part(NamedTuple):
    """One launch of mlp_bwd, which computes the gradients of the layers from `first` to `last`.

    Attributes:
        registers: of the threads of row warps and of sum warps, if these move registers to each other; otherwise zeros.
    """

    first: int
    last: int
    block: Block
    registers: tuple[int, int] = (0, 0)


class Target(NamedTuple):
    """The properties of a GPU that decide the launches of mlp_bwd.

    Attributes:
        shared: bytes of shared memory that a block may have.
        moves_registers: whether warps can give registers to each other.
    """

    shared: int
    multiprocessors: int
    moves_registers: bool


def supports(problem: MLPProblem, device: int) -> bool:
    """Whether the kernels support an MLP on a device.

    The MLP must have a 16-bit type, at least two layers, all of at most `MAX_WIDTH` columns, and few enough weights for
    a block's shared memory and registers. The GPU must have compute capability 8.0 (Ampere) or higher.
    """
    layers = len(problem.dims) - 1
    fits = 2 <= layers <= MAX_LAYERS and max(problem.dims) <= MAX_WIDTH and problem.rows > 0
    if not fits or problem.dtype not in TYPES or device_info(device).capability < _CAPABILITY:
        return False
    enough = _forward_bytes(problem) <= _shared_of_block(device)
    return enough and (not problem.backward or bool(_parts_for(problem, device)))


def forward_macros(dtype: DType, activation: str, width: int) -> Macros:
    """Preprocessor definitions of mlp_fwd; `width` counts the padded columns of the hidden layers."""
    return define(SCALAR=dtype, ACTIVATION=ACTIVATION_NAMES[activation], WIDTH=width)


def backward_macros(problem: MLPProblem, part: Part, loss: str | None = None) -> Macros:
    """Preprocessor definitions of mlp_bwd.

    Args:
        loss: one of `LOSSES`; None if the gradient of the outputs is given.
    """
    block, (inputs, width, *_, outputs) = part.block, _sizes(problem)
    of_layers = define(INPUTS=inputs, OUTPUTS=outputs, HIDDEN=len(problem.dims) - 2, SAVED=_SAVED[_saved(problem)])
    of_part = define(FIRST=part.first, LAST=part.last)
    of_block = define(ROW_WARPS=block.row_warps, ROW_TILES=block.row_tiles, SUM_WARPS=block.sum_warps)
    rows, sums = part.registers
    of_block += define(ROW_REGISTERS=rows, SUM_REGISTERS=sums)
    of_loss = define(THREADS=block.threads, WEIGHTED=False) + (define(LOSS=LOSSES[loss]) if loss else ())
    forward = forward_macros(problem.dtype, problem.activation.name, width)
    return (*forward, *of_layers, *of_part, *of_block, *of_loss)


class MlpForward:
    """Computes the outputs of an MLP from its inputs, in one kernel."""

    scratch_bytes = 0

    def __init__(self, problem: MLPProblem, x: Layout, y: Layout, device: int) -> None:
        shared, (_, width, *_) = _forward_bytes(problem), _sizes(problem)
        wave = device_info(device).multiprocessors * _blocks(device, shared, _FORWARD_BLOCKS)
        blocks = min(-(-problem.rows // (_FORWARD_WARPS * _warp_rows(problem))), wave)
        macros = forward_macros(problem.dtype, problem.activation.name, width)
        tiling = Tiling((blocks, 1), (_FORWARD_WARPS * WARP, 1))
        self._launches = Launches(MLP_FWD, macros, device, tiling, _params(problem, x, y), shared=shared)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`.

        Args:
            call: holds the addresses of x, y, and each layer's weight and bias, which is 0 if there is none.
        """
        params, launch = self._launches[memory.stream]
        params.x.data, params.y.data, *parameters = call.addresses
        _fill(params, parameters)
        launch()


class MlpBackward:
    """Computes the gradients of an MLP's weights and biases from x and the outputs' gradient dy, or from x and targets.

    Args:
        x: layout of the inputs.
        y: layout of dy or, with a loss, of the targets.
        accumulate: whether the gradients are added to the present values of their buffers.
        loss: the loss of the outputs against their targets; None if dy is given instead of targets.

    Attributes:
        scratch_bytes: bytes of scratch memory for the partial sums of the blocks.
    """

    def __init__(
        self, problem: MLPProblem, x: Layout, y: Layout, accumulate: bool, loss: ElementwiseLoss | None, device: int
    ) -> None:
        parts = _parts_for(problem, device)
        assert parts, "`supports` has refused the problem"
        self._layers, self._has_loss = len(problem.dims) - 1, loss is not None
        self._size = problem.rows * problem.dims[-1]
        blocks = min(-(-problem.rows // parts[0].block.chunk), device_info(device).multiprocessors)
        sums, (_, width, *_) = sum(_sums(problem)) + (_LOSS_PLACES if loss else 0), _sizes(problem)
        self.scratch_bytes = 4 * blocks * sums
        self._parts = list[Launches]()
        for part in parts:
            macros, params = backward_macros(problem, part, loss and loss.name), _params(problem, x, y)
            params.delta = loss.delta if loss else 0.0
            tiling, shared = Tiling((blocks, 1), (part.block.threads, 1)), _backward_bytes(problem, part)
            self._parts.append(Launches(MLP_BWD, macros, device, tiling, params, shared=shared))
        last = MLP_GRADIENTS.params(_layers_of(problem), blocks=blocks, sums=sums, size=self._size)
        last.count, last.width, last.accumulate = self._layers, width, accumulate
        tiling = Tiling((-(-sums // _GRADIENTS_BLOCK[0]), 1), _GRADIENTS_BLOCK)
        self._last = Launches(MLP_GRADIENTS, define(SCALAR=problem.dtype), device, tiling, last)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`.

        Args:
            call: holds the addresses of x, of dy or the targets, of each layer's weight and bias, of the gradients
                of weights and biases, and of the loss if there is one; 0 for an absent one. Only a loss reads the
                scalars: `LossArguments`, and the address of a factor of the loss's gradient, or 0.
        """
        x, y, *rest = call.addresses
        partial = memory.scratch(self.scratch_bytes)
        last, launch_last = self._last[memory.stream]
        if self._has_loss:
            last.loss = rest.pop()
        for launches in self._parts:
            params, launch = launches[memory.stream]
            params.x.data, params.y.data, params.partial = x, y, partial
            if self._has_loss:
                arguments, params.grad_scale = call.scalars
                params.gradient_scale = arguments.factor / self._size
                params.table, params.first = arguments.table, arguments.first
            _fill(params, rest[: 2 * self._layers])
            launch()
        _fill(last, rest[2 * self._layers :])
        last.partial = partial
        launch_last()


def _params(problem: MLPProblem, x: Layout, y: Layout) -> Struct:
    count, slope = len(problem.dims) - 1, problem.activation.negative_slope
    return MLP_FWD.params(_layers_of(problem), Matrix.of(x), Matrix.of(y), rows=problem.rows, count=count, slope=slope)


def _layers_of(problem: MLPProblem) -> tuple[tuple[int, int, int, int], ...]:
    return tuple((0, 0, inputs, outputs) for inputs, outputs in itertools.pairwise(problem.dims))


def _fill(params: Struct, addresses: list[int]) -> None:
    """Writes each layer's addresses, given as weight and bias in turn, into a kernel's argument block."""
    for i in range(0, len(addresses), 2):
        layer = params.layers[i // 2]
        layer.weight, layer.bias = addresses[i], addresses[i + 1]


def _sizes(problem: MLPProblem) -> list[int]:
    """Columns of the inputs, of each hidden layer and of the outputs, padded as in the kernels."""
    first, *hidden, last = problem.dims
    inputs, width, outputs = (-(-columns // _STEP) * _STEP for columns in (first, max(hidden), last))
    return [inputs, *[width] * len(hidden), outputs]


def _warp_rows(problem: MLPProblem) -> int:
    return _STEP * (2 if _sizes(problem)[1] <= _NARROWER else 1)


def _resident_bytes(problem: MLPProblem, biases: int) -> int:
    """Bytes of shared memory for the weights of all layers and `biases` biases."""
    (inputs, width, *_, outputs), hidden = _sizes(problem), len(problem.dims) - 2
    weights = width * (inputs + _SKEW) + ((hidden - 1) * width + outputs) * (width + _SKEW)
    return 2 * weights + 4 * biases


def _forward_bytes(problem: MLPProblem) -> int:
    """Bytes of shared memory that a block of mlp_fwd takes: for weights, biases, and two tiles of each warp."""
    inputs, *others = _sizes(problem)
    tiles = 2 * _FORWARD_WARPS * _warp_rows(problem) * (max(inputs, others[-1]) + _SKEW)
    return _resident_bytes(problem, sum(others)) + 2 * tiles


def _sums(problem: MLPProblem) -> list[int]:
    """Number of FP32 sums of each layer's gradients: tiles of 16 outputs by 8 inputs, and a tile for each 16 biases."""
    pairs = itertools.pairwise(_sizes(problem))
    return [below // _STEP * (above // 8 + 1) * _FRAGMENT for above, below in pairs]


def _parts_for(problem: MLPProblem, device: int) -> tuple[Part, ...]:
    """The launches of mlp_bwd on a device; an empty tuple if no block of `_BLOCKS` has enough memory and registers."""
    info = device_info(device)
    return fitting_parts(problem, Target(_shared_of_block(device), info.multiprocessors, info.capability == _MOVING))


def fitting_parts(problem: MLPProblem, target: Target) -> tuple[Part, ...]:
    """The fewest launches that compute all gradients; an empty tuple if no block of `_BLOCKS` can compute them.

    A launch of blocks with two row warps counts as two, since it takes longer. Of several blocks with equal counts, the
    first of `_BLOCKS` is taken.

    Each launch repeats the forward and backward pass of all rows, so that fewer launches are faster.
    """
    found = (_parts_of(problem, block, target) for block in _blocks_for(problem, target.multiprocessors))
    return min((parts for parts in found if 0 < _cost(parts) <= _MOST_PARTS), key=_cost, default=())


def _cost(parts: Sequence[Part]) -> int:
    """Number of launches; one of blocks with two row warps counts as two."""
    return sum(_BLOCKS[0].row_warps // part.block.row_warps for part in parts)


def _parts_of(problem: MLPProblem, block: Block, target: Target) -> tuple[Part, ...]:
    """Divides the layers into parts (launches), from the last layer to the first, each with as many layers as fit.

    Returns an empty tuple if a block's memory or registers do not suffice for some layer alone.
    """
    found, last = list[Part](), len(problem.dims) - 2
    while last >= 0:
        parts = (_fitted(problem, Part(first, last, block), target) for first in range(last + 1))
        part = next(filter(None, parts), None)
        if part is None:
            return ()
        found.append(part)
        last = part.first - 1
    return tuple(found)


def _blocks_for(problem: MLPProblem, multiprocessors: int) -> list[Block]:
    """The entries of `_BLOCKS` to try: with few rows or wide layers only those with one tile for a row warp."""
    is_small = problem.rows <= _BLOCKS[0].row_warps * _STEP * multiprocessors
    most = 1 if is_small or _sizes(problem)[1] > _NARROWER else _BLOCKS[0].row_tiles
    return [block for block in _BLOCKS if block.row_tiles <= most]


def _fitted(problem: MLPProblem, part: Part, target: Target) -> Part | None:
    """The launch `part` with its registers; None if a block's memory or its threads' registers do not suffice."""
    if _backward_bytes(problem, part) > target.shared:
        return None
    block, layers = part.block, part.last - part.first + 1
    needed = _sums_each(problem, part) + _OTHER_REGISTERS + _LAYER_REGISTERS * layers
    of_rows = _WIDE_ROW_REGISTERS if _sizes(problem)[1] > _WIDE else 0
    if max(needed + _SPARE_REGISTERS[block.sum_warps], of_rows) <= block.registers:
        return part
    if not target.moves_registers or block.row_warps % _GROUP or block.sum_warps % _GROUP:
        return None
    rows, sums = _moved_registers(block, needed)
    needs_more = {"gelu": len(problem.dims) > _FEW_LAYERS, "gelu_erf": True}.get(problem.activation.name, False)
    enough = rows >= (_GELU_REGISTERS if needs_more else _ROW_REGISTERS) and sums <= _MOST_MOVED
    return part._replace(registers=(rows, sums)) if enough else None


def _moved_registers(block: Block, needed: int) -> tuple[int, int]:
    """Registers of a thread in row warps and in sum warps, if the latter get `needed` and the former what is left."""
    sums = -(-needed // _UNIT) * _UNIT
    left = block.registers * (block.row_warps + block.sum_warps) - sums * block.sum_warps
    return min(left // block.row_warps // _UNIT * _UNIT, _MOST_MOVED), sums


def _saved(problem: MLPProblem) -> Saved:
    if problem.activation.name == "none":
        return Saved.NOTHING
    return Saved.OUTPUT if problem.activation.name in _FROM_OUTPUT else Saved.PREACTIVATION


def _backward_bytes(problem: MLPProblem, part: Part) -> int:
    """Bytes of shared memory that a block of mlp_bwd takes.

    The shared memory holds weights, biases, and the `WarpBuffers` of each row warp; mlp_bwd.cu has a drawing.
    """
    (inputs, width, *_, outputs), hidden = _sizes(problem), len(problem.dims) - 2
    first, last, saved = part.first, part.last, _saved(problem)
    x, makes_last = 2 if first == 0 else 1, last == hidden
    kept = (hidden if saved is Saved.OUTPUT else last) - max(0, first - 1)
    replaces = saved is Saved.OUTPUT and not makes_last
    gradients = (hidden if saved is Saved.PREACTIVATION or makes_last else last + (not replaces)) - first
    columns = x * (inputs + _SKEW) + (kept + gradients) * (width + _SKEW) + makes_last * (outputs + _SKEW)
    rows = part.block.row_warps * part.block.chunk
    return _resident_bytes(problem, hidden * width + outputs) + 2 * rows * columns


def _sums_each(problem: MLPProblem, part: Part) -> int:
    """Number of FP32 sums of gradients for which a thread of mlp_bwd needs registers; see its `smallest_run`."""
    tiles, warps = list[int](), part.block.sum_warps
    for above, below in itertools.pairwise(_sizes(problem)[part.first : part.last + 2]):
        down, across = below // _STEP, above // _STEP
        tiles += [_TILE_SUMS + _BIAS_SUMS] * down + [_TILE_SUMS] * down * (across - 1)
    least = max(-(-sum(tiles) // warps), _TILE_SUMS + _BIAS_SUMS)
    return next(most for most in range(least - least % -4, sum(tiles) + 4, 4) if _runs(tiles, most) <= warps)


def _runs(tiles: Sequence[int], most: int) -> int:
    """Number of runs of consecutive tiles, each of which has at most `most` sums; `tiles` are the tiles' sums."""
    count, left = 0, 0
    for each in tiles:
        if each > left:
            count, left = count + 1, most
        left -= each
    return count


def _shared_of_block(device: int) -> int:
    (size,) = device_attributes(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    return size


def _blocks(device: int, shared: int, most: int) -> int:
    """Blocks that a multiprocessor holds, given `shared` bytes of memory for each, and registers for at most `most`."""
    (size,) = device_attributes(device, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")
    return max(1, min(most, size // (shared + _RESERVED_SHARED)))
