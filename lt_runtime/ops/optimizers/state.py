"""The state of an optimizer: its moments, its parts in several processes, and the state of NumPy arrays."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from lt_runtime import reference
from lt_runtime.arrays.operand import HOST
from lt_runtime.arrays.transfer import arena_size, arena_views, host_zeros
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.kernels.optimizer import Options
from lt_runtime.ops.optimizers.parameters import Parameter, ReadParameter, check_masters, read_parameters

Shape = tuple[int, ...]
Moments = Sequence[tuple[Any, ...]]
"""The moments of each parameter, in the order of its rule's `moments`."""
Groups = Sequence[Sequence[Parameter]]
"""The parameters of each of an optimizer's rules."""


class Shard(NamedTuple):
    """Divides the state of an optimizer among processes: each parameter has an owner, which alone updates it.

    Attributes:
        owners: the rank of each parameter's owner.
        rank: of this process.
        broadcast: function of arrays, a rank and a stream that copies the arrays of that process to all processes.
    """

    owners: tuple[int, ...]
    rank: int
    broadcast: Callable[[Sequence[Any], int, int | None], None]

    @property
    def others(self) -> set[int]:
        """The numbers of the parameters that other processes own."""
        return {i for i, owner in enumerate(self.owners) if owner != self.rank}

    def send(self, arrays: Sequence[Sequence[Any]], stream: int | None) -> None:
        """Copies the arrays of each parameter from its owner to all processes."""
        for rank in sorted({*self.owners}):
            pairs = zip(arrays, self.owners, strict=True)
            sent = [array for each, owner in pairs if owner == rank for array in each]
            if sent:  # empty for parameters with neither moments nor master copies
                self.broadcast(sent, rank, stream)


def new_moments(
    groups: Groups, options: Options, zeros: Callable[[Shape, np.dtype[Any]], Any], others: Collection[int] = ()
) -> Moments:
    """Makes all moments, in one allocation.

    Args:
        zeros: function of a shape and a type that returns an array of zeros.
        others: numbers of parameters without moments.
    """
    kinds = [len(rule.moments) for rule, group in zip(options.rules, groups, strict=True) for _ in group]
    counts = [0 if i in others else count for i, count in enumerate(kinds)]
    dtype, parameters = options.moments.numpy, itertools.chain(*groups)
    shapes = [tuple(each.data.shape) for each, count in zip(parameters, counts, strict=True) for _ in range(count)]
    arrays = iter(arena_views(zeros((arena_size(shapes, dtype.itemsize),), dtype), shapes))
    return [tuple(itertools.islice(arrays, count)) for count in counts]


def group_of(groups: Groups) -> list[int]:
    """The index of each parameter's group."""
    return [i for i, group in enumerate(groups) for _ in group]


def without_masters(parameters: Sequence[ReadParameter], numbers: Collection[int]) -> list[ReadParameter]:
    """Drops the master copies of the parameters with the given numbers, and returns all parameters."""
    kept = [each._replace(master=None) if i in numbers else each for i, each in enumerate(parameters)]
    for each in kept:
        if each.master is None:
            each.parameter.master = None
    return kept


class HostState:
    """The state of NumPy parameters, updated by the reference; its arrays are attributes of `lt.Optimizer`."""

    notes_skips = True

    def __init__(self, groups: Groups, options: Options) -> None:
        self.steps, self.skipped_steps = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
        self.grad_norm = np.zeros((), np.float32) if options.judges_gradients else None
        self.skipped = np.zeros(1, np.uint32) if options.skip_nonfinite else None
        self.options = options
        self._parameters = read_parameters([*itertools.chain(*groups)], options, HOST, 0)
        self._groups, self._group_of = groups, group_of(groups)
        self.shard: Shard | None = None
        self.moments = new_moments(groups, options, self.zeros)
        if options.scaler is not None:
            options.scaler.bind(np.array(options.scaler.init_scale, np.float32), np.zeros((), np.int32))

    def keep(self, shard: Shard) -> None:
        """Drops moments and master copies of parameters that other processes own."""
        before, self.shard, others = self.moments, shard, shard.others
        self._parameters = without_masters(self._parameters, others)
        self.moments = new_moments(self._groups, self.options, self.zeros, others)
        for i in {*range(len(before))} - others:
            for array, values in zip(self.moments[i], before[i], strict=True):
                array[...] = values

    def zeros(self, shape: Shape, dtype: np.dtype[Any]) -> Any:
        """A new array of zeros."""
        return host_zeros(math.prod(shape), dtype).reshape(shape)

    def apply_settings(self, stream: Any) -> None:
        """Checks the stream and writes nothing: updates on the host read the settings directly."""
        stream_handle(stream, HOST)

    def step(self, stream: Any) -> None:
        """Updates all parameters; `stream` is checked, but not used."""
        self.apply_settings(stream)
        scaler = self.options.scaler
        check_masters([read.parameter for read in self._parameters], 0)
        with np.errstate(all="ignore"):  # NumPy must not warn of NaN and infinite gradients, as a GPU does not
            factor, finite = self._judge()
            if self.skipped is not None:
                self.skipped[...] = not finite
            if self.options.skip_nonfinite and not finite:
                self.skipped_steps += 1
            else:
                self.steps += 1
                others = () if self.shard is None else self.shard.others
                for i, parameter in enumerate(self._parameters):
                    if i not in others:
                        self._update(i, parameter, factor)
            if scaler is not None:
                scale, tracker = reference.next_scale(scaler, float(scaler.scale), int(scaler.growth_tracker), finite)
                scaler.scale[...], scaler.growth_tracker[...] = scale, tracker
        if self.shard is not None:
            self.shard.send([[each.data.array] for each in self._parameters], None)

    def _judge(self) -> tuple[float, bool]:
        """The factor that clipping and the loss scale give gradients, and whether all gradients are finite."""
        options = self.options
        if self.grad_norm is None:
            return 1.0, True
        scale = 1.0 if options.scaler is None else float(options.scaler.scale)
        norm, finite = reference.gradient_norm([each.grad.array for each in self._parameters], scale)
        self.grad_norm[...] = norm
        clipping = 1.0 if options.max_norm is None else reference.clip_factor(float(self.grad_norm), options.max_norm)
        return clipping / scale, finite

    def _update(self, index: int, read: ReadParameter, gradient_factor: float) -> None:
        """Updates one parameter and its moments; `steps` has already been increased for this update."""
        options, step = self.options, int(self.steps[0])
        rule = options.rules[self._group_of[index]]
        lr_scale, weight_decay = read.settings(rule.weight_decay)
        own = dataclasses.replace(rule, lr=rule.lr * lr_scale, weight_decay=weight_decay)
        # reshape returns views, because the arrays are contiguous.
        arrays = [each.reshape(-1) for each in (read.value.array, *self.moments[index])]
        gradient, place = read.grad.array.reshape(-1), {"seed": options.seed, "tensor": index}
        reference.update_in_place(own, options.schedule, arrays, gradient, step, gradient_factor, **place)
        if read.master is not None:
            read.data.array[...] = read.master.array.astype(read.data.array.dtype)
