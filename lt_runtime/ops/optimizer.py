"""AdamW over all parameters of a model in one launch, and its state on the host and on a GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lt_runtime import ranges, reference
from lt_runtime.arguments import Fixed, check_instance, flag, not_negative, number, shown
from lt_runtime.arrays.operand import CUPY, HOST, Operand, device_of, library_of, on_host
from lt_runtime.arrays.transfer import arena_size, arena_views, host_zeros
from lt_runtime.errors import ArgumentError, CaptureError, DriverError, KindError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import is_captured, stream_handle
from lt_runtime.grad_scaler import GradScaler
from lt_runtime.kernels import optimizer as kernels
from lt_runtime.kernels.kernel import Launches
from lt_runtime.kernels.optimizer import Options
from lt_runtime.ops._parameters import HeldArrays, Parameter, ReadParameter, changes, check_masters, read_parameters
from lt_runtime.problem import DType, Philox, TorchDType, type_name
from lt_runtime.reference import AdamWHyper, RoundedTensor
from lt_runtime.schedules import Schedule

__all__ = ["AdamW", "Parameter"]

MomentsType: TypeAlias = Literal["float32", "bfloat16"] | DType | np.dtype[Any] | type[Any] | TorchDType
# names of the 32-bit words of the state on the device
_WORDS: Final = [name for name, *_ in kernels.OptimizerState._fields_]
_BLOCK: Final = 32768  # elements that the host updates at a time, so that intermediate results stay in its cache
_PARTS: Final = (RoundedTensor.PARAMETER, RoundedTensor.M, RoundedTensor.V, RoundedTensor.V)

Moments = Sequence[tuple[Any, ...]]
"""The moments of each parameter: m, v and, with AMSGrad, the largest v."""


class AdamW(Fixed):
    """AdamW (Loshchilov and Hutter, 2019) as PyTorch defines it, with arithmetic in FP32.

    θ ← θ·(1 - lr·λ) - lr · m̂ / (√v̂ + ε), where lr is multiplied by the schedule's factor. On a GPU one kernel
    updates every parameter. It computes the bias corrections and the learning rate from the step's number on the
    device, and advances that number, so that a captured graph can be replayed. With `max_norm`, `skip_nonfinite` or
    `scaler` a second kernel reads the gradients before it. The host reads nothing back.

    A NaN or infinite gradient makes its own element NaN, and with `max_norm` every element. With `skip_nonfinite` or
    `scaler` the whole update is skipped instead: parameters, moments and `steps` stay.

    `lr`, `weight_decay` and `schedule` may be set between steps, as may `lr_scale` and `weight_decay` of a parameter.
    The next step uses them, also that of an `lt.TrainStep`, whose graph reads them from the device. Other attributes
    cannot be set. For a graph that you capture from `step` yourself, see `apply_settings`.

    Parameters' data must be the rounding of their master copies, as they are after `Parameter.assign` and after every
    update. The optimizer checks this when it is made and at each step on the host; on a GPU it checks before the first
    step and before the first graph of a `TrainStep`. Later steps on a GPU do not check, because reading `data` would
    take an eighth more memory traffic: later writes into `data` alone are lost silently.

    Args:
        parameters: one or more, without repetition; all NumPy arrays, or all on one GPU.
        lr: learning rate.
        betas: decay rates of the moments, in [0, 1).
        eps: added to the denominator.
        weight_decay: λ.
        schedule: factor of the learning rate by step; None for a constant factor of 1.
        amsgrad: divide by the largest v̂ so far instead of the present one.
        max_norm: clip the gradients to this norm over all parameters together, as PyTorch's `clip_grad_norm_`. With
            infinity the norm is computed and nothing is clipped; with None it is not computed.
        skip_nonfinite: skip an update in which any gradient is NaN or infinite.
        scaler: divides the gradients by its scale, skips as `skip_nonfinite` does, and moves the scale. It serves one
            optimizer.
        moments: their type, FP32 or BF16, as a name or as a type of NumPy, `ml_dtypes` or PyTorch. BF16 moments are
            rounded stochastically, because rounding to nearest would lose small changes.
        stochastic_rounding: update BF16 parameters that have no master copy in place, rounded stochastically, rather
            than making master copies of them.
        seed: of the random numbers that stochastic rounding draws; 64 bits.

    Attributes:
        lr, weight_decay, schedule: the present settings.
        steps: array (1,) of uint32 on the parameters' device, the number of updates done; `steps.item()` is the int.
        skipped_steps: array (1,) of uint32 on the parameters' device, the number of updates skipped.
        grad_norm: FP32 array of shape (), the norm of the unscaled gradients in the last step, before clipping. None
            without `max_norm`, `skip_nonfinite` and `scaler`.
        moments: for each parameter m, v and, with `amsgrad`, the largest v; one allocation holds them all.
        options: all options but the parameters, with the present settings.
        parameters, scaler: as given.

    Raises:
        ArgumentError: no parameters, or an option out of its range.
        OperandError: a parameter whose arrays do not fit together, with gaps between its elements, or whose data are
            not the rounding of their master copy; or a parameter that was given twice.
    """

    _changeable: ClassVar = ("lr", "weight_decay", "schedule")

    def __init__(
        self,
        parameters: Sequence[Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        schedule: Schedule | None = None,
        *,
        amsgrad: bool = False,
        max_norm: float | None = None,
        skip_nonfinite: bool = False,
        scaler: GradScaler | None = None,
        moments: MomentsType = "float32",
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        self.parameters: Final = _parameters(parameters)
        self.scaler: Final = scaler
        check_instance("scaler", scaler, (GradScaler, type(None)), "None or an lt.GradScaler")
        if scaler is not None and scaler.is_bound:
            raise ArgumentError("scaler already serves an optimizer; make one for each")
        max_norm = None if max_norm is None else number("max_norm", max_norm)
        if max_norm is not None and not max_norm > 0:
            raise ArgumentError(f"max_norm is {max_norm}; it must be positive, or None")
        options = Options(
            _hyper(lr, betas, eps, weight_decay, schedule),
            flag("amsgrad", amsgrad),
            max_norm,
            flag("skip_nonfinite", skip_nonfinite) or scaler is not None,
            scaler,
            _moments_type(moments),
            flag("stochastic_rounding", stochastic_rounding),
            Philox(seed).seed,  # `Philox` refuses anything but a 64-bit seed
        )
        arrays = {
            f"{each.name}.{part} (parameter {i})": getattr(each, part)
            for i, each in enumerate(self.parameters)
            for part in ("data", "grad", "master")
            if part != "master" or each.master is not None
        }
        kind = HostState if on_host(arrays) else GpuState
        self._state: HostState | GpuState = kind(self.parameters, options)
        self._held = HeldArrays(self.parameters, "the optimizer")
        self.steps, self.skipped_steps = self._state.steps, self._state.skipped_steps
        self.grad_norm: Final = self._state.grad_norm
        self.moments: Final = self._state.moments
        self._is_made = True

    @property
    def options(self) -> Options:
        """All options but the parameters, with the present settings."""
        return self._state.options

    @property
    def lr(self) -> float:
        """The learning rate; may be set."""
        return self.options.hyper.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._change(lr=not_negative("lr", value))

    @property
    def weight_decay(self) -> float:
        """λ of the parameters that have none of their own; may be set."""
        return self.options.hyper.weight_decay

    @weight_decay.setter
    def weight_decay(self, value: float) -> None:
        self._change(weight_decay=not_negative("weight_decay", value))

    @property
    def schedule(self) -> Schedule:
        """The factor of the learning rate by step; may be set; None is a constant factor of 1."""
        return self.options.hyper.schedule

    @schedule.setter
    def schedule(self, value: Schedule | None) -> None:
        self._change(schedule=_schedule(value))

    def __repr__(self) -> str:
        hyper, count = self.options.hyper, len(self.parameters)
        rates = f"lr={hyper.lr}, betas=({hyper.beta1}, {hyper.beta2}), eps={hyper.eps}, "
        return f"AdamW({count} parameters, {rates}weight_decay={hyper.weight_decay})"

    def step(self, *, stream: Any = None) -> None:
        """Updates every parameter from its gradient.

        Args:
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
                that the first operand comes from: PyTorch's for its tensors, CuPy's for all others. The first
                operand is the first parameter.

        Raises:
            OperandError: an array of a parameter has been replaced; or data are not the rounding of their master copy,
                which a GPU checks only before the first step. Nothing has been updated.
            CaptureError: the stream is being captured, and settings have been changed since the last step.
            GpuError: the driver or the compiler failed.
        """
        ranges.tell(self)
        self._held.check()
        self._state.step(stream)

    def apply_settings(self, *, stream: Any = None) -> None:
        """Writes changed settings to the device, in the order of a stream.

        `step` and `lt.TrainStep` do so by themselves. If you have captured a graph from `step`, call this before the
        graph's next launch. Do not capture it with the step: each launch would then restore the captured settings.

        Args:
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
                that the first operand comes from: PyTorch's for its tensors, CuPy's for all others. The first
                operand is the first parameter.

        Raises:
            CaptureError: the stream is being captured, and settings have been changed.
            GpuError: the driver failed.
        """
        self._state.apply_settings(stream)

    def check_arrays(self) -> None:
        """Raises `OperandError` if an array of a parameter has been replaced since the optimizer was made."""
        self._held.check()

    def _change(self, **settings: Any) -> None:
        options = self.options
        self._state.options = dataclasses.replace(options, hyper=dataclasses.replace(options.hyper, **settings))
        changes.latest = object()


def _moments(parameters: Sequence[Parameter], options: Options, zeros: Callable[[int, np.dtype[Any]], Any]) -> Moments:
    """Makes all moments, in one allocation.

    Args:
        zeros: function of a size and a type that returns a flat array of zeros.
    """
    each, dtype = 3 if options.amsgrad else 2, options.moments.numpy
    shapes = [tuple(parameter.data.shape) for parameter in parameters for _ in range(each)]
    arrays = iter(arena_views(zeros(arena_size(shapes, dtype.itemsize), dtype), shapes))
    return [tuple(next(arrays) for _ in range(each)) for _ in parameters]


class HostState:
    """The state of NumPy parameters, updated by the reference; its arrays are attributes of `lt.AdamW`."""

    def __init__(self, parameters: Sequence[Parameter], options: Options) -> None:
        self.steps, self.skipped_steps = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
        self.grad_norm = np.zeros((), np.float32) if options.judges_gradients else None
        self.options = options
        self._parameters = read_parameters(parameters, options, HOST, 0)
        self.moments = _moments(parameters, options, host_zeros)
        if options.scaler is not None:
            options.scaler.bind(np.array(options.scaler.init_scale, np.float32), np.zeros((), np.int32))

    def apply_settings(self, stream: Any) -> None:
        """Checks the stream and writes nothing: updates on the host read the settings directly."""
        stream_handle(stream, HOST)

    def step(self, stream: Any) -> None:
        """Updates all parameters; `stream` is checked, but not used."""
        self.apply_settings(stream)
        scaler = self.options.scaler
        check_masters([read.parameter for read in self._parameters], 0)
        with np.errstate(all="ignore"):  # NaN and infinite gradients cost no warnings, as on a GPU
            factor, finite = self._judge()
            if self.options.skip_nonfinite and not finite:
                self.skipped_steps += 1
            else:
                self.steps += 1
                for i, parameter in enumerate(self._parameters):
                    self._update(i, parameter, factor)
            if scaler is not None:
                scale, tracker = reference.next_scale(scaler, float(scaler.scale), int(scaler.growth_tracker), finite)
                scaler.scale[...], scaler.growth_tracker[...] = scale, tracker

    def _judge(self) -> tuple[float, bool]:
        """The factor by which clipping and the loss scale multiply gradients; and whether all gradients are finite."""
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
        (lr_scale, weight_decay), step = read.settings(self.options), int(self.steps[0])
        own = dataclasses.replace(self.options.hyper, lr=self.options.hyper.lr * lr_scale, weight_decay=weight_decay)
        # reshape returns views, because the arrays have no gaps.
        arrays = [each.reshape(-1) for each in (read.value.array, *self.moments[index])]
        gradient = read.grad.array.reshape(-1)
        for first in range(0, gradient.size, _BLOCK):
            block = slice(first, first + _BLOCK)
            old = [array[block] for array in arrays]
            new = reference.adamw_update(reference.AdamWTensor(*old), gradient[block], own, step, gradient_factor)
            for array, exact, part in zip(old, new, _PARTS, strict=False):  # v_max exists only with AMSGrad
                if array.dtype == np.float32:
                    array[...] = exact
                else:
                    lanes = reference.rounding_lanes(exact.size, self.options.seed, index, step, part, first)
                    array[...] = reference.round_stochastically(exact, lanes)
        if read.master is not None:
            read.data.array[...] = read.master.array.astype(read.data.array.dtype)


class GpuState:
    """The state of parameters on one GPU: moments, settings, the kernels' tables of addresses, and the launches."""

    def __init__(self, parameters: Sequence[Parameter], options: Options) -> None:
        first = parameters[0]
        self._device = device_of(f"{first.name}.data", first.data)
        self._current_stream = library_of(first.data).current_stream
        self.options, self._stream = options, self._current_stream(self._device)
        self._unchecked = parameters
        with activated(self._device):
            self._parameters = read = read_parameters(parameters, options, self._device, self._stream)
            self._seen: object = None
            # Keeps arrays alive: the kernels' tables hold the addresses of these arrays, besides those of the
            # parameters' arrays.
            self._kept: list[Any] = []
            words = self._zeros((len(_WORDS),), np.dtype(np.uint32))
            self.moments = _moments(parameters, options, lambda size, dtype: self._zeros((size,), dtype))
            self._written = self._settings()
            self._device_settings = self._upload(self._written)
            tensors = [_tensor(*pair, options) for pair in zip(read, self.moments, strict=True)]
            self._scale: tuple[Any, Any] | None = None
            if options.scaler is not None:
                self._scale = self._zeros((), np.dtype(np.float32)), self._zeros((), np.dtype(np.int32))
                bits = int(np.float32(options.scaler.init_scale).view(np.uint32))
                call("cuMemsetD32Async", self._scale[0].data.ptr, bits, 1, self._stream)
            norms = [self._norm(tensors, words)] if options.judges_gradients else []
            self._launches: list[Launches] = [*norms, self._update(tensors, words)]
            call("cuStreamSynchronize", self._stream)  # waits, because later steps may use any stream
        if options.scaler is not None and self._scale is not None:
            options.scaler.bind(*self._scale)
        self.steps, self.skipped_steps = (_word(words, name) for name in ("steps", "skipped"))
        self._nonfinite = int(_word(words, "nonfinite").data.ptr)
        norm = _word(words, "norm").view(np.float32).reshape(())
        self.grad_norm = norm if options.judges_gradients else None

    def step(self, stream: Any) -> None:
        """Updates all parameters by one or two launches. Before the first update, master copies are checked."""
        with activated(self._device):
            handle = stream_handle(stream, self._device, self._current_stream)
            if self._unchecked and not is_captured(handle):
                check_masters(self._unchecked, handle)
                self._unchecked = ()
            self._apply(handle)
            ready = [launches[handle] for launches in self._launches]
            try:
                for _, launch in ready:
                    launch()
            except DriverError:
                # Resets the count of NaN gradients: otherwise the next step would be skipped too.
                call("cuMemsetD32Async", self._nonfinite, 0, 1, handle)
                raise

    def apply_settings(self, stream: Any) -> None:
        """See `AdamW.apply_settings`."""
        with activated(self._device):
            self._apply(stream_handle(stream, self._device, self._current_stream))

    def _apply(self, stream: int) -> None:
        """Writes the settings that differ from those on the device, by a memset for each run of equal words.

        A memset has its value in its arguments; a copy would need a host buffer that stays unchanged until it runs. The
        stream orders the memset after earlier updates, which read the old settings.
        """
        latest = changes.latest
        if latest is self._seen:
            return
        words = self._settings()
        changed = np.flatnonzero(words != self._written)
        if changed.size and is_captured(stream):
            raise CaptureError(
                "settings of the optimizer were changed before the capture; call its apply_settings first"
            )
        ends = np.flatnonzero((np.diff(changed) > 1) | (words[changed[1:]] != words[changed[:-1]])) + 1
        for run in np.split(changed, ends) if changed.size else ():
            first, value = int(run[0]), int(words[run[0]])
            call("cuMemsetD32Async", self._device_settings + first * kernels.WORD_BYTES, value, run.size, stream)
            self._written[run] = value
        self._seen = latest

    def _settings(self) -> NDArray[np.uint32]:
        return kernels.settings_words(self.options.hyper, [each.settings(self.options) for each in self._parameters])

    def _update(self, tensors: Sequence[kernels.Tensor], words: Any) -> Launches:
        table = kernels.update_table(tensors)
        params = kernels.adamw_params(self.options, self._device_settings, len(tensors))
        params.chunks, params.state = self._upload(table), words.data.ptr
        params.tickets = self._zeros((kernels.UPDATE_TICKETS,), np.dtype(np.uint32)).data.ptr
        if self._scale is not None:
            params.scale, params.growth_tracker = (array.data.ptr for array in self._scale)
        stochastic = any(tensor.arrays["value"][1] is not DType.FLOAT32 for tensor in tensors)
        return kernels.update_launches(params, len(table), self._device, self.options, stochastic=stochastic)

    def _norm(self, tensors: Sequence[kernels.Tensor], words: Any) -> Launches:
        table = kernels.norm_table(tensors)
        params = kernels.GRADIENT_NORM.params(
            chunks=self._upload(table),
            partial=self._zeros((len(table),), np.dtype(np.float32)).data.ptr,
            state=words.data.ptr,
            scale=0 if self._scale is None else self._scale[0].data.ptr,
        )
        return kernels.launches_by_row(kernels.GRADIENT_NORM, params, len(table), self._device)

    def _zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        array = CUPY.zeros(shape, dtype, self._device, self._stream)
        self._kept.append(array)
        return array

    def _upload(self, table: NDArray[Any]) -> int:
        array = self._zeros((table.nbytes,), np.dtype(np.uint8))
        call("cuMemcpyHtoDAsync", array.data.ptr, table.ctypes.data, table.nbytes, self._stream)
        return int(array.data.ptr)


def _tensor(read: ReadParameter, moments: tuple[Any, ...], options: Options) -> kernels.Tensor:
    arrays = {"value": _typed(read.value), "gradient": _typed(read.grad)}
    if read.master is not None:
        arrays["copy"] = _typed(read.data)
    for name, array in zip(("m", "v", "v_max"), moments, strict=False):  # v_max exists only with AMSGrad
        arrays[name] = array.data.ptr, options.moments
    return kernels.Tensor(math.prod(read.data.shape), arrays)


def _word(words: Any, name: str) -> Any:
    index = _WORDS.index(name)
    return words[index : index + 1]


def _typed(operand: Operand) -> tuple[int, DType]:
    return operand.address, operand.element_type()


def _parameters(given: Any) -> tuple[Parameter, ...]:
    """Checks that there is at least one parameter, and returns all; their arrays are checked later."""
    accepted = "a sequence of lt.Parameter, such as model.parameters()"
    try:
        parameters = tuple(given)
    except TypeError:
        raise KindError(f"parameters is {shown(given)}; it must be {accepted}") from None
    if not parameters:
        raise ArgumentError(f"parameters is empty ({shown(given)}); it must be {accepted}")
    for i, parameter in enumerate(parameters):
        check_instance(f"parameters[{i}]", parameter, Parameter, "an lt.Parameter")
    return parameters


def _hyper(lr: float, betas: Any, eps: float, weight_decay: float, schedule: Schedule | None) -> AdamWHyper:
    try:
        first, second = betas
    except (TypeError, ValueError):
        raise KindError(f"betas is {shown(betas)}; it must be two numbers in [0, 1)") from None
    rates = number("betas[0]", first), number("betas[1]", second)
    if not all(0.0 <= rate < 1.0 for rate in rates):
        raise ArgumentError(f"betas is {rates}; accepted are two numbers in [0, 1)")
    rest = not_negative("eps", eps), not_negative("weight_decay", weight_decay)
    return AdamWHyper(not_negative("lr", lr), *rates, *rest, _schedule(schedule))


def _schedule(schedule: Schedule | None) -> Schedule:
    if schedule is None:
        return Schedule()
    check_instance("schedule", schedule, Schedule, "None or an lt.Schedule, such as lt.schedules.warmup_cosine makes")
    return schedule


def _moments_type(moments: object) -> DType:
    for accepted in (DType.FLOAT32, DType.BFLOAT16):
        if type_name(moments) == accepted.value:
            return accepted
    raise ArgumentError(f"moments is {shown(moments)}; accepted are 'float32' and 'bfloat16'")
