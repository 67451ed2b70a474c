"""`replace`: modules of a PyTorch model compute by the package's operations, with the parameters they have.

A replaced module's class becomes a subclass of its class, in which one method is another. So parameters, keys of
state_dict, `isinstance` and the places of modules stay as they are, and `restore` gives back the class.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeAlias, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from lt_runtime.arguments import check_instance
from lt_runtime.errors import ArgumentError
from lt_runtime.tables import rendered, table
from lt_runtime.torch.functional import gated, layer_norm, linear_layers, rms_norm
from lt_runtime.torch.operators import Tensor

Function: TypeAlias = "Callable[..., Any] | str"
"""The function that computes what a module does; or the reason why there is none."""

_TYPES: Final = {torch.float32, torch.float16, torch.bfloat16, torch.float64}
_ACTIVATIONS: Final[dict[Any, str]] = {
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Tanh": "tanh",
    "transformers.activations.GELUActivation": "gelu_erf",
    "transformers.activations.GELUTanh": "gelu",
    "transformers.activations.NewGELUActivation": "gelu",
    "transformers.activations.FastGELUActivation": "gelu",
    "transformers.activations.AccurateGELUActivation": "gelu",
    "transformers.activations.LinearActivation": "none",
    "transformers.activations.SiLUActivation": "silu",
    F.relu: "relu",
    torch.relu: "relu",
    F.silu: "silu",
    F.gelu: "gelu_erf",
}
_LINEAR: Final = "torch.nn.modules.linear.Linear"
_CONV1D: Final = "transformers.pytorch_utils.Conv1D"
_WITHOUT: Final = ("none",), (0.01,), (0.0,)
"""Options of a linear layer without activation and dropout."""
_ROUNDS: Final = 5
_REPEATS: Final = 10


class Replacement(NamedTuple):
    """What `replace` did with one module.

    Attributes:
        name: of the module in the model, "" for the model itself.
        kind: its class.
        replaced: whether it computes by the package's operations now.
        reason: why not, or how it was decided.
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
    """A `Replacement` for each module that was replaced, and for each other one with parameters.

    As text it is a table, in which modules at places that differ only by numbers share a line.
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


def _name_of(part: Any) -> Any:
    """The full name of a module's class, which imports nothing; a function is its own name."""
    return f"{type(part).__module__}.{type(part).__qualname__}" if isinstance(part, nn.Module) else part


def _unusual(module: Any) -> str:
    """Why calling a module may do more than its class says; "" if it does not."""
    if "forward" in vars(module):
        return "its forward was set from outside"
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return "it has hooks" if hooks else ""


def _refused(*parameters: Tensor) -> str:
    """Why parameters are not accepted; "" if they are."""
    first = parameters[0]
    for each in parameters:
        if each is None:
            continue
        if type(each) not in (nn.Parameter, torch.Tensor) or each.dtype not in _TYPES:
            return f"a parameter is a {type(each).__name__} of {each.dtype}"
        if each.dtype is not first.dtype or each.device != first.device:
            return f"parameters are {first.dtype} on {first.device} and {each.dtype} on {each.device}"
    return "PyTorch computes float64 on GPUs" if first.dtype is torch.float64 and first.is_cuda else ""


class _Run:
    """Linear layers in a row, with activations and dropout after them, which run as one operator."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.parameters: list[Tensor] = []
        self.options: tuple[list[str], list[float], list[float]] = [], [], []
        self.is_open = False

    def takes(self, part: Any) -> bool:
        """Appends a part if it may follow here."""
        if isinstance(part, nn.Module) and _unusual(part):
            return False
        name = _name_of(part)
        if name in (_LINEAR, _CONV1D):
            weight = part.weight if name == _LINEAR else part.weight.t()
            if _refused(*self.parameters, weight, part.bias):
                return False
            self.parameters += weight, part.bias
            for values, value in zip(self.options, ("none", 0.01, 0.0), strict=True):
                values.append(value)  # type: ignore[attr-defined]
            self.is_open = True
        elif not self.parts:
            return False
        elif name == "torch.nn.modules.dropout.Dropout" and part.p < 1 and not self.options[2][-1]:
            self.options[2][-1] = part.p if part.training else 0.0
            self.is_open = False
        else:
            activation = _activation_of(part, name)
            if activation is None or not self.is_open:
                return False
            self.options[0][-1], self.options[1][-1] = activation
            self.is_open = False
        self.parts.append(part)
        return True

    def __call__(self, x: Tensor, add: Tensor = None) -> Tensor:
        """y of the last layer, with `add` added."""
        activations, slopes, dropouts = self.options
        return linear_layers(x, self.parameters, (tuple(activations), tuple(slopes), tuple(dropouts)), add)


def _activation_of(part: Any, name: Any) -> tuple[str, float] | None:
    """Name and slope of an activation; None for an unknown one."""
    if name == "torch.nn.modules.activation.GELU":
        return "gelu" if part.approximate == "tanh" else "gelu_erf", 0.01
    if name == "torch.nn.modules.activation.LeakyReLU":
        return "leaky_relu", part.negative_slope
    return (_ACTIVATIONS[name], 0.01) if name in _ACTIVATIONS else None


def _steps(parts: Iterable[Any]) -> list[Any]:
    """The parts, with runs of linear layers put together."""
    steps: list[Any] = []
    for part in parts:
        if steps and type(steps[-1]) is _Run and steps[-1].takes(part):
            continue
        run = _Run()
        steps.append(run if run.takes(part) else part)
    return steps


def _chain(*parts: Any) -> Function:
    """Linear layers in a row, with all that stands between and after them."""
    steps = _steps(parts)
    if len(steps) == 1 and type(steps[0]) is _Run:
        run: _Run = steps[0]
        return run
    return _reason_of(parts)


def _reason_of(parts: Iterable[Any]) -> str:
    """Why parts do not make a run."""
    for part in parts:
        if isinstance(part, nn.Module):
            name = type(part).__name__
            if _unusual(part):
                return f"{name}: {_unusual(part)}"
            if hasattr(part, "weight") and _refused(part.weight, part.bias):
                return _refused(part.weight, part.bias)
    return f"its parts do not run as one: {', '.join(getattr(each, '__name__', type(each).__name__) for each in parts)}"


def _linear(module: Any) -> Function:
    weight = module.weight if _name_of(module) == _LINEAR else module.weight.t()
    return _refused(weight, module.bias) or functools.partial(
        linear_layers, parameters=(weight, module.bias), options=_WITHOUT
    )


def _sequence(module: Any) -> Function:
    steps = _steps(module)
    if not any(type(each) is _Run and len(each.parts) > 1 for each in steps):
        return "it has no linear layer with an activation, dropout or another one behind"
    return lambda x: functools.reduce(lambda y, step: step(y), steps, x)


def _gated_block(gate: Any, activation: Any, up: Any, down: Any, *dropout: Any) -> Function:
    """down(dropout(activation(gate(x)) ∘ up(x)))."""
    runs = [_chain(gate, activation), _chain(up, *dropout), _chain(down)]
    if any(isinstance(each, str) for each in runs) or _refused(gate.weight, up.weight, down.weight):
        return _reason_of((gate, activation, up, *dropout, down))
    of_gate, of_up, of_down = cast("list[_Run]", runs)
    weights, biases = zip(of_gate.parameters, of_up.parameters, of_down.parameters, strict=True)
    (name,), (slope,), _ = of_gate.options
    options: Any = {"activation": name, "negative_slope": slope, "dropout": of_up.options[2][0]}
    return lambda x: gated(x, *weights, *biases, **options)


def _norm(module: Any) -> Function:
    """LayerNorm or RMSNorm, PyTorch's or of transformers."""
    is_pytorch, has_mean = hasattr(module, "normalized_shape"), isinstance(module, nn.LayerNorm)
    weight, bias = module.weight, getattr(module, "bias", None)
    if weight is None or weight.dim() != 1:
        return "it has no weight, or several axes"
    if why := _refused(weight, bias):
        return why
    eps = module.eps if is_pytorch else module.variance_epsilon
    eps = torch.finfo(weight.dtype).eps if eps is None else eps

    def compute(x: Tensor, add: Tensor = None) -> Any:
        is_cast = x.dtype is not torch.float32 and torch.is_autocast_enabled(x.device.type)
        if is_cast or x.dtype is not weight.dtype:  # PyTorch's result may have another type than x
            return None
        return layer_norm(x, weight, bias, eps=eps, add=add) if has_mean else rms_norm(x, weight, eps=eps, add=add)

    return compute


class _Kind(NamedTuple):
    """What a class of modules computes.

    Attributes:
        read: takes the module, or its parts.
        parts: attributes of the module; empty if `read` takes the module itself.
        method: the method that computes it.
    """

    read: Callable[..., Function]
    parts: tuple[str, ...] = ()
    method: str = "forward"

    def function(self, module: Any) -> Function:
        """Computes what the method does, or None if this call needs the method of the class."""
        return self.read(*[getattr(module, name) for name in self.parts] or [module])

    def absorbed(self, module: Any) -> list[Any]:
        """The parts that the function computes too, and that need no replacement."""
        if self.read is _sequence:
            return [part for each in _steps(module) if type(each) is _Run for part in each.parts]
        return [getattr(module, name) for name in self.parts]


_ENCODER: Final = _Kind(_chain, ("linear1", "activation", "dropout", "linear2", "dropout2"), "_ff_block")
_DECODER: Final = _Kind(_chain, ("linear1", "activation", "dropout", "linear2", "dropout3"), "_ff_block")
_KINDS: Final[dict[Any, _Kind]] = {
    _LINEAR: _Kind(_linear),
    _CONV1D: _Kind(_linear),
    "torch.nn.modules.container.Sequential": _Kind(_sequence),
    "torch.nn.modules.normalization.LayerNorm": _Kind(_norm),
    "torch.nn.modules.normalization.RMSNorm": _Kind(_norm),
    "torch.nn.modules.transformer.TransformerEncoderLayer": _ENCODER,
    "torch.nn.modules.transformer.TransformerDecoderLayer": _DECODER,
    "transformers.models.bert.modeling_bert.BertIntermediate": _Kind(_chain, ("dense", "intermediate_act_fn")),
    "transformers.models.gpt2.modeling_gpt2.GPT2MLP": _Kind(_chain, ("c_fc", "act", "c_proj", "dropout")),
    "transformers.models.llama.modeling_llama.LlamaMLP": _Kind(
        _gated_block, ("gate_proj", "act_fn", "up_proj", "down_proj")
    ),
    "transformers.models.llama.modeling_llama.LlamaRMSNorm": _Kind(_norm),
    "transformers.models.t5.modeling_t5.T5DenseActDense": _Kind(_chain, ("wi", "act", "dropout", "wo")),
    "transformers.models.t5.modeling_t5.T5DenseGatedActDense": _Kind(
        _gated_block, ("wi_0", "act", "wi_1", "wo", "dropout")
    ),
    "transformers.models.t5.modeling_t5.T5LayerNorm": _Kind(_norm),
    "transformers.models.vit.modeling_vit.ViTMLP": _Kind(_chain, ("fc1", "activation_fn", "fc2")),
}


class _Replaced:
    """Base of the classes of replaced modules; `replaces` is the module's own class."""

    replaces: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and files hold the module's own class, because nobody can import this one."""
        made: Any = super().__reduce_ex__(protocol)
        return _empty, (self.replaces,), *made[2:]


def _empty(base: type) -> Any:
    """A replaced module without attributes."""
    made: Any = _class_of(base)
    return made.__new__(made)


@functools.cache
def _class_of(base: Any) -> Any:
    """The class of replaced modules of a class."""
    kind = _KINDS[f"{base.__module__}.{base.__qualname__}"]
    original = getattr(base, kind.method)

    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        function = kind.function(self)
        result = None if isinstance(function, str) else function(*arguments, *keywords.values())
        return original(self, *arguments, **keywords) if result is None else result

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (_Replaced, base), {**names, "replaces": base, kind.method: method})


class _Site(NamedTuple):
    """A module that can be replaced."""

    name: str
    module: Any
    kind: _Kind


def replace(model: Any, example_inputs: Any = None) -> Report:
    """Lets modules of a model compute by the package's operations, in place, with the parameters they have.

    Linear layers are replaced with the activation and the dropout that follow them, feed-forward blocks as a whole, and
    norms; docs/pytorch.md has the list. Modules with hooks, parametrizations or unusual parameters, and subclasses, are
    left alone. Keys of state_dict stay as they are.

    Args:
        model: a `torch.nn.Module`.
        example_inputs: what the model is called with: a tensor, a tuple of positional arguments, or a dict of keyword
            arguments. With them the modules on a GPU are measured, forward and backward, and none is replaced that is
            slower so. Without them, all modules are replaced that can be.

    Returns:
        What was replaced, what was not, and why. `print` shows it as a table.

    Raises:
        ArgumentError: model is not a module.
    """
    check_instance("model", model, nn.Module, "a torch.nn.Module")
    sites, entries = _sites_of(model)
    inputs = {} if example_inputs is None else _inputs_of(model, sites, example_inputs)
    races: dict[Any, tuple[float, float]] = {}
    for site in sites:
        entries[site.name] = _decided(site, inputs.get(site.module), races)
        if entries[site.name].replaced:
            own: Any = type(site.module)
            site.module.__class__ = _class_of(own)
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


def _sites_of(model: Any) -> tuple[list[_Site], dict[str, Replacement]]:
    """The modules that can be replaced, and an entry for them and for each other module with parameters."""
    sites, entries, absorbed = [], {}, set[int]()
    for name, module in model.named_modules():
        if id(module) in absorbed:
            continue
        label, kind = type(module).__name__, _KINDS.get(_name_of(module))
        why = _why_not(module, kind)
        if not why and kind is not None:
            absorbed |= {id(part) for part in kind.absorbed(module)}
        if not why and isinstance(module, _Replaced):
            entries[name] = Replacement(name, label, True, "it was replaced before")
        elif not why and kind is not None:
            sites.append(_Site(name, module, kind))
            entries[name] = Replacement(name, label, True, "")
        elif (kind is not None and kind.read is not _sequence) or next(
            module.parameters(recurse=False), None
        ) is not None:
            entries[name] = Replacement(name, label, False, why)
    return sites, entries


def _why_not(module: Any, kind: _Kind | None) -> str:
    """Why a module cannot be replaced; "" if it can be."""
    if kind is None:
        known = [
            base.__name__ for base in type(module).__mro__[1:] if _KINDS.get(f"{base.__module__}.{base.__qualname__}")
        ]
        return f"a subclass of {known[0]} may compute something else" if known else "the package has nothing for it"
    function = kind.function(module)
    return _unusual(module) or (function if isinstance(function, str) else "")


def _decided(site: _Site, inputs: Any, races: dict[Any, tuple[float, float]]) -> Replacement:
    """What is done with a module; equal modules share a race."""
    label = type(site.module).__name__
    if not inputs or not all(each.is_cuda and each.is_floating_point() for each in inputs):
        return Replacement(site.name, label, True, "not measured")
    parameters = [(each.shape, each.dtype, each.requires_grad) for each in site.module.parameters()]
    key = repr(site.module), *map(repr, parameters), *[(each.shape, each.dtype) for each in inputs]
    if key not in races:
        races[key] = _race(site, inputs)
    theirs, ours = races[key]
    return Replacement(site.name, label, ours <= theirs, "faster" if ours <= theirs else "slower", theirs, ours)


def _inputs_of(model: Any, sites: list[_Site], example_inputs: Any) -> dict[Any, list[Tensor]]:
    """The tensors, without values, that each module is called with first when the model runs on the example inputs."""
    met: dict[Any, list[Tensor]] = {}
    handles = []
    for site in sites:
        first = site.module if site.kind.method == "forward" else getattr(site.module, site.kind.parts[0])

        def note(_: Any, arguments: Any, module: Any = site.module) -> None:
            if all(isinstance(each, torch.Tensor) for each in arguments):
                met.setdefault(module, [each.new_empty(()).expand(each.shape) for each in arguments])  # takes no memory

        handles.append(first.register_forward_pre_hook(note))
    training = [each for each in model.modules() if each.training]
    devices = {each.device for each in model.parameters() if each.is_cuda}
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            if isinstance(example_inputs, dict):
                model(**example_inputs)
            else:
                model(*example_inputs if isinstance(example_inputs, (tuple, list)) else [example_inputs])
    finally:
        for each in training:
            each.training = True
        for handle in handles:
            handle.remove()
    return met


def _race(site: _Site, inputs: list[Tensor]) -> tuple[float, float]:
    """Microseconds of forward and backward by PyTorch and by the package: medians of rounds in turns."""
    module, own = site.module, cast("Any", type(site.module))
    arguments = [torch.randn_like(each, requires_grad=True) for each in inputs]
    leaves = [*arguments, *[each for each in module.parameters() if each.requires_grad]]
    times: dict[Any, list[float]] = {own: [], _class_of(own): []}
    try:
        with torch.random.fork_rng(devices=[arguments[0].device]):
            for round_ in range(_ROUNDS + 1):
                for taken, found in times.items():
                    module.__class__ = taken
                    time = _microseconds(getattr(module, site.kind.method), arguments, leaves)
                    found += [time] if round_ else []
    finally:
        module.__class__ = own
    theirs, ours = (statistics.median(found) for found in times.values())
    return theirs, ours


def _microseconds(function: Any, arguments: list[Tensor], leaves: list[Tensor]) -> float:
    """Of a forward and backward pass on a GPU, the mean of some."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_REPEATS):
        y = function(*arguments)
        torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
    end.record()
    end.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return 1000 * elapsed / _REPEATS
