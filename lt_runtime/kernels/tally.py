"""tally.cu: sums over training steps on the device: of the loss, and of rows that are classified right."""

from __future__ import annotations

import threading
from ctypes import Structure, c_float, c_int, c_int64, c_uint64, c_void_p
from typing import Final

from lt_runtime.kernels.blocks import SCALAR, Matrix, fields
from lt_runtime.kernels.cross_entropy import Labels
from lt_runtime.kernels.kernel import Entry, Launches
from lt_runtime.kernels.tiling import THREADS, WARP, Tiling
from lt_runtime.layout import Layout
from lt_runtime.problem import DType

_ROWS: Final = THREADS // WARP  # rows that a block handles at a time: one for each warp
_MAX_BLOCKS: Final = 1024


class TallyState(Structure):
    """`lt::TallyState`: a tally's sums on the device."""

    _fields_ = fields(("loss rest", c_float), ("steps rows correct", c_uint64))


class TallyParams(Structure):
    """`lt::TallyParams`."""

    _fields_ = fields(
        ("logits", Matrix),
        ("labels loss mean state", c_void_p),
        ("rows cols ignore_index", c_int64),
        ("weight", c_float),
        ("first wide_labels ignores", c_int),
    )


TALLY: Final = Entry("tally", "tally.cu", TallyParams)


class TallyPass:
    """Adds a part of a step to a tally.

    Args:
        dtype: type of the logits; any type without logits.
        logits: None for a loss without classes.
    """

    def __init__(self, dtype: DType, logits: Layout | None, labels: Labels, device: int) -> None:
        params, blocks = TallyParams(), 1
        if logits is not None:
            params = TallyParams(Matrix.of(logits), rows=logits.rows, cols=logits.cols, wide_labels=labels.wide)
            params.ignore_index, params.ignores = labels.ignore_index or 0, labels.ignore_index is not None
            blocks = max(1, min(-(-logits.rows // _ROWS), _MAX_BLOCKS))
        tiling = Tiling((blocks, 1), (THREADS, 1))
        self._launches = Launches(TALLY, (("SCALAR", SCALAR[dtype]),), device, tiling, params)
        self._lock = threading.Lock()

    def run(
        self, logits: int, labels: int, loss: int, mean: int, state: int, *, weight: float, first: bool, stream: int
    ) -> None:
        """Puts the pass on `stream`.

        Args:
            logits, labels, loss, mean, state: addresses; `loss` and `mean` are FP32 numbers, `state` is a `TallyState`.
            weight: the factor of the part's loss.
            first: whether it is the step's first part.
        """
        with self._lock:
            params, launch = self._launches[stream]
            params.logits.data, params.labels = logits, labels
            params.loss, params.mean, params.state = loss, mean, state
            params.weight, params.first = weight, first
            launch()
