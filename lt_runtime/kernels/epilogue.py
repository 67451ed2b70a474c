"""Launches of our own passes over a matrix: grid, argument block, kernel variant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.launch import Launch
from lt_runtime.kernels.call import DropoutState
from lt_runtime.kernels.kernel import OCTET, get_kernel
from lt_runtime.kernels.params import SCALAR, ColumnSum, EpilogueBwdParams, EpilogueFwdParams, Matrix
from lt_runtime.kernels.tiling import access_macros, are_aligned, moves_vectors, reduction, sweep, wave_of
from lt_runtime.layout import Order
from lt_runtime.problem import Activation, Derivative, DType, ForwardProblem, Saved, Spec

ACTIVATION_NAMES: Final = {
    "none": "lt::None",
    "relu": "lt::Relu",
    "leaky_relu": "lt::LeakyRelu",
    "sigmoid": "lt::Sigmoid",
    "tanh": "lt::Tanh",
    "gelu": "lt::Gelu",
    "gelu_erf": "lt::GeluErf",
    "silu": "lt::Silu",
}
"""The struct of `activations.cuh` for each activation."""
_SAVED: Final = {Saved.NOTHING: 0, Saved.PREACTIVATION: 1, Saved.OUTPUT: 2, Saved.MASK: 3}
# Blocks that a multiprocessor shall hold, which bounds a thread's registers. Measured on an H200: with fewer blocks
# memory's latency shows, with more the compiler moves the loads that were to be early to the end of the loop.
_FORWARD_BLOCKS: Final = 5
_BACKWARD_BLOCKS: Final = {DType.FLOAT32: 2, DType.FLOAT16: 4, DType.BFLOAT16: 4}


def _macros(dtype: DType, activation: Activation, dropout: bool) -> Macros:
    return (
        ("SCALAR", SCALAR[dtype]),
        ("ACTIVATION", ACTIVATION_NAMES[activation.name]),
        ("DROPOUT", str(int(dropout))),
    )


class ForwardPass:
    """y = dropout(act(z + bias)) over one matrix.

    Args:
        source: how the product lies where it is kept; None where it lies in y.
        adds_bias: the product has no bias yet. What is kept gets it as well.
    """

    def __init__(self, problem: ForwardProblem, device: int, *, source: Spec | None, adds_bias: bool) -> None:
        self._problem, self._source = problem, source or problem.y
        self._keeps, self._adds_bias = adds_bias and source is not None, adds_bias
        aligned = are_aligned(problem.dtype, self._source, problem.y)
        macros = (
            *_macros(problem.dtype, problem.activation, problem.dropout),
            ("KEEP", str(int(self._keeps))),
            *access_macros(aligned, _FORWARD_BLOCKS - self._keeps),
        )
        self._kernel = get_kernel("epilogue_fwd", macros, device)
        # Drawing random numbers takes a 16-bit pass longer than memory does; blocks then had better start only once.
        busy = problem.dropout and problem.dtype is not DType.FLOAT32
        self._tiling = sweep(problem.y.layout, wave_of(device, _FORWARD_BLOCKS) if busy else None)
        self._launches: dict[int, tuple[EpilogueFwdParams, Launch]] = {}

    def run(self, z: int, bias: int, y: int, *, dropout: DropoutState | None, stream: int) -> None:
        """Puts the pass on `stream`, whose memory's lock the caller holds.

        Args:
            z: address of the product.
            bias: address; looked at only if the pass adds it.
        """
        known = self._launches.get(stream)
        params, launch = known or self._prepare(stream)
        params.in_.data, params.out.data = z, y
        if self._keeps:
            params.preactivation.data = z
        if self._adds_bias:
            params.bias = bias
        if dropout is not None:
            params.dropout = dropout.block()
        launch()

    def _prepare(self, stream: int) -> tuple[EpilogueFwdParams, Launch]:
        """The argument block of a stream, without addresses, and the launch that it is of."""
        layout, source = self._problem.y.layout, Matrix.at(0, self._source.layout)
        params = EpilogueFwdParams(
            in_=source,
            preactivation=source if self._keeps else Matrix(),
            out=Matrix.at(0, layout),
            rows=layout.rows,
            cols=layout.cols,
            slope=self._problem.activation.negative_slope,
        )
        self._launches[stream] = params, self._kernel.prepare(*self._tiling, params, stream)
        return self._launches[stream]


@dataclass(frozen=True, slots=True)
class Sums:
    """That a pass makes the bias gradient.

    Attributes:
        accumulate: it is added to what is there.
    """

    accumulate: bool = False


class BackwardPass:
    """dz = dropout'(dy) · act'(saved), the bias gradient, or both, over one matrix.

    Args:
        derivative: what dy is multiplied by. Its `db` is not looked at.
        dy: how the gradient lies.
        dz: how it is to lie in memory, at another place or as dy at the same; None where only the bias gradient is
            wanted.
        sums: None where the bias gradient is not.
    """

    def __init__(
        self, dtype: DType, derivative: Derivative, dy: Spec, dz: Spec | None, device: int, *, sums: Sums | None
    ) -> None:
        self._derivative, self._dy, self._dz, self._sums = derivative, dy, dz, sums
        self._reads_saved = derivative.saved_spec is not None
        self._launches: dict[int, tuple[EpilogueBwdParams, Launch]] = {}
        transposes = dz is not None and (dy.layout.order, dz.layout.order) == (Order.ROW, Order.COLUMN)
        saved = derivative.saved_spec if derivative.saved is not Saved.MASK else None
        aligned = are_aligned(dtype, dy, saved, None if transposes else dz)
        if dz is not None and transposes:
            aligned = aligned and moves_vectors(dz, dtype)
        blocks = _BACKWARD_BLOCKS[dtype]
        macros = (
            *_macros(dtype, derivative.activation, derivative.dropout),
            ("SAVED", str(_SAVED[derivative.saved])),
            ("DZ", str(0 if dz is None else 1 + transposes)),
            *access_macros(aligned, blocks),
        )
        self._kernel = get_kernel("epilogue_bwd", macros, device)
        wave = wave_of(device, blocks)
        if sums is not None or transposes:
            # in FP32 a strip is too much for a block: on an H200 two passes over 256x512 took 1.2 µs more in a step
            strips = dtype is not DType.FLOAT32
            self._tiling = reduction(dy.layout, wave, transposes=transposes, strips=strips)
        else:
            self._tiling = sweep(dy.layout, wave)

    @property
    def partial_bytes(self) -> int:
        """Bytes of scratch memory for the bias gradient's partial sums."""
        (columns, parts), (x, _) = self._tiling
        return 4 * parts * columns * x * OCTET if self._sums and parts > 1 else 0

    def run(
        self,
        dy: int,
        saved: int,
        dz: int,
        db: int,
        partial: int,
        tickets: int,
        dropout: DropoutState | None,
        stream: int,
    ) -> None:
        """Puts the pass on `stream`, whose memory's lock the caller holds.

        Args:
            partial: address of `partial_bytes`.
            tickets: address of a zero uint32 for each block in x, which are zero again afterwards.
        """
        known = self._launches.get(stream)
        params, launch = known or self._prepare(stream)
        params.dy.data = dy
        if self._reads_saved:
            params.saved.data = saved
        if self._dz is not None:
            params.dz.data = dz
        if self._sums is not None:
            sums = params.db
            sums.sum, sums.partial, sums.tickets = db, partial, tickets
        if dropout is not None:
            params.dropout = dropout.block()
        launch()

    def _prepare(self, stream: int) -> tuple[EpilogueBwdParams, Launch]:
        """The argument block of a stream, without addresses, and the launch that it is of."""
        layout, sums = self._dy.layout, self._sums
        params = EpilogueBwdParams(
            dy=Matrix.at(0, layout),
            saved=self._saved(),
            dz=Matrix.at(0, self._dz.layout) if self._dz else Matrix(),
            db=ColumnSum(accumulate=int(sums.accumulate)) if sums else ColumnSum(),
            rows=layout.rows,
            cols=layout.cols,
            slope=self._derivative.activation.negative_slope,
        )
        self._launches[stream] = params, self._kernel.prepare(*self._tiling, params, stream)
        return self._launches[stream]

    def _saved(self) -> Matrix:
        """How the saved tensor lies; a mask is a matrix of bytes to the kernel, each eight columns of a row."""
        spec = self._derivative.saved_spec
        if spec is None:
            return Matrix()
        if self._derivative.saved is Saved.MASK:
            return Matrix(0, spec.layout.leading_dimension // OCTET, 1)
        return Matrix.at(0, spec.layout)
