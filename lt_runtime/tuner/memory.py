"""Memory of a GPU for what is measured, and comparisons of arrays in it. Nothing here needs CuPy's compiler."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lt_runtime.arrays.operand import CUPY
from lt_runtime.gpu.driver import call
from lt_runtime.kernels.verify import (
    CompareParams,
    Comparison,
    Elements,
    ExpectParams,
    compare_blocks,
    launch_compare,
    launch_expect,
)


class Difference(NamedTuple):
    """How two arrays differ.

    Attributes:
        bad: how many elements are off by more than their limit, or NaN.
        first: index of the first of them in row-major order; meaningless if there is none.
        error_squares: sum of the squares of all differences.
        wanted_squares: sum of the squares of what was wanted.
    """

    bad: int
    first: int
    error_squares: float
    wanted_squares: float


class Memory(NamedTuple):
    """Memory of one GPU, which is current, used in the order of one stream, which is CuPy's current one."""

    device: int
    stream: int

    def allocate(self, size: int) -> Any:
        """Uninitialised memory of `size` bytes; it begins at `data.ptr` of what is returned."""
        return CUPY.empty((size,), np.dtype(np.uint8), self.device, self.stream)

    def write(self, address: int, values: NDArray[Any]) -> None:
        """Copies an array without gaps from the host, which may change it afterwards."""
        call("cuMemcpyHtoDAsync", address, values.ctypes.data, values.nbytes, self.stream)
        call("cuStreamSynchronize", self.stream)

    def read(self, address: int, count: int, dtype: DTypeLike) -> NDArray[Any]:
        """Copies `count` numbers to the host, once the stream has made them."""
        values = np.empty(count, dtype)
        call("cuMemcpyDtoHAsync", values.ctypes.data, address, values.nbytes, self.stream)
        call("cuStreamSynchronize", self.stream)
        return values

    def copy(self, target: int, source: int, size: int) -> None:
        """Copies bytes within the GPU."""
        call("cuMemcpyDtoDAsync", target, source, size, self.stream)

    def set(self, address: int, byte: int, size: int) -> None:
        """Sets every one of `size` bytes."""
        call("cuMemsetD8Async", address, byte, size, self.stream)

    def expect(self, params: ExpectParams, batch: int) -> None:
        """Computes what a product must be; see verify.cu."""
        launch_expect(params, batch, self.device, self.stream)

    def compare(
        self,
        found: Elements,
        shape: tuple[int, int, int],
        wanted: Elements | None = None,
        *,
        constant: float = 0.0,
        limits: int = 0,
        limit: float = 0.0,
        relative: float = 0.0,
    ) -> Difference:
        """Compares every element of matrices with that of others, in FP64.

        Args:
            shape: (batch, rows, cols).
            wanted: None if every element must be `constant`.
            limits: address of how far off each element may be, FP64, row-major without gaps; 0 where that is `limit`
                plus `relative` times the magnitude of what is wanted.
        """
        parts = np.dtype(Comparison)
        blocks = compare_blocks(shape[0] * shape[1] * shape[2])
        made = self.allocate(blocks * parts.itemsize)
        params = CompareParams(found, wanted or Elements(), limits, made.data.ptr, *shape, constant, limit, relative)
        launch_compare(params, self.device, self.stream)
        of_blocks = self.read(made.data.ptr, blocks, parts)
        sums = (of_blocks[name].sum() for name in ("error_squares", "wanted_squares"))
        return Difference(int(of_blocks["bad"].sum()), int(of_blocks["first"].min()), *map(float, sums))
