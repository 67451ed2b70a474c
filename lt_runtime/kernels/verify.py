"""verify.cu: computes matrix products in FP64 with error bounds, and compares arrays element by element."""

from __future__ import annotations

from typing import Final

from lt_runtime.kernels.kernel import Entry, Launches, Struct, declared, struct
from lt_runtime.kernels.tiling import THREADS, Tiling
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
    """Launches `expect`, which computes the expected results of a product, on a stream of the current device."""
    grid = -(-params.rows // EXPECT_TILE), -(-params.cols // EXPECT_TILE)
    _, launch = Launches(EXPECT, (), device, Tiling(grid, (THREADS, 1)), params, batch)[stream]
    launch()


def launch_compare(params: Struct, device: int, stream: int) -> None:
    """Launches `compare` on a stream of the current device; `params.parts` has `compare_blocks(...)` elements."""
    blocks = compare_blocks(params.batch * params.rows * params.cols)
    _, launch = Launches(COMPARE, (), device, Tiling((blocks, 1), (THREADS, 1)), params)[stream]
    launch()
