"""Collects the state of models, optimizers, averages and steps by name, for `lt.save` and `lt.load`."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from lt_runtime.arguments import not_negative, shown
from lt_runtime.errors import ArgumentError, KindError
from lt_runtime.nn.block import Block
from lt_runtime.nn.linear import Linear
from lt_runtime.ops.optimizers.adamw import AdamW
from lt_runtime.ops.optimizers.optimizer import Optimizer, state_arrays, state_ranges
from lt_runtime.ops.optimizers.parameters import Parameter
from lt_runtime.problem import Activation
from lt_runtime.saving.checkpoints import MASTER, options_of_all_groups, plain
from lt_runtime.saving.descriptions import named_parameters
from lt_runtime.schedules import Schedule, Table
from lt_runtime.training.averages import EMA
from lt_runtime.training.step import TrainStep

PLAIN: Final = (int, float, str, np.integer, np.floating, np.bool_)
_OF_BLOCKS: Final = ("activation", "compute", "dropout", "eps", "join", "p", "split")
"""Attributes of blocks that are saved as options if their values are of JSON's types."""
_RESERVED: Final = ("settings", "changed", "group")


class State(NamedTuple):
    """The state of several objects. A key is the keyword of an object and a name: "head/enc.weight.m".

    Attributes:
        arrays: the arrays by key; `key + MASTER` is the master copy of the array at `key`.
        options: the options by key, in JSON's types; "head/kind" is the kind of the object with the keyword "head".
        bounds: the lowest and highest value that training can reach by an array's key, as in `state_ranges`.
        names: for each optimizer, by keyword, the names of its parameters.
    """

    arrays: dict[str, Any]
    options: dict[str, Any]
    bounds: dict[str, tuple[float, float]]
    names: dict[str, list[str]]


def state_of(owners: Mapping[str, Any]) -> State:
    """Collects the state of all objects of a mapping from keyword to object.

    A parameter of an optimizer is named after the first model that has it, in the order of the keywords.

    Raises:
        ArgumentError: a keyword is not accepted, or two parameters of an optimizer have one name.
        KindError: an object of a kind that has no state.
    """
    state = State({}, {}, {}, {})
    # Maps a parameter's id to the keyword of the first model that has the parameter, and to its name in this model.
    named = dict[int, tuple[str, str]]()
    for keyword, each in sorted(owners.items(), key=lambda item: (not isinstance(item[1], Block), item[0])):
        if not keyword.isidentifier() or keyword in _RESERVED:
            raise ArgumentError(f"{shown(keyword)} is no keyword for an object to save; take another, such as 'model'")
        parts: tuple[Mapping[str, Any], ...]
        if isinstance(each, Block):
            parameters = named_parameters(each)
            parts = _arrays(parameters), _options_of_model(each)
            for name, parameter in parameters.items():
                named.setdefault(id(parameter), (keyword, name))
        elif isinstance(each, Optimizer):
            names = state.names[keyword] = _names(keyword, each.parameters, named)
            parts = state_arrays(each, names), _options_of_optimizer(each, names), state_ranges(each, names)
        elif isinstance(each, EMA):
            averages = dict(zip(named_parameters(each.model), each.averages.values(), strict=True))
            parts = averages, {"kind": "EMA", "decay": each.decay}
        elif isinstance(each, TrainStep):
            options = {name: getattr(each, name) for name in ("loss", "batch_size", "accumulate")}
            parts = {}, {"kind": "TrainStep", **options}
        else:
            accepted = "an lt.Block, an lt.Optimizer (whose scaler is saved with it), an lt.EMA or an lt.TrainStep"
            raise KindError(f"{keyword} is {shown(each)}; it must be {accepted}. Numbers and strings are only saved")
        wholes: tuple[dict[str, Any], ...] = state.arrays, state.options, state.bounds
        for whole, part in zip(wholes, parts, strict=False):
            whole |= {f"{keyword}/{name}": value for name, value in part.items()}
    return state._replace(options=json.loads(json.dumps(plain(state.options))))


def settings_of(
    key: str, optimizer: Optimizer, names: Sequence[str], options: Mapping[str, Any], table: Any, taken: Collection[str]
) -> list[tuple[Any, str, Any]]:
    """The assignments (object, attribute, value) that set an optimizer's settings to those of a file.

    Args:
        key: the keyword of the optimizer.
        names: names of the optimizer's parameters.
        options: the file's options, by key.
        table: values of the file's `lt.schedules.Table`; None if there is none.
        taken: names of the settings to take from the file.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: the file's settings are not accepted.
    """
    made, rules = list[tuple[Any, str, Any]](), []
    if "schedule" in taken:
        given = options[f"{key}/schedule"]
        schedule = Table(tuple(table.tolist())) if "table" in given else Schedule(**given)
        made.append((optimizer, "schedule", schedule))
    for i, rule in enumerate(optimizer.rules):
        rates = {name: options[f"{key}/group {i}.{name}"] for name in ("lr", "weight_decay") if name in taken}
        rules.append(dataclasses.replace(rule, **rates))
    if isinstance(optimizer, AdamW):
        made += [(optimizer, name, getattr(rules[0], name)) for name in ("lr", "weight_decay")]
    else:
        made.append((optimizer, "rules", rules))
    for name, parameter in zip(names, optimizer.parameters, strict=True):
        for setting in {"lr_scale", "weight_decay"} & {*taken}:
            value = options[f"{key}/{name}.{setting}"]
            has_none = value is None and setting == "weight_decay"
            made.append((parameter, setting, None if has_none else not_negative(f"{name}.{setting}", value)))
    return made


def _arrays(parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    masters = {f"{name}{MASTER}": each.master for name, each in parameters.items() if each.master is not None}
    return {name: each.data for name, each in parameters.items()} | masters


def _options_of_model(model: Block) -> dict[str, Any]:
    """Collects the options of all blocks that affect training, and the class of each block of the package."""
    options: dict[str, Any] = {"kind": "Block"}
    for block in model.blocks():
        held, place = vars(block), block.name.removeprefix(model.name).removeprefix(".")
        held = {name: value for name, value in held.items() if isinstance(value, (*PLAIN, Activation))}
        draws = any(held.get(name) for name in ("dropout", "p"))  # the seed matters only if random numbers are drawn
        own = {name: held[name] for name in (*_OF_BLOCKS, *["seed"] * draws) if name in held}
        if type(block).__module__.startswith("lt_runtime."):
            own["block"] = type(block).__name__
        if isinstance(block, Linear) and block.precision is not None:
            own["precision"] = block.precision
        options |= {f"{place}.{name}" if place else name: value for name, value in own.items()}
    return options


def _options_of_optimizer(optimizer: Optimizer, names: Sequence[str]) -> dict[str, Any]:
    scaler = optimizer.scaler
    options: dict[str, Any] = {"kind": "Optimizer", "scaler": None if scaler is None else scaler.options}
    options |= options_of_all_groups(optimizer)
    for i, rule in enumerate(optimizer.rules):
        of_rule = {"rule": type(rule).__name__, **dataclasses.asdict(rule)}
        options |= {f"group {i}.{name}": value for name, value in of_rule.items()}
    groups = itertools.chain(*([i] * count for i, count in enumerate(optimizer.groups)))
    for name, each, group in zip(names, optimizer.parameters, groups, strict=True):
        own: dict[str, Any] = {"group": group, "lr_scale": each.lr_scale, "weight_decay": each.weight_decay}
        options |= {f"{name}.{option}": value for option, value in own.items()}
    return options


def _names(keyword: str, parameters: Sequence[Parameter], named: Mapping[int, tuple[str, str]]) -> list[str]:
    """The names of an optimizer's parameters, prefixed with their models' keywords if two names are equal."""
    places = [named.get(id(each), ("", each.name)) for each in parameters]
    names = [name for _, name in places]
    if len({*names}) < len(names):
        names = [f"{model}/{name}" if model else name for model, name in places]
    (name, count), *_ = Counter(names).most_common(1)
    if count > 1:
        raise ArgumentError(
            f"{count} parameters of {keyword} are named {name}; pass the models that they belong to by keyword too, "
            "or give each parameter its own name"
        )
    return names
