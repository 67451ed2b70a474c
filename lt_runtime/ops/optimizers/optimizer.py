"""`Optimizer`: rules over groups of parameters, with one gradient norm, loss scale and step number."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lt_runtime import ranges, reference
from lt_runtime.arguments import Fixed, check_instance, flag, number, shown
from lt_runtime.arrays.libraries import cupy
from lt_runtime.arrays.operand import HOST, device_of, library_of, on_host
from lt_runtime.arrays.transfer import fetch, host_access, host_values, replace_all, writes
from lt_runtime.errors import ArgumentError, KindError, LtError, OperandError
from lt_runtime.grad_scaler import LARGEST_SCALE, SMALLEST_SCALE, GradScaler
from lt_runtime.kernels.optimizer import Options
from lt_runtime.ops.optimizers.gpu_state import GpuState
from lt_runtime.ops.optimizers.parameters import HeldArrays, Parameter, changes
from lt_runtime.ops.optimizers.state import HostState, Shard
from lt_runtime.problem import DType, Philox, TorchDType, type_name
from lt_runtime.rules import RULES, Rule
from lt_runtime.schedules import AnySchedule, Schedule, Table

MomentsType: TypeAlias = Literal["float32", "bfloat16"] | DType | np.dtype[Any] | type[Any] | TorchDType
Bounds: TypeAlias = Mapping[str, tuple[float, float]]
"""For each array by name, the lowest and highest value that training can give its elements."""
LAST_STEP: Final = 2**32 - 2
"""The largest number of steps from which training can continue: an update uses the number plus 1 in 32 bits."""


class Optimizer(Fixed):
    """Updates groups of parameters, each by a rule of `lt.rules`, with arithmetic in FP32.

    All groups share a step number, a schedule, the norm of all gradients and a loss scale. On a GPU each group is
    updated by one kernel. It computes the learning rate from the step's number on the device, and the last group's
    kernel advances that number, so that a captured graph can be replayed. With `max_norm`, `skip_nonfinite` or `scaler`
    another kernel reads the gradients first. The host reads nothing back::

        optimizer = lt.Optimizer([(matrices, lt.rules.Lion(1e-4)), (others, lt.rules.AdamW(3e-4))], max_norm=1.0)

    A NaN or infinite gradient spoils its own element, and with `max_norm` every element. With `skip_nonfinite` or
    `scaler` the whole update is skipped instead: parameters, moments and `steps` stay.

    `rules` and `schedule` may be set between steps, as may `lr_scale` and `weight_decay` of a parameter. The next step
    uses them, also the next step of an `lt.TrainStep`, whose graph reads them from the device. Of a rule, `lr` and
    `weight_decay` may change: `optimizer.rules = [dataclasses.replace(rule, lr=1e-5) for rule in optimizer.rules]`.
    Other attributes cannot be set. For a graph that you capture from `step` yourself, see `apply_settings`. On a GPU,
    a new `lt.schedules.Table` is copied to the device at the next step, for which the host waits.

    Parameters' data must be the rounding of their master copies, see `lt.AdamW`.

    Args:
        groups: pairs of a sequence of parameters and their rule; no parameter twice; all NumPy arrays, or all on one
            GPU.
        schedule: factor of every learning rate by step; None for a constant factor of 1.
        max_norm, skip_nonfinite, scaler, moments, stochastic_rounding, seed: as for `lt.AdamW`.

    Attributes:
        rules: the present rule of each group.
        schedule: the present schedule.
        rates: the learning rate in force for each group.
        parameters: those of all groups, in their order.
        groups: number of the parameters of each group.
        moments: for each parameter a tuple of the arrays that its rule keeps (`rule.moments` has their names); one
            allocation holds them all.
        steps, skipped_steps, grad_norm, options, scaler: as for `lt.AdamW`.

    Raises:
        ArgumentError: no group, no parameters in a group, or an option out of its range.
        KindError: a group is no pair of parameters and a rule.
        OperandError: as for `lt.AdamW`.
    """

    _changeable: ClassVar[tuple[str, ...]] = ("rules", "schedule")

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[Parameter], Rule]],
        schedule: AnySchedule | None = None,
        *,
        max_norm: float | None = None,
        skip_nonfinite: bool = False,
        scaler: GradScaler | None = None,
        moments: MomentsType = "float32",
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        pairs = _groups(groups)
        self.parameters: Final = tuple(itertools.chain(*(parameters for parameters, _ in pairs)))
        self.groups: Final = tuple(len(parameters) for parameters, _ in pairs)
        self.scaler: Final = scaler
        check_instance("scaler", scaler, (GradScaler, type(None)), "None or an lt.GradScaler")
        if scaler is not None and scaler.is_bound:
            raise ArgumentError("scaler already serves an optimizer; make one for each")
        max_norm = None if max_norm is None else number("max_norm", max_norm)
        if max_norm is not None and not max_norm > 0:
            raise ArgumentError(f"max_norm is {max_norm}; it must be positive, or None")
        rules, skips = tuple(rule for _, rule in pairs), flag("skip_nonfinite", skip_nonfinite) or scaler is not None
        # `Philox` refuses anything but a 64-bit seed
        rounding = _moments_type(moments), flag("stochastic_rounding", stochastic_rounding), Philox(seed).seed
        options = Options(rules, _schedule(schedule), max_norm, skips, scaler, *rounding)
        arrays = {
            f"{each.name}.{part} (parameter {i})": getattr(each, part)
            for i, each in enumerate(self.parameters)
            for part in ("data", "grad", "master")
            if part != "master" or each.master is not None
        }
        kind = HostState if on_host(arrays) else GpuState
        self._state: HostState | GpuState = kind([parameters for parameters, _ in pairs], options)
        self._is_uncopied = kind is GpuState
        for each in self.parameters:
            each.owner.is_trained = True
        self._held, self._have_masters = HeldArrays(self.parameters, "the optimizer"), list[bool]()
        self.steps, self.skipped_steps = self._state.steps, self._state.skipped_steps
        self.grad_norm: Final = self._state.grad_norm
        self._is_made = True

    @property
    def moments(self) -> Sequence[tuple[Any, ...]]:
        """For each parameter its rule's moments; none of parameters that other processes own, see `lt.TrainStep`."""
        return self._state.moments

    @property
    def owners(self) -> tuple[int, ...]:
        """The rank of the process that has the moments and master copy of each parameter; empty if all processes do."""
        return () if self._state.shard is None else self._state.shard.owners

    def keep(self, shard: Shard) -> None:
        """Drops moments and master copies of parameters that other processes own; `lt.TrainStep` calls this.

        From then on all processes must call `step`, `state_dict`, `load_state_dict` and functions for checkpoints.
        """
        self._have_masters = [each.master is not None for each in self.parameters]
        self._state.keep(shard)
        self._held = HeldArrays(self.parameters, "the optimizer")

    @contextlib.contextmanager
    def whole_state(self) -> Iterator[None]:
        """Within a `with` block every process has the moments and master copies of all parameters.

        All processes must enter the block. Arrays that another process owns are copies, and are dropped at the block's
        end.
        """
        shard, own = self._state.shard, self._state.moments
        if shard is None:
            yield
            return
        others, fp32 = shard.others, np.dtype(np.float32)
        device = device_of(self.parameters[0].name, self.parameters[0].data)
        stream = None if device == HOST else library_of(self.parameters[0].data).current_stream(device)
        moments, masters = list[tuple[Any, ...]](), list[Any]()
        for i, (each, names) in enumerate(zip(self.parameters, _moment_names(self), strict=True)):
            shape = tuple(each.data.shape)
            new = [self._state.zeros(shape, self.options.moments.numpy) for _ in names] if i in others else own[i]
            moments.append(tuple(new))
            masters.append(self._state.zeros(shape, fp32) if i in others and self._have_masters[i] else each.master)
        shard.send([[*each, *([] if m is None else [m])] for each, m in zip(moments, masters, strict=True)], stream)
        if stream is not None:
            cupy().cuda.Device(device).synchronize()
        self._state.moments = moments
        for each, master in zip(self.parameters, masters, strict=True):
            each.master = master
        try:
            yield
        finally:
            self._state.moments = own
            for i in others:
                self.parameters[i].master = None

    @property
    def options(self) -> Options:
        """All options but the parameters, with the present settings."""
        return self._state.options

    @property
    def skipped(self) -> Any:
        """Array (1,) of uint32 on the parameters' device: nonzero if the last step was skipped.

        Pass the array to `FP8State.update(skipped=)`. The value is None unless steps may be skipped. Steps write the
        array only after this property has been read once, and a graph only if that was before the graph's capture.
        """
        self._state.notes_skips = True
        return self._state.skipped

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rule of each group; may be set to rules that differ in `lr` and `weight_decay`."""
        return self.options.rules

    @rules.setter
    def rules(self, value: Sequence[Rule]) -> None:
        present = self.options.rules
        if not isinstance(value, (list, tuple)) or len(value) != len(present):
            raise ArgumentError(f"rules is {shown(value)}; it must be a list of {len(present)} rules, one a group")
        for i, (rule, old) in enumerate(zip(value, present, strict=True)):
            is_alike = type(rule) is type(old)
            if not is_alike or dataclasses.replace(rule, lr=old.lr, weight_decay=old.weight_decay) != old:
                raise ArgumentError(f"rules[{i}] is {rule}; only lr and weight_decay may differ from {old}")
        self._change(rules=tuple(value))

    @property
    def schedule(self) -> AnySchedule:
        """The factor of the learning rate by step; may be set; None is a constant factor of 1."""
        return self.options.schedule

    @schedule.setter
    def schedule(self, value: AnySchedule | None) -> None:
        self._change(schedule=_schedule(value))

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate in force for each group: its `lr` times the schedule's factor at the last update.

        Before the first update this is the rate of the first update. A parameter's own rate is this times its
        `lr_scale`. Reading waits for the GPU.
        """
        factor = reference.learning_rate_factor(self.schedule, max(int(self.steps.item()), 1))
        return tuple(rule.lr * factor for rule in self.rules)

    def __repr__(self) -> str:
        groups = ", ".join(f"{count} parameters: {rule}" for count, rule in zip(self.groups, self.rules, strict=True))
        return f"Optimizer({groups})"

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
        writes.latest = None
        self._state.step(stream)

    def apply_settings(self, *, stream: Any = None) -> None:
        """Writes changed settings to the device, in the order of a stream.

        `step` and `lt.TrainStep` write changed settings by themselves. If you have captured a graph from `step`, call
        this method before the graph's next launch. Do not capture this call with the step: each launch of the graph
        would then restore the settings of the capture.

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

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Copies of everything but settings that the next update reads, as NumPy arrays. Waits for the GPU.

        The names are "NAME.m", "NAME.v" and "NAME.v_max" for the moments of the parameter NAME, "steps",
        "skipped_steps" and, with a scaler, "scale" and "growth_tracker". Values of parameters and their master copies
        are the model's.

        Raises:
            ArgumentError: two parameters have one name.
            CaptureError: the current stream is being captured.
            GpuError: a copy failed.
        """
        with self.whole_state():
            return {name: np.array(fetch(operand, stream)) for name, (operand, stream) in self._operands().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Writes a state of `state_dict` into the arrays of this optimizer, in place, so that graphs continue with it.

        Waits for the GPU.

        Args:
            state: arrays by the names of `state_dict`, all with the shapes and types that they have here.

        Raises:
            OperandError: the state does not fit. The message lists every entry that is missing, unexpected, of another
                shape or type, or has a value that training cannot reach, see `lt.load_checkpoint`.
            ArgumentError: two parameters have one name.
            CaptureError: the current stream is being captured.
            GpuError: a copy failed. After every error the optimizer has its old state.
        """
        check_instance("state", state, Mapping, "a mapping from names to arrays, such as state_dict() gives")
        with self.whole_state():
            self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        operands, ranges_of_values = self._operands(), state_ranges(self)
        complaints = [f"missing: {name}" for name in operands if name not in state]
        complaints += [f"unexpected: {shown(name)}" for name in state if name not in operands]
        loaded = []
        for name, (operand, stream) in operands.items():
            if name in state:
                try:
                    values = host_values(name, state[name])
                except LtError as error:
                    complaints.append(str(error))
                    continue
                found, wanted = (values.dtype.name, values.shape), (operand.dtype, operand.shape)
                if found != wanted:
                    complaints.append(f"{name} is {found[0]} {found[1]}; it must be {wanted[0]} {wanted[1]}")
                elif complaint := outside(name, values, ranges_of_values):
                    complaints.append(complaint)
                loaded.append((operand, values, stream))
        if complaints:
            raise OperandError("\n  ".join(["state does not fit the optimizer; nothing was loaded:", *complaints]))
        replace_all(loaded)

    def _operands(self) -> dict[str, tuple[Any, int]]:
        """The arrays of `state_arrays` as operands, each with the current stream. Waits for the GPU's updates."""
        (name, count), *_ = collections.Counter(each.name for each in self.parameters).most_common(1)
        if count > 1:
            raise ArgumentError(f"{count} parameters are named {name}; give each its own name")
        found = {name: host_access(name, array) for name, array in state_arrays(self).items()}
        device = found["steps"][0].device
        if device != HOST:
            cupy().cuda.Device(device).synchronize()  # waits for all streams, since updates may run on any
        return found

    def _change(self, **settings: Any) -> None:
        self._state.options = dataclasses.replace(self.options, **settings)
        changes.latest = object()


def state_arrays(optimizer: Optimizer, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Maps names in `Optimizer.state_dict` to the arrays that updates change and read.

    Args:
        names: of the parameters; None for their own.
    """
    names = [each.name for each in optimizer.parameters] if names is None else names
    arrays = {
        f"{name}.{moment}": array
        for name, kinds, moments in zip(names, _moment_names(optimizer), optimizer.moments, strict=True)
        for moment, array in zip(kinds, moments, strict=True)
    }
    arrays |= {"steps": optimizer.steps, "skipped_steps": optimizer.skipped_steps}
    if optimizer.scaler is not None:
        arrays |= {"scale": optimizer.scaler.scale, "growth_tracker": optimizer.scaler.growth_tracker}
    return arrays


def state_ranges(optimizer: Optimizer, names: Sequence[str] | None = None) -> dict[str, tuple[float, float]]:
    """The lowest and the highest value that training can give each array, by name.

    An array whose highest value is infinity may have NaN as well.

    Args:
        names: of the parameters; None for their own.
    """
    names = [each.name for each in optimizer.parameters] if names is None else names
    bounds: dict[str, tuple[float, float]] = {
        f"{name}.{moment}": (0.0, math.inf)
        for name, kinds in zip(names, _moment_names(optimizer), strict=True)
        for moment in kinds[1:]  # second moments are means or maxima of squares, and so not negative
    }
    bounds |= {"steps": (0, LAST_STEP), "skipped_steps": (0, LAST_STEP)}
    if optimizer.scaler is not None:
        bounds["scale"] = SMALLEST_SCALE, LARGEST_SCALE
        bounds["growth_tracker"] = 0, optimizer.scaler.growth_interval - 1
    return bounds


def outside(name: str, values: NDArray[Any], bounds: Bounds) -> str:
    """Error message for the first value of an array that lies outside its bounds; empty if all lie within."""
    if name not in bounds:
        return ""
    (lowest, highest), values = bounds[name], values.reshape(-1)
    takes_nan = math.isinf(highest)
    with np.errstate(invalid="ignore"):  # comparing a signalling NaN raises this floating-point error
        wrong = ~((values >= lowest) & (values <= highest) | (takes_nan & np.isnan(values)))
    if not wrong.any():
        return ""
    accepted = f"{lowest} to {highest}" + (", or NaN" if takes_nan else "")
    return f"{name} has the value {values[wrong][0]!s}; accepted are {accepted}"


def _moment_names(optimizer: Optimizer) -> list[tuple[str, ...]]:
    """The names of each parameter's moments."""
    pairs = zip(optimizer.rules, optimizer.groups, strict=True)
    return [names for rule, count in pairs for names in [rule.moments] * count]


def _groups(given: Any) -> list[tuple[tuple[Parameter, ...], Rule]]:
    """Checks that there is at least one pair of parameters and a rule; the parameters' arrays are checked later."""
    accepted = "a sequence of pairs (parameters, rule), such as [(model.parameters(), lt.rules.Lion())]"
    if not isinstance(given, (list, tuple)):
        raise KindError(f"groups is {shown(given)}; it must be {accepted}")
    if not given:
        raise ArgumentError(f"groups is empty; it must be {accepted}")
    pairs = []
    for i, pair in enumerate(given):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise KindError(f"groups[{i}] is {shown(pair)}; groups must be {accepted}")
        if type(pair[1]) not in RULES:
            raise KindError(f"groups[{i}][1] is {shown(pair[1])}; it must be a rule, such as lt.rules.AdamW()")
        pairs.append((checked_parameters(f"groups[{i}][0]", pair[0]), pair[1]))
    return pairs


def checked_parameters(name: str, given: Any) -> tuple[Parameter, ...]:
    """Checks that there is at least one parameter, and returns all; their arrays are checked later."""
    accepted = "a sequence of lt.Parameter, such as model.parameters()"
    try:
        parameters = tuple(given)
    except TypeError:
        raise KindError(f"{name} is {shown(given)}; it must be {accepted}") from None
    if not parameters:
        raise ArgumentError(f"{name} is empty ({shown(given)}); it must be {accepted}")
    for i, parameter in enumerate(parameters):
        check_instance(f"{name}[{i}]", parameter, Parameter, "an lt.Parameter")
    return parameters


def _schedule(schedule: AnySchedule | None) -> AnySchedule:
    if schedule is None:
        return Schedule()
    accepted = "None or an lt.Schedule, such as lt.schedules.warmup_cosine makes"
    check_instance("schedule", schedule, (Schedule, Table), accepted)
    return schedule


def _moments_type(moments: object) -> DType:
    for accepted in (DType.FLOAT32, DType.BFLOAT16):
        if type_name(moments) == accepted.value:
            return accepted
    raise ArgumentError(f"moments is {shown(moments)}; accepted are 'float32' and 'bfloat16'")
