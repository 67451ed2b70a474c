"""class_chunk.cu: softmax cross-entropy that needs the logits of only one chunk of classes in memory."""

from __future__ import annotations

from typing import Final

from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.kernel import Entry, Launches, Matrix, define
from lt_runtime.kernels.tiling import THREADS, Tiling
from lt_runtime.layout import Layout
from lt_runtime.problem import DType

LOG_SUMS: Final = Entry("log_sums", "class_chunk.cu")
CHUNK_GRADIENT: Final = Entry("chunk_gradient", "class_chunk.cu")
_MAX_BLOCKS: Final = 1 << 16


class ClassChunkPass:
    """Launches a kernel of class_chunk.cu on the logits of a chunk of classes.

    Args:
        entry: `LOG_SUMS` or `CHUNK_GRADIENT`.
        wide: whether labels are int64 rather than int32.
        classes: the number of all classes.
        smoothing: label smoothing, from 0 (none) to 1.
    """

    scratch_bytes = 0

    def __init__(
        self, entry: Entry, dtype: DType, logits: Layout, wide: bool, classes: int, smoothing: float, device: int
    ) -> None:
        of_label = {"wide_labels": wide, "at_label": 1 - smoothing, "elsewhere": smoothing / classes}
        params = entry.params(Matrix.of(logits), rows=logits.rows, cols=logits.cols, **of_label)
        tiling = Tiling((min(logits.rows, _MAX_BLOCKS), 1), (THREADS, 1))
        self._launches = Launches(entry, define(SCALAR=dtype), device, tiling, params)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`.

        Args:
            call: holds the addresses of logits, labels, log sums, targets and row weights. `LOG_SUMS` does not use row
                weights, and `CHUNK_GRADIENT` does not use targets; the unused address is 0. The call's first scalar is
                the class of the chunk's first column.
        """
        params, launch = self._launches[memory.stream]
        params.logits.data, params.labels, params.log_sums, params.targets, params.row_weights = call.addresses
        params.first = call.scalars[0]
        launch()
