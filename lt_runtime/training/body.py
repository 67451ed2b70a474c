"""The part of a training step that host and GPU share: it checks its batch, then runs its operations in order.

The operations are forward, loss, backward, the optimizer's update, and adding up the losses. The loss is one of this
package's, or a function of the caller.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from lt_runtime.arguments import check_instance, one_of, shown
from lt_runtime.arrays.checks import check_one_float32, check_shape, check_weights
from lt_runtime.arrays.libraries import cupy_stream
from lt_runtime.arrays.operand import CUPY, HOST, Operand
from lt_runtime.distributed.buckets import Buckets
from lt_runtime.distributed.group import Group
from lt_runtime.errors import ArgumentError, DTypeError, LayoutError, OperandError, ShapeError
from lt_runtime.gpu.memory import branch, stream_memory
from lt_runtime.kernels.losses import LOSSES as ELEMENTWISE
from lt_runtime.kernels.losses import ElementwiseLoss, launch_scale
from lt_runtime.kernels.mlp import LossArguments
from lt_runtime.kernels.tiling import OCTET
from lt_runtime.nn.block import Block, check_model_type
from lt_runtime.nn.containers import Chain, Residual
from lt_runtime.nn.linear import Linear
from lt_runtime.nn.mlp import MLP
from lt_runtime.nn.narrow import NarrowPasses
from lt_runtime.nn.run import PLACES, Met, Pass
from lt_runtime.ops import losses
from lt_runtime.ops.optimizers.optimizer import Optimizer
from lt_runtime.ops.optimizers.steps import StepInParts
from lt_runtime.problem import Activation, type_name
from lt_runtime.ranges import range_of
from lt_runtime.reference.fp8 import AMAX
from lt_runtime.training.averages import EMA, GpuTally, Tally, scores_of

if TYPE_CHECKING:
    from lt_runtime.ops.fp8.state import FP8State
    from lt_runtime.ops.optimizers.parameters import Parameter
    from lt_runtime.training.fp8_weights import Fp8Weights

LOSSES: Final[Mapping[str, tuple[Callable[..., losses.Loss], tuple[str, ...]]]] = {
    "cross_entropy": (losses.cross_entropy, ("label_smoothing", "class_weights")),
    "mse": (losses.mse_loss, ()),
    "huber": (losses.huber_loss, ("delta",)),
    "bce_with_logits": (losses.bce_with_logits, ("pos_weight",)),
}
"""For each loss by name: its function, and the options that a training step accepts for it."""
_ARRAYS: Final = ("class_weights", "pos_weight")  # the options that are arrays; all others are numbers
LossName: TypeAlias = Literal["cross_entropy", "mse", "huber", "bce_with_logits"]
OwnFunction: TypeAlias = Callable[[Any, Any, Any, int | None], Any]


class StepLoss(NamedTuple):
    """The loss of a training step: one of `LOSSES`, or the caller's function.

    Attributes:
        name: name of the loss, or of the caller's function.
        compute: function that computes the loss and its gradient in the outputs' type. It is called with outputs,
            target and the keyword arguments `row_weights`, `grad_scale`, `share`, `out_gradient`, `out_loss` and
            `stream`, like the functions of `LOSSES`.
        classifies: whether the targets are labels.
        is_own: whether the loss is the caller's function, whose targets may be any array.
        elementwise: the loss as the kernels of narrow MLPs compute it; None if it needs labels or weights.
    """

    name: str
    compute: Callable[..., losses.Loss]
    classifies: bool = False
    is_own: bool = False
    elementwise: ElementwiseLoss | None = None

    def adds_to_tally(self, outputs: Any) -> bool:
        """Whether `compute` can also add the loss of these outputs, on a GPU, to sums over steps; see `Tallied`."""
        classes = outputs.shape[-1] if self.classifies else None
        return not self.is_own and outputs.size > 0 and losses.adds_to_tally(classes)


def step_loss(loss: object, options: Any, model: Block) -> StepLoss:
    """Makes the loss of a training step.

    Args:
        loss: a name of `LOSSES`, or a function.
        options: the options of a named loss, or None.

    Raises:
        ArgumentError, OperandError: the loss or an option is not accepted.
    """
    if callable(loss):
        if options:
            raise ArgumentError(
                "loss_options are for losses with a name; a function of your own may hold what it needs"
            )
        name = getattr(loss, "__name__", type(loss).__name__)
        return StepLoss(name, functools.partial(_own_loss, loss, model), is_own=True)
    name, given = one_of("loss", loss, LOSSES), {} if options is None else options
    check_instance("loss_options", given, Mapping, "a mapping from names to values")
    function, known = LOSSES[name]
    for option in given:
        if option not in known:
            raise ArgumentError(f"loss_options has {shown(option)}; those of {name!r} are {', '.join(known) or 'none'}")
    numbers = {option: value for option, value in given.items() if option not in _ARRAYS}
    row, classifies = np.zeros((1, model.outputs or 1), np.float32), name == "cross_entropy"
    # Computing the loss of a row of zeros raises now for wrong options.
    function(row, np.zeros(1, np.int32) if classifies else row, **numbers)
    arrays = {option: _on_device(option, given[option], model) for option in given if option in _ARRAYS}
    is_elementwise = name in ELEMENTWISE and all(each is None for each in arrays.values())
    elementwise = ElementwiseLoss(name, **numbers) if is_elementwise else None
    return StepLoss(name, functools.partial(function, **numbers, **arrays), classifies, elementwise=elementwise)


def _own_loss(
    function: OwnFunction,
    model: Block,
    outputs: Any,
    target: Any,
    *,
    stream: int | None,
    grad_scale: Any = None,
    share: float = 1.0,
    **_: Any,
) -> losses.Loss:
    """Computes the loss by the caller's function, which writes an FP32 gradient; see `TrainStep`.

    The gradient is scaled before it is rounded. It is never written over the outputs, because the function may have
    kept a reference to them.
    """
    device = model.device.ordinal
    with contextlib.nullcontext() if device is None else cupy_stream(device, stream or 0):
        shape, fp32 = outputs.shape, np.dtype(np.float32)
        gradient: Any = np.zeros(shape, fp32) if device is None else CUPY.zeros(shape, fp32, device, stream or 0)
        loss = _read_loss(function(outputs, target, gradient, stream), model, stream)
        if grad_scale is None and share == 1.0 and outputs.dtype == fp32:
            return losses.Loss(loss, gradient)
        if device is None:
            factor = np.float32(share) * (np.float32(1.0) if grad_scale is None else grad_scale)
            with np.errstate(all="ignore"):  # NumPy must not warn of overflow and NaN, as a GPU does not
                return losses.Loss(loss, (gradient * factor).astype(outputs.dtype))
        rounded = gradient if outputs.dtype == fp32 else CUPY.empty(shape, outputs.dtype, device, stream or 0)
        if rounded.size:
            places, at_scale = (gradient.data.ptr, rounded.data.ptr), 0 if grad_scale is None else grad_scale.data.ptr
            launch_scale(*places, rounded.size, model.dtype, at_scale, share, device, stream or 0)
        return losses.Loss(loss, rounded)


def _read_loss(loss: Any, model: Block, stream: int | None) -> Any:
    """Checks that the caller's function has returned one FP32 number on the model's device, and returns the number."""
    if isinstance(loss, np.generic):
        loss = np.asarray(loss)
    name = "the loss that the function returned"
    if loss is None or isinstance(loss, (int, float)):
        raise OperandError(f"{name} is {shown(loss)}; it must be an FP32 array of one number, on the model's device")
    operand = model.device.read(name, loss, stream or 0)
    check_one_float32(operand)
    return loss.reshape(()) if operand.device == HOST else loss


def _on_device(name: str, array: Any, model: Block) -> Any:
    """Checks an option that holds weights of the outputs, or None; copies a NumPy array to the model's device."""
    if array is None:
        return None
    placed = array
    if isinstance(array, np.ndarray):
        placed = model.device.asarray(array.copy())
    operand = model.device.read(name, placed, 0)
    check_weights(operand, (model.outputs,) if model.outputs else operand.shape, "one an output")
    if isinstance(array, np.ndarray):
        losses.check_not_negative(name, array)
    return placed


Batch: TypeAlias = tuple[Operand, ...]
"""The arrays of a batch: inputs, target and, if given, row weights."""
_FLOATS: Final = ("float16", "bfloat16", "float32", "float64")
_INTEGERS: Final = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


class StepBody:
    """A training step: reads and checks a batch, and runs the operations on it.

    Args:
        rows: the number of rows of every batch; None for any multiple of `parts`.
        parts: the number of micro-batches. All have the same size; the gradients are those of the mean of their losses.
        ema: the averages to update after the optimizer; None if there are no averages.
        group: the processes whose batches together are one batch of the step; None for this process alone.

    Attributes:
        arity: the number of the model's inputs; None before the first batch.
        scales: the `FP8State` of each layer whose products are computed in FP8.
    """

    def __init__(
        self,
        model: Block,
        optimizer: Optimizer,
        loss: StepLoss,
        *,
        rows: int | None,
        parts: int,
        ema: EMA | None,
        group: Group | None = None,
    ) -> None:
        self.model, self.optimizer, self.loss, self.ema = model, optimizer, loss, ema
        self.rows, self.parts = rows, parts
        # Process r of N runs the micro-batches r·parts to (r + 1)·parts - 1 of the N·parts micro-batches of a step.
        self._first, self._all_parts = (0, parts) if group is None else (group.rank * parts, group.size * parts)
        self.group = group
        self._buckets = None if group is None else Buckets(group, optimizer.parameters, model.device.ordinal)
        self._in_parts: StepInParts | None = None
        self.arity: int | None = None
        self._places = len(model.layers) if isinstance(model, MLP) else PLACES
        # An optimizer may have parameters of its own that share the arrays of the model's.
        trained = {id(each.grad) for each in optimizer.parameters}
        self.scales = [block.scales for block in model.blocks() if isinstance(block, Linear) and block.scales]
        self._skipped = optimizer.skipped if self.scales else None
        parameters = model.parameters()
        self._trained, self._frozen = (
            [each for each in parameters if (id(each.grad) in trained) == is_trained] for is_trained in (True, False)
        )
        for each in self._trained:
            each.is_trained = True
        self._written = set[int]()  # the ids of the parameters whose gradients a step has written
        self._known = {id(each) for each in Block.parameters(model)}  # a model's own `parameters` may leave some out
        self._last = None if loss.elementwise is None or model.device.ordinal is None else _last_linear(model)

    def sum_for_owners(self) -> None:
        """Lets gradients be summed only in the processes that update their parameters, if no other process needs them.

        The norm, and the decision to skip a step, need the sums in all processes.
        """
        optimizer = self.optimizer
        if self._buckets is not None and optimizer.owners and not optimizer.options.judges_gradients:
            self._buckets.owners = dict(zip(map(id, optimizer.parameters), optimizer.owners, strict=True))

    def set_arity(self, count: int) -> None:
        """Stores the number of the model's inputs at the first batch; raises at a later one, whose number differs."""
        if self.arity is not None:
            raise ShapeError(f"x has {count} arrays; the batches before had {self.arity}")
        self.arity = count

    def read(self, batch: Sequence[Any], stream: int) -> Batch:
        """Reads and checks the arrays of a batch.

        Args:
            batch: the inputs, (M, ..., K) each; the target; and FP32 row weights, if given. The target is labels for a
                loss that classifies, an array of the outputs' shape for any other named loss, and any array of M rows
                for the caller's own loss.

        Raises:
            ShapeError: x is not a batch of the expected shape.
            ArgumentError: row weights for the caller's own loss.
            DeviceError, DTypeError, LayoutError: an array cannot be copied into a step's buffers.
        """
        count, model, loss = self.arity or 1, self.model, self.loss
        given, target, row_weights = batch[:count], batch[count], batch[count + 1 :]
        names = ["x"] if count == 1 else [f"x[{i}]" for i in range(count)]
        read = [model.device.read(name, each, stream) for name, each in zip(names, given, strict=True)]
        for each in read:
            self._check_input(each, read[0])
        if row_weights and loss.is_own:
            instead = "the target of a loss of your own may hold them, and lt.share(..., drop_uneven=True) makes none"
            raise ArgumentError(f"row_weights are for losses with a name; {instead}")
        wanted = model.device.read("labels" if loss.classifies else "target", target, stream)
        axes = read[0].shape[:-1] if model.inputs and count == 1 else None
        self._check_target(wanted, read[0].shape[0], axes)
        weights = [model.device.read("row_weights", each, stream) for each in row_weights]
        for each in weights:
            check_weights(each, axes or wanted.shape[:1], "one a row of x")
        return *read, wanted, *weights

    def _check_input(self, x: Operand, first: Operand) -> None:
        """Raises for an input with a wrong number of rows, or that does not fit the model."""
        rows, inputs, parts = self.rows, self.model.inputs, self.parts
        fits = inputs is None or (len(x.shape) > 1 and x.shape[-1] == inputs)
        if rows is not None and (not fits or x.shape[:1] != (rows,)):
            takes_any = "; lt.TrainStep(..., batch_size=None) takes batches of any size"
            made = (rows, inputs) if inputs and len(x.shape) <= 2 else f"batches of {rows} rows"
            raise ShapeError(f"{x.name} has shape {x.shape}; this step was made for {made}{takes_any if fits else ''}")
        if not fits or not x.shape or not x.shape[0] or x.shape[0] % parts:
            multiple = f"a multiple of {parts}" if parts > 1 else "at least one"
            accepted = f"(M, {inputs})" if inputs else "(M, ...)"
            raise ShapeError(f"{x.name} has shape {x.shape}; accepted are {accepted}, M {multiple}")
        if x.shape[0] != first.shape[0]:
            raise ShapeError(f"{x.name} has {x.shape[0]} rows, {first.name} has {first.shape[0]}")
        if inputs is not None:
            check_model_type(self.model, x)
        _check_rows(x)

    def _check_target(self, target: Operand, rows: int, axes: tuple[int, ...] | None) -> None:
        """Raises for a target that cannot fit the outputs.

        Args:
            axes: the outputs' shape without the last axis; None if it is not known before the model has run.
        """
        loss, outputs = self.loss, self.model.outputs
        if loss.is_own or axes is None or outputs is None:
            _check_any(target, rows)
        elif loss.classifies:
            losses.check_labels(target, (*axes, outputs))
        else:
            check_shape(target.name, target.shape, (*axes, outputs), "the outputs' shape")
            check_model_type(self.model, target)
            _check_rows(target)

    def run(
        self,
        parts: Sequence[tuple[Any, ...]],
        tally: Tally,
        stream: Any,
        *,
        updates: bool = True,
        sums: bool = True,
        met: Met | None = None,
        weights: Fp8Weights | None = None,
        table: int = 0,
    ) -> None:
        """Runs a step.

        Args:
            parts: inputs, targets and, if given, row weights of each micro-batch.
            tally: adds up the losses.
            stream: a handle on a GPU, None on the host.
            updates: whether the optimizer takes its step, and the averages are updated.
            sums: whether gradients and loss are summed over the processes of the group, if there is one.
            met: collects the groups of linear layers that run, for tuning; a narrow MLP then runs layer by layer.
            weights: copies of weights in FP8, which the step reads and its update writes.
            table: only for a step that `reads_table`: device address of a table with the addresses of the whole batch's
                inputs and targets, which replace those of `parts`; 0 without a table.
        """
        with contextlib.nullcontext() if weights is None else weights.in_use():
            in_parts = self._in_parts if sums and updates and weights is None else None
            early = None if in_parts is None else functools.partial(in_parts.begin, stream)
            self._run_parts(parts, tally, stream, met, self._buckets if sums else None, early, table)
        if updates:
            with range_of("optimizer"):
                set_scales = functools.partial(self._set_scales, stream)
                if weights is None:
                    (in_parts or self.optimizer.step)(stream=stream)
                    set_scales()
                else:
                    weights.step(set_scales, stream=stream)
            if self.ema is not None:
                with range_of("ema"):
                    self.ema.update(stream=stream)

    def _set_scales(self, stream: Any) -> None:
        """Sets FP8 scales for the next step; called once the optimizer has found whether it skips this step."""
        if in_fp8 := [each for each in self.scales if each.fallback is None]:
            from lt_runtime.ops.fp8.state import update_scales  # imported late, because few models are in FP8

            update_scales(in_fp8, skipped=self._skipped, stream=stream)

    def expect_fp8_weights(self, *, graph: bool) -> None:
        """Tells layers in FP8 whether the step's update will write their weights, as it does in a graph."""
        for state, _ in self._suited_layers():
            state.is_written = graph

    def fp8_weights(self, device: int, stream: int) -> Fp8Weights | None:
        """Makes copies in FP8 of the weights that the step has cast with delayed scales; None if there are none."""
        layers = self._suited_layers()
        if not layers:
            return None
        from lt_runtime.training.fp8_weights import Fp8Weights, can_write

        cast = [(state, weight) for state, weight in layers if can_write(state)]
        return Fp8Weights(self.optimizer, cast, device, stream) if cast else None

    def _suited_layers(self) -> list[tuple[FP8State, Parameter]]:
        if not self.scales or self.optimizer.owners:  # this process updates only some of the weights
            return []
        # imported late, because few models are in FP8
        from lt_runtime.training.fp8_weights import suited_layers

        linear = [(block.scales, block.weight) for block in self.model.blocks() if isinstance(block, Linear)]
        return suited_layers(self.optimizer, linear)

    def split_update(self, stream: int) -> None:
        """Lets most parameters be updated during the last sum of gradients, unless clipping or skipping needs all."""
        if self._in_parts is not None or self._buckets is None or self.optimizer.options.judges_gradients:
            return
        if self._buckets.early:
            numbers = {id(each): number for number, each in enumerate(self.optimizer.parameters)}
            self._in_parts = StepInParts(self.optimizer, [numbers[id(each)] for each in self._buckets.early], stream)

    def _run_parts(
        self,
        parts: Sequence[tuple[Any, ...]],
        tally: Tally,
        stream: Any,
        met: Met | None,
        buckets: Buckets | None,
        early: Callable[[], None] | None,
        table: int,
    ) -> None:
        """Runs forward and backward of all micro-batches.

        Args:
            buckets: sum the results over the processes of the group.
            early: see `Buckets.finish`.
            table: see `run`.
        """
        for i, part in enumerate(parts):
            is_last = i == len(parts) - 1
            if buckets is not None and is_last:
                buckets.begin(stream)
            self._run_part(part, i, tally, stream, met, buckets if is_last else None, table)
        if buckets is not None:
            with range_of("sums"):
                buckets.finish(tally.mean, early=early)
                self._share_magnitudes(stream)

    def share_scales(self, stream: Any) -> None:
        """Copies the scales and histories of process 0 to all processes, after calls that have made the first scales.

        So the first scales are those that a step of one process would make: from the first micro-batch, which process 0
        has.
        """
        known = [each for each in self.scales if each.slots is not None]
        if self.group is not None and known:
            arrays = [array for each in known for array in (each.slots, each.history)]
            self.group.engine(self.model.device.ordinal).broadcast(arrays, 0, stream)

    def _share_magnitudes(self, stream: Any) -> None:
        """Gives all processes the largest magnitudes of the tensors in FP8, from which `FP8State.update` makes scales.

        The magnitudes are a column of `slots`, whose other columns are equal in all processes.
        """
        slots = [each.slots for each in self.scales if each.slots is not None]
        if self.group is None or not slots:
            return
        if stream is None:  # on the host there is no rehearsal: the first step itself has just made the first scales
            own = [each[:, AMAX].copy() for each in slots]
            self.share_scales(None)
            for each, magnitudes in zip(slots, own, strict=True):
                each[:, AMAX] = magnitudes
        self.group.engine(self.model.device.ordinal).maximum(slots, stream)

    def reads_table(self, part: tuple[Any, ...], stream: Any) -> bool:
        """Whether a fused pass computes a micro-batch's loss and gradients; it can read the batch through a table."""
        return self._fuses_loss(part) and self._narrow(part, stream, None, 0) is not None

    def _fuses_loss(self, part: tuple[Any, ...]) -> bool:
        """Whether fused passes of a narrow MLP would compute the loss of a micro-batch; row weights prevent it."""
        return self.loss.elementwise is not None and len(part) == 2

    def _narrow(self, part: tuple[Any, ...], stream: Any, met: Met | None, table: int) -> NarrowPasses | None:
        """The fused passes of a narrow MLP; None if they are not used for a micro-batch.

        With a `table` they are used in any case, because only they can read a batch through a table.
        """
        model = self.model
        if not isinstance(model, MLP) or met is not None:
            return None
        takes = table or model.narrow.take(part[0], stream, backward=True, loss=self._fuses_loss(part))
        return model.narrow if takes else None

    def _run_part(
        self,
        part: tuple[Any, ...],
        index: int,
        tally: Tally,
        stream: Any,
        met: Met | None,
        buckets: Buckets | None,
        table: int,
    ) -> None:
        count, model, loss, scaler = self.arity or 1, self.model, self.loss, self.optimizer.scaler
        xs, (target, *weights) = part[:count], part[count:]
        x = xs[0] if count == 1 else xs
        narrow = self._narrow(part, stream, met, table)
        scale, share, first = None if scaler is None else scaler.scale, 1.0 / self._all_parts, index == 0
        options: dict[str, Any] = {"accumulate": not first, "stream": stream}
        run = Pass(
            self.optimizer.steps, micro_batch=self._first + index, frozen=self._frozen, inputs=(x, *xs), **options
        )
        run.places, run.met, run.on_written = self._places, met, buckets.written if buckets else None
        run.known = self._known
        if narrow is not None and loss.elementwise is not None and self._fuses_loss(part):
            arguments = LossArguments(share, table, index * target.shape[0])
            with range_of("backward"):
                number = narrow.backward(x, target, loss=loss.elementwise, scale=scale, arguments=arguments, **options)
            with range_of("loss"):
                tally.add(number, None, share, first=first, stream=stream)
            return
        with range_of("forward"):
            outputs = model.forward(x, run) if narrow is None else narrow.outputs(x, stream)
        with range_of("loss"):
            # The gradient overwrites the outputs, unless the tally of classified rows or the last layer's derivative
            # reads the outputs later.
            is_read_later = loss.classifies or not (narrow or run.may_overwrite(outputs))
            scaling = {"grad_scale": scale, "share": share} | ({"row_weights": weights[0]} if weights else {})
            compute, out = self._compute(run, target, weights), None if is_read_later else outputs
            # The loss's own kernel adds to the tally, if it can.
            tallied = tally.part(first=first) if isinstance(tally, GpuTally) and loss.adds_to_tally(outputs) else None
            value, gradient = compute(outputs, target, **scaling, out_gradient=out, out_loss=tallied, stream=stream)
        scores = scores_of(outputs, target) if loss.classifies else None
        run.release(outputs)
        del outputs, out  # Arrays are dropped after their last use, so that later arrays get their memory.
        device, held = model.device.ordinal, [gradient]
        del gradient
        # No other operation reads the tally of losses, so that on a GPU a branch of the graph updates it concurrently.
        run.memory = None if device is None else stream_memory(device, stream)
        beside = None if tallied else run.memory
        with contextlib.nullcontext() if beside is None else branch(beside) as memory:
            if tallied is None:
                with range_of("loss"):
                    tally.add(value, scores, share, first=first, stream=memory and memory.stream)
            with range_of("backward"):
                if narrow is not None:
                    narrow.backward(x, held.pop(), loss=None, scale=None, arguments=None, **options)
                else:
                    model.backward(held.pop(), run)
                    run.finish()
                    if first:
                        # Otherwise the update would read the gradients of an earlier step again.
                        run.clear_unwritten(each for each in self._trained if id(each) in self._written)
                    self._written |= run.written
                    run.join()

    def _compute(self, run: Pass, target: Any, weights: Sequence[Any]) -> Callable[..., tuple[Any, Any]]:
        """The function that computes the loss and its gradient.

        If possible, the function also does work of the last layer's backward pass: it computes the layer's bias
        gradient and, for a layer in FP8, casts the gradient of the outputs to FP8.
        """
        layer, loss = self._last, self.loss.elementwise
        if layer is None or loss is None or weights:
            return self.loss.compute
        bias = layer.bias if run.trains_parameter(layer.bias) else None
        compute: Callable[..., tuple[Any, Any]] = losses.summed_loss
        if layer.scales is not None:
            from lt_runtime.ops.fp8.gradients import cast_loss, casts_loss  # imported late: few models use FP8

            if not casts_loss(layer.scales, target):
                return self.loss.compute
            compute = functools.partial(cast_loss, layer.scales)
        elif bias is None:
            return self.loss.compute
        run.has_db = True
        return functools.partial(compute, loss, *((None, False) if bias is None else run.grad(bias)))


def _last_linear(block: Block) -> Linear | None:
    """The last linear layer, if its dz is the gradient of the model's outputs; None if there is no such layer.

    The loss can do work of this layer's backward, see `_compute`. The layer must get the gradient of the model's
    outputs unchanged. The last layer of a `Residual` counts only if it is not in FP8, because the block also adds that
    gradient to the gradient of its inputs. The last layer of an `MLP` counts only in FP8: in other types the tuner
    has timed every layer with its own bias gradient against the fused kernels of a narrow MLP.
    """
    if type(block) is Chain:
        return _last_linear(block.sequence[-1])
    if isinstance(block, (Residual, MLP)):
        inner, in_fp8 = (block.inner, False) if isinstance(block, Residual) else (block.layers[-1], True)
        last = _last_linear(inner) if type(block) in (Residual, MLP) else None
        return last if last is not None and (last.scales is not None) == in_fp8 else None
    if type(block) is not Linear or block.activation != Activation() or block.dropout:
        return None
    is_whole = block.weight.data.shape[0] % OCTET == 0  # the kernels need rows of a multiple of 8 elements
    return block if is_whole and (block.scales is None or type_name(block.weight.data.dtype) == "bfloat16") else None


def _check_any(target: Operand, rows: int) -> None:
    """Raises for a target with other than `rows` rows, with elements that are no numbers, or with gaps within rows."""
    if target.shape[:1] != (rows,):
        raise ShapeError(f"target has shape {target.shape}; it must have {rows} rows, as x has")
    if target.dtype not in (*_FLOATS, *_INTEGERS, "bool"):
        raise DTypeError(f"target is {target.dtype}; accepted are {', '.join(_FLOATS)}, integers and bool")
    if len(target.shape) == 2:
        _check_rows(target)
    else:
        target.check_packed()


def _check_rows(operand: Operand) -> None:
    if len(operand.shape) != 2:
        operand.check_packed()
        return
    rows, cols = operand.layout.shape
    if rows > 1 and cols > 1 and operand.strides[1] != 1:
        raise LayoutError(f"{operand.name} has strides {operand.strides}; its rows must be contiguous: lt.contiguous")
