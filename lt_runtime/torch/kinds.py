"""For each known module class of PyTorch and transformers, a function that computes it by this package's operations.

Classes are identified by their full names, so that transformers need not be imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from lt_runtime.torch.fp8 import chain
from lt_runtime.torch.functional import GATED, LINEAR, PLAIN, layer_norm, rms_norm
from lt_runtime.torch.operators import Operator
from lt_runtime.torch.tensors import Tensor, is_autocast

Function: TypeAlias = "Callable[..., Any] | str"
"""The function that computes what a module does; or, as a string, the reason why there is none."""

_ACTIVATIONS: Final[dict[Any, str]] = {
    **{f"torch.nn.modules.activation.{name}": name.lower() for name in ("ReLU", "SiLU", "Sigmoid", "Tanh")},
    **{f"transformers.activations.{name}Activation": "gelu" for name in ("NewGELU", "FastGELU", "AccurateGELU")},
    "transformers.activations.GELUTanh": "gelu",
    "transformers.activations.GELUActivation": "gelu_erf",
    "transformers.activations.SiLUActivation": "silu",
    F.relu: "relu",
    torch.relu: "relu",
    F.silu: "silu",
    F.gelu: "gelu_erf",
}
LAYERS: Final = "torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D"


def full_name(kind: type) -> str:
    """Module and name of a class, by which `KINDS` finds it."""
    return f"{kind.__module__}.{kind.__qualname__}"


def name_of(part: Any) -> Any:
    """The full name of a module's class; any other activation, such as a function, is returned as it is."""
    return full_name(type(part)) if isinstance(part, nn.Module) else part


def unusual(module: Any) -> str:
    """Says why calling a module may do more than its class defines, such as run hooks; "" if it does not."""
    if "forward" in vars(module):
        return "its forward was set from outside"
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return "it has hooks" if hooks else ""


class _Run:
    """Linear layers, with the activation and dropout that follow each, which run as one operator."""

    operator: Operator = LINEAR

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.layers: list[Any] = []
        self.parameters: list[Tensor] = []
        self.options: list[list[Any]] = []  # activation, slope and probability of dropout of each layer

    def takes(self, part: Any) -> bool:
        """Appends a layer, activation or dropout if it can come next in this run; returns whether it was appended."""
        if isinstance(part, nn.Module) and unusual(part):
            return False
        name = name_of(part)
        if name in LAYERS:
            self.layers.append(part)
            self.parameters += _parameters_of(part)
            self.options.append(["none", 0.01, 0.0])
        elif name == "torch.nn.modules.dropout.Dropout" and self.parts and part.p < 1 and not self.options[-1][2]:
            self.options[-1][2] = part.p if part.training else 0.0
        elif self.parts and name_of(self.parts[-1]) in LAYERS and (activation := _activation_of(part, name)):
            self.options[-1][:2] = activation
        else:
            return False
        self.parts.append(part)
        return True

    def __call__(self, x: Tensor, add: Tensor = None) -> Tensor:
        """The sum of the last layer's output and `add`."""
        return chain(self.operator, self.layers, x, self.parameters, tuple(zip(*self.options, strict=True)), add)


def _activation_of(part: Any, name: Any) -> tuple[str, float] | None:
    """The package's name of an activation, and its slope; None if the package does not have the activation."""
    if name == "torch.nn.modules.activation.GELU":
        return "gelu" if part.approximate == "tanh" else "gelu_erf", 0.01
    if name == "torch.nn.modules.activation.LeakyReLU":
        return "leaky_relu", part.negative_slope
    return (_ACTIVATIONS[name], 0.01) if name in _ACTIVATIONS else None


def _steps(parts: Iterable[Any]) -> list[Any]:
    """Returns the modules in order, with consecutive linear layers, activations and dropout merged into one `_Run`."""
    steps: list[Any] = []
    for part in parts:
        if steps and type(steps[-1]) is _Run and steps[-1].takes(part):
            continue
        run = _Run()
        steps.append(run if run.takes(part) else part)
    return steps


def _chain(*parts: Any) -> Function:
    """The `_Run` that computes all given modules; a string with the reason if they do not form one run."""
    run = _Run()
    if all(map(run.takes, parts)):
        return run
    for part in parts:
        if isinstance(part, nn.Module) and (why := unusual(part)):
            return f"{type(part).__name__}: {why}"
    return f"its parts do not run as one: {', '.join(getattr(each, '__name__', type(each).__name__) for each in parts)}"


def _parameters_of(layer: Any) -> tuple[Tensor, Tensor]:
    """A layer's weight as a view (outputs, inputs), and its bias or None."""
    return layer.weight if isinstance(layer, nn.Linear) else layer.weight.t(), layer.bias


def _linear(module: Any) -> Function:
    return functools.partial(chain, LINEAR, [module], parameters=_parameters_of(module), options=PLAIN)


def sequence(module: Any) -> Function:
    """The function of an `nn.Sequential`; linear layers and the activations and dropout after them are one operator."""
    steps = _steps(module)
    if not any(type(each) is _Run and len(each.parts) > 1 for each in steps):
        return "it has no linear layer with an activation, dropout or another one behind"
    return lambda x: functools.reduce(lambda y, step: step(y), steps, x)


def _gated_block(gate: Any, activation: Any, up: Any, down: Any, *dropout: Any) -> Function:
    """The function of a gated block: down(dropout(activation(gate(x)) ∘ up(x)))."""
    run = _chain(gate, activation, up, *dropout, down)
    if isinstance(run, _Run):
        run.operator = GATED
    return run


def _norm(module: Any) -> Function:
    """The function of a LayerNorm or RMSNorm of PyTorch or of transformers."""
    weight, bias, has_mean = module.weight, getattr(module, "bias", None), isinstance(module, nn.LayerNorm)
    if weight is None or weight.dim() != 1:
        return "it has no weight, or several axes"
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon

    def compute(x: Tensor, add: Tensor = None) -> Any:
        is_cast = x.dtype is not torch.float32 and is_autocast(x)
        if is_cast or x.dtype is not weight.dtype:  # PyTorch's result may have another type than x
            return None
        return layer_norm(x, weight, bias, eps=eps, add=add) if has_mean else rms_norm(x, weight, eps=eps, add=add)

    return compute


def _norm_among_parts(module: Any) -> Function:
    """The function of a norm that belongs to a larger module; its optional second argument `add` is added to x."""
    kind = KINDS.get(name_of(module))
    function = unusual(module) or (_norm(module) if kind and kind.read is _norm else "it is no norm")
    return f"{type(module).__name__}: {function}" if isinstance(function, str) else function


def _residual(*parts: Any) -> Function:
    """The function norm(layers(x) + residual) of linear layers; the residual is x unless the call gives one."""
    *layers, norm = parts
    run, normalise = _chain(*layers), _norm_among_parts(norm)
    if isinstance(run, str) or isinstance(normalise, str):
        return run if isinstance(run, str) else normalise

    def compute(x: Tensor, add: Tensor = None) -> Any:
        add = x if add is None else add
        # The addition is fused only for equal types: PyTorch's sum of two types has the promoted type.
        is_exact = x.dtype is add.dtype and not is_autocast(x)
        total = run(x, add) if is_exact else run(x) + add
        y = normalise(total)
        return norm(total) if y is None else y

    return compute


def _pre_norm(
    feed_forward: Callable[..., Function],
    first: Any,
    attention: Any,
    second: Any,
    *parts: Any,
    drops: bool = False,
    by_name: bool = False,
) -> Function:
    """The function of a transformer's layer: h = x + attention(first(x)), y = h + feed_forward(second(h)).

    The first sum is computed with the second norm, the other one with the last product.

    Args:
        feed_forward: makes the function of `parts`.
        first, attention: modules, which are called. second: the norm after attention.
        parts: layers, activation and dropout of the feed-forward block.
        drops: whether the last part, a dropout, is applied to attention's result too.
        by_name: whether attention gets its input by the keyword `hidden_states`, as in the original class. Attention's
            hooks see whether an argument has a keyword.
    """
    run, normalise = feed_forward(*parts), _norm_among_parts(second)
    if isinstance(run, str) or isinstance(normalise, str):
        return run if isinstance(run, str) else normalise

    def compute(x: Tensor, encoder_hidden_states: Any = None, encoder_attention_mask: Any = None, **more: Any) -> Any:
        # The sums are fused only if x has the norm's type, without autocast and cross-attention.
        if encoder_hidden_states is not None or x.dtype is not second.weight.dtype or is_autocast(x):
            return None
        attended, _ = attention(hidden_states=first(x), **more) if by_name else attention(first(x), **more)
        y, total = normalise(parts[-1](attended) if drops else attended, x)
        return run(y, total)

    return compute


class Kind(NamedTuple):
    """How the package computes modules of one class.

    Attributes:
        read: returns the function for a module, given the module or its parts; or, as a string, the reason why there is
            none.
        parts: names of attributes, also dotted, that hold the parts; "" if `read` takes the module itself.
        method: the method of the class that the function replaces.
        is_layer: whether the module is a transformer's layer. Its function takes all arguments but the first by name.
            Its parts are replaced too, for calls that the function leaves to the method.
    """

    read: Callable[..., Function]
    parts: str = ""
    method: str = "forward"
    is_layer: bool = False

    def function(self, module: Any) -> Function:
        """The function that replaces a module's method; or, as a string, the reason why there is none.

        Where a call of the function returns None, the method must run.
        """
        if not self.parts:
            return self.read(module)
        try:
            for each in self._holders(module):
                if why := unusual(each) if name_of(each) in KINDS else "it is no part that belongs here":
                    return f"{type(each).__name__}: {why}"
            parts = self.parts_of(module)
        except AttributeError as error:  # a part was deleted, or a module was exchanged for one with other parts
            return f"a part is missing: {error}"
        return self.read(*parts)

    def absorbed(self, module: Any) -> list[Any]:
        """The submodules whose work the module's function includes, so that they are not replaced themselves."""
        if self.read is sequence:
            return [part for each in _steps(module) if type(each) is _Run for part in each.parts]
        return [*self._holders(module), *self.parts_of(module)]

    def _holders(self, module: Any) -> list[Any]:
        names = {name.partition(".")[0]: None for name in self.parts.split() if "." in name}
        return [getattr(module, name) for name in names]

    def parts_of(self, module: Any) -> list[Any]:
        """The parts of a module."""
        return [attrgetter(name)(module) for name in self.parts.split()]


_MODELS: Final = "transformers.models"
_LLAMAS: Final = "Llama", "Mistral", "Qwen2", "Qwen3"
_GATED: Final = Kind(_gated_block, "gate_proj act_fn up_proj down_proj")
_GATED_LAYER: Final = Kind(
    functools.partial(_pre_norm, _gated_block, by_name=True),
    "input_layernorm self_attn post_attention_layernorm mlp.gate_proj mlp.act_fn mlp.up_proj mlp.down_proj",
    is_layer=True,
)
_GPT2_LAYER: Final = Kind(
    functools.partial(_pre_norm, _chain), "ln_1 attn ln_2 mlp.c_fc mlp.act mlp.c_proj mlp.dropout", is_layer=True
)
_VIT_LAYER: Final = Kind(
    functools.partial(_pre_norm, _chain, drops=True),
    "layernorm_before attention layernorm_after mlp.fc1 mlp.activation_fn mlp.fc2 dropout",
    is_layer=True,
)
_TORCH_BLOCK: Final = "linear1 activation dropout linear2"
_BERT: Final = "intermediate.dense intermediate.intermediate_act_fn output.dense output.dropout output.LayerNorm"
KINDS: Final[dict[Any, Kind]] = {
    **dict.fromkeys(LAYERS, Kind(_linear)),
    "torch.nn.modules.container.Sequential": Kind(sequence),
    "torch.nn.modules.normalization.LayerNorm": Kind(_norm),
    "torch.nn.modules.normalization.RMSNorm": Kind(_norm),
    "torch.nn.modules.transformer.TransformerEncoderLayer": Kind(_chain, f"{_TORCH_BLOCK} dropout2", "_ff_block"),
    "torch.nn.modules.transformer.TransformerDecoderLayer": Kind(_chain, f"{_TORCH_BLOCK} dropout3", "_ff_block"),
    f"{_MODELS}.bert.modeling_bert.BertIntermediate": Kind(_chain, "dense intermediate_act_fn"),
    f"{_MODELS}.bert.modeling_bert.BertLayer": Kind(_residual, _BERT, "feed_forward_chunk"),
    f"{_MODELS}.bert.modeling_bert.BertOutput": Kind(_residual, "dense dropout LayerNorm"),
    f"{_MODELS}.bert.modeling_bert.BertSelfOutput": Kind(_residual, "dense dropout LayerNorm"),
    f"{_MODELS}.gpt2.modeling_gpt2.GPT2Block": _GPT2_LAYER,
    f"{_MODELS}.gpt2.modeling_gpt2.GPT2MLP": Kind(_chain, "c_fc act c_proj dropout"),
    **{f"{_MODELS}.{name.lower()}.modeling_{name.lower()}.{name}DecoderLayer": _GATED_LAYER for name in _LLAMAS},
    **{f"{_MODELS}.{name.lower()}.modeling_{name.lower()}.{name}MLP": _GATED for name in _LLAMAS},
    **{f"{_MODELS}.{name.lower()}.modeling_{name.lower()}.{name}RMSNorm": Kind(_norm) for name in _LLAMAS},
    f"{_MODELS}.t5.modeling_t5.T5DenseActDense": Kind(_chain, "wi act dropout wo"),
    f"{_MODELS}.t5.modeling_t5.T5DenseGatedActDense": Kind(_gated_block, "wi_0 act wi_1 wo dropout"),
    f"{_MODELS}.t5.modeling_t5.T5LayerNorm": Kind(_norm),
    f"{_MODELS}.vit.modeling_vit.ViTLayer": _VIT_LAYER,
    f"{_MODELS}.vit.modeling_vit.ViTMLP": Kind(_chain, "fc1 activation_fn fc2"),
}


def layers_of(module: Any) -> list[Any]:
    """The linear layers whose work the function for a module includes."""
    return [each for each in (module, *KINDS[name_of(module)].absorbed(module)) if name_of(each) in LAYERS]
