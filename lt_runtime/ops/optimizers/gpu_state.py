"""The state of an optimizer on a GPU: moments, step number, settings, and the launches of an update."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.arrays.copies import copies_of
from lt_runtime.arrays.operand import CUPY, Operand, device_of, library_of
from lt_runtime.errors import CaptureError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import is_captured, stream_handle
from lt_runtime.kernels import optimizer as kernels
from lt_runtime.kernels.kernel import Launches
from lt_runtime.kernels.optimizer import Options
from lt_runtime.ops.optimizers.parameters import Parameter, ReadParameter, changes, check_masters, read_parameters
from lt_runtime.ops.optimizers.state import Groups, Shard, group_of, new_moments, without_masters
from lt_runtime.problem import DType
from lt_runtime.schedules import AnySchedule, Table

# names of the 32-bit words of `OptimizerState` on the device
_WORDS: Final = [name for name, *_ in kernels.OptimizerState._fields_]

_CHANGED: Final = "settings of the optimizer were changed before the capture; call its apply_settings first"


class GpuState:
    """The state of parameters on one GPU: moments, settings, the kernels' tables of addresses, and the launches.

    Attributes:
        notes_skips: whether steps also write `skipped`, by a copy of 4 bytes.
    """

    def __init__(self, groups: Groups, options: Options) -> None:
        parameters = [*itertools.chain(*groups)]
        first = parameters[0]
        self._device = device_of(f"{first.name}.data", first.data)
        self._current_stream = library_of(first.data).current_stream
        self.options, self._stream = options, self._current_stream(self._device)
        self._unchecked: Sequence[Parameter] = parameters
        with activated(self._device):
            self._parameters = read = read_parameters(parameters, options, self._device, self._stream)
            self._groups, self._group_of = groups, group_of(groups)
            self.shard: Shard | None = None
            # Copies of weights in FP8 are dropped, so that inference casts the weights in each call from now on. Those
            # that captured graphs read stay.
            self._copies = [copy for each in read for copy in copies_of(each.data) if not copy.drop()]
            self._seen: object = None
            # The schedule whose table of factors is on the device, and that table, which updates read.
            self._table: tuple[AnySchedule, Any] = options.schedule, None
            # Arrays that must stay alive, because tables on the device hold their addresses.
            self._kept: list[Any] = []
            words = self._zeros((len(_WORDS) + 1,), np.dtype(np.uint32))
            self.moments = new_moments(groups, options, self.zeros)
            self._written = self._settings(self._stream)
            self._device_settings = self._upload(self._written, self._stream, self._kept)
            self._tensors, self._words = self._with_moments(), words
            self._scale: tuple[Any, Any] | None = None
            if options.scaler is not None:
                self._scale = self._zeros((), np.dtype(np.float32)), self._zeros((), np.dtype(np.int32))
                bits = int(np.float32(options.scaler.init_scale).view(np.uint32))
                call("cuMemsetD32Async", self._scale[0].data.ptr, bits, 1, self._stream)
            self._norms = [self._norm(self._tensors, words)] if options.judges_gradients else []
            self._updates = self.updates_with({}, self._stream, self._kept)
            call("cuStreamSynchronize", self._stream)  # the host waits, because later steps may use any stream
        if options.scaler is not None and self._scale is not None:
            options.scaler.bind(*self._scale)
        self.steps, self.skipped_steps = (_word(words, name) for name in ("steps", "skipped"))
        self._nonfinite = int(_word(words, "nonfinite").data.ptr)
        self.skipped = words[len(_WORDS) :] if options.skip_nonfinite else None
        self.notes_skips = False
        norm = _word(words, "norm").view(np.float32).reshape(())
        self.grad_norm = norm if options.judges_gradients else None

    def step(
        self, stream: Any, updates: Sequence[Launches] | None = None, before_updates: Callable[[], None] | None = None
    ) -> None:
        """Updates all parameters: one launch for each group, and one for the norm.

        The first step checks master copies.

        Args:
            updates: launches of `updates_with`; None for the updates without copies.
            before_updates: puts work on the stream between the norm and the updates, when `skipped` is known.
        """
        with activated(self._device):
            handle = stream_handle(stream, self._device, self._current_stream)
            if self._unchecked and not is_captured(handle):
                check_masters(self._unchecked, handle)
                self._unchecked = ()
            self._apply(handle)
            ready: list[Callable[[], object]] = [launches[handle][1] for launches in self._norms]
            if self.notes_skips and self.skipped is not None:
                # The norm's launch counts NaN and infinite gradients, and the last update sets the count back to 0.
                arguments = self.skipped.data.ptr, self._nonfinite, kernels.WORD_BYTES, handle
                ready.append(functools.partial(call, "cuMemcpyDtoDAsync", *arguments))
            ready += [] if before_updates is None else [before_updates]
            ready += [launches[handle][1] for launches in (self._updates if updates is None else updates)]
            try:
                for launch in ready:
                    launch()
            except BaseException:
                # A launch has failed, or Ctrl-C came between launches. The last update, which sets the count of
                # nonfinite gradients to 0, may not have been launched. The count is set to 0 here, because otherwise
                # the next step could be skipped too.
                call("cuMemsetD32Async", self._nonfinite, 0, 1, handle)
                raise
            if self.shard is not None:
                self.shard.send([[each.data.array] for each in self._parameters], handle)
            for each in self._copies:
                each.renew(handle)

    def keep(self, shard: Shard) -> None:
        """See `HostState.keep`. Waits for the GPU; graphs of earlier steps must not be launched any more."""
        with activated(self._device):
            stream, others = self._current_stream(self._device), shard.others
            before, self.shard = self.moments, shard
            self._parameters = without_masters(self._parameters, others)
            self.moments = new_moments(self._groups, self.options, self.zeros, others)
            for i in {*range(len(before))} - others:
                for array, values in zip(self.moments[i], before[i], strict=True):
                    call("cuMemcpyDtoDAsync", array.data.ptr, values.data.ptr, values.nbytes, stream)
            self._tensors = self._with_moments()
            self._updates = self.updates_with({}, stream, self._kept)
            call("cuStreamSynchronize", stream)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A new array of zeros, written on the current stream."""
        with activated(self._device):
            return CUPY.zeros(shape, dtype, self._device, self._current_stream(self._device))

    def _with_moments(self) -> list[kernels.Tensor]:
        """The addresses of the arrays that updates read and write."""
        options = self.options
        rules = [options.rules[group] for group in self._group_of]
        parts = zip(self._parameters, rules, self.moments, strict=True)
        return [_tensor(each, rule.moments, moments, options.moments) for each, rule, moments in parts]

    def apply_settings(self, stream: Any) -> None:
        """See `Optimizer.apply_settings`."""
        with activated(self._device):
            self._apply(stream_handle(stream, self._device, self._current_stream))

    def _apply(self, stream: int) -> None:
        """Writes settings that have changed to the device, by one memset for each run of equal words.

        A memset takes its value as an argument, while a copy would need a host buffer that stays unchanged until the
        copy has run. The memsets come after earlier updates on the stream, which read the old settings.
        """
        latest = changes.latest
        if latest is self._seen:
            return
        schedule = self.options.schedule
        if isinstance(schedule, Table) and schedule is not self._table[0] and is_captured(stream):
            raise CaptureError(_CHANGED)
        # Keeps the old schedule's device array alive until the settings on the device hold the address of the new one.
        replaced = self._table
        words = self._settings(stream)
        changed = np.flatnonzero(words != self._written)
        if changed.size and is_captured(stream):
            raise CaptureError(_CHANGED)
        ends = np.flatnonzero((np.diff(changed) > 1) | (words[changed[1:]] != words[changed[:-1]])) + 1
        for run in np.split(changed, ends) if changed.size else ():
            first, value = int(run[0]), int(words[run[0]])
            call("cuMemsetD32Async", self._device_settings + first * kernels.WORD_BYTES, value, run.size, stream)
            self._written[run] = value
        self._seen = latest
        del replaced

    def _settings(self, stream: int) -> NDArray[np.uint32]:
        options = self.options
        pairs = zip(self._parameters, self._group_of, strict=True)
        of_tensors = [each.settings(options.rules[group].weight_decay) for each, group in pairs]
        return kernels.settings_words(options, of_tensors, self._table_address(stream))

    def _table_address(self, stream: int) -> int:
        """The device address of the schedule's table; 0 if the schedule is no `Table`.

        A new table is copied, and the host waits for the copy, so that no earlier update still reads the old table.
        """
        schedule = self.options.schedule
        if not isinstance(schedule, Table):
            return 0
        if self._table[1] is None or self._table[0] is not schedule:
            values = np.array(schedule.values, np.float32)
            array = CUPY.empty(values.shape, values.dtype, self._device, stream)
            call("cuMemcpyHtoDAsync", array.data.ptr, values.ctypes.data, values.nbytes, stream)
            call("cuStreamSynchronize", stream)
            self._table = schedule, array
        return int(self._table[1].data.ptr)

    def updates_with(
        self,
        copies: Mapping[int, kernels.Fp8Copy],
        stream: int,
        kept: list[Any],
        without: Collection[int] = (),
        *,
        advances: bool = True,
    ) -> list[Launches]:
        """The launches that update all groups, and also write the copies of weights in FP8.

        Only the last group's launch counts its finished blocks; the last of these blocks advances the step number and
        the loss scale, which all launches read.

        Args:
            copies: maps the number of a parameter to its FP8 copy.
            stream: the kernels' tables are copied on this stream, which the caller waits for.
            kept: receives arrays that must live as long as the launches.
            without: the numbers of parameters that other launches update.
            advances: whether the step number and the loss scale are advanced, as by the last launches of a step.
        """
        options, made, count = self.options, list[Launches](), len(self._tensors)
        others = set[int]() if self.shard is None else self.shard.others
        for group, rule in enumerate(options.rules):
            first = self._group_of.index(group)
            own = self._tensors[first : first + self._group_of.count(group)]
            updated = [tensor for i, tensor in enumerate(own, first) if i not in others]
            stochastic = any(tensor.arrays["value"][1] is not DType.FLOAT32 for tensor in updated)
            params = kernels.update_params(options, group, self._device_settings, count)
            params.state = self._words.data.ptr
            if self._scale is not None:
                params.scale, params.growth_tracker = (array.data.ptr for array in self._scale)
            copied = {i: (each, copies[i]) for i, each in enumerate(own, first) if i in copies}
            if copied:
                tiles = kernels.fp8_table(copied)
                both = kernels.UPDATE_FP8.params(params, self._upload(tiles, stream, kept))
                macros = kernels.update_macros(rule, options.moments, stochastic=stochastic)
                made.append(kernels.launches_by_row(kernels.UPDATE_FP8, both, len(tiles), self._device, macros))
            if not advances and {*range(first, first + len(own))} <= {*others, *without}:
                continue
            table = kernels.update_table(own, first, {*copied, *others, *without})
            params.chunks = self._upload(table, stream, kept)
            if advances and group == len(options.rules) - 1:
                tickets = np.zeros(kernels.UPDATE_TICKETS, np.uint32)
                params.tickets = self._upload(tickets, stream, kept)
            macros = kernels.update_macros(rule, options.moments, stochastic=stochastic)
            made.append(Launches(kernels.UPDATE, macros, self._device, kernels.update_tiling(len(table)), params))
        return made

    def _norm(self, tensors: Sequence[kernels.Tensor], words: Any) -> Launches:
        table = kernels.norm_table(tensors)
        params = kernels.GRADIENT_NORM.params(
            chunks=self._upload(table, self._stream, self._kept), state=words.data.ptr
        )
        params.partial = self._zeros((len(table),), np.dtype(np.float32)).data.ptr
        params.scale = 0 if self._scale is None else self._scale[0].data.ptr
        return kernels.launches_by_row(kernels.GRADIENT_NORM, params, len(table), self._device)

    def _zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        array = CUPY.zeros(shape, dtype, self._device, self._stream)
        self._kept.append(array)
        return array

    def _upload(self, table: NDArray[Any], stream: int, kept: list[Any]) -> int:
        kept.append(CUPY.zeros((table.nbytes,), np.dtype(np.uint8), self._device, stream))
        address = int(kept[-1].data.ptr)
        call("cuMemcpyHtoDAsync", address, table.ctypes.data, table.nbytes, stream)
        return address


def _tensor(read: ReadParameter, names: Sequence[str], moments: tuple[Any, ...], dtype: DType) -> kernels.Tensor:
    """The addresses of a parameter's arrays for the tables; `names` are the names of its moments."""
    arrays = {"value": _typed(read.value), "gradient": _typed(read.grad)}
    if read.master is not None:
        arrays["copy"] = _typed(read.data)
    # There are no moments if another process of the group keeps them.
    for name, array in zip(names, moments, strict=bool(moments)):
        arrays[name] = array.data.ptr, dtype
    return kernels.Tensor(math.prod(read.data.shape), arrays)


def _word(words: Any, name: str) -> Any:
    index = _WORDS.index(name)
    return words[index : index + 1]


def _typed(operand: Operand) -> tuple[int, DType]:
    return operand.address, operand.element_type()
