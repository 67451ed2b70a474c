"""The beginning of a training step that several processes run together, and the sums of their metrics."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from importlib import import_module
from typing import Any

import numpy as np

from lt_runtime.distributed.group import Group
from lt_runtime.fp8 import FP8
from lt_runtime.nn.block import Block
from lt_runtime.ops.optimizers.optimizer import Optimizer, state_arrays
from lt_runtime.ops.optimizers.state import Shard
from lt_runtime.problem import Activation, type_name
from lt_runtime.store.plan_store import plan_store

_PLAIN = (bool, int, float, str, Activation, FP8, np.generic)


def start_together(
    model: Block,
    optimizer: Optimizer,
    averages: Mapping[str, Any],
    group: Group,
    options: Mapping[str, Any],
    *,
    shard_state: bool,
) -> None:
    """Compares a new step with the steps of the other processes, and copies all values of process 0 to these processes.

    Args:
        averages: the arrays of an `lt.EMA`; empty without one.
        options: the step's options.
        shard_state: whether the processes then divide the state of the optimizer among them.

    Raises:
        GroupError: a value differs that must be equal in all processes.
    """
    version = import_module("lt_runtime").__version__
    described = {"version": version, **_of_model(model, optimizer), **_of_optimizer(optimizer)}
    described["shard_state"] = shard_state or bool(optimizer.owners)
    group.agree(described | dict(options), "the model or the options of a TrainStep")
    device = model.device
    engine, stream = group.engine(device.ordinal), None if device.ordinal is None else 0
    with optimizer.whole_state(), device.current():
        device.synchronize()  # waits for all streams, because any of them may have computed the values
        engine.broadcast([*_values_of(model, optimizer), *averages.values()], 0, stream)
        device.synchronize()
    if shard_state and not optimizer.owners:
        optimizer.keep(Shard(_owners(optimizer, group.size), group.rank, engine.broadcast))


def _owners(optimizer: Optimizer, size: int) -> tuple[int, ...]:
    """The rank of each parameter's owner: the largest parameters first, each to the process with the least so far."""
    loads, owners = [0] * size, dict[int, int]()
    sizes = [math.prod(each.data.shape) for each in optimizer.parameters]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return tuple(owners[i] for i in range(len(sizes)))


def sums_of_all(own: Sequence[float], group: Group) -> list[Any]:
    """The sums of each of some numbers over all processes."""
    every = [json.loads(each) for each in group.gather(json.dumps(own).encode(), "the metrics")]
    return [sum(column) for column in zip(*every, strict=True)]


def merged(own: Sequence[Any], group: Group) -> list[Any]:
    """The results of all batches of an evaluation in their order; process r of N has computed every N-th from r on."""
    parts = [json.loads(each) for each in group.gather(json.dumps(own).encode(), "the results of an evaluation")]
    return [each for turn in itertools.zip_longest(*parts) for each in turn if each is not None]


def _of_model(model: Block, optimizer: Optimizer) -> dict[str, Any]:
    """The names, shapes and types of a model's parameters, and the options of its blocks."""
    device, divided = model.device.ordinal, {id(each) for each in optimizer.parameters if optimizer.owners}
    described: dict[str, Any] = {"device": "cpu"} if device is None else asdict(plan_store(device).fingerprint)
    for each in model.parameters():
        master = "divided" if id(each) in divided else each.master is not None
        described[each.name] = f"{tuple(each.data.shape)}, {type_name(each.data.dtype)}, master: {master}"
    for i, block in enumerate(model.blocks()):
        plain = {name: repr(value) for name, value in vars(block).items() if isinstance(value, _PLAIN)}
        described |= {f"{block.name or i}.{name}": value for name, value in plain.items() if name[0] != "_"}
    return described


def _of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    options = optimizer.options
    described = {each.name: repr(getattr(options, each.name)) for each in fields(options)}
    described["groups"] = repr(optimizer.groups)
    settings = {f"{each.name} in the optimizer": (each.lr_scale, each.weight_decay) for each in optimizer.parameters}
    return described | settings


def _values_of(model: Block, optimizer: Optimizer) -> list[Any]:
    """The arrays of a model and its optimizer that training changes."""
    parameters = {id(each): each for each in (*model.parameters(), *optimizer.parameters)}.values()
    values = [array for each in parameters for array in (each.data, each.master) if array is not None]
    return [*values, *state_arrays(optimizer, [str(i) for i in range(len(optimizer.parameters))]).values()]
