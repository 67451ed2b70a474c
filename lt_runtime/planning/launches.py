"""Launches of our own passes over a matrix: grid, argument block, kernel variant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lt_runtime.gpu.kernels import MAX_GRID_Y, OCTET, THREADS, Kernel, get_kernel, tile
from lt_runtime.gpu.params import (
    SCALAR,
    ColumnSumParams,
    Dropout,
    EpilogueBwdParams,
    EpilogueFwdParams,
    Matrix,
)
from lt_runtime.layout import Layout
from lt_runtime.problem import Activation, BackwardProblem, DType, ForwardProblem, Philox, Saved, keep_scale

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
_SAVED: Final = {Saved.NOTHING: 0, Saved.PREACTIVATION: 1, Saved.OUTPUT: 2}
_TARGET_BLOCKS: Final = 1024
_MIN_ROWS_PER_BLOCK: Final = 32


@dataclass(frozen=True, slots=True)
class DropoutState:
    """Dropout as a launch needs it: threshold of `keep_threshold`, and where the random numbers come from.

    Attributes:
        step_address: of a uint32 on the device that replaces `philox.step`; 0 if there is none.
    """

    threshold: int
    philox: Philox
    step_address: int = 0

    def block(self) -> Dropout:
        """The kernels' argument block."""
        step = 0 if self.step_address else self.philox.step
        scale = keep_scale(self.threshold)
        return Dropout(self.philox.seed, self.step_address, step, self.philox.layer, self.threshold, scale)


def _no_dropout() -> Dropout:
    return Dropout(0, 0, 0, 0, 65536, 1.0)


def grid_for(layout: Layout) -> tuple[tuple[int, int], tuple[int, int]]:
    """Grid and block of an elementwise pass over a matrix."""
    x, y = tile(layout.rows, layout.cols)
    return (-(-layout.cols // (OCTET * x)), min(-(-layout.rows // y), MAX_GRID_Y)), (x, y)


def _macros(dtype: DType, activation: Activation, dropout: bool) -> tuple[tuple[str, str], ...]:
    return (
        ("SCALAR", SCALAR[dtype]),
        ("ACTIVATION", ACTIVATION_NAMES[activation.name]),
        ("DROPOUT", str(int(dropout))),
    )


class ForwardPass:
    """y = dropout(act(z + bias)) over one matrix, keeping z + bias where the problem asks for it."""

    def __init__(self, problem: ForwardProblem, device: int) -> None:
        self._problem = problem
        self._kernel = get_kernel("epilogue_fwd", _macros(problem.dtype, problem.activation, problem.dropout), device)
        self._grid, self._block = grid_for(problem.y.layout)

    def run(self, z: int, bias: int, y: int, *, in_place: bool, dropout: DropoutState | None, stream: int) -> None:
        """Puts the pass on `stream`.

        Args:
            z: address of the product: y's if `in_place`, otherwise the kept pre-activation's, where z + bias is
                written if there is a bias to add.
            bias: address, 0 if the product has it already.
        """
        y_layout = self._problem.y.layout
        output = Matrix.at(y, y_layout)
        kept = self._problem.preactivation
        source = output if in_place or kept is None else Matrix.at(z, kept.layout)
        params = EpilogueFwdParams(
            in_=source,
            preactivation=source if bias and not in_place else Matrix(),
            out=output,
            bias=bias,
            rows=y_layout.rows,
            cols=y_layout.cols,
            dropout=dropout.block() if dropout else _no_dropout(),
            slope=self._problem.activation.negative_slope,
        )
        self._kernel.launch(self._grid, self._block, params, stream)


class BackwardPass:
    """dz = dropout'(dy) · act'(saved), the bias gradient, or both, over one matrix."""

    def __init__(self, problem: BackwardProblem, device: int) -> None:
        self._problem = problem
        layout = problem.dy.layout
        macros = _macros(problem.dtype, problem.activation, problem.dropout)
        self._kernel = get_kernel("epilogue_bwd", (*macros, ("SAVED", str(_SAVED[problem.saved]))), device)
        self._finish: Kernel | None = None
        if problem.db:
            self._finish = get_kernel("column_sum_finish", (("SCALAR", SCALAR[problem.dtype]),), device)
        self._block = tile(layout.rows, layout.cols)
        columns = -(-layout.cols // (OCTET * self._block[0]))
        # Enough blocks to fill any GPU, few enough that the partial sums stay a small part of the traffic. A function
        # of the shape alone, so that the sum's order, and with it the bits, are the same on every GPU.
        parts = max(1, min(_TARGET_BLOCKS // columns, layout.rows // _MIN_ROWS_PER_BLOCK))
        self._rows_per_block = -(-layout.rows // parts)
        self._grid = (columns, -(-layout.rows // self._rows_per_block))

    @property
    def partial_bytes(self) -> int:
        """Bytes of scratch memory for the bias gradient's partial sums."""
        return 4 * self._grid[1] * self._problem.dy.layout.cols if self._problem.db else 0

    def run(
        self,
        dy: int,
        saved: int,
        dz: Matrix | None,
        partial: int,
        db: int,
        dropout: DropoutState | None,
        stream: int,
    ) -> None:
        """Puts the pass on `stream`; `dz` is None where only the bias gradient is wanted."""
        problem, layout = self._problem, self._problem.dy.layout
        saved_spec = problem.saved_spec
        params = EpilogueBwdParams(
            dy=Matrix.at(dy, layout),
            saved=Matrix.at(saved, saved_spec.layout) if saved_spec else Matrix(),
            dz=dz or Matrix(),
            partial=partial if problem.db else 0,
            rows=layout.rows,
            cols=layout.cols,
            rows_per_block=self._rows_per_block,
            dropout=dropout.block() if dropout else _no_dropout(),
            slope=problem.activation.negative_slope,
        )
        self._kernel.launch(self._grid, self._block, params, stream)
        if self._finish is not None:
            total = ColumnSumParams(partial, db, layout.cols, self._grid[1], int(problem.accumulate))
            self._finish.launch((-(-layout.cols // THREADS), 1), (THREADS, 1), total, stream)
