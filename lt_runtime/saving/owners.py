"""Owners: what `lt.save` and `lt.load` keep of models, optimizers, averages and steps, by name."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from lt_runtime.arguments import not_negative, shown
from lt_runtime.errors import ArgumentError, KindError
from lt_runtime.nn.block import Block
from lt_runtime.ops._parameters import Parameter
from lt_runtime.ops.optimizer import AdamW, Optimizer, state_arrays, state_ranges
from lt_runtime.problem import Activation
from lt_runtime.saving.checkpoints import MASTER, options_of_all_groups
from lt_runtime.schedules import AnySchedule, Schedule, Table
from lt_runtime.training.averages import EMA
from lt_runtime.training.step import TrainStep

_OF_BLOCKS: Final = ("activation", "compute", "dropout", "eps", "join", "p", "split")
"""Attributes of blocks that are options, where their values are plain."""
PLAIN: Final = (int, float, str, np.integer, np.floating, np.bool_)
_RESERVED: Final = ("path", "settings", "changed")


class Owner(NamedTuple):
    """All that a file holds of one object.

    Attributes:
        arrays: by name; `name + MASTER` is the master copy of `name`.
        options: by place within the object ("" is the object itself) and name, as JSON gives them.
        bounds: the lowest and highest value that training can reach by an array's name, as `state_ranges`.
        parameters: of an optimizer, by the names under which their moments are saved.
    """

    arrays: Mapping[str, Any]
    options: Mapping[str, Mapping[str, Any]]
    bounds: Mapping[str, tuple[float, float]] = {}
    parameters: Mapping[str, Parameter] = {}


class Settings(NamedTuple):
    """The settings of an optimizer, and the `lr_scale` and `weight_decay` of its parameters."""

    rates: Sequence[tuple[float, float]]
    schedule: AnySchedule
    of_parameters: Sequence[tuple[float, float | None]]


def owners_of(given: Mapping[str, Any]) -> dict[str, Owner]:
    """What is saved of objects, by keyword.

    A parameter is named after the first model that has it, in the order of the keywords.

    Raises:
        ArgumentError: a keyword is not accepted, or two parameters of an optimizer have one name.
        KindError: an object of a kind that has no state.
    """
    owners = dict[str, Owner]()
    named = dict[int, tuple[str, str]]()  # by a parameter's id, its first model's keyword and its name in the model
    for keyword, each in sorted(given.items(), key=lambda item: (not isinstance(item[1], Block), item[0])):
        if not keyword.isidentifier() or keyword in _RESERVED:
            raise ArgumentError(f"{shown(keyword)} is no keyword for an object to save; take another, such as 'model'")
        if isinstance(each, Block):
            parameters = _by_name(each)
            owners[keyword] = _of_block(each, parameters)
            for name, parameter in parameters.items():
                named.setdefault(id(parameter), (keyword, name))
        elif isinstance(each, Optimizer):
            owners[keyword] = _of_optimizer(each, _names(keyword, each.parameters, named))
        elif isinstance(each, EMA):
            averages = dict(zip(_by_name(each.model), each.averages.values(), strict=True))
            owners[keyword] = Owner(averages, {"": {"kind": "EMA", "decay": each.decay}})
        elif isinstance(each, TrainStep):
            options = {name: getattr(each, name) for name in ("loss", "batch_size", "accumulate")}
            owners[keyword] = Owner({}, {"": {"kind": "TrainStep", **options}})
        else:
            accepted = "an lt.Block, an lt.Optimizer (whose scaler is saved with it), an lt.EMA or an lt.TrainStep"
            raise KindError(f"{keyword} is {shown(each)}; it must be {accepted}. Numbers and strings are only saved")
    return {
        keyword: each._replace(options=json.loads(json.dumps(plain(each.options))))
        for keyword, each in sorted(owners.items())
    }


def plain(value: Any) -> Any:
    """A value as JSON holds it; NaN and infinity, for which JSON has no numbers, become {"float": "inf"}."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    if isinstance(value, Activation):
        return plain(dataclasses.asdict(value))
    if isinstance(value, np.generic):
        value = value.item()
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def settings_of(
    optimizer: Optimizer, owner: Owner, theirs: Mapping[str, Mapping[str, Any]], table: Any, taken: Iterable[str]
) -> Settings:
    """An optimizer's settings with those named in `taken` from a file.

    Args:
        theirs: the optimizer's options in the file.
        table: values of the file's `lt.schedules.Table`; None if there is none.

    Raises:
        KeyError, TypeError, ValueError: the file's settings are not accepted.
    """

    def setting(place: str, name: str, present: Any) -> Any:
        if name not in taken:
            return present
        value = theirs[place][name]
        return value if value is None and place in owner.parameters else not_negative(f"{place}.{name}", value)

    schedule = optimizer.schedule
    if "schedule" in taken:
        given = theirs[""]["schedule"]
        schedule = Table(tuple(table.tolist())) if "table" in given else Schedule(**given)
    rates = [
        (setting(_group(i), "lr", rule.lr), setting(_group(i), "weight_decay", rule.weight_decay))
        for i, rule in enumerate(optimizer.rules)
    ]
    of_parameters = [
        (setting(name, "lr_scale", each.lr_scale), setting(name, "weight_decay", each.weight_decay))
        for name, each in owner.parameters.items()
    ]
    return Settings(rates, schedule, of_parameters)


def apply(settings: Settings, optimizer: Optimizer) -> None:
    """Gives an optimizer and its parameters their settings, which the next step uses."""
    optimizer.schedule = settings.schedule
    if isinstance(optimizer, AdamW):
        optimizer.lr, optimizer.weight_decay = settings.rates[0]
    else:
        pairs = zip(optimizer.rules, settings.rates, strict=True)
        optimizer.rules = tuple(dataclasses.replace(rule, lr=lr, weight_decay=decay) for rule, (lr, decay) in pairs)
    for parameter, (scale, decay) in zip(optimizer.parameters, settings.of_parameters, strict=True):
        parameter.lr_scale, parameter.weight_decay = scale, decay


def _by_name(model: Block) -> dict[str, Parameter]:
    """The parameters of a model, by their names within it."""
    return {each.name[_start(model) :]: each for each in model.parameters()}


def _start(model: Block) -> int:
    """The number of characters of a name before the name within the model, which may be a part of another one."""
    return len(model.name) + 1 if model.name else 0


def _of_block(model: Block, parameters: Mapping[str, Parameter]) -> Owner:
    arrays = {name: each.data for name, each in parameters.items()}
    arrays |= {f"{name}{MASTER}": each.master for name, each in parameters.items() if each.master is not None}
    places = {each.name[_start(model) :]: _options_of_block(each) for each in model.blocks()}
    return Owner(arrays, {**places, "": {"kind": "Block", **places[""]}})


def _options_of_block(block: Block) -> dict[str, Any]:
    """The options of a block that decide how training goes on; of a block of the package also its class."""
    held = vars(block)
    names = [*_OF_BLOCKS, *(["seed"] if _draws(held) else [])]
    options = {name: held[name] for name in names if isinstance(held.get(name), (*PLAIN, Activation))}
    is_ours = type(block).__module__.startswith("lt_runtime.")
    return {"block": type(block).__name__, **options} if is_ours else options


def _draws(held: Mapping[str, Any]) -> bool:
    """Whether a block with these attributes draws random numbers in training, so that its seed matters."""
    return any(isinstance(held.get(name), PLAIN) and held[name] for name in ("dropout", "p"))


def _of_optimizer(optimizer: Optimizer, names: Sequence[str]) -> Owner:
    scaler, places = optimizer.scaler, dict[str, dict[str, Any]]()
    common = {**options_of_all_groups(optimizer), "scaler": None if scaler is None else scaler.options}
    places[""] = {"kind": "Optimizer", **common}
    for i, rule in enumerate(optimizer.rules):
        places[_group(i)] = {"rule": type(rule).__name__, **dataclasses.asdict(rule)}
    groups = itertools.chain(*([i] * count for i, count in enumerate(optimizer.groups)))
    for name, each, group in zip(names, optimizer.parameters, groups, strict=True):
        places[name] = {"group": group, "lr_scale": each.lr_scale, "weight_decay": each.weight_decay}
    parameters = dict(zip(names, optimizer.parameters, strict=True))
    return Owner(state_arrays(optimizer, names), places, state_ranges(optimizer, names), parameters)


def _group(index: int) -> str:
    """The place of the options of one group's rule."""
    return f"group {index}"


def _names(keyword: str, parameters: Sequence[Parameter], named: Mapping[int, tuple[str, str]]) -> list[str]:
    """The names of an optimizer's parameters; with the keywords of their models if one name stands for several."""
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
