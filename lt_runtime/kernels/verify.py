"""verify.cu: computes matrix products in FP64 with error bounds, and compares arrays element by element."""

from __future__ import annotations

from typing import Any, Final

from lt_runtime.kernels.kernel import Entry, Launches, Struct, declared, struct
from lt_runtime.kernels.tiling import MAX_GRID_Z, THREADS, Tiling
from lt_runtime.problem import DType

EXPECT_TILE: Final = 64
"""Rows and columns of the tile of results that a block of `expect` computes."""
BITS: Final = "bits"
"""Name of the type of a mask's elements; the strides of a mask in `Elements` count bits."""
_INTEGERS: Final = (BITS, "uint8", "uint16", "uint32", "uint64")
_FLOATS: Final = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")
TYPES: Final = {name: number for number, name in enumerate((*_INTEGERS, *_FLOATS))}
"""Maps the name of a type to its value in the C++ enum `lt::ElementType`."""
ACTIVATIONS: Final = {"none": 0, "relu": 1, "gelu": 2}
"""Numbers of the activations that `expect` computes."""
_ITEM_BITS: Final = (1, 8, 16, 32, 64, 8, 8, 16, 16, 32, 64)
"""Bits of an element, by the type's value in `TYPES`."""
_BYTE: Final = 8  # bits
_MOST_BLOCKS: Final = 512


@declared
class Elements(Struct):
    """The C++ struct `lt::Elements`: a batch of matrices. `type` is one of `TYPES`; strides are in elements."""


@declared
class Rounding(Struct):
    """The C++ struct `lt::Rounding`: unit in the last place, smallest normal and largest compared number of a type."""


Results: Final = struct("Results")
"""The C++ struct `lt::Results`: addresses of the expected results, and of the largest error that each may have."""
Comparison: Final = struct("Comparison")
EXPECT: Final = Entry("expect", "verify.cu")
COMPARE: Final = Entry("compare", "verify.cu")


def elements_of(address: int, strides: tuple[int, int, int], dtype: DType | None) -> Elements:
    """Describes a batch of matrices at an address; if the type is None, a bit mask, whose strides count bits."""
    return Elements(address, *strides, TYPES[BITS if dtype is None else dtype.value])


def compare_blocks(size: int) -> int:
    """Number of blocks that compare arrays of `size` elements; each block writes a `Comparison`."""
    return min(max(1, -(-size // THREADS)), _MOST_BLOCKS)


def launch_expect(params: Struct, batch: int, device: int, stream: int) -> None:
    """Launches `expect`, which computes the expected results of a product, on a stream of the current device.

    A grid has a matrix for each index in z, so that a large batch needs several launches, and all tiles of a matrix in
    x, because y has at most 65,535 indices.
    """
    params = type(params).from_buffer_copy(params)  # the addresses change from launch to launch
    tiles = -(-params.rows // EXPECT_TILE) * -(-params.cols // EXPECT_TILE)
    for first in range(0, batch, MAX_GRID_Z):
        if first:
            _move_on(params, MAX_GRID_Z)
        size = min(MAX_GRID_Z, batch - first)
        _, launch = Launches(EXPECT, (), device, Tiling((tiles, 1), (THREADS, 1)), params, size)[stream]
        launch()


def _move_on(params: Any, count: int) -> None:
    """Moves the addresses of a batch's operands and results on by `count` matrices."""
    for each in (params.a, params.b, params.c, params.bias, params.aux):
        if each.data:
            each.data += count * each.batch_stride * _ITEM_BITS[each.type] // _BYTE
    step = _ITEM_BITS[TYPES["float64"]] // _BYTE * count * params.rows * params.cols
    for results in (params.d, params.kept):
        if results.values:
            results.values += step
            results.limits += step


def launch_compare(params: Struct, device: int, stream: int) -> None:
    """Launches `compare` on a stream of the current device; `params.parts` has `compare_blocks(...)` elements."""
    blocks = compare_blocks(params.batch * params.rows * params.cols)
    _, launch = Launches(COMPARE, (), device, Tiling((blocks, 1), (THREADS, 1)), params)[stream]
    launch()
