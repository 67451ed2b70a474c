"""epilogue_fwd.cu, epilogue_bwd.cu and dropout.cu: bias, activation and dropout in one pass over a product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call, DropoutState
from lt_runtime.kernels.kernel import Entry, Launches, Matrix, define
from lt_runtime.kernels.tiling import OCTET, Access, are_aligned, folded, moves_vectors, reduction, sweep, wave_of
from lt_runtime.layout import Order
from lt_runtime.problem import ACTIVATIONS, Derivative, DType, ForwardProblem, MatmulProblem, Philox, Saved, Spec

ACTIVATION_NAMES: Final[Mapping[str, str]] = {name: f"lt::{name.title().replace('_', '')}" for name in ACTIVATIONS}
"""The struct of `activations.cuh` for each activation."""
_SAVED: Final = {Saved.NOTHING: 0, Saved.PREACTIVATION: 1, Saved.OUTPUT: 2, Saved.MASK: 3}
# Launch bounds: blocks that a multiprocessor must be able to hold, which limits a thread's registers. Measured on an
# H200: fewer blocks do not hide the latency of memory; with more, the compiler has too few registers to issue loads
# early.
_FORWARD_BLOCKS: Final = 5
_BACKWARD_BLOCKS: Final = {DType.FLOAT32: 2, DType.FLOAT16: 4, DType.BFLOAT16: 4}
# Launch bound of dropout.cu: blocks that a multiprocessor must be able to hold.
_DROPOUT_BLOCKS: Final = 6
_DROPOUT_WAVES: Final = 4
_KEEPS_ALL: Final = DropoutState(65536, Philox())  # dropout with p = 0: the kernel then copies


EPILOGUE_FWD: Final = Entry("epilogue_fwd", "epilogue_fwd.cu")
EPILOGUE_BWD: Final = Entry("epilogue_bwd", "epilogue_bwd.cu")


class ForwardPass:
    """Computes y = dropout(act(product + bias)) + addend in one pass.

    Args:
        product: the matrix product whose result the pass reads, which may be in the memory of y or of the kept
            pre-activation. Its type is the problem's, or FP32 if its sum with the bias is to be rounded only once. The
            pass adds the problem's bias unless the product's epilogue does, and the problem's addend unless the product
            adds it as its C.
        kept: spec of the pre-activation that the pass writes besides y; None if it writes y alone.

    Attributes:
        moved: bytes that a launch reads and writes.
    """

    def __init__(self, problem: ForwardProblem, product: MatmulProblem, kept: Spec | None, device: int) -> None:
        self._keeps, self._adds_bias = kept is not None, problem.bias is not None and not product.epilogue.has_bias
        dtype, layout, addend = problem.dtype, problem.y.layout, problem.addend if product.c is None else None
        self._adds = adds = addend is not None
        self.moved = layout.size * (product.d_dtype.itemsize + dtype.itemsize * (1 + self._keeps + adds))
        self.moved += self._adds_bias * layout.cols * dtype.itemsize
        access = Access.of((product.d_dtype, product.d), (dtype, problem.y), (dtype, kept), (dtype, addend))
        function, keeps, drops = ACTIVATION_NAMES[problem.activation.name], self._keeps, problem.dropout
        macros = define(SCALAR=dtype, ACTIVATION=function, DROPOUT=drops, PRODUCT=product.d_dtype, KEEP=keeps, ADD=adds)
        blocks = _forward_blocks(access, keeps=keeps, adds=adds)
        macros += access.macros(blocks)
        # Drawing random numbers makes a 16-bit pass compute-bound, so that one wave of persistent blocks is faster than
        # many blocks.
        busy = drops and dtype is not DType.FLOAT32
        params = EPILOGUE_FWD.params(*map(Matrix.of, (product.d, kept, layout, addend)), 0, *layout.shape)
        params.slope = problem.activation.negative_slope
        tiling = sweep(layout, wave_of(device, blocks if adds else _FORWARD_BLOCKS) if busy else None)
        self._launches = Launches(EPILOGUE_FWD, macros, device, tiling, params)
        # the addresses in each stream's argument block, which are written only if they change
        self._written: dict[int, tuple[int, ...]] = {}

    def launch(
        self, product: int, bias: int, y: int, kept: int, addend: int, dropout: DropoutState | None, stream: int
    ) -> None:
        """Launches the pass on `stream`; the caller must hold the lock of the stream's `StreamMemory`.

        Args:
            product, bias, y, kept, addend: addresses. `bias` and `addend` are read only if the pass adds them, `kept`
                is written only if the pass was made with a spec for it. `addend` may be y if their layouts are equal.
        """
        params, launch = self._launches[stream]
        addresses = product, bias, y, kept, addend
        if self._written.get(stream) != addresses:
            self._written[stream] = addresses
            params.in_.data, params.out.data = product, y
            if self._keeps:
                params.preactivation.data = kept
            if self._adds_bias:
                params.bias = bias
            if self._adds:
                params.addend.data = addend
        if dropout is not None:
            params.dropout = dropout.block()
        launch()


def _forward_blocks(access: Access, *, keeps: bool, adds: bool) -> int:
    """Launch bound of a forward pass, in blocks of a multiprocessor: a kept matrix or an addend takes registers."""
    return _FORWARD_BLOCKS - keeps - adds - (adds and access is Access.FLAT)


class BackwardPass:
    """Computes dz = dropout'(dy) · act'(saved), its sum over rows (the bias gradient), or both, in one pass.

    Args:
        derivative: describes the factor of dy. Its `db` is None unless the pass is to compute the bias gradient.
        dy: spec of the gradient.
        dz: spec of dz in any layout, or with dy's layout if dz overwrites dy; None if only the bias gradient is wanted.
        accumulate: whether the bias gradient is added to the present values of its buffer.

    Attributes:
        partial_bytes: bytes of scratch memory for the bias gradient's partial sums.
        moved: bytes that a launch reads and writes, without the partial sums.
    """

    def __init__(
        self, dtype: DType, derivative: Derivative, dy: Spec, dz: Spec | None, device: int, *, accumulate: bool = False
    ) -> None:
        self._makes_dz, self._sums = dz is not None, derivative.db is not None
        self._reads_saved = derivative.saved_spec is not None
        transposes = dz is not None and (dy.layout.order, dz.layout.order) == (Order.ROW, Order.COLUMN)
        access = _access(dtype, derivative, dy, dz, transposes=transposes)
        is_flat, blocks = access is Access.FLAT, _backward_blocks(dtype, access, derivative.dropout)
        function, stores = ACTIVATION_NAMES[derivative.activation.name], 0 if dz is None else 1 + transposes
        macros = define(SCALAR=dtype, ACTIVATION=function, DROPOUT=derivative.dropout)
        macros += define(SAVED=_SAVED[derivative.saved], DZ=stores) + access.macros(blocks)
        layout, wave = dy.layout, wave_of(device, blocks)
        self.moved = dtype.itemsize * (layout.size * (1 + self._makes_dz) + self._sums * layout.cols)
        if dz is not None and derivative.saved_spec is not None:
            saved_bits = 1 if derivative.saved is Saved.MASK else 8 * dtype.itemsize
            self.moved += derivative.saved_spec.layout.size * saved_bits // 8
        if self._sums or transposes:
            # In FP32 a strip of columns is always shared by several blocks: on an H200, one block for each strip made
            # two passes over 256x512 in a training step take 1.2 µs longer.
            strips = dtype is not DType.FLOAT32 and not is_flat
            tiling = reduction(layout, wave, transposes=transposes, strips=strips)
        else:
            tiling = sweep(layout, wave)
        (columns, parts), (x, _) = tiling
        keeps_parts = self._sums and (parts > 1 or is_flat)
        self.partial_bytes = 4 * parts * columns * (x + 2 * is_flat) * OCTET if keeps_parts else 0
        params = EPILOGUE_BWD.params(dy=Matrix.of(layout), dz=Matrix.of(dz), rows=layout.rows, cols=layout.cols)
        params.saved = Matrix.of(derivative.saved_spec, is_mask=derivative.saved is Saved.MASK)
        params.db.accumulate = self._sums and accumulate
        params.slope = derivative.activation.negative_slope
        self._launches = Launches(EPILOGUE_BWD, macros, device, tiling, params)

    def launch(
        self, dy: int, saved: int, dz: int, db: int, partial: int, dropout: DropoutState | None, memory: StreamMemory
    ) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`.

        Args:
            dy, saved, dz, db: addresses; those of operands without a spec are not used.
            partial: address of `partial_bytes`; not used if they are 0.
        """
        params, launch = self._launches[memory.stream]
        params.dy.data = dy
        if self._reads_saved:
            params.saved.data = saved
        if self._makes_dz:
            params.dz.data = dz
        if self._sums:
            sums = params.db
            sums.sum, sums.partial, sums.tickets = db, partial if self.partial_bytes else 0, memory.tickets
        if dropout is not None:
            params.dropout = dropout.block()
        launch()


def _backward_blocks(dtype: DType, access: Access, dropout: bool) -> int:
    """Launch bound of a backward pass, in blocks of a multiprocessor.

    It is one less for 16-bit dropout with `Access.FLAT`, which would otherwise spill registers.
    """
    return _BACKWARD_BLOCKS[dtype] - (dropout and access is Access.FLAT and dtype is not DType.FLOAT32)


def _access(dtype: DType, derivative: Derivative, dy: Spec, dz: Spec | None, *, transposes: bool) -> Access:
    """How a backward pass loads and stores octets.

    Access.FLAT, which reads a matrix as one long row, is impossible with a mask, in which an octet is one byte, and
    with a transposed dz, in which an octet lies in a column.
    """
    is_mask = derivative.saved is Saved.MASK
    saved, result = None if is_mask else derivative.saved_spec, None if transposes else dz
    access = Access.of(*((dtype, each) for each in (dy, saved, result)))
    if dz is not None and transposes and not moves_vectors(dz, dtype):
        return Access.ANY
    return Access.ANY if access is Access.FLAT and (is_mask or transposes) else access


DROPOUT: Final = Entry("dropout", "dropout.cu")


class DropoutPass:
    """Computes target = mask · scale · source; both may be in the same memory."""

    scratch_bytes = 0

    def __init__(self, dtype: DType, source: Spec, target: Spec, device: int) -> None:
        specs = folded(source, target)
        layout = specs[0].layout
        access = Access.ALIGNED if are_aligned(dtype, *specs) else Access.ANY
        macros = *define(SCALAR=dtype), *access.macros(_DROPOUT_BLOCKS)
        wave = None if dtype is DType.FLOAT32 else _DROPOUT_WAVES * wave_of(device, _DROPOUT_BLOCKS)
        params = DROPOUT.params(*map(Matrix.of, specs), layout.rows, layout.cols)
        self._launches = Launches(DROPOUT, macros, device, sweep(layout, wave), params)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`.

        Args:
            call: holds the addresses of source and target; if its first dropout is None, the target becomes a copy.
        """
        params, launch = self._launches[memory.stream]
        params.in_.data, params.out.data = call.addresses
        params.dropout = (call.dropouts[0] or _KEEPS_ALL).block()
        launch()
