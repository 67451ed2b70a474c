"""Loss and accuracy of a model on batches, without training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lt_runtime.arguments import check_instance, shown
from lt_runtime.arrays.operand import HOST, device_of, library_of
from lt_runtime.errors import KindError
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.training.body import IGNORE_INDEX
from lt_runtime.training.losses import LossName, OwnFunction, step_loss
from lt_runtime.training.mlp import MLP
from lt_runtime.training.step import Metrics
from lt_runtime.training.tally import GpuTally, HostTally, Scores, Tally, Totals


def evaluate(
    model: MLP,
    batches: Iterable[tuple[Any, Any]],
    *,
    loss: LossName | OwnFunction = "cross_entropy",
    loss_options: Mapping[str, Any] | None = None,
    stream: Any = None,
) -> Metrics:
    """Means over all rows of some batches, without dropout and without an update.

    Batches may have any sizes: nothing is captured for them. The host waits for a GPU only at the end.

    Args:
        model: an `MLP`.
        batches: pairs of inputs (M, dims[0]), of the model's type and on its device, and targets, as for `TrainStep`.
        loss, loss_options: as for `TrainStep`; a function of your own writes its gradient here too.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others. The first
            operand is the first batch's inputs.

    Returns:
        As `TrainStep.metrics`: the number of batches in place of steps, the loss and the accuracy. The loss is the mean
        of the batches' losses, each weighted by its rows that count; NaN if there are none.

    Raises:
        KindError: `batches` is no iterable of pairs.
        LtError: as `lt.linear` and the loss do.
        Whatever `batches` raises.
    """
    check_instance("model", model, MLP, "an lt.MLP")
    measured = step_loss(loss, loss_options, model)
    device = model.device.ordinal
    if stream is not None:
        stream = stream_handle(stream, HOST if device is None else device)
    tallies, sizes = list[Tally](), list[int]()
    for x, target in _pairs(batches):
        device_of("x", x)  # refuses anything but an array
        if device is not None and stream is None:
            stream = stream_handle(None, device, library_of(x).current_stream)
        outputs = model(x, stream=stream)
        reuse = not measured.classifies
        value = measured.compute(outputs, target, None, scale=None, share=1.0, reuse=reuse, stream=stream).loss
        scores = Scores(outputs, target, IGNORE_INDEX) if measured.classifies else None
        tallies.append(HostTally() if device is None else GpuTally(device, stream))
        tallies[-1].add(value, scores, 1.0, first=True, stream=stream)
        sizes.append(int(outputs.shape[0]))
    return _means([each.read(stream) for each in tallies], sizes, measured.classifies)


def _pairs(batches: Any) -> Iterator[tuple[Any, Any]]:
    try:
        given = iter(batches)
    except TypeError:
        raise KindError(f"batches is {shown(batches)}; it must be an iterable of pairs (x, target)") from None
    for i, batch in enumerate(given):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise KindError(f"number {i} of batches is {shown(batch)}; it must be a pair (x, target)")
        yield batch[0], batch[1]


def _means(totals: list[Totals], sizes: list[int], classifies: bool) -> Metrics:
    """Means over the rows that count, which are all rows for a loss without classes.

    Args:
        totals: of each batch; its loss is the mean over the batch's rows that count.
        sizes: the number of rows of each batch.
    """
    counts = [each.rows for each in totals] if classifies else sizes
    rows = sum(counts)
    # A batch without a row that counts has the loss NaN; it is left out of the sum.
    whole = sum(count * each.loss for count, each in zip(counts, totals, strict=True) if count)
    accuracy = sum(each.correct for each in totals) / rows if rows else math.nan
    return Metrics(len(totals), whole / rows if rows else math.nan, accuracy if classifies else None)
