"""`Buckets`: sums gradients over all processes while the backward pass goes on."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from lt_runtime.arrays.operand import CUPY
from lt_runtime.distributed.group import Group
from lt_runtime.errors import GroupError
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import order_after, private_stream
from lt_runtime.ops.optimizers.parameters import Parameter

_BYTES: Final = 32 << 20
"""Bytes of a bucket, roughly.

On two H200s the sum of 19 MB of gradients took 97 us in one bucket and 147 us in four, and the step took longer by
about the difference: short products that run beside a sum take longer by nearly the time of the sum.
"""
_LEAST_BYTES: Final = 8 << 20
"""Gradients are divided into two buckets if each has at least this many bytes.

Two buckets let the update of the first one's parameters run beside the second one's sum, which shortened a step with
19 MB of gradients from 1017 to 991 us (two H100s).
"""


def divided(sizes: Sequence[int]) -> list[list[int]]:
    """Divides gradients into buckets, given their bytes in the order in which they are completed; returns indices.

    Buckets are about equal, and are filled from the last gradient on, so that only the first one may be smaller: its
    sum has most of the backward pass beside it.
    """
    total = sum(sizes)
    least = filled = total // max(1, total // _BYTES, min(2, total // _LEAST_BYTES))
    made = list[list[int]]()
    for index in reversed(range(len(sizes))):
        if filled >= least:
            made.insert(0, [])
            filled = 0
        made[0].insert(0, index)
        filled += sizes[index]
    return made


class Buckets:
    """Sums the gradients of some parameters over all processes of a group, in buckets, see `divided`.

    The first backward pass records the order in which gradients are completed. Process 0 divides this order into
    buckets for all processes, which are summed at the end of that pass. In later passes a bucket is summed as soon as
    its gradients and all buckets before it are complete: on a GPU on a stream of its own, beside the backward pass.

    For each pass, `begin` is called before its first gradient is written, `written` when the work that completes some
    gradients has been put on the stream, and `finish` after the backward pass.

    Args:
        parameters: the parameters that are trained.
        device: ordinal of their GPU; None for NumPy arrays.

    Attributes:
        owners: by a parameter's id, the only process that needs the sum of its gradient; empty if all processes need
            all sums.
    """

    def __init__(self, group: Group, parameters: Sequence[Parameter], device: int | None) -> None:
        self._group, self._device, self._engine = group, device, group.engine(device)
        self._parameters = {id(each): each for each in parameters}
        # Maps the id of a parameter to how often a pass writes its gradient, in the order of the last writes.
        self._writes = Counter[int]()
        self._buckets: list[list[int]] = []
        self._left = Counter[int]()  # The number of these writes that the present pass has not made yet.
        self._next = 0  # The index of the first bucket that has not been summed in the present pass.
        self._stream: int | None = None
        self._word = None if device is None else CUPY.empty((1,), np.dtype(np.uint32), device, 0)  # see `_delay`
        self.owners: Mapping[int, int] = {}

    def begin(self, stream: int | None) -> None:
        """Begins a pass whose work is put on `stream`, a handle; None for NumPy arrays."""
        self._stream, self._next, self._left = stream, 0, self._writes.copy()
        if not self._buckets:
            self._writes.clear()

    def written(self, parameters: Iterable[Parameter]) -> None:
        """Tells that all work so far on the gradients of some parameters is on the stream."""
        keys = [key for key in map(id, parameters) if key in self._parameters]
        if not self._buckets:
            for key in keys:
                self._writes[key] = self._writes.pop(key, 0) + 1
            return
        self._left.subtract(keys)
        for key in keys:
            if self._left[key] < 0 < self._writes[key]:
                name = self._parameters[key].name
                raise GroupError(f"the gradient of {name} is written more often than in the first step of the group")
        # The last bucket is left to `finish`, and so are gradients that one kernel for the whole model wrote at first.
        while self._next < len(self._buckets) - 1 and all(map(self._is_complete, self._buckets[self._next])):
            self._sum()
            self._delay()

    def _is_complete(self, key: int) -> bool:
        return self._writes[key] > 0 and self._left[key] == 0

    @property
    def early(self) -> list[Parameter]:
        """The parameters whose gradients are not in the last bucket; empty before the end of the first pass."""
        return [self._parameters[key] for bucket in self._buckets[:-1] for key in bucket]

    def finish(self, *extra: Any, early: Callable[[], None] | None = None) -> None:
        """Sums the remaining buckets, and makes the stream wait for all sums.

        Args:
            extra: arrays that are summed in place together with the last bucket.
            early: puts work on the stream that reads no sums of the last bucket, and runs beside these.
        """
        if not self._buckets:
            self._divide()
        while self._next < len(self._buckets) - 1:
            self._sum()
        if self._next:
            self._join()
        self._sum(extra)
        if early is not None:
            self._delay()
            early()
        self._join()

    def _join(self) -> None:
        """Makes the stream wait for all sums so far."""
        if self._stream is not None:
            order_after(self._stream, self._branch)

    @property
    def _branch(self) -> int:
        """The handle of the stream on which gradients of the present stream are summed."""
        assert self._device is not None
        return private_stream(self._device, f"sums of {self._stream:#x}")

    def _divide(self) -> None:
        """Divides the gradients into buckets in the order of their last writes in process 0."""
        keys = [*self._parameters]
        own = [keys.index(key) for key in dict.fromkeys([*self._writes, *keys])]
        order = json.loads(self._group.from_first(json.dumps(own).encode(), "the order of the gradients"))
        gradients = [self._parameters[keys[number]].grad for number in order]
        sizes = [math.prod(each.shape) * int(each.dtype.itemsize) for each in gradients]
        self._buckets = [[keys[order[index]] for index in each] for each in divided(sizes)]

    def _sum(self, extra: Sequence[Any] = ()) -> None:
        """Sums the next bucket, and further arrays with it."""
        if self._stream is not None:
            order_after(self._branch, self._stream)
        stream, keys = None if self._stream is None else self._branch, self._buckets[self._next]
        for owner in sorted({self.owners[key] for key in keys if key in self.owners}):
            gradients = [self._parameters[key].grad for key in keys if self.owners.get(key) == owner]
            self._engine.reduce(gradients, owner, stream)
        for_all = [self._parameters[key].grad for key in keys if key not in self.owners]
        if for_all or extra:
            self._engine.sum([*for_all, *extra], stream)
        self._next += 1

    def _delay(self) -> None:
        """Delays later work on the stream by a memset of a word that nothing reads.

        A sum and the work after it can often start at the same moment. If that work starts first, it fills the GPU, and
        the sum runs after it instead of beside it: with the memset, a step of 4764 us took 4519 (two H200s).
        """
        if self._word is not None:
            call("cuMemsetD32Async", self._word.data.ptr, 0, 1, self._stream)
