"""gated.cu: y = dropout(act(gate) · value) and its gradients, each as one pass over the rows of a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.epilogue import ACTIVATION_NAMES
from lt_runtime.kernels.kernel import Entry, Launches, Matrix, define
from lt_runtime.kernels.tiling import Access, are_aligned, sweep, wave_of
from lt_runtime.layout import Layout
from lt_runtime.problem import Activation, DType, Spec

GATED_FWD: Final = Entry("gated_fwd", "gated.cu")
GATED_BWD: Final = Entry("gated_bwd", "gated.cu")
_BLOCKS: Final = {DType.FLOAT32: 3, DType.FLOAT16: 4, DType.BFLOAT16: 4}


@dataclass(frozen=True, slots=True)
class GatedProblem:
    """y[M,F] = dropout(act(gate) · value), with h[M,2F] = (gate, value); or dh[M,2F] from dy[M,F] and h.

    Attributes:
        y: spec of y; in a backward pass, of dy.
        dh: spec of the gradient of h; None in a forward pass.
        remakes: whether a backward pass also writes y, over dy.
    """

    dtype: DType
    activation: Activation
    dropout: bool
    h: Spec
    y: Spec
    dh: Spec | None = None
    remakes: bool = False


def blocks_of(dtype: DType, *, remakes: bool) -> int:
    """Launch bound of a pass, in blocks of a multiprocessor; with one more, backward spills registers."""
    return _BLOCKS[dtype] - remakes


class GatedPass:
    """The pass that solves a `GatedProblem`; dh may be the same memory as h, if it has the same layout."""

    scratch_bytes = 0

    def __init__(self, problem: GatedProblem, device: int) -> None:
        dtype, layout, activation = problem.dtype, problem.y.layout, problem.activation
        blocks = blocks_of(dtype, remakes=problem.remakes)
        h, self._to_value = _half(problem.h, dtype)
        if problem.dh is None:
            entry, matrices = GATED_FWD, {"gate": h, "value": h, "out": problem.y}
        else:
            dh, self._to_dvalue = _half(problem.dh, dtype)
            entry, matrices = GATED_BWD, {"dy": problem.y, "gate": h, "value": h, "dgate": dh, "dvalue": dh}
        access = Access.ALIGNED if are_aligned(dtype, *matrices.values()) else Access.ANY
        macros = define(SCALAR=dtype, ACTIVATION=ACTIVATION_NAMES[activation.name], DROPOUT=problem.dropout)
        macros += (*define(REMAKES=problem.remakes), *access.macros(blocks))
        places = {name: Matrix.of(spec) for name, spec in matrices.items()}
        params = entry.params(rows=layout.rows, cols=layout.cols, slope=activation.negative_slope, **places)
        tiling = sweep(layout, wave_of(device, blocks))
        self._launches = Launches(entry, macros, device, tiling, params)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Puts the pass on the memory's stream; the caller holds the memory's lock.

        Args:
            call: its addresses are those of h and y, or of dy, h and dh.
        """
        params, launch = self._launches[memory.stream]
        *dy, h, out = call.addresses
        params.gate.data, params.value.data = h, h + self._to_value
        if dy:
            params.dy.data, params.dgate.data, params.dvalue.data = *dy, out, out + self._to_dvalue
        else:
            params.out.data = out
        if call.dropouts[0] is not None:
            params.dropout = call.dropouts[0].block()
        launch()


def _half(spec: Spec, dtype: DType) -> tuple[Spec, int]:
    """The left half of a matrix, and the bytes from its first element to that of the right half.

    Where the left half is whole octets, the right half is aligned to 16 bytes as the left half is.
    """
    layout = spec.layout
    half = Layout(layout.rows, layout.cols // 2, layout.order, layout.leading_dimension)
    return Spec(half, spec.alignment), half.cols * half.strides[1] * dtype.itemsize
