"""Saves models and checkpoints in safetensors files; training continues bit by bit from a loaded checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from lt_runtime.arguments import check_instance, integers, one_of, shown
from lt_runtime.arrays.operand import CUPY, read
from lt_runtime.arrays.transfer import store
from lt_runtime.distributed.group import Group, check_group, first_alone
from lt_runtime.errors import ArgumentError, CheckpointError, OperandError
from lt_runtime.files import AnyPath, parse_json
from lt_runtime.fp8 import FP8
from lt_runtime.gpu.devices import parse_device
from lt_runtime.nn.block import Block
from lt_runtime.nn.linear import scales_of
from lt_runtime.nn.mlp import MLP, shapes_of
from lt_runtime.ops.optimizers.adamw import AdamW
from lt_runtime.ops.optimizers.optimizer import Bounds, Optimizer, outside, state_arrays, state_ranges
from lt_runtime.ops.optimizers.parameters import check_rounding, rounded, values_for, write_values
from lt_runtime.problem import Activation
from lt_runtime.rules import AMSGrad
from lt_runtime.saving import checkpoint_file
from lt_runtime.saving.checkpoint_file import Arrays, Kinds, check_kinds, kind_of, of_others, shortened
from lt_runtime.saving.descriptions import describe, make, named_parameters, options_of
from lt_runtime.saving.fp8_scales import check_scales, names_of_scales, scales_to_load, scales_to_save, without_scales
from lt_runtime.saving.plan_choices import choices_of, take_choices
from lt_runtime.schedules import AnySchedule, Table

_FORMAT: Final = 1
STATE_FORMAT: Final = 2
"""The format version of the files of `lt.save`."""
_READERS: Final = {_FORMAT: "lt.load_checkpoint or lt.load_model", STATE_FORMAT: "lt.load"}
MASTER: Final = ".master"
"""Suffix of the name of a master copy, after the parameter's name."""
_MOMENTS: Final = ("m", "v", "v_max")

_FLOATS: Final = ("float32", "float16", "bfloat16")
_WORDS: Final = ("float32", "uint32", "int32")

_OPTIMIZER: Final = ("max_norm", "skip_nonfinite", "stochastic_rounding", "seed")
_GRAD_NORM: Final = "optimizer.grad_norm"
_STATE: Final = {
    **{name: f"optimizer.{name}" for name in ("steps", "skipped_steps")},
    **{name: f"scaler.{name}" for name in ("scale", "growth_tracker")},
}
"""Maps the names of arrays in `Optimizer.state_dict`, moments excepted, to their names in a checkpoint."""
_PER_PARAMETER: Final = ("lr_scale", "weight_decay")

CHANGEABLE: Final = (
    *("compute", "dropout", "eps", "lr", "lr_scale", "max_norm", "scaler", "schedule", "seed", "weight_decay"),
    *("betas", "precision"),
)
"""Names of options that `load_checkpoint(..., changed=...)` accepts: their values may differ from the checkpoint's."""
_PLANS: Final = "plans"
# Options of a model that are not compared: the names of a file's arrays already tell whether it has master copies.
_SEEN_OTHERWISE: Final = frozenset({"master_weights"})
_OF_TRAINING: Final = frozenset({"compute", "dropout", "precision", "seed"})
"""Options of a model that matter only for training, and are not compared when only a model's values are loaded."""

_ROWS: Final = 20
_NAME: Final = 60
_CELL: Final = 40


def save_checkpoint(path: AnyPath, model: Block, optimizer: Optimizer, *, group: Group | None = None) -> None:
    """Writes parameters, master copies, moments, steps, seeds, scales and all options to a safetensors file.

    The scales are those of the loss, and those of layers in FP8 with their histories. The plan cache's entries for the
    model's training steps are saved with them, see `load_checkpoint`. A digest of everything is saved too. An older
    file of that name is replaced in one step, when the new file is completely on the disk. The new file has the older
    one's mode. If the path is a symbolic link, its target is replaced. Temporary files of killed saves to the same path
    are removed. Waits for the GPU.

    Args:
        optimizer: an optimizer of parameters of `model`. No other thread may train the model during the call.
        group: processes that train together. All call this; process 0 writes the file, and the others wait for it. The
            file does not depend on the number of processes, each of which may load it.

    Raises:
        GroupError: in the other processes, if process 0 could not write the file.
        ArgumentError: the optimizer has other parameters, or a block of the model is not of the package: `lt.save`
            takes such models.
        OperandError: an array of a parameter has been replaced since the optimizer was made.
        CheckpointError: a value is out of the range that training can reach, see `load_checkpoint`.
        FileError: the file cannot be written, for example because the disk is full; it is an OSError too. An older file
            stays unchanged, unless it had been replaced and only the flush of the directory failed.
    """
    _check_kinds(path, model)
    check_instance("optimizer", optimizer, Optimizer, "an lt.AdamW or an lt.Optimizer")
    by_first(path, group, [model, optimizer], partial(_save, path, model, optimizer))


@contextlib.contextmanager
def whole_states(owners: Iterable[object]) -> Iterator[None]:
    """Within a `with` block, the optimizers among some objects have their whole state, see `Optimizer.whole_state`.

    Raises:
        OperandError: an array of a parameter has been replaced since an optimizer was made.
    """
    optimizers = [each for each in owners if isinstance(each, Optimizer)]
    for each in optimizers:
        each.check_arrays()  # before the first `whole_state`, which replaces master copies within its block
    with contextlib.ExitStack() as stack:
        for each in optimizers:
            stack.enter_context(each.whole_state())
        yield


def by_first(path: AnyPath, group: Group | None, owners: Collection[object], write: Callable[[], object]) -> None:
    """Calls `write`, which works on the file at `path`, in process 0 alone while the other processes wait.

    Args:
        owners: the objects to save; optimizers among them have their whole state meanwhile.

    Raises:
        KindError: `group` is no group.
        GroupError: in the other processes, if process 0 has failed; or in all, if a process lacks a master copy.
    """
    check_group(group)
    with whole_states(owners):
        if group is not None:
            parameters = [each for model in owners if isinstance(model, Block) for each in model.parameters()]
            masters = {each.name: each.master is not None for each in parameters}
            with group.patience():  # process 0 may have worked alone for long before it saves
                group.agree(masters, "master copies; pass the optimizer too, whose state the processes divide")
        with first_alone(group, f"the writing of {os.fspath(path)}") as is_first:
            if is_first:
                write()


def _save(path: AnyPath, model: Block, optimizer: Optimizer) -> None:
    arrays = _arrays(model, optimizer)
    model.device.synchronize()
    host = {name: model.device.to_host(array) for name, array in arrays.items()} | scales_to_save(model)
    _check_values(f"{os.fspath(path)} is not written", host, model, optimizer)
    plans = choices_of(model)
    described = _description(model, optimizer) | ({} if plans is None else {_PLANS: plans})
    checkpoint_file.write(path, host, json.dumps(described))


def load_checkpoint(
    path: AnyPath, model: Block, optimizer: Optimizer | None = None, *, changed: Collection[str] = ()
) -> None:
    """Loads a checkpoint's values into a model and an optimizer that were made with the same options.

    Training then continues bit by bit as if it had not been interrupted. The arrays are written in place, so that
    captured graphs continue too. Waits for the GPU. The host keeps the old values until all new ones are written, and
    restores them if a write fails.

    If the checkpoint was saved on the same kind of machine, its plan choices are added to the plan cache for problems
    that the cache does not know, as by `python -m lt_runtime cache merge`: algorithms are rebuilt, and verified before
    their first use. A step that has run before keeps its plans.

    A layer in FP8 takes the file's scales and histories. If the file's model had no FP8, the layer keeps its own
    scales, or computes them from its first batch. A model without FP8 ignores the file's scales.

    The file's digest is checked; the digest reveals damage, but is no signature. Values that training cannot reach are
    refused: a loss scale that is no positive, normal FP32 number, a growth tracker that is negative or not below
    `growth_interval`, negative second moments or norms, data that are not the rounding of their master copy, and a
    number of steps of 2³² - 1, after which the 32-bit number of the next update would be 0. Parameters, moments and the
    norm of the gradients may be NaN or infinite, because a NaN or infinite gradient makes them so.

    Args:
        optimizer: None loads only the parameters' values. The file may then also come from `save_model`, and
            `compute`, `dropout`, `precision`, `seed` and master copies of the model may differ from the file's.
        changed: names of options that may differ from the file's; the model's and optimizer's present values are kept:
            "betas", "compute", "dropout", "eps", "lr", "lr_scale", "max_norm", "precision", "scaler", "schedule",
            "seed", "weight_decay". "precision" is for two different recipes: a layer whose recipe has other types or
            another length of the history than the file's takes no scales from the file.

    Raises:
        CheckpointError: the file is damaged, it was not written by `save_checkpoint`, its model or optimizer has other
            options, all of which the message lists, or a value is out of its range. Nothing has been changed.
        ArgumentError: the optimizer has other parameters than the model, or `changed` has another name.
        OperandError: an array of a parameter has been replaced since the optimizer was made.
        FileError: the file cannot be read; it is an OSError too. If there is no file, it is a MissingFileError, which
            is a FileNotFoundError too.
    """
    _check_kinds(path, model)
    check_instance("optimizer", optimizer, (Optimizer, type(None)), "None, an lt.AdamW or an lt.Optimizer")
    check_instance("changed", changed, (tuple, list, set, frozenset), "a tuple of options' names")
    may_differ = {one_of(f"changed[{i}]", name, CHANGEABLE) for i, name in enumerate(changed)}
    with whole_states([optimizer]):
        _load(path, model, optimizer, may_differ)


def _load(path: AnyPath, model: Block, optimizer: Optimizer | None, may_differ: Set[str]) -> None:
    arrays = {} if optimizer is None else _arrays(model, optimizer)
    with checkpoint_file.reading(path) as file:
        theirs = _description_of(path, file.text)
        if optimizer is None:
            _check_options(path, {"model": theirs["model"]}, {"model": _options_of(model)}, _OF_TRAINING)
            names = _value_names(path, file.kinds, _shapes_of(model))
            _write_saved(path, model, file.load([*names, *check_scales(path, file.kinds)]))
            return
        plans = theirs.pop(_PLANS, None)
        if "optimizer" not in theirs:
            raise CheckpointError(f"{path} has no optimizer: lt.save_model wrote it; load it without an optimizer")
        _check_options(path, theirs, _description(model, optimizer), may_differ)
        scales = check_scales(path, file.kinds)
        check_kinds(path, without_scales(file.kinds), {name: kind_of(array) for name, array in arrays.items()})
        values = file.load(file.kinds)
    _check_values(f"{os.fspath(path)} cannot be used", values, model, optimizer)
    loading = scales_to_load(path, model, {name: values[name] for name in scales})
    model.device.synchronize()
    device = model.device.ordinal
    stream = 0 if device is None else CUPY.current_stream(device)
    writes = [(read(name, array, stream), values[name], stream) for name, array in arrays.items()]
    loading.write(writes)
    take_choices(path, plans, model)


def save_model(path: AnyPath, model: Block, *, optimizer: Optimizer | None = None, group: Group | None = None) -> None:
    """Writes a model to a safetensors file: its parameters' values and its options, for `load_model`.

    The model is an `lt.MLP`, or made of the package's blocks, which may share weights. If there are FP32 master copies,
    their values are saved, so that training can continue from the file. Other tools find them as "layer0.weight",
    "layer0.bias" and so on. The scales of layers in FP8 are saved too, see `lt.FP8State`. An older file is replaced as
    by `save_checkpoint`. Waits for the GPU.

    Args:
        optimizer: the model's optimizer; needed if the processes of a group divide the optimizer's state. The optimizer
            then gathers the master copies, of which each process has only some. The optimizer itself is not saved.
        group: processes that train together, as for `save_checkpoint`.

    Raises:
        GroupError: in the other processes, if process 0 could not write the file.
        ArgumentError: the model has a block that is not of the package; `lt.save` takes such models.
        OperandError: a parameter's data are not the rounding of its master copy, see `Parameter.assign`.
        FileError: the file cannot be written; it is an OSError too. An older file stays unchanged, unless it had been
            replaced and only the flush of the directory failed.
    """
    _check_kinds(path, model)
    check_instance("optimizer", optimizer, (Optimizer, type(None)), "None or the model's optimizer")
    by_first(path, group, [model, optimizer], partial(_save_model, path, model))


def _save_model(path: AnyPath, model: Block) -> None:
    model.device.synchronize()
    described, values = json.dumps({"format": _FORMAT, "model": _options_of(model)}), scales_to_save(model)
    for name, each in named_parameters(model).items():
        values[name] = data = model.device.to_host(each.data)
        if each.master is not None:
            values[name] = master = model.device.to_host(each.master)
            check_rounding(name, data, master)
    checkpoint_file.write(path, values, described)


def load_model(
    path: AnyPath, device: object = "auto", *, precision: Literal["file", "fp8"] | FP8 | None = "file"
) -> Any:
    """Makes the model of a file that `save_model` or `save_checkpoint` has written.

    The file's digest is checked as by `load_checkpoint`. The model is made only after the file has been found to hold
    all its values.

    Args:
        device: the device of the model: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:N", a GPU's ordinal, or a
            `torch.device`.
        precision: of the linear layers, as for `lt.MLP`: "fp8", an `lt.FP8`, or None; "file" for the precision of the
            model that was saved. If the file has no scales, the model's first call finds them.

    Raises:
        CheckpointError: the file is damaged, or it was not written by `save_model` or `save_checkpoint` of this version
            or an earlier one.
        ArgumentError: a device that does not exist, or another precision.
        FileError: the file cannot be read; it is an OSError too. If there is no file, it is a MissingFileError, which
            is a FileNotFoundError too.
    """
    check_instance("path", path, (str, os.PathLike), "a string or a pathlib.Path")
    place, given = parse_device(device), {}
    if not (isinstance(precision, str) and precision == "file"):
        given = {"precision": state.recipe if (state := scales_of(precision)) else None}
    with checkpoint_file.reading(path) as file:
        described = _description_of(path, file.text)["model"]
        # the model needs twice the memory of the file's arrays, for values and gradients
        scales = check_scales(path, file.kinds)
        without_masters = (each for each in file.kinds.items() if each[0] + MASTER not in file.kinds)
        values = (kind for name, kind in without_masters if name.rpartition(".")[2] not in _MOMENTS)
        file.require_memory(2 * sum(map(checkpoint_file.size_of, values)))

        def check_mlp(options: Mapping[str, Any], kinds: Kinds) -> None:
            """Compares a file's arrays with the `dims` of an MLP, in case the file claims huge sizes."""
            _value_names(path, kinds, _shapes(path, options, kinds))

        try:
            model = make({"block": "MLP", **described}, file.kinds, "cpu" if place is None else place, check_mlp, given)
        except CheckpointError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} describes no model: {shortened(str(error))}") from error
        # the file's arrays are compared with the parameters of the model that was made, including which layers have a
        # bias
        names = _value_names(path, file.kinds, _shapes_of(model))
        writer = _Writer(model, names, {name: file.kinds[name] for name in scales})
        file.scan(writer.write)
        if writer.fault:
            raise CheckpointError(f"{path} cannot be used: {writer.fault}")
    scales_to_load(path, model, writer.kept).write()
    return model


class _Writer:
    """Writes pieces of a file's arrays into a new model.

    Args:
        names: names of the arrays that have the parameters' values.
        kept: types and shapes of arrays to keep.

    Attributes:
        kept: the arrays that `kept` asked for, by name.
        fault: a sentence about the first finite number that would become infinite in the model's type; empty if there
            is none.
    """

    def __init__(self, model: Block, names: Collection[str], kept: Kinds) -> None:
        self.fault, self.kept = "", {name: np.empty(each.shape, each.dtype) for name, each in kept.items()}
        parameters, ordinal = named_parameters(model), model.device.ordinal
        self._parameters = {name: parameters[name.removesuffix(MASTER)] for name in names}
        self._stream = 0 if ordinal is None else CUPY.current_stream(ordinal)

    def write(self, name: str, at: int, piece: NDArray[Any]) -> None:
        """Writes a piece, before which an array has `at` elements, into a parameter's data and master copy."""
        if name in self.kept:
            self.kept[name].reshape(-1)[at : at + piece.size] = piece
        parameter = self._parameters.get(name)
        if parameter is None:
            return
        for array in [each for each in (parameter.master, parameter.data) if each is not None]:
            operand = read(name, array.reshape(-1)[at : at + piece.size], self._stream)
            with np.errstate(all="ignore"):
                values = rounded(piece.astype(np.float32, copy=False), np.dtype(operand.dtype))
                lost = np.isinf(values) & np.isfinite(piece)
            store(operand, values, self._stream)
        if lost.any() and not self.fault:
            place = np.unravel_index(at + int(lost.argmax()), parameter.data.shape)
            found = f"{name} has {piece[lost][0]!s} at {tuple(map(int, place))}"
            self.fault = f"{found}, which is too large for {operand.element_type().value}"


def _check_kinds(path: object, model: object) -> None:
    check_instance("path", path, (str, os.PathLike), "a string or a pathlib.Path")
    check_instance("model", model, Block, "an lt.MLP or another lt.Block")


def _arrays(model: Block, optimizer: Optimizer) -> dict[str, Any]:
    """Maps names in a checkpoint to all arrays that training changes."""
    parameters, of_optimizer = named_parameters(model), state_arrays(optimizer, _trained(model, optimizer))
    arrays = {name: each.data for name, each in parameters.items()}
    arrays |= {f"{name}{MASTER}": each.master for name, each in parameters.items()}
    arrays |= {_STATE.get(name, name): array for name, array in of_optimizer.items()}
    arrays[_GRAD_NORM] = optimizer.grad_norm
    return {name: array for name, array in arrays.items() if array is not None}


def _trained(model: Block, optimizer: Optimizer) -> list[str]:
    """The name of each of an optimizer's parameters within a model, which may be a part of a larger model.

    Raises:
        ArgumentError: the optimizer has a parameter that the model lacks.
    """
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}
    for parameter in optimizer.parameters:
        if id(parameter) not in names:
            raise ArgumentError(f"the optimizer has {parameter.name}, which is no parameter of the model")
    return [names[id(parameter)] for parameter in optimizer.parameters]


def _description(model: Block, optimizer: Optimizer) -> dict[str, Any]:
    """The options that must be equal in file and model for training to continue, converted to JSON's types."""
    scaler, trained = optimizer.scaler, zip(_trained(model, optimizer), optimizer.parameters, strict=True)
    described = {
        "format": _FORMAT,
        "model": _options_of(model),
        "optimizer": {
            **_rules(optimizer),
            **options_of_all_groups(optimizer),
            "parameters": {name: [each.lr_scale, each.weight_decay] for name, each in trained},
        },
        "scaler": None if scaler is None else scaler.options,
    }
    result: dict[str, Any] = json.loads(json.dumps(plain(described)))
    return result


def options_of_all_groups(optimizer: Optimizer) -> dict[str, Any]:
    """The options of an optimizer besides its rules, parameters and scaler."""
    options = optimizer.options
    common = {name: getattr(options, name) for name in _OPTIMIZER}
    return {"schedule": _schedule(options.schedule), **common, "moments": options.moments.value}


def plain(value: Any) -> Any:
    """Converts a value to JSON's types; NaN and infinity, which JSON lacks, become {"float": "inf"} and the like."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (Activation, FP8)):
        return plain(dataclasses.asdict(value))
    if isinstance(value, np.generic):
        value = value.item()
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _rules(optimizer: Optimizer) -> dict[str, Any]:
    """The settings of an `lt.AdamW`; for any other optimizer, the rule and the size of each of its groups."""
    options = optimizer.options
    if isinstance(optimizer, AdamW):
        settings = dataclasses.asdict(options.rules[0])
        settings["beta1"], settings["beta2"] = settings.pop("betas")
        return {**settings, "amsgrad": isinstance(options.rules[0], AMSGrad)}
    groups = enumerate(zip(options.rules, optimizer.groups, strict=True))
    described = {
        i: {"rule": type(rule).__name__, **dataclasses.asdict(rule), "size": size} for i, (rule, size) in groups
    }
    return {"rules": described}


def _schedule(schedule: AnySchedule) -> dict[str, Any]:
    """A schedule's settings; for a table, a digest of its values, which may be too many for a file's header."""
    if not isinstance(schedule, Table):
        return dataclasses.asdict(schedule)
    digest = hashlib.sha256(np.array(schedule.values, "<f4").tobytes()).hexdigest()
    return {"table": len(schedule.values), "sha256": digest}


def check_values(complaint: str, arrays: Arrays, masters: Iterable[str], bounds: Bounds) -> None:
    """Raises `CheckpointError` if a value is out of its bounds, or an array is not its rounded master copy.

    Args:
        complaint: the beginning of the message.
        masters: names of the arrays that have a master copy.
        bounds: the lowest and highest accepted value of each array, by name, as `state_ranges` gives them.
    """
    for name in masters:
        try:
            check_rounding(name, arrays[name], arrays[f"{name}{MASTER}"])
        except OperandError as error:
            raise CheckpointError(f"{complaint}: {error}") from error
    for name in bounds:
        if found := outside(name, arrays[name], bounds):
            raise CheckpointError(f"{complaint}: {found}")


def _check_values(complaint: str, arrays: Arrays, model: Block, optimizer: Optimizer) -> None:
    ranges = state_ranges(optimizer, _trained(model, optimizer))
    bounds = {_STATE.get(name, name): each for name, each in ranges.items()}
    if optimizer.grad_norm is not None:
        bounds[_GRAD_NORM] = 0.0, math.inf
    masters = [name for name, each in named_parameters(model).items() if each.master is not None]
    check_values(complaint, arrays, masters, bounds)


def _check_options(path: AnyPath, theirs: Mapping[str, Any], ours: Mapping[str, Any], may_differ: Set[str]) -> None:
    """Raises `CheckpointError`, with a table of the differing options, if options differ that must be equal.

    A file with a precision may be loaded into a model without one, and the reverse: a difference of the whole precision
    is accepted, a difference of one of its fields is not.
    """
    rows = [
        row
        for row in differences("", theirs, ours)
        if (may_differ | _SEEN_OTHERWISE).isdisjoint(_names_in(row[0])) and not row[0].endswith(".precision")
    ]
    refuse_differences(path, rows, {name for row in rows for name in _names_in(row[0])}, CHANGEABLE)


def refuse_differences(
    path: AnyPath, rows: Sequence[tuple[str, str, str]], names: Set[str], changeable: Sequence[str]
) -> None:
    """Raises `CheckpointError` with a table of options that differ, if there are any.

    Args:
        rows: from `differences`.
        names: names of the options in the rows.
        changeable: names that `changed` accepts.
    """
    if rows:
        given = tuple(name for name in changeable if name in names)
        advice = f"\nWith changed={given} yours are used for these." if given else ""
        raise CheckpointError(f"{path} was saved with other options:\n{_table(rows)}{advice}")


def _names_in(path: str) -> list[str]:
    """Splits a dotted path into the names of options: "optimizer.beta1" gives ["optimizer", "betas"]."""
    return ["betas" if name in ("beta1", "beta2") else name for name in path.split(".")]


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    """A table of differing options. Names from the file are escaped, and the table has at most `_ROWS` lines."""
    cells = [(ascii(name)[1:-1][:_NAME], there[:_CELL], here[:_CELL]) for name, there, here in rows[:_ROWS]]
    cells = [("option", "in the file", "here"), *cells]
    first, second = (max(len(row[column]) for row in cells) for column in range(2))
    lines = [f"  {name:{first}}  {there:{second}}  {here}" for name, there, here in cells]
    return "\n".join([*lines, *([f"  and {len(rows) - _ROWS} more"] if len(rows) > _ROWS else [])])


def differences(name: str, theirs: Any, ours: Any) -> Iterator[tuple[str, str, str]]:
    """Yields the differences of two descriptions as texts for errors: option, the file's value, the present value."""
    if name.startswith("optimizer.parameters.") and isinstance(theirs, list) and isinstance(ours, list):
        theirs, ours = (dict(zip(_PER_PARAMETER, rates, strict=False)) for rates in (theirs, ours))
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in {**theirs, **ours}:
            yield from differences(f"{name}.{key}" if name else key, theirs.get(key), ours.get(key))
        if name.endswith(".parameters") and [*theirs] != [*ours]:
            yield f"the order of {name}", shown([*theirs]), shown([*ours])
    elif theirs != ours:
        yield name, shown(theirs), shown(ours)


def _options_of(model: Block) -> Any:
    """The options of an MLP, or the description of another model."""
    return options_of(model) if isinstance(model, MLP) else plain(describe(model))


def description_of(path: AnyPath, text: str, version: int) -> dict[str, Any]:
    """Reads the description that a file's text holds.

    Args:
        version: the only format version that is accepted, a key of `_READERS`.

    Raises:
        CheckpointError: the text is no description, or has another format version.
    """
    try:
        description: dict[str, Any] = parse_json(text.encode())
        found = description["format"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise of_others(path) from error
    if type(found) is not int or found != version:
        reader = _READERS.get(found) if type(found) is int else None
        advice = f"this version reads format {version}" if reader is None else f"load it with {reader}"
        raise CheckpointError(f"{path} has format {shortened(repr(found))}; {advice}")
    return description


def _description_of(path: AnyPath, text: str) -> dict[str, Any]:
    """Reads the description of a model and, in a checkpoint, of its optimizer; raises as `description_of`."""
    description = description_of(path, text, _FORMAT)
    if not isinstance(description.get("model"), dict):
        raise of_others(path)
    return description


def _value_names(path: AnyPath, kinds: Kinds, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Names of the arrays with the most accurate values of parameters: master copies if the file has them.

    Raises:
        CheckpointError: the file lacks a parameter, has one with a wrong shape, or has an array that no checkpoint has.
    """
    for name in shapes.keys() - kinds.keys():
        raise CheckpointError(f"{path} has no {shortened(name)}")
    for name, kind in without_scales(kinds).items():
        owner, _, part = name.rpartition(".")
        shape = shapes.get(name, shapes.get(owner) if part in (MASTER[1:], *_MOMENTS) else None)
        is_number = kind.dtype in _WORDS and math.prod(kind.shape) == 1
        if shape is None and not (owner in ("optimizer", "scaler") and is_number):
            raise CheckpointError(f"{path} has {shortened(name)}, which there is not here")
        if shape is not None and (kind.shape != shape or kind.dtype not in _FLOATS):
            raise CheckpointError(f"{path}: {shortened(name)} is {shortened(str(kind))}; here its shape is {shape}")
    return [name + MASTER if name + MASTER in kinds else name for name in shapes]


def _write_saved(path: AnyPath, model: Block, values: Arrays) -> None:
    """Writes values into all parameters of a model and their master copies; loads FP8 scales among the values too.

    `_value_names` gives the name of each parameter's value.

    Raises:
        CheckpointError: the model's type would make a finite value infinite.
    """
    found = {name.removesuffix(MASTER): array for name, array in values.items()}
    try:
        assigned = [(each, values_for(each, name, found[name])) for name, each in named_parameters(model).items()]
    except ArgumentError as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error
    loading = scales_to_load(path, model, {name: values[name] for name in names_of_scales(values)})
    write_values(assigned)
    loading.write()


def _shapes_of(model: Block) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.data.shape) for name, each in named_parameters(model).items()}


def _shapes(path: AnyPath, options: Mapping[str, Any], kinds: Kinds) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of a file's model, from the file's `dims` and the names of its biases."""
    try:
        # A file's header may claim millions of layers: names are made only if there are at least as many arrays.
        if len(options["dims"]) > len(kinds) + 1:
            raise CheckpointError(f"{path} describes {len(options['dims']) - 1} layers, but has {len(kinds)} arrays")
        dims = integers("dims", options["dims"])
    except (ArgumentError, KeyError, TypeError) as error:
        raise of_others(path) from error
    return shapes_of(dims, [f"layer{i}.bias" in kinds for i in range(len(dims) - 1)])
