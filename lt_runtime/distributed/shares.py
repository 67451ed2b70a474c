"""`share`: the part of each batch that a process of a group trains on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from lt_runtime.arguments import batches_of, check_instance, flag, integer, shown
from lt_runtime.arrays.operand import device_of
from lt_runtime.distributed.group import Group
from lt_runtime.errors import ArgumentError, KindError, OperandError, ShapeError
from lt_runtime.nn.device import ComputeDevice

_logger: Final = logging.getLogger("lt_runtime")
_ACCEPTED: Final = "an iterable of pairs (x, target)"


def share(
    batches: Iterable[tuple[Any, Any]], group: Group, batch_size: int, *, drop_uneven: bool = False
) -> Iterator[tuple[Any, ...]]:
    """This process's part of each batch, for an `lt.TrainStep` of the group.

    All processes give equal batches of N·batch_size rows, N being the number of processes; process r gets the rows
    r·batch_size to (r + 1)·batch_size - 1. A batch with fewer rows, such as the last one of an epoch, is filled up with
    copies of its own rows, which have a weight of 0; the weights of its own rows make the step's loss their exact mean.
    Training's accuracy counts the copies too. The exact mean needs a loss that divides by the number of rows, as all
    named losses do, except "cross_entropy" with ignored rows or class weights. Example::

        for batch in lt.prefetch(lt.share(batches, group, batch_size=256)):
            step(*batch)

    Args:
        batches: pairs (x, target) of arrays, as for `TrainStep`; x may be a tuple of arrays. Arrays of NumPy, CuPy or
            PyTorch. The arrays are not copied, except those of a batch with fewer rows.
        batch_size: the number of rows of each process.
        drop_uneven: leave out batches with fewer rows, and log a line for each, instead of filling them up. A loss of
            your own takes no row weights and needs this.

    Yields:
        (x, target); for a batch with fewer rows (x, target, row_weights).

    Raises:
        ArgumentError: `batch_size` is not positive.
        KindError: `batches` is no iterable of pairs.
        OperandError: x or the target of a batch is no array with rows, or x is an empty tuple.
        ShapeError: a batch has more rows, no rows, or arrays of different numbers of rows.
        Whatever `batches` raises.
    """
    check_instance("group", group, Group, "what lt.group() returns")
    rows = integer("batch_size", batch_size)
    if not 1 <= rows < 1 << 48:
        raise ArgumentError(f"batch_size is {shown(batch_size)}; it must be positive, and below 2**48")
    if not isinstance(batches, Iterable):
        raise KindError(f"batches is {shown(batches)}; it must be {_ACCEPTED}")
    return _parts(batches, group, rows, flag("drop_uneven", drop_uneven))


def _parts(batches: Any, group: Group, rows: int, drop_uneven: bool) -> Iterator[tuple[Any, ...]]:
    first, whole = group.rank * rows, group.size * rows
    for i, (x, target) in enumerate(batches_of("batches", batches, (2,), "pair (x, target)", _ACCEPTED)):
        inputs = x if isinstance(x, tuple) and x else (x,)
        counts = [_rows_of(f"number {i} of batches", each) for each in (*inputs, target)]
        if len({*counts}) > 1 or not 0 < counts[0] <= whole:
            found = f"number {i} of batches has arrays of {' and '.join(map(str, dict.fromkeys(counts)))} rows"
            raise ShapeError(f"{found}; all must have the same number, from 1 to {group.size}·{rows}")
        own: Any = slice(first, first + rows)
        if counts[0] < whole:
            if drop_uneven:
                _logger.info("number %d of batches has %d of %d rows and is left out", i, counts[0], whole)
                continue
            own = np.arange(first, first + rows) % counts[0]
        parts = tuple(each[own] for each in inputs)
        batch = parts if isinstance(x, tuple) else parts[0], target[own]
        yield batch if counts[0] == whole else (*batch, _weights(inputs, target, first, rows, counts[0], whole))


def _rows_of(name: str, array: Any) -> int:
    shape = getattr(array, "shape", ())
    if not shape:
        raise OperandError(f"{name} has {shown(array)}; it must have arrays whose first axis is the rows")
    return int(shape[0])


def _weights(inputs: tuple[Any, ...], target: Any, first: int, rows: int, count: int, whole: int) -> Any:
    """The weights of a process's rows in a batch of `count` rows that is filled up to `whole` rows.

    If x is one array and the target begins with all of x's axes but the last, each position along these axes has a
    weight. Otherwise, as for a model that pools over the middle axes, each element of the first axis has one weight.
    """
    axes = inputs[0].shape[:-1] if len(inputs) == 1 else ()
    shape = axes[1:] if target.shape[: len(axes)] == axes else ()
    weights = np.zeros((rows, *shape), np.float32)
    weights[: max(count - first, 0)] = whole / count
    on_host = isinstance(inputs[0], np.ndarray) or str(getattr(inputs[0], "device", "")) == "cpu"  # a PyTorch tensor
    return weights if on_host else ComputeDevice(device_of("x", inputs[0])).asarray(weights)
