"""`lt.save` and `lt.load`: models, optimizers, averages, steps and plain values of a run in one safetensors file.

A key of the file is `<keyword>/<name>`, such as "model/enc.weight" or "head/enc.weight.m". An array that several keys
name is written once, under its first key; the file's text has the other keys.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lt_runtime.arguments import check_instance, one_of, shown
from lt_runtime.arrays.operand import CUPY, HOST, Operand, device_of, read
from lt_runtime.arrays.transfer import fetch, replace_all
from lt_runtime.errors import ArgumentError, CheckpointError
from lt_runtime.files import parse_json
from lt_runtime.nn.device import ComputeDevice
from lt_runtime.nn.mlp import MLP
from lt_runtime.ops.optimizer import Optimizer
from lt_runtime.saving import checkpoint_file
from lt_runtime.saving.checkpoint_file import Kind, Kinds, check_kinds, of_others, shortened
from lt_runtime.saving.checkpoints import (
    CHANGEABLE,
    MASTER,
    STATE_FORMAT,
    check_values,
    description_of,
    differences,
    refuse_differences,
)
from lt_runtime.saving.owners import PLAIN, Owner, apply, owners_of, plain, settings_of
from lt_runtime.saving.plan_choices import choices_of, take_choices
from lt_runtime.schedules import Table

Value: TypeAlias = int | float | str
_Options: TypeAlias = Mapping[str, Mapping[str, Any]]
_SETTINGS: Final = ("lr", "lr_scale", "schedule", "weight_decay")
"""Options that `settings="file"` takes from the file."""
_CHANGEABLE: Final = (*CHANGEABLE, "accumulate", "batch_size", "decay", "loss", "momentum", "nesterov")


def save(path: str | os.PathLike[str], **owners: Any) -> None:
    """Writes models, optimizers, averages, steps and plain values to one safetensors file, under their keywords.

    The file holds all values that training changes, by name, the options that decide how training goes on, and the plan
    choices of each `lt.MLP`. An array that is found several times is written once. The file has a digest and is
    replaced in one step, as by `save_checkpoint`. Waits for the GPU::

        lt.save("run.safetensors", model=net, head=optimizer, ema=ema, epoch=3)
        epoch = lt.load("run.safetensors", model=net, head=optimizer, ema=ema)["epoch"]

    Args:
        owners: by keyword: any `lt.Block`; an `lt.Optimizer`, such as `lt.AdamW`, with its scaler; an `lt.EMA`; an
            `lt.TrainStep`, of which the loss's name, `batch_size` and `accumulate` are saved; integers, floats and
            strings, which `load` returns. The optimizer and the averages of a step are saved only if they are given
            themselves, and the sums of its `metrics` are not saved. If two parameters of an optimizer have one name, as
            those of two models may, the models must be given too. No other thread may train during the call.

    Raises:
        ArgumentError: there are no owners; "settings" or "changed" is a keyword; two parameters of an optimizer have
            one name; or JSON cannot hold a value.
        KindError: an owner of another kind.
        CheckpointError: a value is out of the range that training can reach, see `load_checkpoint`.
        FileError: the file cannot be written, as for `save_checkpoint`.
    """
    check_instance("path", path, (str, os.PathLike), "a string or a pathlib.Path")
    if not owners:
        raise ArgumentError("there is nothing to save: pass objects and values by keyword, such as model=model")
    values = {keyword: each for keyword, each in owners.items() if isinstance(each, PLAIN)}
    objects = {keyword: each for keyword, each in owners.items() if keyword not in values}
    found, plans = owners_of(objects), {}
    arrays, roots = _keyed(found)
    host = {key: fetch(operand, stream) for key, (operand, stream) in _operands(arrays).items()}
    _check(f"{os.fspath(path)} is not written", {key: host[root] for key, root in roots.items()}, found)
    for keyword, each in objects.items():
        if isinstance(each, MLP):
            plans[keyword] = choices_of(each)
        if isinstance(each, Optimizer) and isinstance(each.schedule, Table):
            host[_table_key(keyword)] = np.array(each.schedule.values, np.float32)
    described = {
        "format": STATE_FORMAT,
        "owners": {keyword: each.options for keyword, each in found.items()},
        "shared": {key: root for key, root in roots.items() if key != root},
        "values": plain(values),
        "plans": plans,
    }
    try:
        text = json.dumps(described)
        parse_json(text.encode())
    except ValueError as error:
        found_in = f"the names or the values {shown(values)} cannot be saved"
        raise ArgumentError(f"{os.fspath(path)} is not written: {found_in}: {error}") from error
    checkpoint_file.write(path, host, text)


def load(
    path: str | os.PathLike[str],
    *,
    settings: Literal["equal", "file"] = "equal",
    changed: Collection[str] = (),
    **owners: Any,
) -> dict[str, Value]:
    """Loads a file of `save` into objects that were made with the same options, and returns the file's plain values.

    Training then continues bit by bit as if it had not been interrupted. Arrays are found by their names and written in
    place, so that captured graphs continue too. Each object that is given is loaded as a whole; the file may have other
    objects, which are not loaded. The file's digest and the ranges of its values are checked, and the old values are
    restored if a write fails, as by `load_checkpoint`. Waits for the GPU.

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
        FileError: the file cannot be read, as for `load_checkpoint`.
    """
    check_instance("path", path, (str, os.PathLike), "a string or a pathlib.Path")
    check_instance("changed", changed, (tuple, list, set, frozenset), "a tuple of options' names")
    kept = {one_of(f"changed[{i}]", name, _CHANGEABLE) for i, name in enumerate(changed)}
    taken = {*_SETTINGS} - kept if one_of("settings", settings, ("equal", "file")) == "file" else set[str]()
    found = owners_of(owners)
    arrays, roots = _keyed(found)
    operands = _operands(arrays)
    here = {key: Kind(operands[root][0].dtype, operands[root][0].shape) for key, root in roots.items()}
    with checkpoint_file.reading(path) as file:
        theirs, shared, values, plans = _described(path, file.text)
        _check_options(path, theirs, found, kept | taken)
        sources = _sources(path, file.kinds, shared, theirs, found)
        tables = _tables(theirs, found)
        check_kinds(path, {key: file.kinds[source] for key, source in sources.items()}, {**here, **tables})
        _check_shared(path, sources, roots)
        content = file.load({*sources.values()})
    saved = {key: content[source] for key, source in sources.items()}
    _check(f"{os.fspath(path)} cannot be used", saved, found)
    optimizers = {keyword: each for keyword, each in owners.items() if isinstance(each, Optimizer)}
    try:
        changes = [
            (settings_of(each, found[keyword], theirs[keyword], saved.get(_table_key(keyword)), taken), each)
            for keyword, each in optimizers.items()
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: its settings are wrong: {shortened(str(error))}") from error
    replace_all([(operand, saved[key], stream) for key, (operand, stream) in operands.items()])
    for change in changes if taken else ():
        apply(*change)
    for keyword, each in owners.items():
        if isinstance(each, MLP):
            take_choices(path, plans.get(keyword), each)
    return values


def _keyed(found: Mapping[str, Owner]) -> tuple[dict[str, Any], dict[str, str]]:
    """All arrays, each once by its first key; and for every key the first key of its array."""
    arrays, roots, firsts = dict[str, Any](), dict[str, str](), dict[int, str]()
    for keyword, owner in found.items():
        for name, array in owner.arrays.items():
            key = f"{keyword}/{name}"
            roots[key] = firsts.setdefault(id(array), key)
            arrays.setdefault(roots[key], array)
    return arrays, roots


def _operands(arrays: Mapping[str, Any]) -> dict[str, tuple[Operand, int]]:
    """Reads arrays as operands, each with the current stream of its device. Waits for all work on the devices."""
    devices = {key: device_of(key, array) for key, array in arrays.items()}
    for device in {*devices.values()} - {HOST}:
        ComputeDevice(device).synchronize()
    streams = {device: 0 if device == HOST else CUPY.current_stream(device) for device in {*devices.values()}}
    operands = {key: (read(key, array, streams[devices[key]]), streams[devices[key]]) for key, array in arrays.items()}
    for operand, _ in operands.values():
        operand.check_packed()
    return operands


def _check(complaint: str, arrays: Mapping[str, NDArray[Any]], found: Mapping[str, Owner]) -> None:
    """Raises `CheckpointError` if a value of any owner is out of its range; arrays are by key."""
    for keyword, owner in found.items():
        masters = [f"{keyword}/{name}" for name in owner.arrays if f"{name}{MASTER}" in owner.arrays]
        bounds = {f"{keyword}/{name}": each for name, each in owner.bounds.items()}
        check_values(complaint, arrays, masters, bounds)


def _described(
    path: str | os.PathLike[str], text: str
) -> tuple[dict[str, _Options], dict[str, str], dict[str, Value], dict[str, Any]]:
    """A file's options by owner and place, other keys of shared arrays, plain values and plan choices."""
    described = description_of(path, text, STATE_FORMAT)
    sections: list[Any] = [described.get(each) for each in ("owners", "shared", "values", "plans")]
    owners, shared, values, plans = sections
    try:
        places = [place for owner in owners.values() for place in owner.values()]
        plain_values = {keyword: _value_of(each) for keyword, each in values.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise of_others(path) from error
    are_objects = all(isinstance(each, dict) for each in [*sections, *owners.values(), *places])
    if not are_objects or not all(isinstance(key, str) for key in shared.values()):
        raise of_others(path)
    return owners, shared, plain_values, plans


def _value_of(given: Any) -> Value:
    """The value of which `plain` made a part of a file; raises an error of Python for anything else."""
    value: Value = float(given["float"]) if isinstance(given, dict) else given
    if not isinstance(value, (int, float, str)):
        raise TypeError("no plain value")
    return value


def _check_options(
    path: str | os.PathLike[str],
    theirs: Mapping[str, _Options],
    found: Mapping[str, Owner],
    may_differ: Collection[str],
) -> None:
    """Raises `CheckpointError` if an owner is missing, or with a table of all options that differ and must not."""
    rows, names = [], set()
    for keyword, owner in found.items():
        if keyword not in theirs:
            raise CheckpointError(f"{path} has no {keyword}; its objects are {shortened(', '.join(theirs))}")
        for option, row in _rows(keyword, theirs[keyword], owner.options):
            if option not in may_differ:
                rows.append(row)
                names.add(option)
    refuse_differences(path, rows, names, _CHANGEABLE)


def _rows(keyword: str, theirs: _Options, ours: _Options) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """The options of one owner that differ: each option's name, and a row for a table of them."""
    for place in {**ours, **theirs}:
        there, here = theirs.get(place, {}), ours.get(place, {})
        for option in {**here, **there}:
            name = f"{keyword}/{place}.{option}" if place else f"{keyword}.{option}"
            for row in differences(name, there.get(option), here.get(option)):
                yield option, row


def _sources(
    path: str | os.PathLike[str],
    kinds: Kinds,
    shared: Mapping[str, str],
    theirs: Collection[str],
    found: Collection[str],
) -> dict[str, str]:
    """For every key of the given owners in a file, the key under which the file has the array."""
    sources = dict[str, str]()
    for key in sorted({*kinds, *shared}):
        keyword, source = key.partition("/")[0], shared.get(key, key)
        if keyword not in theirs or source not in kinds:
            raise CheckpointError(f"{path} has {shortened(key)}, which belongs to none of its objects")
        if keyword in found:
            sources[key] = source
    return sources


def _tables(theirs: Mapping[str, _Options], found: Mapping[str, Owner]) -> dict[str, Kind]:
    """The arrays with the values of schedules that a file must have, by key."""
    schedules = {keyword: theirs[keyword].get("", {}).get("schedule") for keyword in found}
    return {
        _table_key(keyword): Kind("float32", (each["table"],))
        for keyword, each in schedules.items()
        if isinstance(each, dict) and isinstance(each.get("table"), int)
    }


def _table_key(keyword: str) -> str:
    """The key of the values of an optimizer's `lt.schedules.Table`."""
    return f"{keyword}/schedule"


def _check_shared(path: str | os.PathLike[str], sources: Mapping[str, str], roots: Mapping[str, str]) -> None:
    """Raises `CheckpointError` unless the same keys share an array in a file and here."""
    there, here = _firsts(sources), _firsts(roots)
    for key in roots:
        if there[key] != here[key]:
            other, where = (there[key], "in the file") if there[key] != key else (here[key], "here")
            raise CheckpointError(f"{path}: {key} is the same array as {shortened(other)} only {where}")


def _firsts(roots: Mapping[str, str]) -> dict[str, str]:
    """For every key the first key, in the order of the keys, that has the same root."""
    firsts = dict[str, str]()
    return {key: firsts.setdefault(root, key) for key, root in sorted(roots.items())}
