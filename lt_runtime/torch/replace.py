"""`replace`: modules of a PyTorch model compute by the package's operations, with the parameters they have.

A replaced module's class becomes a subclass of its class, in which one method is another. So parameters, keys of
state_dict, `isinstance` and the places of modules stay as they are, and `restore` gives back the class.
"""

from __future__ import annotations

import contextlib
import functools
import re
import statistics
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from lt_runtime.arguments import check_instance
from lt_runtime.errors import ArgumentError, LtError
from lt_runtime.tables import rendered, table
from lt_runtime.torch.functional import PLAIN, gated, layer_norm, linear_layers, rms_norm
from lt_runtime.torch.losses import cross_entropy
from lt_runtime.torch.tensors import DTYPES, Tensor

Function: TypeAlias = "Callable[..., Any] | str"
"""The function that computes what a module does; or the reason why there is none."""

_ACTIVATIONS: Final[dict[Any, str]] = {
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Tanh": "tanh",
    "transformers.activations.GELUActivation": "gelu_erf",
    "transformers.activations.GELUTanh": "gelu",
    "transformers.activations.NewGELUActivation": "gelu",
    "transformers.activations.FastGELUActivation": "gelu",
    "transformers.activations.AccurateGELUActivation": "gelu",
    "transformers.activations.SiLUActivation": "silu",
    F.relu: "relu",
    torch.relu: "relu",
    F.silu: "silu",
    F.gelu: "gelu_erf",
}
_LAYERS: Final = "torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D"
_LOSSES: Final = "ForCausalLMLoss", "causal_loss"
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


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _name_of(part: Any) -> Any:
    """The full name of a module's class, which imports nothing; a function is its own name."""
    return _full_name(type(part)) if isinstance(part, nn.Module) else part


def _unusual(module: Any) -> str:
    """Why calling a module may do more than its class says; "" if it does not."""
    if "forward" in vars(module):
        return "its forward was set from outside"
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return "it has hooks" if hooks else ""


def _refused(parts: Iterable[Any]) -> str:
    """Why the parameters of modules are not accepted; "" if they are."""
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


class _Run:
    """Linear layers in a row, with activations and dropout after them, which run as one operator."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.parameters: list[Tensor] = []
        self.options: list[list[Any]] = []  # activation, slope and probability of dropout of each layer

    def takes(self, part: Any) -> bool:
        """Appends a part if it may follow here."""
        if isinstance(part, nn.Module) and _unusual(part):
            return False
        name = _name_of(part)
        if name in _LAYERS:
            self.parameters += _parameters_of(part)
            self.options.append(["none", 0.01, 0.0])
        elif name == "torch.nn.modules.dropout.Dropout" and self.parts and part.p < 1 and not self.options[-1][2]:
            self.options[-1][2] = part.p if part.training else 0.0
        elif self.parts and _name_of(self.parts[-1]) in _LAYERS and (activation := _activation_of(part, name)):
            self.options[-1][:2] = activation
        else:
            return False
        self.parts.append(part)
        return True

    def __call__(self, x: Tensor, add: Tensor = None) -> Tensor:
        """y of the last layer, with `add` added."""
        return linear_layers(x, self.parameters, tuple(zip(*self.options, strict=True)), add)


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
    for part in parts:
        if isinstance(part, nn.Module) and (why := _unusual(part)):
            return f"{type(part).__name__}: {why}"
    return f"its parts do not run as one: {', '.join(getattr(each, '__name__', type(each).__name__) for each in parts)}"


def _parameters_of(layer: Any) -> tuple[Tensor, Tensor]:
    """The weight (outputs, inputs), as a view, and the bias or None."""
    return layer.weight if isinstance(layer, nn.Linear) else layer.weight.t(), layer.bias


def _linear(module: Any) -> Function:
    return functools.partial(linear_layers, parameters=_parameters_of(module), options=PLAIN)


def _sequence(module: Any) -> Function:
    steps = _steps(module)
    if not any(type(each) is _Run and len(each.parts) > 1 for each in steps):
        return "it has no linear layer with an activation, dropout or another one behind"
    return lambda x: functools.reduce(lambda y, step: step(y), steps, x)


def _gated_block(gate: Any, activation: Any, up: Any, down: Any, *dropout: Any) -> Function:
    """down(dropout(activation(gate(x)) ∘ up(x)))."""
    run: Any = _chain(gate, activation, up, *dropout, down)  # reads them: their order in a row is as good as any
    if isinstance(run, str):
        return run
    (name, slope, _), (_, _, p), _ = run.options
    operands = *run.parameters[::2], *run.parameters[1::2]
    return lambda x: gated(x, *operands, activation=name, negative_slope=slope, dropout=p)


def _norm(module: Any) -> Function:
    """LayerNorm or RMSNorm, PyTorch's or of transformers."""
    weight, bias, has_mean = module.weight, getattr(module, "bias", None), isinstance(module, nn.LayerNorm)
    if weight is None or weight.dim() != 1:
        return "it has no weight, or several axes"
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon

    def compute(x: Tensor) -> Any:
        is_cast = x.dtype is not torch.float32 and torch.is_autocast_enabled(x.device.type)
        if is_cast or x.dtype is not weight.dtype:  # PyTorch's result may have another type than x
            return None
        return layer_norm(x, weight, bias, eps=eps) if has_mean else rms_norm(x, weight, eps=eps)

    return compute


def _residual(*parts: Any) -> Function:
    """Linear layers in a row, to whose output a residual is added, and a norm of the sum."""
    *layers, norm = parts
    run, kind = _chain(*layers), _KINDS.get(_name_of(norm))
    normalise = _unusual(norm) or (_norm(norm) if kind and kind.read is _norm else "it is no norm")
    if isinstance(run, str) or isinstance(normalise, str):
        return run if isinstance(run, str) else f"{type(norm).__name__}: {normalise}"

    def compute(x: Tensor, add: Tensor = None) -> Any:
        add = x if add is None else add
        is_exact = x.dtype is add.dtype and not torch.is_autocast_enabled(x.device.type)  # else the sum has add's type
        total = run(x, add) if is_exact else run(x) + add
        y = normalise(total)
        return norm(total) if y is None else y

    return compute


class _Kind(NamedTuple):
    """What a class of modules computes.

    Attributes:
        read: takes the module, or its parts.
        parts: names of attributes of the module, or of modules in it; "" if `read` takes the module itself.
        method: the method that computes it.
    """

    read: Callable[..., Function]
    parts: str = ""
    method: str = "forward"

    def function(self, module: Any) -> Function:
        """Computes what the method does, or None if this call needs the method of the class."""
        if not self.parts:
            return self.read(module)
        for each in self._holders(module):
            if _name_of(each) not in _KINDS or _unusual(each):
                return f"{type(each).__name__}: {_unusual(each) or 'it is no part that belongs here'}"
        return self.read(*self._parts(module))

    def absorbed(self, module: Any) -> list[Any]:
        """Modules whose work the function does too, and that need no replacement."""
        if self.read is _sequence:
            return [part for each in _steps(module) if type(each) is _Run for part in each.parts]
        return [*self._holders(module), *self._parts(module)]

    def _holders(self, module: Any) -> list[Any]:
        return [getattr(module, name.partition(".")[0]) for name in self.parts.split() if "." in name]

    def _parts(self, module: Any) -> list[Any]:
        return [attrgetter(name)(module) for name in self.parts.split()]


_MODELS: Final = "transformers.models"
_LLAMAS: Final = "Llama", "Mistral", "Qwen2", "Qwen3"
_GATED: Final = _Kind(_gated_block, "gate_proj act_fn up_proj down_proj")
_TORCH_BLOCK: Final = "linear1 activation dropout linear2"
_BERT: Final = "intermediate.dense intermediate.intermediate_act_fn output.dense output.dropout output.LayerNorm"
_KINDS: Final[dict[Any, _Kind]] = {
    **dict.fromkeys(_LAYERS, _Kind(_linear)),
    "torch.nn.modules.container.Sequential": _Kind(_sequence),
    "torch.nn.modules.normalization.LayerNorm": _Kind(_norm),
    "torch.nn.modules.normalization.RMSNorm": _Kind(_norm),
    "torch.nn.modules.transformer.TransformerEncoderLayer": _Kind(_chain, f"{_TORCH_BLOCK} dropout2", "_ff_block"),
    "torch.nn.modules.transformer.TransformerDecoderLayer": _Kind(_chain, f"{_TORCH_BLOCK} dropout3", "_ff_block"),
    f"{_MODELS}.bert.modeling_bert.BertIntermediate": _Kind(_chain, "dense intermediate_act_fn"),
    f"{_MODELS}.bert.modeling_bert.BertLayer": _Kind(_residual, _BERT, "feed_forward_chunk"),
    f"{_MODELS}.bert.modeling_bert.BertOutput": _Kind(_residual, "dense dropout LayerNorm"),
    f"{_MODELS}.bert.modeling_bert.BertSelfOutput": _Kind(_residual, "dense dropout LayerNorm"),
    f"{_MODELS}.gpt2.modeling_gpt2.GPT2MLP": _Kind(_chain, "c_fc act c_proj dropout"),
    **{f"{_MODELS}.{name.lower()}.modeling_{name.lower()}.{name}MLP": _GATED for name in _LLAMAS},
    **{f"{_MODELS}.{name.lower()}.modeling_{name.lower()}.{name}RMSNorm": _Kind(_norm) for name in _LLAMAS},
    f"{_MODELS}.t5.modeling_t5.T5DenseActDense": _Kind(_chain, "wi act dropout wo"),
    f"{_MODELS}.t5.modeling_t5.T5DenseGatedActDense": _Kind(_gated_block, "wi_0 act wi_1 wo dropout"),
    f"{_MODELS}.t5.modeling_t5.T5LayerNorm": _Kind(_norm),
    f"{_MODELS}.vit.modeling_vit.ViTMLP": _Kind(_chain, "fc1 activation_fn fc2"),
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
    kind = _KINDS[_full_name(base)]
    original, read = getattr(base, kind.method), kind.function if kind.parts else kind.read

    @functools.wraps(original)
    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        function = read(self)
        result = None if isinstance(function, str) else function(*arguments, *keywords.values())
        return original(self, *arguments, **keywords) if result is None else result

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (_Replaced, base), {**names, "replaces": base, kind.method: method})


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
    races: dict[Any, tuple[float, float]] = {}
    declined: dict[Any, Replacement] = {}
    while True:
        sites, entries = _sites_of(model, declined)
        inputs = {} if example_inputs is None else _inputs_of(model, sites, example_inputs)
        decided = {module: _decided(name, module, inputs.get(module), races) for module, name in sites.items()}
        slower = {module: each for module, each in decided.items() if not each.replaced}
        if not slower:
            break
        declined |= slower  # the parts of a block that is slower as a whole may be faster one by one
    for module, each in decided.items():
        own: Any = type(module)
        entries[each.name], module.__class__ = each, _class_of(own)
    for name, module in model.named_modules():
        if type(module).__name__.endswith(("ForCausalLM", "LMHeadModel")) and _loss_name(module) in _LOSSES:
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
        if vars(module).get("_loss_function") is causal_loss:
            del module._loss_function


def _loss_name(module: Any) -> str:
    return getattr(getattr(module, "loss_function", None), "__name__", "")


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


def _sites_of(model: Any, declined: dict[Any, Replacement]) -> tuple[dict[Any, str], dict[str, Replacement]]:
    """The names of modules that can be replaced, and entries for them and for all other modules with parameters."""
    sites, entries, absorbed = {}, {}, set[int]()
    for name, module in model.named_modules():
        kind = _KINDS.get(_name_of(module))
        if id(module) in absorbed:
            continue
        if module in declined:
            entries[name] = declined[module]
            continue
        why = _why_not(module, kind)
        if kind is not None and not why:
            absorbed |= {id(part) for part in kind.absorbed(module)}
            entries[name] = Replacement(name, type(module).__name__, True, "it was replaced before")
            if not isinstance(module, _Replaced):
                sites[module] = name
        elif (kind and kind.read is not _sequence) or [*module.parameters(recurse=False)]:
            entries[name] = Replacement(name, type(module).__name__, False, why)
    return sites, entries


def _why_not(module: Any, kind: _Kind | None) -> str:
    """Why a module cannot be replaced; "" if it can be."""
    if kind is None:
        known = [base.__name__ for base in type(module).__mro__ if _full_name(base) in _KINDS]
        return f"a subclass of {known[0]} may compute something else" if known else "the package has nothing for it"
    function = kind.function(module)
    why = function if isinstance(function, str) else _refused((module, *kind.absorbed(module)))
    return _unusual(module) or why


def _decided(name: str, module: Any, inputs: Any, races: dict[Any, tuple[float, float]]) -> Replacement:
    """What is done with a module; equal modules share a race."""
    label = type(module).__name__
    if not inputs or not all(each.is_cuda and each.is_floating_point() for each in inputs):
        return Replacement(name, label, True, "not measured")
    parameters = [(each.shape, each.dtype, each.requires_grad) for each in module.parameters()]
    key = repr(module), *map(repr, parameters), *[(each.shape, each.dtype) for each in inputs]
    try:
        races[key] = theirs, ours = races.get(key) or _race(module, inputs)
    except LtError as error:
        return Replacement(name, label, False, str(error))
    return Replacement(name, label, ours <= theirs, "faster" if ours <= theirs else "slower", theirs, ours)


def _inputs_of(model: Any, sites: Iterable[Any], example_inputs: Any) -> dict[Any, list[Tensor]]:
    """The tensors, without values, that each module is called with first when the model runs on the example inputs."""
    met: dict[Any, list[Tensor]] = {}
    devices = {each.device for each in model.parameters() if each.is_cuda}
    with contextlib.ExitStack() as restored:
        for each in sites:
            kind = _KINDS[_name_of(each)]
            first = each if kind.method == "forward" else attrgetter(kind.parts.split()[0])(each)

            def note(_: Any, arguments: Any, module: Any = each) -> None:
                if all(isinstance(each, torch.Tensor) for each in arguments):  # kept without values: takes no memory
                    met.setdefault(module, [each.new_empty(()).expand(each.shape) for each in arguments])

            restored.enter_context(first.register_forward_pre_hook(note))
        for each in model.modules():
            restored.callback(setattr, each, "training", each.training)
        restored.enter_context(torch.random.fork_rng(devices=devices))
        restored.enter_context(torch.no_grad())
        model.eval()
        if isinstance(example_inputs, dict):
            model(**example_inputs)
        else:
            model(*example_inputs if isinstance(example_inputs, (tuple, list)) else [example_inputs])
    return met


def _race(module: Any, inputs: list[Tensor]) -> tuple[float, float]:
    """Microseconds of forward and backward by PyTorch and by the package: medians of rounds in turns."""
    own: Any = type(module)
    times: dict[Any, list[float]] = {own: [], _class_of(own): []}
    with contextlib.ExitStack() as restored:
        restored.callback(setattr, module, "__class__", own)
        for each in module.buffers():  # such as BatchNorm's averages
            restored.callback(each.copy_, each.clone())
        restored.enter_context(torch.random.fork_rng(devices=[inputs[0].device]))
        # Backward in this thread: `lt.tuning` acts in the calling thread.
        restored.enter_context(torch.autograd.set_multithreading_enabled(False))
        arguments = [torch.randn_like(each, requires_grad=True) for each in inputs]
        leaves = [*arguments, *[each for each in module.parameters() if each.requires_grad]]
        for round_ in range(_ROUNDS + 1):
            for taken, found in times.items():
                module.__class__ = taken
                time = _microseconds(getattr(module, _KINDS[_full_name(own)].method), arguments, leaves)
                found += [time] if round_ else []
    theirs, ours = (statistics.median(found) for found in times.values())
    return theirs, ours


def _microseconds(function: Any, arguments: list[Tensor], leaves: list[Tensor]) -> float:
    """The microseconds of a forward and backward pass on a GPU, as the mean of several."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_REPEATS):
        y = function(*arguments)
        torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
    end.record()
    end.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return 1000 * elapsed / _REPEATS
