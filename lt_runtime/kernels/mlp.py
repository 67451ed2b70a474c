"""mlp_fwd.cu, mlp_bwd.cu and mlp_gradients.cu: a narrow MLP from its inputs to its outputs, or to its gradients."""

from __future__ import annotations

import itertools
from ctypes import Structure, c_float, c_int, c_int64, c_void_p
from typing import Final

from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.devices import device_attributes, device_info
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.blocks import SCALAR, Matrix, fields
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.epilogue import ACTIVATION_NAMES
from lt_runtime.kernels.kernel import Entry, Launches
from lt_runtime.kernels.tiling import WARP, Tiling
from lt_runtime.problem import DType, MLPProblem

MAX_WIDTH: Final = 128
"""The most columns of inputs, of a hidden layer and of outputs."""
WIDTHS: Final = (16, 32, 64, MAX_WIDTH)
"""Columns of the hidden layers that the kernels are compiled for; narrower layers are padded."""
MAX_LAYERS: Final = 16
TYPES: Final = (DType.FLOAT16, DType.BFLOAT16)
_CAPABILITY: Final = 80  # of the instructions in mma.cuh
_STEP: Final = 16  # rows of a tile, and what numbers of columns are padded to a multiple of
_SKEW: Final = 8  # elements between two rows in shared memory
_FRAGMENT: Final = 128  # sums of a tile of a gradient, 16 x 8
_RESERVED_SHARED: Final = 1024  # bytes that the driver takes of a block's shared memory
_NARROWER: Final = 64  # columns of hidden layers up to which a warp of mlp_fwd has registers for two tiles of rows
_FORWARD_WARPS: Final = 4
_FORWARD_BLOCKS: Final = 3  # of a multiprocessor
_TILES: Final = (128, 64, 32)  # rows of a tile of mlp_bwd, from which a plan chooses
_WIDE_TILES: Final = (64, 32)  # where a row warp has only one tile of 16 rows
_LEAST_ROWS: Final = 64  # of a tile, for the priors
_GRADIENTS_BLOCK: Final = (32, 8)
_FROM_OUTPUT: Final = ("relu", "sigmoid", "tanh")
_SHORT: Final = ("relu", "gelu")  # activations that take the fewest registers in mlp_bwd, and those that take the most
_LONG: Final = ("sigmoid", "tanh", "gelu_erf")


class MlpLayer(Structure):
    """`lt::MlpLayer`, and `lt::MlpGradient`."""

    _fields_ = fields(("weight bias", c_void_p), ("inputs outputs", c_int))


class MlpParams(Structure):
    """`lt::MlpParams`."""

    _fields_ = fields(
        ("layers", MlpLayer * MAX_LAYERS),
        ("x y", Matrix),
        ("partial", c_void_p),
        ("rows", c_int64),
        ("count tile_rows", c_int),
        ("slope", c_float),
    )


class MlpGradientsParams(Structure):
    """`lt::MlpGradientsParams`."""

    _fields_ = fields(
        ("layers", MlpLayer * MAX_LAYERS),
        ("partial", c_void_p),
        ("blocks sums count width accumulate", c_int),
    )


MLP_FWD: Final = Entry("mlp_fwd", "mlp_fwd.cu", MlpParams)
MLP_BWD: Final = Entry("mlp_bwd", "mlp_bwd.cu", MlpParams)
MLP_GRADIENTS: Final = Entry("mlp_gradients", "mlp_gradients.cu", MlpGradientsParams)


def takes(problem: MLPProblem, device: int) -> bool:
    """Whether the kernels can run an MLP.

    Its type must have 16 bits, and its layers must be narrow, and few enough for shared memory. The GPU must be an
    Ampere or a later one.
    """
    layers = len(problem.dims) - 1
    fits = 2 <= layers <= MAX_LAYERS and max(problem.dims) <= MAX_WIDTH and problem.rows > 0
    if not fits or problem.dtype not in TYPES or device_info(device).capability < _CAPABILITY:
        return False
    room = _shared_of_block(device)
    enough = _forward_bytes(problem) <= room
    return enough and (not problem.backward or bool(_fitting_tiles(problem, device)))


def is_likely_faster(problem: MLPProblem, device: int) -> bool:
    """Whether an MLP that the kernels can run is probably faster by them than layer by layer.

    In training small tiles do not pay, unless a multiprocessor has only one.
    """
    if not problem.backward:
        return True
    rows = _tile_rows(problem, device)
    return rows >= _LEAST_ROWS or _tiles_each(problem, rows, device) == 1


def forward_macros(dtype: DType, activation: str, width: int) -> Macros:
    """What mlp_fwd is compiled for; the width is that of the hidden layers, padded."""
    return ("SCALAR", SCALAR[dtype]), ("ACTIVATION", ACTIVATION_NAMES[activation]), ("WIDTH", str(width))


def backward_macros(dtype: DType, activation: str, width: int) -> Macros:
    """What mlp_bwd is compiled for."""
    saved = 0 if activation == "none" else 2 if activation in _FROM_OUTPUT else 1
    tiles, threads = _row_tiles(activation, width), _threads(activation, width, max(_tiles_for(activation, width)))
    macros = ("SAVED", str(saved)), ("ROW_TILES", str(tiles)), ("THREADS", str(threads))
    return (*forward_macros(dtype, activation, width), *macros)


def gradients_macros(dtype: DType) -> Macros:
    """What mlp_gradients is compiled for."""
    return (("SCALAR", SCALAR[dtype]),)


class MlpForward:
    """The outputs of an MLP."""

    def __init__(self, problem: MLPProblem, x: Matrix, y: Matrix, device: int) -> None:
        self._layers = len(problem.dims) - 1
        warps, rows = _FORWARD_WARPS, _FORWARD_WARPS * _warp_rows(problem)
        shared = _forward_bytes(problem)
        wave = device_info(device).multiprocessors * _blocks(device, shared, _FORWARD_BLOCKS)
        blocks = min(-(-problem.rows // rows), wave)
        params = _params(problem, x, y)
        macros = forward_macros(problem.dtype, problem.activation.name, _width(problem))
        tiling = Tiling((blocks, 1), (warps * WARP, 1))
        self._launches = Launches(MLP_FWD, macros, device, tiling, params, shared=shared)

    def run(self, call: Call, memory: StreamMemory) -> None:
        """Puts the pass on the memory's stream; the caller holds the memory's lock.

        Args:
            call: its addresses are those of x, y, and each layer's weight and bias, which is 0 if there is none.
        """
        params, launch = self._launches[memory.stream]
        params.x.data, params.y.data, *parameters = call.addresses
        _fill(params, parameters)
        launch()


class MlpBackward:
    """The gradients of an MLP's weights and biases, from x and the gradient dy of the outputs."""

    def __init__(self, problem: MLPProblem, x: Matrix, dy: Matrix, accumulate: bool, device: int) -> None:
        self._layers, width, activation = len(problem.dims) - 1, _width(problem), problem.activation.name
        rows = _tile_rows(problem, device)
        wave = device_info(device).multiprocessors * _resident(problem, rows, device)
        self._blocks = min(-(-problem.rows // rows), wave)
        self._sums, shared = sum(_sums(problem)), _backward_bytes(problem, rows)
        macros, params = backward_macros(problem.dtype, activation, width), _params(problem, x, dy)
        params.tile_rows = rows
        tiling = Tiling((self._blocks, 1), (_threads(activation, width, rows), 1))
        self._launches = Launches(MLP_BWD, macros, device, tiling, params, shared=shared)
        last = MlpGradientsParams(_layers_of(problem), None, self._blocks, self._sums, self._layers, width, accumulate)
        tiling = Tiling((-(-self._sums // _GRADIENTS_BLOCK[0]), 1), _GRADIENTS_BLOCK)
        self._last = Launches(MLP_GRADIENTS, gradients_macros(problem.dtype), device, tiling, last)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory for the blocks' sums."""
        return 4 * self._blocks * self._sums

    def run(self, call: Call, memory: StreamMemory) -> None:
        """Puts the pass on the memory's stream; the caller holds the memory's lock.

        Args:
            call: its addresses are those of x, dy, each layer's weight and bias, then of their gradients, 0 for absent
                ones.
        """
        params, launch = self._launches[memory.stream]
        last_params, launch_last = self._last[memory.stream]
        params.x.data, params.y.data, *rest = call.addresses
        _fill(params, rest[: 2 * self._layers])
        _fill(last_params, rest[2 * self._layers :])
        params.partial = last_params.partial = memory.scratch(self.scratch_bytes)
        launch()
        launch_last()


def _params(problem: MLPProblem, x: Matrix, y: Matrix) -> MlpParams:
    count, slope = len(problem.dims) - 1, problem.activation.negative_slope
    return MlpParams(_layers_of(problem), x, y, None, problem.rows, count, slope=slope)


def _layers_of(problem: MLPProblem) -> object:
    sizes = itertools.pairwise(problem.dims)
    return (MlpLayer * MAX_LAYERS)(*(MlpLayer(None, None, inputs, outputs) for inputs, outputs in sizes))


def _fill(params: MlpParams | MlpGradientsParams, addresses: list[int]) -> None:
    """Each layer's weight and bias, in turn."""
    for i in range(0, len(addresses), 2):
        layer = params.layers[i // 2]
        layer.weight, layer.bias = addresses[i], addresses[i + 1]


def _padded(columns: int) -> int:
    return -(-columns // _STEP) * _STEP


def _width(problem: MLPProblem) -> int:
    """Columns of the hidden layers, as the kernels are compiled for them."""
    widest = max(problem.dims[1:-1])
    return next(each for each in WIDTHS if each >= widest)


def _ends(problem: MLPProblem) -> tuple[int, int]:
    """Columns of inputs and outputs, padded."""
    return _padded(problem.dims[0]), _padded(problem.dims[-1])


def _warp_rows(problem: MLPProblem) -> int:
    return _STEP * (2 if _width(problem) <= _NARROWER else 1)


def _resident_bytes(problem: MLPProblem, biases: int) -> int:
    """How many bytes the weights of all layers and so many biases take."""
    (inputs, outputs), width, hidden = _ends(problem), _width(problem), len(problem.dims) - 2
    weights = width * (inputs + _SKEW) + ((hidden - 1) * width + outputs) * (width + _SKEW)
    return 2 * weights + 4 * biases


def _forward_bytes(problem: MLPProblem) -> int:
    """How many bytes of shared memory a block of mlp_fwd takes: for weights, biases, and two tiles of each warp."""
    inputs, outputs = _ends(problem)
    biases = (len(problem.dims) - 2) * _width(problem) + outputs
    tiles = 2 * _FORWARD_WARPS * _warp_rows(problem) * (max(inputs, outputs) + _SKEW)
    return _resident_bytes(problem, biases) + 2 * tiles


def _sums(problem: MLPProblem) -> list[int]:
    """How many sums each layer's gradients take: 16 x 8 tiles of the weight's, and a tile in each row for the bias."""
    (inputs, outputs), width = _ends(problem), _width(problem)
    sizes = [inputs, *[width] * (len(problem.dims) - 2), outputs]
    return [below // _STEP * (above // 8 + 1) * _FRAGMENT for above, below in itertools.pairwise(sizes)]


def _backward_bytes(problem: MLPProblem, rows: int) -> int:
    """How many bytes of shared memory a block of mlp_bwd takes.

    It holds the weights, the hidden layers' biases and the sums, two tiles each of x and dy, a tile or two of each
    hidden layer, and a spare tile, or two where the number of hidden layers is even; see mlp_bwd.cu.

    Args:
        rows: of a tile.
    """
    (inputs, outputs), width, hidden = _ends(problem), _width(problem), len(problem.dims) - 2
    saved = dict(backward_macros(problem.dtype, problem.activation.name, width))["SAVED"] == "1"
    columns = 2 * (inputs + _SKEW) + 2 * (outputs + _SKEW) + (hidden * (1 + saved) + 2 - hidden % 2) * (width + _SKEW)
    return _resident_bytes(problem, hidden * width) + 4 * sum(_sums(problem)) + 2 * rows * columns


def _tile_rows(problem: MLPProblem, device: int) -> int:
    """Rows of a tile: those with which a multiprocessor has the fewest tiles; of equal ones the smallest.

    On an H200 a tile of 128 rows takes hardly longer than one of 32 rows.
    """
    return min(reversed(_fitting_tiles(problem, device)), key=lambda rows: _tiles_each(problem, rows, device))


def _tiles_each(problem: MLPProblem, rows: int, device: int) -> int:
    """Tiles of so many rows for each multiprocessor."""
    return -(-problem.rows // (rows * device_info(device).multiprocessors))


def _fitting_tiles(problem: MLPProblem, device: int) -> list[int]:
    """Rows of those tiles for which there is enough shared memory."""
    room = _shared_of_block(device)
    tiles = _tiles_for(problem.activation.name, _width(problem))
    return [each for each in tiles if _backward_bytes(problem, each) <= room]


def _resident(problem: MLPProblem, rows: int, device: int) -> int:
    """Blocks with such tiles that a multiprocessor holds: the largest block takes all registers."""
    width, activation = _width(problem), problem.activation.name
    threads = [_threads(activation, width, each) for each in (max(_tiles_for(activation, width)), rows)]
    return _blocks(device, _backward_bytes(problem, rows), threads[0] // threads[1])


def _tiles_for(activation: str, width: int) -> tuple[int, ...]:
    return _TILES if _row_tiles(activation, width) == 2 else _WIDE_TILES


def _row_tiles(activation: str, width: int) -> int:
    """Tiles of 16 rows that a row warp of mlp_bwd has: two where a thread's registers suffice for them."""
    suffice = activation in _SHORT if width == _NARROWER else activation not in _LONG
    return 2 if width <= _NARROWER and suffice else 1


def _threads(activation: str, width: int, rows: int) -> int:
    """How many threads a block of mlp_bwd has: those of its row warps, and of a sum warp for each 16 rows."""
    return WARP * (rows // (_STEP * _row_tiles(activation, width)) + rows // _STEP)


def _shared_of_block(device: int) -> int:
    (size,) = device_attributes(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    return size


def _blocks(device: int, shared: int, most: int) -> int:
    """Blocks of so many bytes of shared memory that a multiprocessor holds, which has registers for `most`."""
    (size,) = device_attributes(device, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")
    return max(1, min(most, size // (shared + _RESERVED_SHARED)))
