"""Descriptions of models that are made of the package's blocks, from which `load_model` makes them anew.

A description has a block's class and options, and the descriptions of its parts by name. A description has no sizes:
they are those of the file's arrays, so that a file cannot claim larger ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from lt_runtime.errors import ArgumentError
from lt_runtime.nn.block import Block
from lt_runtime.nn.containers import Chain, Parallel, Residual
from lt_runtime.nn.layers import GEGLU, Dropout, Gated, LayerNorm, ReGLU, RMSNorm, SwiGLU
from lt_runtime.nn.linear import Linear
from lt_runtime.nn.mlp import MLP
from lt_runtime.ops.optimizers.parameters import Parameter
from lt_runtime.problem import DType
from lt_runtime.saving.checkpoint_file import Kinds

_CONTAINERS: Final = (Chain, Residual, Parallel)
_LEAVES: Final = (Linear, MLP, LayerNorm, RMSNorm, Gated, SwiGLU, GEGLU, ReGLU, Dropout)
_CLASSES: Final[Mapping[str, Any]] = {each.__name__: each for each in (*_CONTAINERS, *_LEAVES)}
_OPTIONS: Final = ("activation", "compute", "dropout", "eps", "join", "p", "precision", "seed", "split")
"""Constructor arguments that a block stores as attributes of the same names (a gated block: in its layer `up`)."""


def named_parameters(model: Block) -> dict[str, Parameter]:
    """Maps names within a model to its parameters, also if the model is a part of a larger one."""
    start = len(model.name) + 1 if model.name else 0
    return {each.name[start:]: each for each in model.parameters()}


def describe(model: Block) -> dict[str, Any]:
    """Makes the description of a model; all its values but activations are of JSON's types.

    Raises:
        ArgumentError: a block is none of the package's, or shares a parameter in a way that its constructor cannot.
    """
    names, seen = {id(each): name for name, each in named_parameters(model).items()}, dict[int, str]()

    def described(block: Any, place: str) -> Any:
        if id(block) in seen:
            return seen[id(block)]
        seen[id(block)], kind = place, type(block)
        refused = f"{place.rstrip('.') or 'the model'} ({kind.__name__})"
        elsewhere = "keep its values with lt.save, make the model by its code and load them with lt.load"
        if _CLASSES.get(kind.__name__) is not kind:
            raise ArgumentError(f"{refused} is no block of the package, so that no file can describe it: {elsewhere}")
        if isinstance(block, _CONTAINERS):
            found = {name: part for name, part in block.parts() if isinstance(part, Block)}
            parts = {name: described(part, f"{place}{name}.") for name, part in found.items()}
            own = {name: getattr(block, name) for name in ("join", "split") if hasattr(block, name)}
            return {"block": kind.__name__, "parts": parts, **own}
        options, shares, is_view = {"block": kind.__name__, **options_of(block)}, False, False
        if kind is Linear:
            name, is_view = names[id(block.weight.owner)], block.weight.transposed is not None
            shares = name != f"{place}weight"
            options |= {"weight": name, "transposed": is_view} if shares else {}
        held = {id(each.owner) for each in block.parameters()}
        first_here = sum(names[each].startswith(place) for each in held)
        if first_here + shares < len(held) or (is_view and not shares):
            raise ArgumentError(f"{refused} shares a parameter that its constructor does not take: {elsewhere}")
        return options

    found: dict[str, Any] = described(model, "")
    # Sets the parameters' names for the whole model again: a call of a part's `parameters` has changed them.
    model.parameters()
    return found


def options_of(block: Any) -> dict[str, Any]:
    """The arguments of a block without parts, besides sizes, device, whether it has a bias, and `recompute`.

    `master_weights` is also true if an optimizer has made the master copies.
    """
    if isinstance(block, MLP):
        return {**block.options, "master_weights": _has_masters(block)}
    taken, holder = inspect.signature(type(block)).parameters, block.up if isinstance(block, Gated) else block
    options = {name: getattr(block, name, None) or getattr(holder, name) for name in _OPTIONS if name in taken}
    if "dtype" in taken:
        options |= {"dtype": block.dtype.value, "master_weights": _has_masters(block)}
    return options


def _has_masters(block: Block) -> bool:
    return block.dtype is not DType.BFLOAT16 or any(each.master is not None for each in block.parameters())


def make(
    description: Any,
    kinds: Kinds,
    device: object,
    check_mlp: Callable[[Any, Kinds], object],
    given: Mapping[str, Any],
) -> Block:
    """Builds the model that a file's description specifies, with arrays of the sizes in `kinds`.

    Args:
        check_mlp: is called with the options of an MLP and its arrays before the MLP is made, and may raise.
        given: options that replace those of the description, in the blocks that take them.

    Raises:
        Exception: any exception, if the description is of no block, or the arrays' sizes do not fit together.
    """
    made, parameters = dict[str, Block](), dict[str, Parameter]()

    def block_of(described: Any, place: str) -> Block:
        if isinstance(described, str):
            return made[described]
        options = {**described}
        kind = _CLASSES[options.pop("block")]
        options |= {name: each for name, each in given.items() if name in inspect.signature(kind).parameters}
        arguments: list[Any] = []
        if kind in _CONTAINERS:
            arguments = [block_of(part, f"{place}{name}.") for name, part in options.pop("parts").items()]
        elif kind is MLP:
            own = {name: each for name, each in kinds.items() if name.startswith(place)}
            check_mlp(options, {name.removeprefix(place): each for name, each in own.items()})
        elif kind is not Dropout:
            prefix = f"{place}up." if issubclass(kind, Gated) else place
            shared = parameters[options["weight"]] if "weight" in options else None
            if shared is not None:
                options["weight"] = shared.T if options.pop("transposed") else shared
            shape = kinds[f"{prefix}weight"].shape if shared is None else options["weight"].data.shape
            arguments = [*reversed(shape)]
            if issubclass(kind, Gated):
                arguments[1] //= 2
            if kind is not RMSNorm:
                options["bias"] = f"{prefix}bias" in kinds
        placed = {"device": device} if kind in _LEAVES and kind is not Dropout else {}
        block: Block = kind(*arguments, **options, **placed)
        made[place] = block
        if kind in _LEAVES:
            parameters.update({f"{place}{each.name}": each for each in block.parameters()})
        return block

    return block_of(description, "")
