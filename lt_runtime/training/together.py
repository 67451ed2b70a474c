"""The beginning of a training step that several processes run together, and the sums of their metrics."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from lt_runtime.arguments import shown
from lt_runtime.distributed.group import Group
from lt_runtime.fp8 import FP8
from lt_runtime.nn.block import Block
from lt_runtime.ops._optimizer_state import Shard
from lt_runtime.ops.optimizer import Optimizer, state_arrays
from lt_runtime.problem import Activation, type_name
from lt_runtime.training.averages import Totals

if TYPE_CHECKING:
    from lt_runtime.training.step import TrainStep

_PLAIN = (bool, int, float, str, Activation, FP8, np.generic)


def start_together(step: TrainStep, group: Group, loss_options: Mapping[str, Any] | None, *, shard_state: bool) -> None:
    """Compares a new step with those of the other processes, and copies all values of process 0 to them.

    With `shard_state` the processes then divide the state of the optimizer among them.

    Raises:
        GroupError: something differs that must be equal.
    """
    options = {name: shown(value) for name, value in (loss_options or {}).items()}
    group.agree(
        {
            "version": import_module("lt_runtime").__version__,
            **_of_model(step.model),
            **_of_optimizer(step.optimizer),
            "shard_state": shard_state or step.optimizer.is_sharded,
            "ema.decay": None if step.ema is None else step.ema.decay,
            **{name: getattr(step, name) for name in ("loss", "batch_size", "accumulate")},
            **{f"loss_options.{name}": value for name, value in options.items()},
        },
        "the model or the options of a TrainStep",
    )
    device = step.model.device
    engine, stream = group.engine(device.ordinal), None if device.ordinal is None else 0
    with step.optimizer.whole_state(), device.current():
        device.synchronize()  # waits for all streams, because any of them may have computed the values
        engine.broadcast(_values_of(step), 0, stream)
        device.synchronize()
    if shard_state and not step.optimizer.is_sharded:
        step.optimizer.keep(Shard(_owners(step.optimizer, group.size), group.rank, engine.broadcast))


def _owners(optimizer: Optimizer, size: int) -> tuple[int, ...]:
    """The rank of each parameter's owner: the largest parameters first, each to the process with the least so far."""
    loads, owners = [0] * size, dict[int, int]()
    sizes = [math.prod(each.data.shape) for each in optimizer.parameters]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return tuple(owners[i] for i in range(len(sizes)))


def totals_of_all(own: Totals, group: Group) -> Totals:
    """The sums over all processes; each has had the same number of steps."""
    every = [json.loads(each) for each in group.gather(json.dumps(own).encode(), "the metrics")]
    return Totals(own.steps, *(sum(column) for column in [*zip(*every, strict=True)][1:]))


def all_batches(own: list[Totals], sizes: list[int], group: Group) -> tuple[list[Totals], list[int]]:
    """The totals and sizes of the batches of all processes, in the order of the batches."""
    packed = json.dumps([*zip(own, sizes, strict=True)]).encode()
    parts = [json.loads(each) for each in group.gather(packed, "the results of an evaluation")]
    every = [each for turn in itertools.zip_longest(*parts) for each in turn if each is not None]
    return [Totals(*totals) for totals, _ in every], [size for _, size in every]


def _of_model(model: Block) -> dict[str, Any]:
    """The names, shapes and types of a model's parameters, and the options of its blocks."""
    described: dict[str, Any] = {"device": "cpu" if model.device.ordinal is None else "cuda"}
    for each in model.parameters():
        described[each.name] = (
            f"{tuple(each.data.shape)}, {type_name(each.data.dtype)}, master: {each.master is not None}"
        )
    for i, block in enumerate(model.blocks()):
        plain = {name: repr(value) for name, value in vars(block).items() if isinstance(value, _PLAIN)}
        described |= {f"{block.name or i}.{name}": value for name, value in plain.items() if name[0] != "_"}
    return described


def _of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    options = optimizer.options
    described = {each.name: repr(getattr(options, each.name)) for each in dataclasses.fields(options)}
    described["groups"] = repr(optimizer.groups)
    settings = {f"{each.name} in the optimizer": (each.lr_scale, each.weight_decay) for each in optimizer.parameters}
    return described | settings


def _values_of(step: TrainStep) -> list[Any]:
    """All arrays that training changes."""
    parameters = {id(each): each for each in (*step.model.parameters(), *step.optimizer.parameters)}.values()
    values = [array for each in parameters for array in (each.data, each.master) if array is not None]
    values += state_arrays(step.optimizer, [str(i) for i in range(len(step.optimizer.parameters))]).values()
    return values + ([] if step.ema is None else [*step.ema.averages.values()])
