"""Checkpoints: safetensors files from which training continues bit by bit as if it had not been interrupted."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lt_runtime.arguments import check_instance, one_of, shown
from lt_runtime.errors import ArgumentError, CheckpointError, OperandError
from lt_runtime.grad_scaler import LARGEST_SCALE, SMALLEST_SCALE
from lt_runtime.ops._adamw_parameters import check_rounding
from lt_runtime.ops.adamw import AdamW, Parameter
from lt_runtime.saving import checkpoint_file
from lt_runtime.saving.checkpoint_file import Kinds, check_kinds, kind_of
from lt_runtime.saving.plan_choices import choices_of, take_choices
from lt_runtime.saving.saved_model import (
    FORMAT,
    MASTER,
    MOMENTS,
    description_of,
    options_of,
    value_names,
    write_saved,
)
from lt_runtime.training.device import ComputeDevice
from lt_runtime.training.mlp import MLP

_OPTIMIZER: Final = ("amsgrad", "max_norm", "skip_nonfinite", "stochastic_rounding", "seed")
_SCALER: Final = ("scale", "growth_tracker")
_PER_PARAMETER: Final = ("lr_scale", "weight_decay")

_CHANGEABLE: Final[Mapping[str, tuple[str, ...]]] = {
    **{name: (name,) for name in ("compute", "dropout", "eps", "lr", "lr_scale", "max_norm")},
    **{name: (name,) for name in ("scaler", "schedule", "seed", "weight_decay")},
    "betas": ("beta1", "beta2"),
}
"""Options that may have other values when a run continues, and their names in descriptions."""
_PLANS: Final = "plans"
_SEEN_OTHERWISE: Final = frozenset({"master_weights"})  # the names of the arrays show whether there are master copies
_OF_TRAINING: Final = frozenset({"compute", "dropout", "seed"})
"""Options that matter only for training: a model's values can be loaded without regard to them."""

_ROWS: Final = 20
_NAME: Final = 60
_CELL: Final = 40

_LAST_STEP: Final = 2**32 - 2
"""An update adds 1 to the number of steps, and uses the sum, in 32 bits."""


def save_checkpoint(path: str | os.PathLike[str], model: MLP, optimizer: AdamW) -> None:
    """Writes parameters, master copies, moments, steps, seeds, the loss scale and all options to a safetensors file.

    The plan cache's entries for the model's training steps are saved with them, see `load_checkpoint`. A digest of
    everything is saved too. An older file of that name is replaced in one step, when the new file is completely on the
    disk. The new file has the older one's mode. If the path is a symbolic link, its target is replaced. Temporary files
    of killed saves to the same path are removed. Waits for the GPU.

    Args:
        optimizer: over parameters of `model`. No other thread may train the model during the call.

    Raises:
        ArgumentError: the optimizer has other parameters.
        CheckpointError: a value is out of the range that training can reach, see `load_checkpoint`.
        FileError: the file cannot be written, for example because the disk is full; it is an OSError too. An older file
            stays unchanged, unless it had been replaced and only the flush of the directory failed.
    """
    _check_kinds(path, model, optimizer)
    arrays = _arrays(model, optimizer)
    model.device.synchronize()
    host = {name: model.device.to_host(array) for name, array in arrays.items()}
    _check_values(f"{os.fspath(path)} is not written", host, model, optimizer)
    plans = choices_of(model)
    described = _description(model, optimizer) | ({} if plans is None else {_PLANS: plans})
    checkpoint_file.write(path, host, json.dumps(described))


def load_checkpoint(
    path: str | os.PathLike[str], model: MLP, optimizer: AdamW | None = None, *, changed: Collection[str] = ()
) -> None:
    """Loads a checkpoint's values into a model and an optimizer that were made with the same options.

    Training then continues bit by bit as if it had not been interrupted. The arrays are written in place, so that
    captured graphs continue too. Waits for the GPU. The host keeps the old values until all new ones are written, and
    restores them if a write fails.

    If the checkpoint was saved on the same kind of machine, its plan choices are added to the plan cache for problems
    that the cache does not know, as by `python -m lt_runtime cache merge`: algorithms are rebuilt, and verified before
    their first use. A step that has run before keeps its plans.

    The file's digest is checked; it shows damage, but is no signature. A file of an earlier version has no digest,
    which costs a UserWarning. Values that training cannot reach are refused: a loss scale that is no positive, normal
    FP32 number, a growth tracker that is negative or not below `growth_interval`, negative second moments or norms,
    data that are not the rounding of their master copy, and a number of steps of 2³² - 1, after which the 32-bit number
    of the next update would be 0. Parameters, moments and the norm of the gradients may be NaN or infinite, because a
    NaN or infinite gradient makes them so.

    Args:
        optimizer: None loads only the parameters' values. The file may then also come from `save_model`, and
            `compute`, `dropout`, `seed` and master copies of the model may differ from the file's.
        changed: names of options that may differ from the file's; the model's and optimizer's present values are kept:
            "betas", "compute", "dropout", "eps", "lr", "lr_scale", "max_norm", "scaler", "schedule", "seed",
            "weight_decay".

    Raises:
        CheckpointError: the file is damaged, it was not written by `save_checkpoint`, its model or optimizer has other
            options, all of which the message lists, or a value is out of its range. Nothing has been changed.
        ArgumentError: the optimizer has other parameters than the model, or `changed` has another name.
        FileError: the file cannot be read; it is an OSError too. If there is no file, it is a MissingFileError, which
            is a FileNotFoundError too.
    """
    _check_kinds(path, model, optimizer, "None or an lt.AdamW", type(None))
    may_differ = _parts_of(changed)
    if optimizer is None:
        _, values = checkpoint_file.read(path, lambda text, kinds: _model_names(path, text, kinds, model))
        write_saved(path, model, values)
        return
    arrays, ours = _arrays(model, optimizer), _description(model, optimizer)
    plans: object = None

    def wanted(text: str, kinds: Kinds) -> Kinds:
        nonlocal plans
        theirs = description_of(path, text)
        plans = theirs.pop(_PLANS, None)
        if "optimizer" not in theirs:
            raise CheckpointError(f"{path} has no optimizer: lt.save_model wrote it; load it without an optimizer")
        _check_options(path, theirs, ours, may_differ)
        check_kinds(path, kinds, {name: kind_of(array) for name, array in arrays.items()})
        return kinds

    _, values = checkpoint_file.read(path, wanted)
    _check_values(f"{os.fspath(path)} cannot be used", values, model, optimizer)
    model.device.synchronize()
    _replace(model.device, arrays, values)
    take_choices(path, plans, model)


def _replace(device: ComputeDevice, arrays: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Writes values into arrays, and restores the old values if a write fails.

    The old values are kept on the host, so that the GPU need not hold the arrays twice.
    """
    before = {name: device.to_host(array).copy() for name, array in arrays.items()}
    try:
        for name, array in arrays.items():
            device.write(array, values[name])
        device.synchronize()
    except BaseException:
        for name, array in arrays.items():
            device.write(array, before[name])
        device.synchronize()
        raise


def _check_kinds(path: object, model: object, optimizer: object, accepted: str = "an lt.AdamW", *more: type) -> None:
    check_instance("path", path, (str, os.PathLike), "a string or a pathlib.Path")
    check_instance("model", model, MLP, "an lt.MLP")
    check_instance("optimizer", optimizer, (AdamW, *more), accepted)


def _parts_of(changed: Any) -> set[str]:
    """The names in descriptions of the options that a caller lists as changed."""
    check_instance("changed", changed, (tuple, list, set, frozenset), "a tuple of options' names")
    names = [one_of(f"changed[{i}]", name, _CHANGEABLE) for i, name in enumerate(changed)]
    return {part for name in names for part in _CHANGEABLE[name]}


def _arrays(model: MLP, optimizer: AdamW) -> dict[str, Any]:
    """Everything that training changes, by name."""
    known = {id(parameter) for parameter in model.parameters()}
    for parameter in optimizer.parameters:
        if id(parameter) not in known:
            raise ArgumentError(f"the optimizer has {parameter.name}, which is no parameter of the model")
    arrays = {each.name: each.data for each in model.parameters()}
    arrays |= {f"{each.name}{MASTER}": each.master for each in model.parameters()}
    for parameter, moments in zip(optimizer.parameters, optimizer.moments, strict=True):
        arrays |= {f"{parameter.name}.{moment}": array for moment, array in zip(MOMENTS, moments, strict=False)}
    arrays |= {f"optimizer.{name}": getattr(optimizer, name) for name in ("steps", "skipped_steps", "grad_norm")}
    arrays |= {f"scaler.{name}": getattr(optimizer.scaler, name, None) for name in _SCALER}
    return {name: array for name, array in arrays.items() if array is not None}


def _model_names(path: str | os.PathLike[str], text: str, kinds: Kinds, model: MLP) -> list[str]:
    """Checks a file's model against ours, and returns the names of the arrays with the parameters' values."""
    theirs, ours = description_of(path, text)["model"], model.options
    _check_options(path, {"model": theirs}, {"model": ours}, _OF_TRAINING)
    return value_names(path, kinds, {each.name: kind_of(each.data).shape for each in model.parameters()})


def _description(model: MLP, optimizer: AdamW) -> dict[str, Any]:
    """The options that must be equal for a run to continue, as JSON returns them."""
    options, scaler = optimizer.options, optimizer.scaler
    described = {
        "format": FORMAT,
        "model": options_of(model),
        "optimizer": {
            **dataclasses.asdict(options.hyper),
            **{name: getattr(options, name) for name in _OPTIMIZER},
            "moments": options.moments.value,
            "parameters": {each.name: _rates(each) for each in optimizer.parameters},
        },
        "scaler": None if scaler is None else scaler.options,
    }
    result: dict[str, Any] = json.loads(json.dumps(described))
    return result


def _rates(parameter: Parameter) -> list[float | None]:
    """The settings of `_PER_PARAMETER`, converted from NumPy scalars."""
    given = (getattr(parameter, name) for name in _PER_PARAMETER)
    return [None if value is None else float(value) for value in given]


class _Range(NamedTuple):
    """The values that training can give an array, both ends included."""

    name: str
    lowest: float
    highest: float
    takes_nan: bool = False

    def __str__(self) -> str:
        return f"{self.lowest} to {self.highest}" + (", or NaN" if self.takes_nan else "")

    def holds(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Whether each value is within the range."""
        with np.errstate(invalid="ignore"):  # raised by a comparison with a signalling NaN
            inside = (values >= self.lowest) & (values <= self.highest)
            return inside | np.isnan(values) if self.takes_nan else inside


def _ranges(optimizer: AdamW) -> Iterator[_Range]:
    """The ranges of the arrays that training cannot give every value of their type."""
    for parameter, moments in zip(optimizer.parameters, optimizer.moments, strict=True):
        for moment in MOMENTS[1 : len(moments)]:
            yield _Range(f"{parameter.name}.{moment}", 0.0, math.inf, takes_nan=True)
    yield _Range("optimizer.steps", 0, _LAST_STEP)
    yield _Range("optimizer.skipped_steps", 0, _LAST_STEP)
    if optimizer.grad_norm is not None:
        yield _Range("optimizer.grad_norm", 0.0, math.inf, takes_nan=True)
    if optimizer.scaler is not None:
        yield _Range("scaler.scale", SMALLEST_SCALE, LARGEST_SCALE)
        yield _Range("scaler.growth_tracker", 0, optimizer.scaler.growth_interval - 1)


def _check_values(complaint: str, arrays: Mapping[str, NDArray[Any]], model: MLP, optimizer: AdamW) -> None:
    for parameter in model.parameters():
        if parameter.master is not None:
            try:
                check_rounding(parameter.name, arrays[parameter.name], arrays[f"{parameter.name}{MASTER}"])
            except OperandError as error:
                raise CheckpointError(f"{complaint}: {error}") from error
    for accepted in _ranges(optimizer):
        values = arrays[accepted.name].reshape(-1)
        outside = np.flatnonzero(~accepted.holds(values))
        if outside.size:
            found = f"{accepted.name} has the value {values[outside[0]]!s}"
            raise CheckpointError(f"{complaint}: {found}; accepted are {accepted}")


def _check_options(
    path: str | os.PathLike[str],
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    may_differ: Set[str],
) -> None:
    """Raises `CheckpointError`, with a table of the differing options, if options differ that must be equal."""
    rows = [
        row for row in _differences("", theirs, ours) if (may_differ | _SEEN_OTHERWISE).isdisjoint(row[0].split("."))
    ]
    if rows:
        parts = {part for name, *_ in rows for part in name.split(".")}
        names = tuple(name for name, aliases in _CHANGEABLE.items() if not parts.isdisjoint(aliases))
        advice = f"\nWith changed={names} yours are used for these." if names else ""
        raise CheckpointError(f"{path} was saved with other options:\n{_table(rows)}{advice}")


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    """A table of differing options. Names from the file are escaped, and the table has at most `_ROWS` lines."""
    cells = [(ascii(name)[1:-1][:_NAME], there[:_CELL], here[:_CELL]) for name, there, here in rows[:_ROWS]]
    cells = [("option", "in the file", "here"), *cells]
    first, second = (max(len(row[column]) for row in cells) for column in range(2))
    lines = [f"  {name:{first}}  {there:{second}}  {here}" for name, there, here in cells]
    return "\n".join([*lines, *([f"  and {len(rows) - _ROWS} more"] if len(rows) > _ROWS else [])])


def _differences(name: str, theirs: Any, ours: Any) -> Iterator[tuple[str, str, str]]:
    """The differences of two descriptions: the option, its value in the file, and ours, as errors show them."""
    if name.startswith("optimizer.parameters.") and isinstance(theirs, list) and isinstance(ours, list):
        theirs, ours = (dict(zip(_PER_PARAMETER, rates, strict=False)) for rates in (theirs, ours))
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in {**theirs, **ours}:
            yield from _differences(f"{name}.{key}" if name else key, theirs.get(key), ours.get(key))
        if name.endswith(".parameters") and [*theirs] != [*ours]:
            yield f"the order of {name}", shown([*theirs]), shown([*ours])
    elif theirs != ours:
        yield name, shown(theirs), shown(ours)
