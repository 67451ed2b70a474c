"""`Block`: the protocol of models and of their parts."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from lt_runtime.arguments import flag, integer, shown
from lt_runtime.arrays.operand import HOST, Operand, device_of, library_of
from lt_runtime.arrays.transfer import copied
from lt_runtime.errors import ArgumentError, DTypeError, KindError, OperandError, ShapeError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.nn.device import ComputeDevice
from lt_runtime.nn.loading import LeftOut, by_name, load_values
from lt_runtime.nn.run import Met, Pass
from lt_runtime.ops.add import add as sum_of
from lt_runtime.ops.first_use import not_tuning
from lt_runtime.ops.optimizers.parameters import Parameter
from lt_runtime.problem import Activation, DType

if TYPE_CHECKING:
    from lt_runtime.tuner.chain import Tunable

_MOST_SIZES: Final = 8
"""Number of batch sizes whose problems a model remembers; a training step keeps as many graphs."""


_SHOWN: Final = ("inputs", "outputs", "bias", "activation", "dropout")
"""The attributes of a block that the table of its model shows."""
_FINDING: Final = ("parts", "blocks", "parameters")
"""The methods of `Block` by which a model's parts and parameters are found."""


class Block:
    """A model or a part of one: parameters, a forward and a backward.

    Derive from it to write a block of your own::

        class TiedAutoencoder(lt.Block):
            def __init__(self):
                self.enc = lt.Linear(784, 64, activation="gelu")
                self.dec = lt.Linear(64, 784, weight=self.enc.weight.T)

            def forward(self, x, run):
                return self.dec.forward(self.enc.forward(x, run), run)

            def backward(self, dy, run):
                return self.enc.backward(self.dec.backward(dy, run), run)

    The parts of a block are the blocks and parameters among its attributes, also in lists, tuples and dicts, in the
    order in which they were assigned. A part's name is its attribute's, after the name of the block around it:
    "enc.weight". A parameter that is found twice keeps its first name.

    Attributes:
        name: the name within the model, for parameters, ranges and errors; "" for the model itself.
        inputs, outputs: numbers of columns that the block takes and gives; None if it does not say.
    """

    name: str = ""
    inputs: int | None = None
    outputs: int | None = None
    has_range: ClassVar[bool] = True
    """Whether profiles show forward and backward as ranges; False for blocks that only call other blocks."""
    overwrites: ClassVar[bool] = True
    """Whether this block's backward may write into arrays that were passed to the forward or backward of one of its
    parts. If False, a captured step may leave the part's weight gradients running after the part's backward has
    returned."""

    def __init_subclass__(cls, *, surrounded: bool = True) -> None:
        """Wraps a derived class's forward and backward in the checks of `Pass`.

        Args:
            surrounded: False for a class whose methods call `Pass.forward_of` and `backward_of` themselves.
        """
        if not surrounded:
            return
        for name, wrap in (("forward", _forward), ("backward", _backward)):
            if name in vars(cls):
                setattr(cls, name, wrap(vars(cls)[name]))

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; raises `ArgumentError` if it would hide a method of `Block` that finds parts."""
        if name in _FINDING:
            raise ArgumentError(f"{type(self).__name__}.{name} would hide lt.Block.{name}; take another name")
        super().__setattr__(name, value)

    def forward(self, x: Any, run: Pass) -> Any:
        """Computes the outputs, and keeps in `run` what `backward` needs.

        Args:
            x: the inputs; a tuple of arrays for a model with several.
        """
        raise NotImplementedError(f"{self.title} has no method forward(self, x, run)")

    def backward(self, dy: Any, run: Pass) -> Any:
        """Takes the values that `forward` kept, and writes the parameters' gradients into the buffers of `run.grad`.

        Args:
            dy: the gradient with respect to the outputs.

        Returns:
            The gradient with respect to x; None if nothing reads it, see `Pass.needs_gradient`.
        """
        raise NotImplementedError(f"{self.title} has no method backward(self, dy, run)")

    @property
    def title(self) -> str:
        """The name with the class, for errors, such as "2.inner (Residual)"."""
        return f"{self.name} ({type(self).__name__})" if self.name else type(self).__name__

    def parts(self) -> Iterable[tuple[str, Any]]:
        """The attributes that may hold parts, with their names; containers override it."""
        return vars(self).items()

    def blocks(self) -> Iterator[Block]:
        """This block and all blocks inside it, outermost first. Also sets their names.

        Raises:
            ArgumentError: a block contains itself.
        """
        return self._blocks(())

    def _blocks(self, around: tuple[Block, ...]) -> Iterator[Block]:
        yield self
        around += (self,)
        for name, part in _flat(self.parts()):
            if isinstance(part, Block):
                path = f"{self.name}.{name}" if self.name else name
                if any(part is each for each in around):
                    raise ArgumentError(f"{path} is {part.title}, which contains it: no block may contain itself")
                part.name = path
                yield from part._blocks(around)

    def parameters(self) -> list[Parameter]:
        """All parameters, each once, in the order of the parts. Also sets their names."""
        found: dict[int, Parameter] = {}
        for block in self.blocks():
            for name, part in _flat(block.parts()):
                if isinstance(part, Parameter) and id(part.owner) not in found:
                    owner, path = part.owner, f"{block.name}.{name}" if block.name else name
                    if owner.name != path:
                        owner.name = path
                    found[id(owner)] = owner
        return [*found.values()]

    def __repr__(self) -> str:
        """A table of this block and the blocks inside it, except containers, with each block's number of parameters."""
        rows: list[tuple[str, ...]] = [("block", "kind", *_SHOWN, "parameters")]
        sizes, blocks = dict[int, int](), [*self.blocks()]
        for block in blocks:
            own = {id(each.owner): each.data.size for _, each in _flat(block.parts()) if isinstance(each, Parameter)}
            count = sum(own[key] for key in own.keys() - sizes.keys())
            sizes |= own
            if block.has_range:
                rows.append((block.name, type(block).__name__, *map(_cell, map(vars(block).get, _SHOWN)), f"{count:,}"))
        rows.append(("total", *[""] * (len(rows[0]) - 2), f"{sum(sizes.values()):,}"))
        place = f" on {self.device.description}, {self.dtype.value}" if sizes else ""
        place += ", FP32 master copies" if sizes and self.parameters()[0].master is not None else ""
        place += ", products in FP8" if any(getattr(block, "scales", None) for block in blocks) else ""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row[:-1], widths)) + "  " + row[-1].rjust(widths[-1]) for row in rows]
        return "\n".join([f"{type(self).__name__}{place}", *lines])

    @functools.cached_property
    def device(self) -> ComputeDevice:
        """The device of the parameters.

        Raises:
            ArgumentError: the block has no parameters.
        """
        parameters = self.parameters()
        if not parameters:
            raise ArgumentError(f"{self.title} has no parameters: assign lt.Parameter or blocks to its attributes")
        device = device_of(parameters[0].name, parameters[0].data)
        return ComputeDevice(None if device == HOST else device)

    @functools.cached_property
    def dtype(self) -> DType:
        """The type of the first parameter, which inputs and targets have too; `ArgumentError` as `device`."""
        _ = self.device
        return DType.parse("the model", self.parameters()[0].data.dtype)

    @functools.cached_property
    def met(self) -> deque[Met]:
        """The problems that the model's training steps have run, one `Met` for each batch size, the latest last."""
        return deque(maxlen=_MOST_SIZES)

    def rehearse(self, x: Any) -> list[Tunable]:
        """Runs the model forward and back, which overwrites its gradients; returns the layers and products that ran.

        Args:
            x: as `forward` takes it; or a number of rows, for zeros of `inputs` columns.

        Raises:
            ArgumentError: x is neither arrays nor a positive number of rows; or x is a number, but the model does not
                say how many columns it takes.
        """
        device = self.device
        if not isinstance(x, tuple) and not hasattr(x, "shape"):
            if integer("rows", x) < 1 or self.inputs is None:
                also = "" if self.inputs else f"; {self.title} does not say how many columns it takes: pass its inputs"
                raise ArgumentError(f"rows is {shown(x)}; accepted are positive numbers, and arrays of inputs{also}")
            x = device.asarray(np.zeros((x, self.inputs), self.dtype.numpy))
        run = Pass(inputs=(x, *x) if isinstance(x, tuple) else (x,))
        with device.current(), not_tuning(), Met() as run.met:
            y = self.forward(x, run)
            self.backward(copied(y), run)
            run.finish()
        device.synchronize()
        return run.met.to_tune()

    def __call__(self, x: Any, *, stream: Any = None) -> Any:
        """Outputs for inputs x, without dropout, and without keeping anything for backward.

        Args:
            x: as `forward` takes it.
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
                that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.
        """
        try:
            return self.forward(x, Pass(trains=False, stream=stream))
        except OperandError:
            self._refuse_inputs(x, stream)
            raise

    def _refuse_inputs(self, x: Any, stream: Any) -> None:
        """Raises an error that names x if x does not fit the model; a part's error would name the part's weight."""
        if self.inputs is None or isinstance(x, tuple):
            return
        device = self.device.ordinal
        with contextlib.nullcontext() if device is None else activated(device):
            handle = 0 if device is None else stream_handle(stream, device, library_of(x).current_stream)
            operand = self.device.read("x", x, handle)
        if len(operand.shape) < 2 or operand.shape[-1] != self.inputs:
            raise ShapeError(f"x has shape {operand.shape}; the model takes (..., {self.inputs})")
        check_model_type(self, operand)

    def state_dict(self, *, names: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Copies of all parameters' values, in the model's type: NumPy arrays, on a GPU CuPy arrays. Waits for the GPU.

        Args:
            names: maps parameters' own names ("layer0.weight", "layer0.bias" and so on) to names in the result, for
                example {"layer0.weight": "0.weight"} for PyTorch's `nn.Sequential`. `load_state_dict` takes the same.

        Raises:
            ArgumentError: `names` has a name of no parameter, or gives two parameters one name.
        """
        device = self.device
        device.synchronize()
        with device.current():
            state = {name: copied(each.data) for name, each in by_name(self.parameters(), names).items()}
        device.synchronize()
        return state

    def load_state_dict(
        self, state: Mapping[str, Any], *, strict: bool = True, names: Mapping[str, str] | None = None
    ) -> LeftOut:
        """Assigns values to the parameters, as `Parameter.assign`; optimizers and graphs use the new values.

        Args:
            state: arrays by name, each as `Parameter.assign` takes it: `state_dict()` of this class, or PyTorch's.
            strict: refuse a state that lacks a parameter or has an entry of no parameter. If False, all entries that
                belong to a parameter are loaded; there must be at least one.
            names: the state's name for each parameter whose name differs in the state, as for `state_dict`.

        Returns:
            `missing` and `unexpected`: lists of the names that were left out; both are empty if `strict`.

        Raises:
            OperandError: the state does not fit. The message lists every entry that is missing, unexpected or of
                another shape or kind. Nothing has been written.
            ArgumentError: `names` is wrong, as in `state_dict`.
            CaptureError: the current stream is being captured.
        """
        return load_values(by_name(self.parameters(), names), state, strict=flag("strict", strict))


def _cell(value: object) -> str:
    """An attribute of a block as a cell of its table; empty if the block does not have the attribute."""
    if isinstance(value, Activation):
        return value.name
    if isinstance(value, Parameter):
        return "yes"
    return f"{value:g}" if isinstance(value, float) else str(value) if isinstance(value, int) else ""


def check_model_type(model: Block, operand: Operand) -> None:
    """Raises `DTypeError` unless an operand has the model's type."""
    if operand.dtype != model.dtype.value:
        found = f"{operand.name} is {operand.dtype}; the model takes {model.dtype.value}"
        raise DTypeError(f"{found}: {operand.converted(model.dtype.value)}")


def _flat(parts: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The parts with those in lists, tuples and dicts, whose names have the index or key appended."""
    for name, part in parts:
        if isinstance(part, (list, tuple)):
            yield from _flat((f"{name}.{i}", each) for i, each in enumerate(part))
        elif isinstance(part, dict):
            yield from _flat((f"{name}.{key}", each) for key, each in part.items())
        else:
            yield name, part


def _forward(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a block's forward so that it runs within `Pass.forward_of`.

    The wrapped method has an additional parameter `add`: an array to add to the outputs, such as a residual. If the
    block's own forward has a parameter `add`, it adds the array; otherwise a separate pass does.
    """
    adds = "add" in inspect.signature(own).parameters

    @functools.wraps(own)
    def forward(self: Block, x: Any, run: Pass, add: Any = None, **options: Any) -> Any:
        _check_run(self, run)
        options |= {"add": add} if adds else {}
        if run.running is self:  # this is a call by a derived class of the method that it overrides
            return own(self, x, run, **options)
        with run.forward_of(self):
            y = own(self, x, run, **options)
        if y is None:
            raise ArgumentError(f"{self.title}.forward has returned None; it must return the outputs")
        if add is None or adds:
            return y
        return sum_of(add, y, stream=run.stream)  # a new array, because y may be a view of x

    return forward


def _backward(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a block's backward so that it runs within `Pass.backward_of`; `add` is added to dx."""
    adds = "add" in inspect.signature(own).parameters

    @functools.wraps(own)
    def backward(self: Block, dy: Any, run: Pass, add: Any = None) -> Any:
        _check_run(self, run)
        options, held = {"add": add} if adds else {}, [dy]
        # Leaves the only reference to the block's own backward, so that the array is freed after its last reader.
        del dy
        if run.running is self:
            return own(self, held.pop(), run, **options)
        with run.backward_of(self):
            dx = own(self, held.pop(), run, **options)
        run.without_dx = (run.without_dx or self) if dx is None else None
        if add is None or adds or dx is None:
            return dx
        return sum_of(add, dx, stream=run.stream)  # a new array, because dx may be a view of dy

    return backward


def _check_run(block: Block, run: object) -> None:
    if not isinstance(run, Pass):
        raise KindError(f"{block.title} was called with run {shown(run)}; it must be the lt.Pass of its model")
