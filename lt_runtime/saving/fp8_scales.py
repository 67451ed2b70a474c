"""Saves and loads the scales of FP8 layers in the files of models and checkpoints.

A layer's arrays are named after it: "layer0.scales.slots", "layer0.scales.history" and "layer0.scales.calibrated". They
are the entries of `FP8State.state_dict`. A layer that has not run yet has none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lt_runtime.arrays.operand import Operand
from lt_runtime.arrays.transfer import host_access, replace_all
from lt_runtime.errors import CheckpointError
from lt_runtime.files import AnyPath
from lt_runtime.fp8 import MOST_STEPS
from lt_runtime.nn.block import Block
from lt_runtime.nn.linear import Linear
from lt_runtime.ops.fp8.state import FP8State, arrays_of, has_types
from lt_runtime.reference.fp8 import SLOT_WIDTH, fault_of
from lt_runtime.saving.checkpoint_file import Arrays, Kind, Kinds, shortened

_NAME: Final = re.compile(r"(?:.*[./])?scales\.(slots|history|calibrated)")
_PARTS: Final = ("slots", "history", "calibrated")
_LENGTHS: Final = {"slots": (SLOT_WIDTH,), "history": range(1, MOST_STEPS + 1), "calibrated": (3,)}
"""Accepted lengths of each array's last axis. The other axis of slots and history has a row for x, w and dy."""


class Loading(NamedTuple):
    """The scales of a file that will be written into a model's layers.

    Attributes:
        writes: the arrays to write and their new values, as `replace_all` takes them.
        calibrated: for each layer's `FP8State` the tensors whose scales the file has.
    """

    writes: list[tuple[Operand, NDArray[Any], int]]
    calibrated: list[tuple[FP8State, set[int]]]

    def write(self, others: Iterable[tuple[Operand, NDArray[Any], int]] = ()) -> None:
        """Writes the scales and other arrays; then tells each layer's state which of its tensors have scales now."""
        replace_all([*others, *self.writes])
        for state, rows in self.calibrated:
            state.calibrated = rows


def names_of_scales(names: Collection[str]) -> set[str]:
    """The names of arrays of scales among the names of a file's arrays."""
    return {name for name in names if _NAME.fullmatch(name)}


def without_scales(kinds: Kinds) -> Kinds:
    """A file's arrays except the arrays of scales."""
    return {name: kind for name, kind in kinds.items() if not _NAME.fullmatch(name)}


def scales_to_save(model: Block) -> dict[str, NDArray[Any]]:
    """Maps names in a file to copies, on the host, of all layers' scales. Waits for the current stream."""
    return {
        f"{place}{part}": array.astype(np.uint32) if part == "calibrated" else array
        for place, layer in _layers(model).items()
        if layer.scales is not None
        for part, array in layer.scales.state_dict().items()
    }


def check_scales(path: AnyPath, kinds: Kinds) -> set[str]:
    """The names of a file's arrays of scales.

    Raises:
        CheckpointError: an array has a type or a shape that scales do not have, or a layer lacks one of its arrays.
    """
    names = names_of_scales(kinds)
    for name in sorted(names):
        place, _, part = name.rpartition(".")
        kind, length = kinds[name], kinds[name].shape[-1:]
        expected = Kind("uint32", (3,)) if part == "calibrated" else Kind("float32", (3, *length))
        if kind != expected or length[0] not in _LENGTHS[part]:
            raise CheckpointError(f"{path}: {shortened(name)} is {shortened(str(kind))}, which no scales are")
        if not {f"{place}.{each}" for each in _PARTS} <= names:
            raise CheckpointError(f"{path} has {shortened(name)}, but not all of {', '.join(_PARTS)} beside it")
    return names


def scales_to_load(path: AnyPath, model: Block, arrays: Arrays) -> Loading:
    """Checks the scales of a file, and prepares loading them into the layers of a model.

    A layer takes no scales if it has no FP8 recipe, or if its recipe has other types or another length of the history.

    Args:
        arrays: maps names in the model to the arrays of scales, without other arrays.

    Raises:
        CheckpointError: the file has a scale or a magnitude that no training can produce; or the model has no layer
            with the name.
    """
    layers, loading = _layers(model), Loading([], [])
    places = sorted({name.rpartition(".")[0] + "." for name in arrays})
    found = {place: {part: arrays[place + part] for part in _PARTS} for place in places}
    for place, values in found.items():
        if place not in layers:
            raise CheckpointError(f"{path} has {shortened(place)}slots, which there is not here")
        fault, calibrated = fault_of(values["slots"], values["history"]), values["calibrated"]
        if not fault and (calibrated > 1).any():
            fault = f"calibrated is {calibrated.tolist()}; accepted are 0 and 1"
        if fault:
            raise CheckpointError(f"{path} cannot be used: {shortened(place)}{fault}")
    for place, values in found.items():
        state = layers[place].scales
        if state is None or not _fits(state, values):
            continue
        for part, array in zip(_PARTS, arrays_of(state, layers[place].weight.data), strict=False):
            operand, stream = host_access(place + part, array)
            loading.writes.append((operand, values[part], stream))
        loading.calibrated.append((state, {int(row) for row in np.flatnonzero(values["calibrated"])}))
    return loading


def _layers(model: Block) -> dict[str, Linear]:
    """Maps the prefix of its scales' names to each linear layer of a model."""
    start = len(model.name) + 1 if model.name else 0
    found = [block for block in model.blocks() if isinstance(block, Linear)]
    return {".".join(filter(None, (each.name[start:], "scales."))): each for each in found}


def _fits(state: FP8State, values: Arrays) -> bool:
    """Whether a file's scales are for the types of a layer's recipe, and the file's history has the recipe's length."""
    return values["history"].shape[1] == state.recipe.steps and has_types(state.recipe, values["slots"])
