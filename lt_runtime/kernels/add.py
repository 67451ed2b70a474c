"""add.cu: the sum of two matrices."""

from __future__ import annotations

from typing import Final

from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.kernel import Entry, Launches, Matrix, define
from lt_runtime.kernels.tiling import Access, are_aligned, folded, sweep
from lt_runtime.problem import DType, Spec

ADD: Final = Entry("add", "add.cu")
# Launch bound: blocks that a multiprocessor must be able to hold.
_ADD_BLOCKS: Final = 4


class AddPass:
    """Computes out = a + b for matrices of one shape. out may be in the memory of a or b, if layouts are equal."""

    scratch_bytes = 0

    def __init__(self, dtype: DType, a: Spec, b: Spec, out: Spec, device: int) -> None:
        specs = folded(a, b, out)
        layout = specs[0].layout
        access = Access.ALIGNED if are_aligned(dtype, *specs) else Access.ANY
        macros = *define(SCALAR=dtype), *access.macros(_ADD_BLOCKS)
        params = ADD.params(*map(Matrix.of, specs), *layout.shape)
        self._launches = Launches(ADD, macros, device, sweep(layout, None), params)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`.

        Args:
            call: holds the addresses of a, b and out.
        """
        params, launch = self._launches[memory.stream]
        params.a.data, params.b.data, params.out.data = call.addresses
        launch()
