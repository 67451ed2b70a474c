"""`lt.save` and `lt.load`: models, optimizers, averages, steps and plain values of a run in one safetensors file.

A key of the file is `<keyword>/<name>`, such as "model/enc.weight" or "head/enc.weight.m". An array that belongs to
several keys is written once, under the first key; the file's text lists the other keys.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Collection, Mapping, Set
from functools import partial
from typing import Any, Final, Literal

import numpy as np

from lt_runtime.arguments import check_instance, one_of, shown
from lt_runtime.arrays.operand import CUPY, HOST, Operand, device_of, read
from lt_runtime.arrays.transfer import fetch
from lt_runtime.distributed.group import Group
from lt_runtime.errors import ArgumentError, CheckpointError
from lt_runtime.files import AnyPath, parse_json
from lt_runtime.nn.block import Block
from lt_runtime.nn.device import ComputeDevice
from lt_runtime.ops.optimizers.optimizer import Optimizer
from lt_runtime.saving import checkpoint_file
from lt_runtime.saving.checkpoint_file import Arrays, Kind, Kinds, check_kinds, of_others, shortened
from lt_runtime.saving.checkpoints import (
    CHANGEABLE,
    MASTER,
    STATE_FORMAT,
    by_first,
    check_values,
    description_of,
    differences,
    plain,
    refuse_differences,
    whole_states,
)
from lt_runtime.saving.fp8_scales import Loading, check_scales, names_of_scales, scales_to_load, scales_to_save
from lt_runtime.saving.owners import PLAIN, State, settings_of, state_of
from lt_runtime.saving.plan_choices import choices_of, take_choices
from lt_runtime.schedules import Table
from lt_runtime.training.step import TrainStep

_SETTINGS: Final = ("lr", "lr_scale", "schedule", "weight_decay")
"""Options that `load(..., settings="file")` sets to the file's values."""
_CHANGEABLE: Final = (*CHANGEABLE, "accumulate", "batch_size", "decay", "loss", "momentum", "nesterov")


def save(path: AnyPath, *, group: Group | None = None, **owners: Any) -> None:
    """Writes models, optimizers, averages, steps and plain values to one safetensors file, under their keywords.

    The file holds all values that training changes, by name, also the scales of layers in FP8, and the options that
    decide how training goes on. An array that is found several times is written once. The file has a digest and is
    replaced in one step, as by `save_checkpoint`, and has the plan choices of the models' steps. Waits for the GPU::

        lt.save("run.safetensors", model=net, head=optimizer, ema=ema, epoch=3)
        epoch = lt.load("run.safetensors", model=net, head=optimizer, ema=ema)["epoch"]

    Args:
        group: processes that train together, as for `save_checkpoint`.
        owners: keywords of your choice, each with an object: any `lt.Block`; an `lt.Optimizer`, such as `lt.AdamW`,
            with its scaler; an `lt.EMA`; an `lt.TrainStep`, of which the loss's name, `batch_size` and `accumulate` are
            saved; integers, floats and strings, which `load` returns. The optimizer and the averages of a step are
            saved only if they are given themselves, and the sums of its `metrics` are not saved. If two parameters of
            an optimizer have one name, as parameters of two models may, the models must be given too. No other thread
            may train during the call.

    Raises:
        ArgumentError: there are no owners; "settings" or "changed" is a keyword; two parameters of an optimizer have
            one name; or JSON cannot hold a value.
        KindError: an owner of another kind.
        OperandError: an array of a parameter has been replaced since its optimizer was made, or has a type that files
            cannot hold.
        CheckpointError: a value is out of the range that training can reach, see `load_checkpoint`.
        FileError: the file cannot be written, as for `save_checkpoint`.
    """
    check_instance("path", path, (str, os.PathLike), "a string or a pathlib.Path")
    if not owners:
        raise ArgumentError("there is nothing to save: pass objects and values by keyword, such as model=model")
    by_first(path, group, owners.values(), partial(_save, path, owners))


def _save(path: AnyPath, owners: Mapping[str, Any]) -> None:
    values = {keyword: each for keyword, each in owners.items() if isinstance(each, PLAIN)}
    objects = {keyword: each for keyword, each in owners.items() if keyword not in values}
    state, operands, firsts = _read(objects)
    host = {key: fetch(*operands[key]) for key, first in firsts.items() if key == first}
    _check(f"{os.fspath(path)} is not written", {key: host[first] for key, first in firsts.items()}, state)
    for keyword, each in objects.items():
        if isinstance(each, Block):
            host |= {f"{keyword}/{name}": array for name, array in scales_to_save(each).items()}
        if isinstance(each, Optimizer) and isinstance(each.schedule, Table):
            host[f"{keyword}/schedule"] = np.array(each.schedule.values, np.float32)
    shared = {key: first for key, first in firsts.items() if key != first}
    plans = [text for text in map(choices_of, _models(objects)) if text is not None]
    described = {"format": STATE_FORMAT, "options": state.options, "shared": shared, "values": plain(values)}
    described |= {"plans": plans} if plans else {}
    try:
        text = json.dumps(described)
        parse_json(text.encode())
    except ValueError as error:
        complaint = f"the names or the values {shown(values)} cannot be saved: {error}"
        raise ArgumentError(f"{os.fspath(path)} is not written: {complaint}") from error
    checkpoint_file.write(path, host, text)


def load(
    path: AnyPath,
    *,
    settings: Literal["equal", "file"] = "equal",
    changed: Collection[str] = (),
    **owners: Any,
) -> dict[str, int | float | str]:
    """Loads a file of `save` into objects that were made with the same options, and returns the file's plain values.

    Training then continues bit by bit as if it had not been interrupted. Arrays are found by their names and written in
    place, so that captured graphs continue too. Each object that is given is loaded as a whole; the file may have other
    objects, which are not loaded. As by `load_checkpoint`, scales of layers in FP8 are loaded, the file's digest and
    the ranges of its values are checked, and the old values are restored if a write fails. Waits for the GPU.

    Args:
        settings: "equal" demands that all options are the file's. "file" sets `lr`, `schedule`, `weight_decay` and
            `lr_scale` of optimizers and their parameters to the file's.
        changed: names of options that may differ from the file's; the present values are kept. In addition to the names
            that `load_checkpoint` accepts: "accumulate", "batch_size" and "loss" of a step, "decay" of averages, and
            "momentum" and "nesterov" of a rule.
        owners: objects by the keywords of `save`, without the plain values.

    Raises:
        CheckpointError: the file is damaged or was not written by `save`; it lacks an object; options differ, all of
            which the message lists; a name is missing, extra, or of another shape or type; two names share an array
            only in the file or only here; or a value is out of its range. Nothing has been changed.
        ArgumentError: as for `save`; or `settings` or `changed` has another name.
        KindError: an owner of another kind.
        OperandError: an array of a parameter has been replaced since its optimizer was made.
        FileError: the file cannot be read, as for `load_checkpoint`.
    """
    check_instance("path", path, (str, os.PathLike), "a string or a pathlib.Path")
    check_instance("changed", changed, (tuple, list, set, frozenset), "a tuple of options' names")
    kept = {one_of(f"changed[{i}]", name, _CHANGEABLE) for i, name in enumerate(changed)}
    taken = {*_SETTINGS} - kept if one_of("settings", settings, ("equal", "file")) == "file" else set[str]()
    with whole_states(owners.values()):
        return _load(path, kept, taken, owners)


def _load(path: AnyPath, kept: Set[str], taken: Set[str], owners: Mapping[str, Any]) -> dict[str, int | float | str]:
    state, operands, firsts = _read(owners)
    like = {key: Kind(operand.dtype, operand.shape) for key, (operand, _) in operands.items()}
    with checkpoint_file.reading(path) as file:
        options, shared, values, plans = _described(path, file.text)
        _check_options(path, options, state.options, {*owners}, kept | taken)
        sources = _sources(path, file.kinds, shared, {*map(_keyword, options)}, owners)
        for key in (f"{keyword}/schedule" for keyword in state.names):
            if isinstance(options.get(key), dict) and isinstance(options[key].get("table"), int):
                like[key] = Kind("float32", (options[key]["table"],))
        check_scales(path, file.kinds)
        scales = names_of_scales(sources)
        arrays = {key: source for key, source in sources.items() if key not in scales}
        found = {key: file.kinds[source] for key, source in arrays.items()}
        _check_masters(path, found, like)
        check_kinds(path, found, like)
        _check_shared(path, _firsts(arrays), firsts)
        content = file.load({*sources.values()})
    saved = {key: content[source] for key, source in sources.items()}
    _check(f"{os.fspath(path)} cannot be used", saved, state)
    made = []
    try:
        for keyword, names in state.names.items() if taken else ():
            table = saved.get(f"{keyword}/schedule")
            made += settings_of(keyword, owners[keyword], names, options, table, taken)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: its settings are wrong: {shortened(str(error))}") from error
    loading = _loading(path, owners, {key: saved[key] for key in scales})
    writes = [(operand, saved[key], stream) for key, (operand, stream) in operands.items() if firsts[key] == key]
    loading.write(writes)
    for assignment in made:
        setattr(*assignment)
    for model in _models(owners):
        for text in plans:
            take_choices(path, text, model)
    return values


def _check_masters(path: AnyPath, found: Kinds, like: Kinds) -> None:
    """Raises `CheckpointError` if a file has a master copy of a parameter that has none here.

    The parameter itself must have the file's type and shape: `check_kinds` reports other parameters.
    """
    for key in sorted(found.keys() - like.keys()):
        owner = key.removesuffix(MASTER)
        if owner in like and found.get(owner) == like[owner]:
            why = f"{path} has {shortened(key)}, but {owner} has no master copy here"
            divided = "if the processes of a group divide its state (shard_state=True), pass it to lt.load too"
            raise CheckpointError(f"{why}: make the optimizer before loading, which makes master copies; {divided}")


def _loading(path: AnyPath, owners: Mapping[str, Any], scales: Arrays) -> Loading:
    """Calls `scales_to_load` for each model among objects; `scales` has the file's FP8 scales by key."""
    whole = Loading([], [])
    for keyword, owner in owners.items():
        own = {key.removeprefix(f"{keyword}/"): each for key, each in scales.items() if _keyword(key) == keyword}
        if isinstance(owner, Block):
            found = scales_to_load(path, owner, own)
            whole.writes.extend(found.writes)
            whole.calibrated.extend(found.calibrated)
        elif own:
            raise CheckpointError(f"{path} has {shortened(f'{keyword}/{min(own)}')}, which there is not here")
    return whole


def _models(owners: Mapping[str, Any]) -> list[Block]:
    """The models among the given objects, and the models of the training steps among the objects, each once."""
    models = (each.model if isinstance(each, TrainStep) else each for each in owners.values())
    return [*{id(each): each for each in models if isinstance(each, Block)}.values()]


def _read(owners: Mapping[str, Any]) -> tuple[State, dict[str, tuple[Operand, int]], dict[str, str]]:
    """Reads objects that are to be saved or loaded, after waiting for all work on their devices.

    Returns:
        The objects' state; each array of the state as an operand, with the current stream of the array's device, by
        key; and for each key the first key that has the same array.
    """
    state = state_of(owners)
    devices = {key: device_of(key, array) for key, array in state.arrays.items()}
    for device in {*devices.values()} - {HOST}:
        ComputeDevice(device).synchronize()
    streams = {device: 0 if device == HOST else CUPY.current_stream(device) for device in {*devices.values()}}
    pairs = [(key, read(key, array, streams[devices[key]])) for key, array in state.arrays.items()]
    for _, operand in pairs:
        operand.check_packed()
    operands = {key: (operand, streams[devices[key]]) for key, operand in pairs}
    return state, operands, _firsts({key: id(array) for key, array in state.arrays.items()})


def _firsts(arrays: Mapping[str, object]) -> dict[str, str]:
    """Maps every key to the first key, in sorted order, that has the same array."""
    firsts = dict[object, str]()
    return {key: firsts.setdefault(array, key) for key, array in sorted(arrays.items())}


def _keyword(key: str) -> str:
    return key.partition("/")[0]


def _check(complaint: str, arrays: Arrays, state: State) -> None:
    """Raises `CheckpointError` if a value is out of its range; `arrays` maps the keys of the state to values."""
    masters = [key for key in state.arrays if f"{key}{MASTER}" in state.arrays]
    check_values(complaint, arrays, masters, state.bounds)


def _described(path: AnyPath, text: str) -> tuple[dict[str, Any], dict[str, str], dict[str, Any], list[Any]]:
    """A file's options by key, the first keys of shared arrays, the plain values, and the texts of plan choices."""
    described = description_of(path, text, STATE_FORMAT)
    parts: list[Any] = [described.get(name) for name in ("options", "shared", "values")]
    plans, (options, shared, values) = described.get("plans", []), parts
    if {*map(type, parts)} != {dict} or not isinstance(plans, list):
        raise of_others(path)
    try:
        values = {key: float(each["float"]) if isinstance(each, dict) else each for key, each in values.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise of_others(path) from error
    if not all(isinstance(each, (int, float, str)) for each in (*values.values(), *shared.values())):
        raise of_others(path)
    return options, shared, values, plans


def _check_options(
    path: AnyPath, theirs: Mapping[str, Any], ours: Mapping[str, Any], keywords: Set[str], may_differ: Set[str]
) -> None:
    """Raises `CheckpointError` if a file lacks an object, or with a table of all options that differ and must not."""
    objects = sorted({*map(_keyword, theirs)})
    for keyword in sorted(keywords - {*objects}):
        raise CheckpointError(f"{path} has no {keyword}; its objects are {shortened(', '.join(objects))}")
    names = {key: key.rpartition(".")[2].rpartition("/")[2] for key in {**ours, **theirs} if _keyword(key) in keywords}
    rows = {
        key: [*differences(key, theirs.get(key), ours.get(key))]
        for key, name in names.items()
        if name not in may_differ and not (name == "precision" and None in (theirs.get(key), ours.get(key)))
    }
    # `changed` does not help if the file or the present object lacks a whole block
    differing = {names[key] for key, found in rows.items() if found and key in theirs and key in ours}
    refuse_differences(path, [*itertools.chain(*rows.values())], differing, _CHANGEABLE)


def _sources(
    path: AnyPath, kinds: Kinds, shared: Mapping[str, str], objects: Collection[str], keywords: Collection[str]
) -> dict[str, str]:
    """Maps the keys of the objects that `keywords` names to the keys under which the file stores their arrays.

    Raises:
        CheckpointError: an array belongs to none of the file's objects.
    """
    sources = {key: shared.get(key, key) for key in sorted({*kinds, *shared})}
    for key, source in sources.items():
        if _keyword(key) not in objects or source not in kinds:
            raise CheckpointError(f"{path} has {shortened(key)}, which belongs to none of its objects")
    return {key: source for key, source in sources.items() if _keyword(key) in keywords}


def _check_shared(path: AnyPath, there: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raises `CheckpointError` unless the keys that share an array in a file also share one in the loaded objects."""
    for key, first in here.items():
        if there[key] != first:
            other, where = (there[key], "in the file") if there[key] != key else (first, "here")
            raise CheckpointError(f"{path}: {key} is the same array as {shortened(other)} only {where}")
