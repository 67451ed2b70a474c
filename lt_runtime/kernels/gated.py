"""gated.cu: gated activations such as SwiGLU, y = dropout(act(gate) · value), and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
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


def blocks_of(dtype: DType, *, remakes: bool) -> int:
    """Launch bound: blocks that a multiprocessor must hold. With one more, a backward pass that remakes y spills."""
    return _BLOCKS[dtype] - remakes


class GatedPass:
    """Computes y[M,F] = dropout(act(gate) · value), with h[M,2F] = (gate, value); or dh[M,2F] from dy[M,F] and h.

    Args:
        drops: whether the pass applies dropout.
        specs: specs of h and y, or of h, dy and dh; dh may be in h's memory, if their layouts are equal.
        remakes: whether a backward pass also recomputes y, and writes it over dy.
    """

    scratch_bytes = 0

    def __init__(
        self, dtype: DType, activation: Activation, drops: bool, specs: Sequence[Spec], remakes: bool, device: int
    ) -> None:
        h, y, *dh = specs
        layout, blocks = y.layout, blocks_of(dtype, remakes=remakes)
        gate, self._to_value = _half(h, dtype)
        entry, matrices = GATED_FWD, {"gate": gate, "value": gate, "out": y}
        if dh:
            dgate, self._to_dvalue = _half(dh[0], dtype)
            entry, matrices = GATED_BWD, {"dy": y, "gate": gate, "value": gate, "dgate": dgate, "dvalue": dgate}
        access = Access.ALIGNED if are_aligned(dtype, *matrices.values()) else Access.ANY
        macros = define(SCALAR=dtype, ACTIVATION=ACTIVATION_NAMES[activation.name], DROPOUT=drops)
        macros += (*define(REMAKES=remakes), *access.macros(blocks))
        places = {name: Matrix.of(spec) for name, spec in matrices.items()}
        params = entry.params(rows=layout.rows, cols=layout.cols, slope=activation.negative_slope, **places)
        tiling = sweep(layout, wave_of(device, blocks))
        self._launches = Launches(entry, macros, device, tiling, params)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`.

        Args:
            call: holds the addresses of h and y, or of dy, h and dh.
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
    """The left half of a matrix, and the distance in bytes from its first element to that of the right half.

    If rows of the left half are whole octets, the right half is aligned to 16 bytes if the left half is.
    """
    layout = spec.layout
    half = Layout(layout.rows, layout.cols // 2, layout.order, layout.leading_dimension)
    return Spec(half, spec.alignment), half.cols * half.strides[1] * dtype.itemsize
