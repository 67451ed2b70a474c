"""Checkpoints: everything that a run needs to continue as if it had never been interrupted, in a safetensors file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from lt_runtime.errors import ArgumentError, CheckpointError
from lt_runtime.files import flush, replacing
from lt_runtime.ops.adamw import AdamW
from lt_runtime.training.mlp import MLP

_KEY: Final = "lt_runtime"
_FORMAT: Final = 1
_MOMENTS: Final = ("m", "v", "v_max")
_MODEL: Final = ("dims", "dropout", "seed", "compute")
_OPTIMIZER: Final = ("amsgrad", "max_norm", "skip_nonfinite", "stochastic_rounding", "seed")
_SCALER: Final = ("scale", "growth_tracker")


def save_checkpoint(path: str | os.PathLike[str], model: MLP, optimizer: AdamW) -> None:
    """Writes parameters, master copies, moments, steps, seeds, the loss scale and all options to a safetensors file.

    An older file of that name is replaced at once, when the new one is on the disk as a whole. Waits for the GPU.

    Args:
        optimizer: over parameters of `model`.

    Raises:
        ArgumentError: the optimizer has other parameters.
        OSError: the file cannot be written; an older one is as it was.
    """
    from safetensors.numpy import save_file

    arrays, target = _arrays(model, optimizer), Path(path)
    model.device.synchronize()
    host = {name: model.device.to_host(array) for name, array in arrays.items()}
    with replacing(target) as temporary:
        save_file(host, temporary, {_KEY: json.dumps(_description(model, optimizer))})
    flush(target.parent)


def load_checkpoint(path: str | os.PathLike[str], model: MLP, optimizer: AdamW) -> None:
    """Puts a checkpoint's values into a model and an optimizer that were made with the same options.

    Training then continues bit by bit as it would have. Captured graphs continue too, because the arrays are written in
    place. Waits for the GPU.

    Raises:
        CheckpointError: the file is damaged, it was not written by `save_checkpoint`, or its model or optimizer has
            other options. Nothing has been changed.
        ArgumentError: the optimizer has other parameters than the model.
        OSError: the file cannot be read.
    """
    arrays = _arrays(model, optimizer)
    values = _read(Path(path), arrays, _description(model, optimizer))
    model.device.synchronize()
    for name, array in arrays.items():
        model.device.write(array, values[name])
    model.device.synchronize()


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
    result: dict[str, Any] = json.loads(json.dumps(described))
    return result


def _read(path: Path, arrays: Mapping[str, Any], description: Mapping[str, Any]) -> dict[str, Any]:
    """The file's arrays, once everything about them has been found right."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            _check_description(path, file.metadata(), description)
            for name in sorted(arrays.keys() ^ set(file.keys())):
                found = f"no {name}" if name in arrays else f"{name}, which there is not here"
                raise CheckpointError(f"{path} has {found}")
            values = {name: file.get_tensor(name) for name in arrays}
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {error}") from error
    for name, array in arrays.items():
        there, here = (f"{each.dtype.name} {tuple(each.shape)}" for each in (values[name], array))
        if there != here:
            raise CheckpointError(f"{path}: {name} is {there}; here it is {here}")
    return values


def _check_description(path: Path, metadata: Mapping[str, str] | None, ours: Mapping[str, Any]) -> None:
    try:
        theirs = json.loads((metadata or {})[_KEY])
        version = theirs["format"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} was not written by lt.save_checkpoint") from error
    if version != _FORMAT:
        raise CheckpointError(f"{path} has format {version}; this version reads format {_FORMAT}")
    for name, there, here in _differences("", theirs, dict(ours)):
        raise CheckpointError(f"{path} was saved with {name} = {there!r}; here it is {here!r}")


def _differences(name: str, theirs: Any, ours: Any) -> Iterator[tuple[str, Any, Any]]:
    """Where two descriptions differ: the option, and its value in each."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in {**theirs, **ours}:
            yield from _differences(f"{name}.{key}" if name else key, theirs.get(key), ours.get(key))
        if name.endswith(".parameters") and [*theirs] != [*ours]:
            yield f"the order of {name}", [*theirs], [*ours]
    elif theirs != ours:
        yield name, theirs, ours
