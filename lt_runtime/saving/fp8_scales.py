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

from lt_runtime.arrays.operand import CUPY, Operand, read
from lt_runtime.arrays.transfer import replace_all
from lt_runtime.errors import CheckpointError
from lt_runtime.files import AnyPath
from lt_runtime.nn.block import Block
from lt_runtime.nn.linear import Linear
from lt_runtime.ops.fp8.state import FP8State, arrays_of, has_types
from lt_runtime.reference.fp8 import (
    AMAX,
    INVERSE,
    LARGEST,
    LARGEST_NUMBER,
    OVERFLOWS,
    SCALE,
    SCALE_EXPONENT,
    SLOT_WIDTH,
)
from lt_runtime.saving.checkpoint_file import Arrays, Kind, Kinds, shortened

_NAME: Final = re.compile(r"(?:.*[./])?scales\.(slots|history|calibrated)")
_PARTS: Final = ("slots", "history", "calibrated")
_COUNTS: Final = {"slots": (SLOT_WIDTH, SLOT_WIDTH), "history": (1, 1024), "calibrated": (1, 1)}
"""The smallest and largest number of words that each array has for each of x, w and dy."""


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
        (low, high), kind = _COUNTS[part], kinds[name]
        count = kind.shape[-1] if len(kind.shape) == 2 else 1
        shape = (3,) if part == "calibrated" else (3, count)
        if kind != Kind("uint32" if part == "calibrated" else "float32", shape) or not low <= count <= high:
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
        if fault := _fault(values):
            raise CheckpointError(f"{path} cannot be used: {shortened(place)}{fault}")
    device = model.device.ordinal
    stream = 0 if device is None else CUPY.current_stream(device)
    for place, values in found.items():
        state = layers[place].scales
        if state is None or not _fits(state, values):
            continue
        held = zip(("slots", "history"), arrays_of(state, layers[place].weight.data), strict=True)
        loading.writes.extend((read(place + part, array, stream), values[part], stream) for part, array in held)
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


def _fault(values: Arrays) -> str:
    """Says which of a layer's scales no training can reach, as the end of an error message; empty if there are none."""
    slots, history, calibrated = (values[part] for part in _PARTS)
    with np.errstate(all="ignore"):
        is_power = np.frexp(slots[:, SCALE])[0] == 0.5
        is_limited = (slots[:, SCALE] >= 2.0**-SCALE_EXPONENT) & (slots[:, SCALE] <= 2.0**SCALE_EXPONENT)
        if not (is_power & is_limited & (slots[:, INVERSE] == 1 / slots[:, SCALE])).all():
            return f"slots has the scales {slots[:, SCALE].tolist()}, 1 / {slots[:, INVERSE].tolist()}"
        if not np.isin(slots[:, LARGEST_NUMBER], [*LARGEST.values()]).all() or (slots[:, AMAX] < 0).any():
            return "slots has magnitudes that no FP8 type has"
        if not (np.isfinite(slots[:, OVERFLOWS]) & (slots[:, OVERFLOWS] >= 0)).all():
            return f"slots has the counts {slots[:, OVERFLOWS].tolist()}"
    if not (np.isfinite(history) & (history >= 0)).all():
        return "history has magnitudes that are negative, infinite or NaN"
    return f"calibrated is {calibrated.tolist()}; accepted are 0 and 1" if (calibrated > 1).any() else ""
