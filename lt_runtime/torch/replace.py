"""`replace` makes the modules of a PyTorch model compute by the package's operations, and keeps their parameters.

`replace` sets a module's class to a subclass that overrides one method. So parameters, keys of state_dict,
`isinstance` and the places of modules stay as they are. `restore` sets the original class again.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from lt_runtime.arguments import check_instance
from lt_runtime.errors import ArgumentError, LtError
from lt_runtime.gpu.devices import check_fp8
from lt_runtime.nn.linear import scales_of
from lt_runtime.ops.fp8.state import FP8State
from lt_runtime.tables import rendered, table
from lt_runtime.torch.fp8 import Precision, set_precision
from lt_runtime.torch.kinds import KINDS, LAYERS, full_name, layers_of, name_of, sequence, unusual
from lt_runtime.torch.losses import cross_entropy
from lt_runtime.torch.tensors import DTYPES, Tensor

_LOSSES: Final = "ForCausalLMLoss", "causal_loss"
_ROUNDS: Final = 5
_REPEATS: Final = 10


class Replacement(NamedTuple):
    """Report of what `replace` did with one module.

    Attributes:
        name: the module's name in the model, "" for the model itself.
        kind: the module's class.
        replaced: whether the module computes by the package's operations now.
        reason: why the module was not replaced; if it was replaced, why, such as "faster".
        theirs, ours: measured microseconds of PyTorch's and of the package's forward and backward; None if not
            measured.
    """

    name: str
    kind: str
    replaced: bool
    reason: str
    theirs: float | None = None
    ours: float | None = None


class Report(tuple[Replacement, ...]):
    """A `Replacement` for each module that was or could be replaced, and for others with parameters of their own.

    Blocks of known classes that cannot be replaced have one too, except an `nn.Sequential`.

    `str` of the report is a table, in which modules whose names differ only in numbers share a line.
    """

    def __str__(self) -> str:
        lines: dict[tuple[str, ...], int] = {}
        for each in self:
            times = ["" if time is None else f"{time:.1f}" for time in (each.theirs, each.ours)]
            place = re.sub(r"\b\d+\b", "*", each.name) or "the model"
            line = place, each.kind, "yes" if each.replaced else "no", each.reason, *times
            lines[line] = lines.get(line, 0) + 1
        headings = "modules", "count", "class", "replaced", "why", "PyTorch µs", "ours µs"
        rows = [(line[0], str(count), *line[1:]) for line, count in lines.items()]
        return rendered(table(None, headings, rows, {"modules", "class", "replaced", "why"}))


def _refused(parts: Iterable[Any]) -> str:
    """Says why the parameters of some modules prevent their replacement; "" if they do not."""
    modules = [part for part in parts if isinstance(part, nn.Module)]
    parameters = [each for module in modules for each in module.parameters(recurse=False)]
    for each in parameters:
        if type(each) is not nn.Parameter or each.dtype not in DTYPES:
            return f"a parameter is a {type(each).__name__} of {each.dtype}"
        if (each.dtype, each.device) != (parameters[0].dtype, parameters[0].device):
            return f"parameters are {parameters[0].dtype} on {parameters[0].device} and {each.dtype} on {each.device}"
        if each.dtype is torch.float64 and each.is_cuda:
            return "PyTorch computes float64 on GPUs"
    return ""


class _Replaced:
    """Base of the classes of replaced modules; `replaces` is the original class."""

    replaces: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles store the original class, since this one cannot be imported; `_empty` remakes this one."""
        made: Any = super().__reduce_ex__(protocol)
        return _empty, (self.replaces,), *made[2:]


def _empty(base: type) -> Any:
    """Makes a module of the subclass for `base` without attributes, which `copy` and `pickle` then set."""
    made = _class_of(base)
    return made.__new__(made)


@functools.cache
def _class_of(base: Any) -> Any:
    """Makes the subclass of a module class `base` whose method computes by the package's operations."""
    kind = KINDS[full_name(base)]
    original, read = getattr(base, kind.method), kind.function if kind.parts else kind.read
    _, *parameters = inspect.signature(original).parameters

    def call(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if kind.is_layer and arguments:
            named = zip(parameters[1:], arguments[1:], strict=False)
            return function(arguments[0], **dict(named), **keywords)
        # With keywords in another order, or unknown ones, the original method runs or raises.
        is_usual = [*keywords] == parameters[len(arguments) : len(arguments) + len(keywords)]
        return function(*arguments, *keywords.values()) if is_usual and not kind.is_layer else None

    @functools.wraps(original)
    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        function = read(self)
        result = None if isinstance(function, str) else call(function, arguments, keywords)
        return original(self, *arguments, **keywords) if result is None else result

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (_Replaced, base), {**names, "replaces": base, kind.method: method})


def replace(model: Any, example_inputs: Any = None, *, precision: Precision = None) -> Report:
    """Makes modules of a model, in place, compute by the package's operations; the parameters stay the same.

    Linear layers are replaced with the activation and the dropout that follow them, feed-forward blocks as a whole, and
    norms; docs/pytorch.md has the list. Modules with hooks, parametrizations or unusual parameters, and subclasses, are
    left alone. Keys of state_dict stay as they are.

    Args:
        model: a `torch.nn.Module`.
        example_inputs: arguments for a call of the model: a tensor, a tuple of positional arguments, or a mapping of
            keyword arguments. With them the modules on a GPU are measured, forward and backward, and those that would
            become slower are not replaced. Without them, every module that can be replaced is.
        precision: "fp8", or an `lt.FP8`, to train the linear layers of replaced modules with products in FP8; None
            otherwise. Layers that were replaced before stay as they are. Each layer gets an `lt.FP8State` as `scales`,
            and its state_dict has entries with the prefix "fp8_"; see `Linear`.

    Returns:
        A report of the modules that were replaced, and of the modules that were not, with reasons. `print` shows it as
        a table.

    Raises:
        KindError, ArgumentError: model is not a module; an unknown precision.
        GpuError: a parameter is on a GPU without FP8, and `precision` asks for it.
    """
    check_instance("model", model, nn.Module, "a torch.nn.Module")
    if scales_of(precision):
        for ordinal in {each.get_device() for each in model.parameters() if each.is_cuda}:
            check_fp8(ordinal)
    named = [(name, module, _why_not(module)) for name, module in model.named_modules()]
    able = [module for _, module, why in named if not why]
    inputs = {} if example_inputs is None else _inputs_of(model, able, example_inputs)
    entries, chosen = dict[str, Replacement](), list[Any]()
    races, absorbed = dict[Any, tuple[float, float]](), set[int]()
    for name, module, why in named:  # a block precedes its parts, which are tried one by one if it is not replaced
        if id(module) in absorbed:
            continue
        kind, entry = KINDS.get(name_of(module)), _decided(name, module, why, inputs.get(module), races, precision)
        if kind and entry.replaced:
            absorbed |= set() if kind.is_layer else {id(part) for part in kind.absorbed(module)}
            chosen += [] if isinstance(module, _Replaced) else [module]
        if not why or (kind and kind.read is not sequence) or [*module.parameters(recurse=False)]:
            entries[name] = entry
    for module in chosen:
        for layer in layers_of(module) if precision else ():
            set_precision(layer, precision)
        module.__class__ = _class_of(module.__class__)
    for name, module in model.named_modules():
        loss_name = getattr(getattr(module, "loss_function", None), "__name__", "")
        if type(module).__name__.endswith(("ForCausalLM", "LMHeadModel")) and loss_name in _LOSSES:
            module.loss_function = causal_loss
            name = f"{name}.loss_function".removeprefix(".")
            entries[name] = Replacement(name, "ForCausalLMLoss", True, "not measured")
    return Report(entries.values())


def restore(model: Any) -> None:
    """Undoes `replace`: every module of the model computes by its own class again.

    Raises:
        ArgumentError: model is not a module, or the class of a replaced module was changed since.
    """
    check_instance("model", model, nn.Module, "a torch.nn.Module")
    replaced = [(name, each) for name, each in model.named_modules() if isinstance(each, _Replaced)]
    for name, module in replaced:
        if "replaces" not in vars(type(module)):
            raise ArgumentError(f"{name or 'model'} is a {type(module).__name__} now; undo that before ltt.restore")
    for _, module in replaced:
        module.__class__ = module.replaces
    for module in model.modules():
        if name_of(module) in LAYERS and isinstance(vars(module).get("scales"), FP8State):
            module.scales = None
        if vars(module).get("_loss_function") is causal_loss:
            del module._loss_function


def causal_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor = None,
    **_: Any,
) -> Tensor:
    """`ForCausalLMLoss` of transformers, without a copy of the logits in FP32."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets, reduction = shift_labels.reshape(-1).to(logits.device), "mean" if num_items_in_batch is None else "sum"
    loss = cross_entropy(logits.reshape(-1, vocab_size), targets, ignore_index=ignore_index, reduction=reduction)
    return loss.float() if num_items_in_batch is None else loss.float() / num_items_in_batch


def _why_not(module: Any) -> str:
    """Why a module cannot be replaced; "" if it can be."""
    kind = KINDS.get(name_of(module))
    if kind is None:
        known = [base.__name__ for base in type(module).__mro__ if full_name(base) in KINDS]
        return f"a subclass of {known[0]} may compute something else" if known else "the package has nothing for it"
    function = kind.function(module)
    why = function if isinstance(function, str) else _refused((module, *kind.absorbed(module)))
    computes_anyway = isinstance(module, _Replaced) and "forward" not in vars(module)  # hooks added later do not matter
    return why or ("" if computes_anyway else unusual(module))


def _decided(
    name: str, module: Any, why_not: str, inputs: Any, races: dict[Any, tuple[float, float]], precision: Precision
) -> Replacement:
    """Decides whether a module is replaced; equal modules share one measurement."""
    label = type(module).__name__
    if why_not or isinstance(module, _Replaced):
        return Replacement(name, label, not why_not, why_not or "it was replaced before")
    if not inputs or not all(each.is_cuda and each.is_floating_point() for each in inputs):
        return Replacement(name, label, True, "not measured")
    parameters = [(each.shape, each.dtype, each.requires_grad) for each in module.parameters()]
    key = repr(module), *map(repr, parameters), *[(each.shape, each.dtype) for each in inputs]
    try:
        races[key] = theirs, ours = races.get(key) or _race(module, inputs, precision)
    except LtError as error:
        return Replacement(name, label, False, str(error))
    return Replacement(name, label, ours <= theirs, "faster" if ours <= theirs else "slower", theirs, ours)


def _inputs_of(model: Any, sites: Iterable[Any], example_inputs: Any) -> dict[Any, list[Tensor]]:
    """For each module, tensors like those of its first call in a run on the example inputs, without their values."""
    met: dict[Any, list[Tensor]] = {}
    devices = {each.device for each in model.parameters() if each.is_cuda}
    with contextlib.ExitStack() as restored, torch.random.fork_rng(devices=devices), torch.no_grad():
        for each in sites:
            kind = KINDS[name_of(each)]
            first = each if kind.method == "forward" else kind.parts_of(each)[0]

            def note(_: Any, arguments: Any, module: Any = each) -> None:
                # An expanded tensor of one element has the shape, but takes no memory.
                if all(isinstance(each, torch.Tensor) for each in arguments):
                    met.setdefault(module, [each.new_empty(()).expand(each.shape) for each in arguments])

            restored.enter_context(first.register_forward_pre_hook(note))
        for each in model.modules():
            restored.callback(setattr, each, "training", each.training)
        model.eval()
        if isinstance(example_inputs, Mapping):
            model(**example_inputs)
        else:
            model(*example_inputs if isinstance(example_inputs, (tuple, list)) else [example_inputs])
    return met


def _race(module: Any, inputs: list[Tensor], precision: Precision) -> tuple[float, float]:
    """Microseconds of forward and backward by PyTorch and by the package: medians over alternating rounds."""
    own = module.__class__
    times: dict[Any, list[float]] = {own: [], _class_of(own): []}
    generators = torch.random.fork_rng(devices=[inputs[0].device])
    with torch.cuda.device_of(inputs[0]), generators, contextlib.ExitStack() as restored:
        restored.callback(setattr, module, "__class__", own)
        for layer in layers_of(module):
            layer.scales = scales_of(precision)
            restored.callback(vars(layer).pop, "scales")
        for each in module.buffers():  # buffers, such as BatchNorm's averages, are restored after the measurement
            restored.callback(each.copy_, each.clone())
        arguments = [torch.randn_like(each, requires_grad=True) for each in inputs]
        leaves = [*arguments, *[each for each in module.parameters() if each.requires_grad]]
        for round_ in range(_ROUNDS + 1):
            for taken, found in times.items():
                module.__class__ = taken
                time = _microseconds(getattr(module, KINDS[full_name(own)].method), arguments, leaves)
                found += [time] if round_ else []
    theirs, ours = (statistics.median(found) for found in times.values())
    return theirs, ours


def _microseconds(function: Any, arguments: list[Tensor], leaves: list[Tensor]) -> float:
    """The mean time of several forward and backward passes on a GPU, in microseconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_REPEATS):
        y = function(*arguments)
        torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
    end.record()
    end.synchronize()
    return float(1000 * begin.elapsed_time(end) / _REPEATS)
