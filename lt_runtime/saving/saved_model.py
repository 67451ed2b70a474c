"""Models in safetensors files: the parameters' values and the options of the model."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lt_runtime.arguments import check_instance, integers
from lt_runtime.errors import ArgumentError, CheckpointError, OperandError
from lt_runtime.gpu.devices import parse_device
from lt_runtime.ops._adamw_parameters import check_rounding, write_values
from lt_runtime.problem import DType
from lt_runtime.saving import checkpoint_file
from lt_runtime.saving.checkpoint_file import Kind, Kinds, kind_of, of_others, shortened
from lt_runtime.training.mlp import MLP

FORMAT: Final = 1
MASTER: Final = ".master"
"""The end of the name of a master copy, after the parameter's name."""
MOMENTS: Final = ("m", "v", "v_max")

_FLOATS: Final = ("float32", "float16", "bfloat16")
_WORDS: Final = ("float32", "uint32", "int32")

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""The shapes of parameters, by name."""


def save_model(path: str | os.PathLike[str], model: MLP) -> None:
    """Writes a model to a safetensors file: its parameters' values and its options, for `load_model`.

    If there are FP32 master copies, their values are saved, so that training can continue from the file. Other tools
    find them as "layer0.weight", "layer0.bias" and so on. An older file is replaced as by `save_checkpoint`. Waits for
    the GPU.

    Raises:
        OperandError: a parameter's data are not the rounding of its master copy, see `Parameter.assign`.
        FileError: the file cannot be written; it is an OSError too. An older file stays unchanged, unless it had been
            replaced and only the flush of the directory failed.
    """
    check_instance("path", path, (str, os.PathLike), "a string or a pathlib.Path")
    check_instance("model", model, MLP, "an lt.MLP")
    model.device.synchronize()
    values = {}
    for each in model.parameters():
        values[each.name] = data = model.device.to_host(each.data)
        if each.master is not None:
            values[each.name] = master = model.device.to_host(each.master)
            check_rounding(each.name, data, master)
    checkpoint_file.write(path, values, json.dumps({"format": FORMAT, "model": options_of(model)}))


def load_model(path: str | os.PathLike[str], device: object = "auto") -> MLP:
    """Makes the model of a file that `save_model` or `save_checkpoint` has written.

    The file's digest is checked as by `load_checkpoint`. The model is made only after the file has been found to hold
    all its values.

    Args:
        device: the device of the model: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:N", a GPU's ordinal, or a
            `torch.device`.

    Raises:
        CheckpointError: the file is damaged, or it was not written by `save_model` or `save_checkpoint` of this version
            or an earlier one.
        ArgumentError: a device that does not exist.
        FileError: the file cannot be read; it is an OSError too. If there is no file, it is a MissingFileError, which
            is a FileNotFoundError too.
    """
    check_instance("path", path, (str, os.PathLike), "a string or a pathlib.Path")
    place = parse_device(device)
    text, values = checkpoint_file.read(path, lambda text, kinds: value_names(path, kinds, _shapes(path, text, kinds)))
    try:
        model = MLP(**description_of(path, text)["model"], device="cpu" if place is None else place)
    except (ArgumentError, OperandError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} describes no model: {shortened(str(error))}") from error
    write_saved(path, model, values)
    return model


def options_of(model: MLP) -> dict[str, Any]:
    """The options of a model, with `master_weights` true if an optimizer has made master copies since."""
    has_masters = model.dtype is not DType.BFLOAT16 or any(each.master is not None for each in model.parameters())
    return {**model.options, "master_weights": has_masters}


def description_of(path: str | os.PathLike[str], text: str) -> dict[str, Any]:
    """The description of the model, and in a checkpoint of the optimizer, in a file's text.

    Raises:
        CheckpointError: the text is no description, or has another format version.
    """
    try:
        description = json.loads(text)
        version = description["format"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise of_others(path) from error
    if type(version) is not int or version != FORMAT:
        found = f"{path} has format {shortened(repr(version))}"
        raise CheckpointError(f"{found}; this version reads format {FORMAT}")
    if not isinstance(description.get("model"), dict):
        raise of_others(path)
    return {**description, "model": {**_DEFAULTS, **description["model"]}}


def value_names(path: str | os.PathLike[str], kinds: Kinds, shapes: Shapes) -> list[str]:
    """Names of the arrays with the most accurate values of the given parameters: master copies where the file has them.

    Raises:
        CheckpointError: the file lacks a parameter, has one of another shape, or an array that no checkpoint has.
    """
    for name in shapes.keys() - kinds.keys():
        raise CheckpointError(f"{path} has no {shortened(name)}")
    for name, kind in kinds.items():
        owner, _, part = name.rpartition(".")
        shape = shapes.get(name, shapes.get(owner) if part in (MASTER[1:], *MOMENTS) else None)
        is_number = kind.dtype in _WORDS and math.prod(kind.shape) == 1
        if shape is None and not (owner in ("optimizer", "scaler") and is_number):
            raise CheckpointError(f"{path} has {shortened(name)}, which there is not here")
        if shape is not None and (kind.shape != shape or kind.dtype not in _FLOATS):
            raise CheckpointError(f"{path}: {shortened(name)} is {shortened(str(kind))}; here its shape is {shape}")
    return [name + MASTER if name + MASTER in kinds else name for name in shapes]


def write_saved(path: str | os.PathLike[str], model: MLP, values: Mapping[str, NDArray[Any]]) -> None:
    """Writes values, by the names of `value_names`, into all parameters of a model and their master copies.

    Raises:
        CheckpointError: the parameters have other names or shapes.
    """
    found = {name.removesuffix(MASTER): array.astype(np.float32, copy=False) for name, array in values.items()}
    like = {each.name: Kind("float32", kind_of(each.data).shape) for each in model.parameters()}
    checkpoint_file.check_kinds(path, {name: kind_of(array) for name, array in found.items()}, like)
    write_values([(each, found[each.name]) for each in model.parameters()])


def _shapes(path: str | os.PathLike[str], text: str, kinds: Kinds) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of a file's model, from the file's `dims` and the names of its biases.

    They are compared with the file's arrays before a model is made, in case the file claims huge sizes.
    """
    try:
        dims = integers("dims", description_of(path, text)["model"]["dims"])
    except (ArgumentError, KeyError) as error:
        raise of_others(path) from error
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (inputs, outputs) in enumerate(itertools.pairwise(dims)):
        shapes[f"layer{i}.weight"] = outputs, inputs
        if f"layer{i}.bias" in kinds:
            shapes[f"layer{i}.bias"] = (outputs,)
    return shapes


_DEFAULTS: Final = {
    name: parameter.default
    for name, parameter in inspect.signature(MLP).parameters.items()
    if name not in ("dims", "device")
}
"""Defaults of the options, for files of earlier versions, which lack the newer options."""
