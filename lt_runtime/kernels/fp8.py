"""cast_fp8.cu and fp8_scales.cu: matrices in FP8, row by row and transposed, and the scales of all FP8 tensors."""

from __future__ import annotations

from typing import Final

from lt_runtime.gpu.devices import check_fp8
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.kernel import Entry, Launches, Matrix, Struct, declared, define
from lt_runtime.kernels.tiling import OCTET, THREADS, VECTOR_BYTES, Tiling, moves_vectors, square_tiles
from lt_runtime.layout import Layout, Order
from lt_runtime.problem import DType, Spec

CAST_FP8: Final = Entry("cast_fp8", "cast_fp8.cu")
FP8_SCALES: Final = Entry("fp8_scales", "fp8_scales.cu")


@declared
class Fp8Output(Struct):
    """The C++ struct `lt::Fp8Output`: the FP8 results of a pass."""

    @classmethod
    def of(cls, layout: Layout, out: Spec | None, transposed: Spec | None) -> Fp8Output:
        """The results for a matrix of the given layout, with addresses 0 for the caller to fill in."""
        return cls(Matrix.of(out), Matrix.of(transposed), rows=layout.rows, cols=layout.cols)

    def point_at(self, scale: int, out: int, transposed: int, amax: int) -> None:
        """Sets the addresses; 0 for a scale of 1 and for absent results."""
        self.scale, self.out.data, self.transposed.data, self.amax = scale, out, transposed, amax


class CastPass:
    """out = x · scale in FP8 and its transpose; amax = max(amax, max |x|).

    Args:
        dtype: name of the FP8 type, see `FP8_TYPES`.
        out, transposed: specs of the results; None for an absent one.

    Raises:
        GpuError: the GPU has no instructions for FP8.
    """

    scratch_bytes = 0

    def __init__(
        self, scalar: DType, dtype: str, x: Spec, out: Spec | None, transposed: Spec | None, device: int
    ) -> None:
        check_fp8(device)
        self._writes = out is not None, transposed is not None
        aligned = moves_tiles((scalar, x), out=out, transposed=transposed)
        macros = define(SCALAR=scalar, E5M2=dtype == "float8_e5m2", ALIGNED=aligned)
        params = CAST_FP8.params(Matrix.of(x), Fp8Output.of(x.layout, out, transposed))
        self._launches = Launches(CAST_FP8, macros, device, square_tiles(x.layout), params)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Puts the pass on the memory's stream; the caller holds the memory's lock.

        Args:
            call: its addresses are those of x, scale, out, transposed and amax.
        """
        params, launch = self._launches[memory.stream]
        params.x.data, scale, out, transposed, amax = call.addresses
        params.fp8.point_at(scale, out * self._writes[0], transposed * self._writes[1], amax)
        launch()


def moves_tiles(*operands: tuple[DType, Spec], out: Spec | None, transposed: Spec | None) -> bool:
    """Whether the kernels' fast path can read the operands and write the FP8 results.

    It reads eight elements of a row at once, and writes eight bytes of a row and 16 of a column.
    """
    results = [each for each in (out, transposed) if each is not None]
    specs = [each for _, each in operands] + results
    is_aligned = all(moves_vectors(spec, dtype) for dtype, spec in operands) and all(map(_moves_bytes, results))
    whole = specs[0].layout.cols % OCTET == 0 and (transposed is None or transposed.layout.cols % VECTOR_BYTES == 0)
    return is_aligned and whole and all(each.layout.order is Order.ROW for each in specs)


def _moves_bytes(spec: Spec) -> bool:
    """Whether every row of an FP8 matrix begins at a multiple of 16 bytes."""
    pitch = spec.layout.leading_dimension if spec.layout.rows > 1 else 0
    return spec.alignment % VECTOR_BYTES == 0 and pitch % VECTOR_BYTES == 0


class ScalesPass:
    """The scales of FP8 tensors for the next step; see `update_fp8_scales` in lt_runtime/reference/fp8.py.

    Args:
        tensors: number of the tensors.
        length: steps of the history.
        headroom: factor by which later absolute maxima may exceed those of the history without an overflow.
    """

    def __init__(self, tensors: int, length: int, headroom: float, device: int) -> None:
        params = FP8_SCALES.params(tensors=tensors, length=length, headroom=headroom)
        self._launches = Launches(FP8_SCALES, (), device, Tiling((-(-tensors // THREADS), 1), (THREADS, 1)), params)

    def launch(self, slots: int, history: int, skipped: int, memory: StreamMemory) -> None:
        """Puts the pass on the memory's stream; the caller holds the memory's lock.

        Args:
            slots, history: addresses of FP32 arrays (tensors, 8) and (tensors, length).
            skipped: address of a uint32 that is not zero if the step is skipped; 0 if none ever is.
        """
        params, launch = self._launches[memory.stream]
        params.slots, params.history, params.skipped = slots, history, skipped
        launch()
