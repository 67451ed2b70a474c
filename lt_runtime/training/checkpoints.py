"""Checkpoints: everything that a run needs to continue as if it had never been interrupted, in a safetensors file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lt_runtime.arguments import check_instance
from lt_runtime.errors import ArgumentError, CheckpointError
from lt_runtime.grad_scaler import LARGEST_SCALE, SMALLEST_SCALE
from lt_runtime.ops.adamw import AdamW
from lt_runtime.training import checkpoint_file
from lt_runtime.training.checkpoint_file import shortened
from lt_runtime.training.device import ComputeDevice
from lt_runtime.training.mlp import MLP

_FORMAT: Final = 1
_MOMENTS: Final = ("m", "v", "v_max")
_MODEL: Final = ("dims", "dropout", "seed", "compute")
_OPTIMIZER: Final = ("amsgrad", "max_norm", "skip_nonfinite", "stochastic_rounding", "seed")
_SCALER: Final = ("scale", "growth_tracker")
_LAST_STEP: Final = 2**32 - 2
"""An update adds 1 to the number of steps, and uses the sum, in 32 bits."""


def save_checkpoint(path: str | os.PathLike[str], model: MLP, optimizer: AdamW) -> None:
    """Writes parameters, master copies, moments, steps, seeds, the loss scale and all options to a safetensors file.

    An older file of that name is replaced in one step, when the new one is on the disk as a whole. It keeps its mode,
    and a symbolic link stays one: the file that it leads to is replaced. A digest of everything is saved too. What
    killed saves to the same file have left beside it is removed. Waits for the GPU.

    Args:
        optimizer: over parameters of `model`. Nothing may train it meanwhile.

    Raises:
        ArgumentError: the optimizer has other parameters.
        CheckpointError: a value is out of the range that training can reach, see `load_checkpoint`.
        FileError: the file cannot be written, for example because the disk is full; it is an OSError too. An older file
            is as it was, unless only the directory could not be flushed, after the file had been replaced.
    """
    _check_kinds(path, model, optimizer)
    arrays = _arrays(model, optimizer)
    model.device.synchronize()
    host = {name: model.device.to_host(array) for name, array in arrays.items()}
    _check_values(f"{os.fspath(path)} is not written", host, optimizer)
    checkpoint_file.write(path, host, json.dumps(_description(model, optimizer)))


def load_checkpoint(path: str | os.PathLike[str], model: MLP, optimizer: AdamW) -> None:
    """Puts a checkpoint's values into a model and an optimizer that were made with the same options.

    Training then continues bit by bit as it would have. Captured graphs continue too, because the arrays are written in
    place. Waits for the GPU. The host holds the old values until all new ones are written, and puts them back if a
    write fails.

    The file's digest is checked: it shows damage, but is no signature. A file of an earlier version has none, which
    costs a UserWarning. Values that training cannot reach are refused: a loss scale that is no positive, normal FP32
    number, a growth tracker that is negative or not below `growth_interval`, negative second moments or norms, and a
    number of steps of 2³² - 1, after which the 32-bit number of the next update would be 0. Parameters, moments and the
    norm of the gradients may be NaN or infinite, because a NaN or infinite gradient makes them so.

    Raises:
        CheckpointError: the file is damaged, it was not written by `save_checkpoint`, its model or optimizer has other
            options, or a value is out of its range. Nothing has been changed.
        ArgumentError: the optimizer has other parameters than the model.
        FileError: the file cannot be read; it is an OSError too. If there is no file, it is a MissingFileError, which
            is a FileNotFoundError too.
    """
    _check_kinds(path, model, optimizer)
    arrays, ours = _arrays(model, optimizer), _description(model, optimizer)
    values = checkpoint_file.read(path, arrays, lambda text: _check_description(path, text, ours))
    _check_values(f"{os.fspath(path)} cannot be used", values, optimizer)
    model.device.synchronize()
    _replace(model.device, arrays, values)


def _replace(device: ComputeDevice, arrays: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Puts values into arrays; if that fails on the way, the old values are put back, which are kept on the host.

    A GPU need not have room for the arrays a second time.
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


def _check_kinds(path: object, model: object, optimizer: object) -> None:
    check_instance("path", path, (str, os.PathLike), "a string or a pathlib.Path")
    check_instance("model", model, MLP, "an lt.MLP")
    check_instance("optimizer", optimizer, AdamW, "an lt.AdamW")


def _arrays(model: MLP, optimizer: AdamW) -> dict[str, Any]:
    """Everything that training changes, by name."""
    known = {id(parameter) for parameter in model.parameters()}
    for parameter in optimizer.parameters:
        if id(parameter) not in known:
            raise ArgumentError(f"the optimizer has {parameter.name}, which is no parameter of the model")
    arrays = {each.name: each.data for each in model.parameters()}
    arrays |= {f"{each.name}.master": each.master for each in model.parameters()}
    for parameter, moments in zip(optimizer.parameters, optimizer.moments, strict=True):
        arrays |= {f"{parameter.name}.{moment}": array for moment, array in zip(_MOMENTS, moments, strict=False)}
    arrays |= {f"optimizer.{name}": getattr(optimizer, name) for name in ("steps", "skipped_steps", "grad_norm")}
    arrays |= {f"scaler.{name}": getattr(optimizer.scaler, name, None) for name in _SCALER}
    return {name: array for name, array in arrays.items() if array is not None}


def _description(model: MLP, optimizer: AdamW) -> dict[str, Any]:
    """What must be equal for the run to go on in the same way, as JSON gives it back."""
    options, scaler = optimizer.options, optimizer.scaler
    described = {
        "format": _FORMAT,
        "model": {
            **{name: getattr(model, name) for name in _MODEL},
            "activation": dataclasses.asdict(model.activation),
            "dtype": model.dtype.value,
        },
        "optimizer": {
            **dataclasses.asdict(options.hyper),
            **{name: getattr(options, name) for name in _OPTIMIZER},
            "moments": options.moments.value,
            "parameters": {each.name: [each.lr_scale, each.weight_decay] for each in optimizer.parameters},
        },
        "scaler": None if scaler is None else scaler.options,
    }
    result: dict[str, Any] = json.loads(json.dumps(described, default=np.generic.item))
    return result


class _Range(NamedTuple):
    """The values that training can give an array, both ends included."""

    name: str
    lowest: float
    highest: float
    takes_nan: bool = False

    def __str__(self) -> str:
        return f"{self.lowest} to {self.highest}" + (", or NaN" if self.takes_nan else "")

    def holds(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Of each value, whether it is within the range."""
        with np.errstate(invalid="ignore"):  # comparing a signalling NaN
            inside = (values >= self.lowest) & (values <= self.highest)
            return inside | np.isnan(values) if self.takes_nan else inside


def _ranges(optimizer: AdamW) -> Iterator[_Range]:
    """The ranges of all arrays that cannot have any value of their type."""
    for parameter, moments in zip(optimizer.parameters, optimizer.moments, strict=True):
        for moment in _MOMENTS[1 : len(moments)]:
            yield _Range(f"{parameter.name}.{moment}", 0.0, math.inf, takes_nan=True)
    yield _Range("optimizer.steps", 0, _LAST_STEP)
    yield _Range("optimizer.skipped_steps", 0, _LAST_STEP)
    if optimizer.grad_norm is not None:
        yield _Range("optimizer.grad_norm", 0.0, math.inf, takes_nan=True)
    if optimizer.scaler is not None:
        yield _Range("scaler.scale", SMALLEST_SCALE, LARGEST_SCALE)
        yield _Range("scaler.growth_tracker", 0, optimizer.scaler.growth_interval - 1)


def _check_values(complaint: str, arrays: Mapping[str, NDArray[Any]], optimizer: AdamW) -> None:
    for accepted in _ranges(optimizer):
        values = arrays[accepted.name].reshape(-1)
        outside = np.flatnonzero(~accepted.holds(values))
        if outside.size:
            found = f"{accepted.name} has the value {values[outside[0]]!s}"
            raise CheckpointError(f"{complaint}: {found}; accepted are {accepted}")


def _check_description(path: str | os.PathLike[str], text: str, ours: Mapping[str, Any]) -> None:
    try:
        complaint = _complaint(json.loads(text), ours)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} was not written by lt.save_checkpoint") from error
    if complaint is not None:
        raise CheckpointError(f"{path} {complaint}")


def _complaint(theirs: Any, ours: Mapping[str, Any]) -> str | None:
    """Why a description does not do; None if it does."""
    version = theirs["format"]
    if type(version) is not int or version != _FORMAT:
        return f"has format {shortened(repr(version))}; this version reads format {_FORMAT}"
    for name, there, here in _differences("", theirs, ours):
        return f"was saved with {shortened(name)} = {shortened(repr(there))}; here it is {here!r}"
    return None


def _differences(name: str, theirs: Any, ours: Any) -> Iterator[tuple[str, Any, Any]]:
    """Where two descriptions differ: the option, and its value in each."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in {**theirs, **ours}:
            yield from _differences(f"{name}.{key}" if name else key, theirs.get(key), ours.get(key))
        if name.endswith(".parameters") and [*theirs] != [*ours]:
            yield f"the order of {name}", [*theirs], [*ours]
    elif theirs != ours:
        yield name, theirs, ours
