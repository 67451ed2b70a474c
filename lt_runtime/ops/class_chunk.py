"""Softmax cross-entropy that needs the logits of only one chunk of classes in memory, for `lt_runtime.torch`.

The caller first passes each chunk of logits to `add_chunk`. It then computes each chunk again, and passes it to
`chunk_gradient`. Shapes and types are not checked, because `lt_runtime.torch` allocates all arrays itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from lt_runtime.kernels.call import Call
from lt_runtime.kernels.class_chunk import CHUNK_GRADIENT, LOG_SUMS, ClassChunkPass
from lt_runtime.kernels.kernel import Entry
from lt_runtime.ops.call import PassOperation, PreparedCall, Request, perform


class SmoothedLabels(NamedTuple):
    """The number of all classes, and the label smoothing: the share of each label that is spread over all classes."""

    classes: int
    smoothing: float


class ClassChunk(PassOperation):
    """Base of `LogSums` and `ChunkGradient`.

    A call's options are a `SmoothedLabels`. The call's first scalar is the class of the chunk's first column.
    """

    names = ("logits", "labels", "log_sums", "targets", "row_weights")
    required = 3
    is_scaled = True
    make_pass = staticmethod(functools.lru_cache(maxsize=1024)(ClassChunkPass))
    entry: ClassVar[Entry]
    written: ClassVar[tuple[int, ...]]

    def read(self, operands: Sequence[Any], options: SmoothedLabels, scalars: Any) -> Request:
        """See `Operation`."""
        logits, labels, *_ = operands
        problem = self.entry, logits.element_type(), logits.layout, labels.dtype == "int64", *options
        return Request(problem if logits.layout.size else None, self.written, {}, options)

    def call(self, prepared: PreparedCall, addresses: tuple[int, ...], scalars: Any, stream: int) -> Call:
        """See `Operation`."""
        return Call(addresses, stream, scalars)


class LogSums(ClassChunk):
    """See `add_chunk`."""

    entry, written = LOG_SUMS, (2, 3)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Any) -> None:
        """See `Operation`."""
        logits, labels, log_sums, targets, _ = arrays
        classes, smoothing = request.detail
        z, rows = logits.astype(np.float64), range(len(logits))
        log_sums[...] = np.logaddexp(log_sums, np.logaddexp.reduce(z, axis=1))
        at = labels - scalars[0]
        is_here = (at >= 0) & (at < z.shape[1])
        targets += np.where(is_here, (1 - smoothing) * z[rows, np.where(is_here, at, 0)], 0).astype(targets.dtype)
        if smoothing:
            targets += (z.sum(axis=1) * (smoothing / classes)).astype(targets.dtype)


class ChunkGradient(ClassChunk):
    """See `chunk_gradient`."""

    entry, written = CHUNK_GRADIENT, (0,)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Any) -> None:
        """See `Operation`."""
        logits, labels, log_sums, _, weights = arrays
        classes, smoothing = request.detail
        is_label = np.arange(logits.shape[1]) + scalars[0] == labels[:, None]
        softmax = np.exp(logits.astype(np.float64) - log_sums[:, None])
        gradient = weights[:, None] * (softmax - smoothing / classes - (1 - smoothing) * is_label)
        logits[...] = np.where(weights[:, None] == 0, 0, gradient).astype(logits.dtype)


_LOG_SUMS: Final = LogSums()
_CHUNK_GRADIENT: Final = ChunkGradient()


def add_chunk(logits: Any, labels: Any, log_sums: Any, targets: Any, *, first: int, of: SmoothedLabels) -> None:
    """Adds a chunk of logits (M, C) to each row's sums over the classes, which are `log_sums` and `targets`.

    Args:
        logits: float32, float16 or bfloat16, or on the host float64; the columns are the classes from `first` on.
        labels: (M,), int32 or int64; a label may be a class outside the chunk.
        log_sums: (M,), FP32 (FP64 for FP64 logits): logarithms of the sums of exponentials, -infinity before the first
            chunk.
        targets: (M,), of the type of `log_sums`: mean logits under the smoothed labels, 0 before the first chunk.
    """
    perform(_LOG_SUMS, (logits, labels, log_sums, targets, None), of, (first, 0), None)


def chunk_gradient(
    logits: Any, labels: Any, log_sums: Any, row_weights: Any, *, first: int, of: SmoothedLabels
) -> None:
    """Overwrites a chunk of logits with the gradient of Σ row_weights · (log_sums - targets) for these logits.

    Args:
        logits, labels: as for `add_chunk`.
        log_sums: the result of `add_chunk` for all chunks.
        row_weights: (M,), of the type of `log_sums`. The gradient of a row with weight 0 is 0.
    """
    perform(_CHUNK_GRADIENT, (logits, labels, log_sums, None, row_weights), of, (first, 0), None)
