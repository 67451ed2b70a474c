"""cast_fp8.cu, loss_fp8.cu and fp8_scales.cu: matrices and gradients of losses in FP8, and the updates of scales."""

from __future__ import annotations

from typing import Final, TypeAlias

from lt_runtime.fp8 import Prologue
from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.devices import check_fp8
from lt_runtime.gpu.driver import call as driver_call
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.epilogue import ACTIVATION_NAMES
from lt_runtime.kernels.kernel import Entry, Launches, Matrix, Struct, declared, define
from lt_runtime.kernels.losses import LOSSES, ElementwiseLoss, LossSums
from lt_runtime.kernels.tiling import OCTET, VECTOR_BYTES, WARP, Tiling, moves_vectors, square_tiles
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import Activation, Derivative, DType, Saved, Spec

CAST_FP8: Final = Entry("cast_fp8", "cast_fp8.cu")
LOSS_FP8: Final = Entry("loss_fp8", "loss_fp8.cu")
FP8_SCALES: Final = Entry("fp8_scales", "fp8_scales.cu")
_IDENTITY: Final = Prologue()
Function: TypeAlias = Prologue | Derivative
"""The elementwise function that a cast applies to its operand first."""
MOST_LAYERS: Final = 32
"""The largest number of layers whose scales one `ScalesPass` computes; `kMostLayers` in fp8_scales.cu."""
_LEAST_SCALE: Final = 1 << 23  # Bits of 2^-126, the least 1 / scale; a row of zeros has it.


@declared
class Fp8Output(Struct):
    """The C++ struct `lt::Fp8Output`: where a kernel writes its FP8 results, and the scale and maximum for them."""

    @classmethod
    def of(cls, layout: Layout, out: Spec | None, transposed: Spec | None) -> Fp8Output:
        """The struct for a matrix of the given layout, with addresses 0, which `point_at` sets."""
        return cls(Matrix.of(out), Matrix.of(transposed), rows=layout.rows, cols=layout.cols)

    def point_at(self, scale: int, out: int, transposed: int, amax: int) -> None:
        """Sets the device addresses. Scale 0 means a factor of 1; address 0 means that the result is absent."""
        self.scale, self.out.data, self.transposed.data, self.amax = scale, out, transposed, amax


def cast_macros(
    scalar: DType,
    dtype: str,
    activation: Activation = _IDENTITY.activation,
    *,
    dropout: bool = False,
    backward: bool = False,
    saved: bool = False,
    gated: bool = False,
    aligned: bool = True,
    vectors: int = 0,
) -> Macros:
    """The preprocessor definitions of cast_fp8.cu, which has `vectors` only for the cast without a function."""
    is_plain = activation.name == "none" and not (dropout or backward or gated)
    has_function = aligned and scalar is DType.BFLOAT16 and not vectors
    assert is_plain or has_function, (scalar, activation, dropout, backward, aligned, vectors)
    function, is_e5m2 = ACTIVATION_NAMES[activation.name], dtype == "float8_e5m2"
    elementwise = define(SCALAR=scalar, ACTIVATION=function, DROPOUT=dropout, BACKWARD=backward, SAVED=saved)
    return elementwise + define(GATED=gated, VECTORS=vectors, E5M2=is_e5m2, ALIGNED=aligned)


class CastPass:
    """Computes out = y · scale in FP8, and its transpose, where y = function(x); amax = max(amax, max |y|).

    With a `Prologue` y = dropout(act(x)). With a `Derivative` x is dy, and y = dz = dropout'(dy) · act'(saved); the
    pass then also computes the bias gradient, the FP32 sum of dz before the cast, which is rounded once. With another
    function than the identity, x must be BF16, and `moves_tiles` must return True for the layouts of all matrices.

    Args:
        dtype: name of the FP8 type, see `FP8_TYPES`.
        out, transposed: specs of the results; None for an absent one.
        function: a gated prologue computes dropout(act(x) · value), where the value's columns follow those of x in
            each row of memory. A derivative reads the pre-activation or nothing; its `db` is None without a bias
            gradient.
        accumulate: whether the bias gradient is added to the present values of its buffer.

    Attributes:
        partial_bytes: bytes of scratch memory for the bias gradient's partial sums.

    Raises:
        GpuError: the GPU has no instructions for FP8.
    """

    scratch_bytes = 0

    def __init__(
        self,
        scalar: DType,
        dtype: str,
        x: Spec,
        out: Spec | None,
        transposed: Spec | None,
        device: int,
        function: Function = _IDENTITY,
        *,
        accumulate: bool = False,
    ) -> None:
        check_fp8(device)
        # The kernel's fast path reads rows. So the kernel reads a column-major matrix as its row-major transpose, and
        # `out` and `transposed` are exchanged.
        self._swaps = x.layout.order is Order.COLUMN and function == _IDENTITY
        if self._swaps:
            x, out, transposed = x.transposed, transposed, out
        self._writes = out is not None, transposed is not None
        derivative = function if isinstance(function, Derivative) else None
        gated = isinstance(function, Prologue) and function.gated
        assert derivative is None or derivative.saved in (Saved.NOTHING, Saved.PREACTIVATION), derivative
        saved = None if derivative is None else derivative.saved_spec
        reads = [(scalar, each) for each in (x, saved) if each is not None]
        aligned, drops = moves_tiles(*reads, out=out, transposed=transposed), function.dropout > 0
        options = {"backward": derivative is not None, "saved": saved is not None, "gated": gated}
        macros = cast_macros(scalar, dtype, function.activation, dropout=drops, aligned=aligned, **options)
        tiling = square_tiles(x.layout, sums=derivative is not None)
        has_partial = derivative is not None and derivative.db is not None and tiling.grid[1] > 1
        self.partial_bytes = tiling.sums_bytes if has_partial else 0
        matrices = map(Matrix.of, (x, saved, x if gated else None))
        params = CAST_FP8.params(*matrices, Fp8Output.of(x.layout, out, transposed))
        params.slope, params.db.accumulate = function.activation.negative_slope, accumulate
        self._derives, self._to_value = derivative is not None, x.layout.cols * scalar.itemsize if gated else None
        self._launches = Launches(CAST_FP8, macros, device, tiling, params)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`.

        Args:
            call: holds the addresses of x, scale, out, transposed, amax, and for a derivative those of the saved
                tensor, the bias gradient (0 for an absent one), and `partial_bytes`. The pass uses only the operands
                that it was made with. Its first dropout is the function's.
        """
        params, launch = self._launches[memory.stream]
        params.x.data, scale, out, transposed, amax, *of_derivative = call.addresses
        if self._swaps:
            out, transposed = transposed, out
        params.fp8.point_at(scale, out * self._writes[0], transposed * self._writes[1], amax)
        if self._to_value is not None:
            params.value.data = call.addresses[0] + self._to_value
        if self._derives:
            sums = params.db
            params.saved.data, sums.sum, sums.partial = of_derivative
            sums.tickets = memory.tickets
        if call.dropouts[0] is not None:
            params.dropout = call.dropouts[0].block()
        launch()


class CastRowsPass:
    """Casts a matrix to FP8 with a scale for each row, and its transpose with a scale for each row of the transpose.

    A first launch finds the scales, each from the largest magnitude of its row, and a second one casts by them; see
    fp8_rows.cuh. Arguments and errors are those of `CastPass`.
    """

    scratch_bytes = 0

    def __init__(
        self, scalar: DType, dtype: str, x: Spec, out: Spec | None, transposed: Spec | None, device: int
    ) -> None:
        check_fp8(device)
        params = CAST_FP8.params(x=Matrix.of(x), fp8=Fp8Output.of(x.layout, out, transposed))
        aligned, tiling = moves_tiles((scalar, x), out=out, transposed=transposed), square_tiles(x.layout)
        macros = [cast_macros(scalar, dtype, aligned=aligned, vectors=each) for each in (1, 2)]
        self._finds, self._casts = [Launches(CAST_FP8, each, device, tiling, params) for each in macros]
        self._lengths, self._writes = x.layout.shape, (out is not None, transposed is not None)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`.

        Args:
            call: holds the addresses of x, out, transposed, and of two FP32 vectors, which get 1 / scale of each
                row of `out` and of `transposed`.
        """
        x, *results = call.addresses
        out, transposed, *scales = (at * writes for at, writes in zip(results, 2 * self._writes, strict=True))
        for address, length in zip(scales, self._lengths, strict=True):
            if address:
                driver_call("cuMemsetD32Async", address, _LEAST_SCALE, length, memory.stream)
        for launches, written in ((self._finds, (0, 0)), (self._casts, (out, transposed))):
            params, launch = launches[memory.stream]
            fp8, params.x.data = params.fp8, x
            fp8.out.data, fp8.transposed.data, fp8.row_scales, fp8.col_scales = *written, *scales
            launch()


class CastGatedPass:
    """Computes dh · scale in FP8, and its transpose: the gradient dh[M,2F] of h[M,2F] = (gate, value), from dy[M,F].

    The gradient of the gate and that of the value each have a scale and a largest magnitude of their own. All matrices
    are packed, h and dy are BF16, and `moves_tiles` holds for them.

    Args:
        dtype: name of the FP8 type, see `FP8_TYPES`.
        drops: whether y, of which dy is the gradient, went through dropout.

    Raises:
        GpuError: the GPU has no instructions for FP8.
    """

    scratch_bytes = 0

    def __init__(self, dtype: str, activation: Activation, drops: bool, dy: Spec, device: int) -> None:
        check_fp8(device)
        scalar, (rows, cols) = DType.BFLOAT16, dy.layout.shape
        half, transposed = Spec(Layout(rows, cols, Order.ROW, 2 * cols)), Spec(packed(cols, rows))
        aligned = moves_tiles((scalar, dy), (scalar, half), out=half, transposed=transposed)
        macros = cast_macros(
            scalar, dtype, activation, dropout=drops, backward=True, saved=True, gated=True, aligned=aligned
        )
        dh = Fp8Output.of(dy.layout, half, transposed)
        matrices = map(Matrix.of, (dy, half, half))
        params = CAST_FP8.params(*matrices, dh, dh, slope=activation.negative_slope)
        self._shape = rows, cols
        self._launches = Launches(CAST_FP8, macros, device, square_tiles(dy.layout), params)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`.

        Args:
            call: holds the addresses of dy, h, dh in FP8, its transpose, the scale and the largest magnitude of the
                gate's gradient, and the same two of the value's gradient. Its first dropout is the one that
                forward applied to y.
        """
        params, launch = self._launches[memory.stream]
        params.x.data, gate, out, transposed, *of_gate, scale, amax = call.addresses
        rows, cols = self._shape
        params.saved.data, params.value.data = gate, gate + 2 * cols
        params.fp8.point_at(of_gate[0], out, transposed, of_gate[1])
        params.fp8_value.point_at(scale, out + cols, transposed + rows * cols, amax)
        if call.dropouts[0] is not None:
            params.dropout = call.dropouts[0].block()
        launch()


def loss_fp8_macros(dtype: str, loss: str) -> Macros:
    """The preprocessor definitions of loss_fp8.cu, whose matrices are BF16 unless they are FP8."""
    return define(SCALAR=DType.BFLOAT16, LOSS=LOSSES[loss], E5M2=dtype == "float8_e5m2")


class LossCastPass:
    """Computes the mean of a loss, its gradient, and the sums of the gradient's columns.

    The gradient is cast to FP8 and written as it is and transposed, or is written in BF16, the type of prediction and
    target. The caller has checked by `moves_tiles` that the layouts of all matrices are supported.

    Args:
        dtype: name of the FP8 type, see `FP8_TYPES`.
        loss: a loss without weights of rows or columns.
        accumulate: whether the sums of columns are added to the present values of their buffer.

    Attributes:
        scratch_bytes: bytes of scratch memory for the blocks' partial sums.

    Raises:
        GpuError: the GPU has no instructions for FP8.
    """

    def __init__(
        self, prediction: Spec, target: Spec, dtype: str, loss: ElementwiseLoss, accumulate: bool, device: int
    ) -> None:
        check_fp8(device)
        layout = prediction.layout
        out, transposed = Spec(packed(*layout.shape)), Spec(packed(layout.cols, layout.rows))
        tiling = square_tiles(layout, sums=True)
        self._sums = LossSums(layout, tiling)
        self.scratch_bytes = self._sums.scratch_bytes
        fp8 = Fp8Output.of(layout, out, transposed)
        params = LOSS_FP8.params(*map(Matrix.of, (prediction, target, out)), fp8=fp8, delta=loss.delta)
        params.db.accumulate = accumulate
        self._launches = Launches(LOSS_FP8, loss_fp8_macros(dtype, loss.name), device, tiling, params)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`.

        Args:
            call: holds the addresses of prediction, target, the uncast gradient, loss, sums, the cast gradient, its
                transpose, and the scale and the largest magnitude of the cast; 0 for absent ones.
        """
        params, launch = self._launches[memory.stream]
        prediction, target, gradient, params.mean.loss, params.db.sum, out, transposed, scale, amax = call.addresses
        params.prediction.data, params.target.data, params.gradient.data = prediction, target, gradient
        params.fp8.point_at(scale, out, transposed, amax)
        self._sums.write(params, call, memory)
        launch()


def moves_tiles(*operands: tuple[DType, Spec], out: Spec | None, transposed: Spec | None) -> bool:
    """Whether the kernels' fast path can read the operands and write the FP8 results.

    The fast path reads eight elements of a row at once, and writes eight bytes of a row and 16 of a column.
    """
    results = [(DType.FLOAT8_E4M3FN, each) for each in (out, transposed) if each is not None]
    matrices, cols = (*operands, *results), operands[0][1].layout.cols
    whole = cols % OCTET == 0 and (transposed is None or transposed.layout.cols % VECTOR_BYTES == 0)
    return whole and all(moves_vectors(each, kind) and each.layout.order is Order.ROW for kind, each in matrices)


class ScalesPass:
    """Computes the scales of FP8 tensors for the next step; see `update_fp8_scales` in lt_runtime/reference/fp8.py.

    Args:
        tensors: number of the tensors of each layer, at most 32.
        length: steps of the history.
        headroom: factor by which later absolute maxima may exceed those of the history without an overflow.
        layers: number of the layers, at most `MOST_LAYERS`.
    """

    scratch_bytes = 0

    def __init__(self, tensors: int, length: int, headroom: float, layers: int, device: int) -> None:
        params = FP8_SCALES.params(tensors=tensors, length=length, headroom=headroom)
        self._launches = Launches(FP8_SCALES, (), device, Tiling((layers, 1), (WARP, 1)), params)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`.

        Args:
            call: `call.addresses` has two addresses for each layer: of its slots, an FP32 array (tensors, 8), and of
                its history, an FP32 array (tensors, length). The last address is that of a uint32, which is not zero if
                the step is skipped; it is 0 if no step is ever skipped.
        """
        params, launch = self._launches[memory.stream]
        *arrays, params.skipped = call.addresses
        for i, (slots, history) in enumerate(zip(arrays[::2], arrays[1::2], strict=True)):
            params.layers[i].slots, params.layers[i].history = slots, history
        launch()
