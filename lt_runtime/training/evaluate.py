"""What a model is worth on batches that it is not trained on."""

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
from lt_runtime.training.tally import GpuTallies, HostTally, Scores, Totals


def evaluate(
    model: MLP,
    batches: Iterable[tuple[Any, Any]],
    *,
    loss: LossName | OwnFunction = "cross_entropy",
    loss_options: Mapping[str, Any] | None = None,
    stream: Any = None,
) -> Metrics:
    """Means over all rows of some batches, without dropout and without an update.

    Batches may have any sizes: nothing is captured for them. A GPU is waited for once, at the end.

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
    totals, sizes, tallies = list[Totals](), list[int](), None
    for x, target in _pairs(batches):
        device_of("x", x)  # refuses what is no array
        if device is not None and stream is None:
            stream = stream_handle(None, device, library_of(x).current_stream)
        outputs = model(x, stream=stream)
        reuse = not measured.classifies
        value = measured.compute(outputs, target, None, scale=None, share=1.0, reuse=reuse, stream=stream).loss
        scores = Scores(outputs, target, IGNORE_INDEX) if measured.classifies else None
        sizes.append(int(outputs.shape[0]))
        if device is None:
            tally = HostTally()
            tally.add(value, scores, 1.0, first=True, stream=None)
            totals.append(tally.read(None))
        else:
            tallies = tallies or GpuTallies(device, stream)
            tallies.add(value, scores)
    return _means(totals if tallies is None else tallies.read(), sizes, measured.classifies)


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
    """The means over the rows that count: of a loss without classes all of them.

    Args:
        totals: of each batch alone, whose loss is the mean over its rows that count.
        sizes: the rows of each batch.
    """
    counts = [each.rows for each in totals] if classifies else sizes
    rows = sum(counts)
    # The loss of no rows is NaN, and counts for nothing.
    whole = sum(count * each.loss for count, each in zip(counts, totals, strict=True) if count)
    accuracy = sum(each.correct for each in totals) / rows if rows else math.nan
    return Metrics(len(totals), whole / rows if rows else math.nan, accuracy if classifies else None)
