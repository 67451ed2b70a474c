"""optimizer.cu, optimizer_fp8.cu, gradient_norm.cu and ema.cu: kernels over all parameters, and tables of addresses.

Each kernel reads a table on the device, which has a row for every chunk of a tensor, or for every tile of a weight with
a copy in FP8. The kernel `optimizer` has eight blocks for each row, and the other kernels have one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from ctypes import sizeof
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lt_runtime.gpu.compiler import Macros
from lt_runtime.grad_scaler import GradScaler
from lt_runtime.kernels.kernel import Entry, Launches, Struct, define, struct
from lt_runtime.kernels.tiling import OCTET, THREADS, VECTOR_BYTES, Tiling
from lt_runtime.problem import DType
from lt_runtime.rules import SGD, AdamW, AMSGrad, Lion, Rule
from lt_runtime.schedules import DECAYS, AnySchedule, Table

UPDATE_THREADS: Final = 128
_UPDATE_BLOCKS: Final = 8  # number of the update kernel's thread blocks that share a chunk of a tensor
UPDATE_CHUNK: Final = _UPDATE_BLOCKS * UPDATE_THREADS * OCTET
"""Elements of a chunk of an update: one octet for each thread of its blocks."""
UPDATE_TICKETS: Final = 32 * 64  # number of 32-bit words of 32 counters of finished blocks, which lie 64 words apart
_EMA_CHUNK: Final = THREADS * OCTET
FP8_COLUMNS: Final = 256
"""Columns of a tile of the kernel optimizer_fp8.

A weight with an FP8 copy must have a multiple of this many columns.
"""
_FP8_ROWS: Final = 32  # Rows of a tile of the kernel optimizer_fp8.
# Fewest elements of a chunk in the gradient norm; one block sums a chunk.
_NORM_CHUNK: Final = 16384
# About the largest number of chunks in the gradient norm, because the last block adds up a partial sum of each.
_NORM_CHUNKS: Final = 8192
WORD_BYTES: Final = 4
_TYPES: Final = {DType.FLOAT32: 0, DType.FLOAT16: 1, DType.BFLOAT16: 2}

UPDATE: Final = Entry("optimizer", "optimizer.cu")
UPDATE_FP8: Final = Entry("optimizer_fp8", "optimizer_fp8.cu")
GRADIENT_NORM: Final = Entry("gradient_norm", "gradient_norm.cu")
EMA: Final = Entry("ema", "ema.cu")
OptimizerState: Final = struct("OptimizerState")
"""The C++ struct of an optimizer's state on the device: counts of updates, and the norm of the latest gradients."""
_Settings: Final = struct("OptimizerSettings")
_RULES: Final = {SGD: "lt::Sgd", Lion: "lt::Lion", AdamW: "lt::AdamW", AMSGrad: "lt::AmsGrad"}


@dataclass(frozen=True, slots=True)
class Options:
    """Everything about an optimizer but its parameters.

    Attributes:
        rules: the rule of each group of parameters.
        schedule: factor of every learning rate, by step.
        max_norm: norm that the gradients are clipped to; None does not clip.
        skip_nonfinite: whether an update with a NaN or infinite gradient is left out; always with a scaler.
        moments: FP32 or BF16.
    """

    rules: tuple[Rule, ...]
    schedule: AnySchedule
    max_norm: float | None
    skip_nonfinite: bool
    scaler: GradScaler | None
    moments: DType
    stochastic_rounding: bool
    seed: int

    @property
    def judges_gradients(self) -> bool:
        """Whether the gradients' norm and finiteness have to be known before an update."""
        return self.max_norm is not None or self.skip_nonfinite


def update_params(options: Options, group: int, settings: int, tensors: int) -> Struct:
    """The argument block of one group's update, without the addresses of the table, the state and the loss scale.

    Args:
        group: index of the group's rule.
        settings: device address of the words that `settings_words` returns.
        tensors: number of the tensors of all groups.
    """
    scaler, rule = options.scaler, options.rules[group]
    beta1, beta2 = (rule.momentum, 0.0) if isinstance(rule, SGD) else rule.betas
    params = UPDATE.params(seed=options.seed, eps=getattr(rule, "eps", 0.0), nesterov=getattr(rule, "nesterov", False))
    params.beta1, params.one_minus_beta1, params.log_beta1 = beta1, 1.0 - beta1, _log(beta1)
    params.beta2, params.one_minus_beta2, params.log_beta2 = beta2, 1.0 - beta2, _log(beta2)
    params.max_norm, params.skip_nonfinite = options.max_norm or 0.0, options.skip_nonfinite
    if scaler:
        params.growth_factor, params.backoff_factor = scaler.growth_factor, scaler.backoff_factor
        params.growth_interval = scaler.growth_interval
    params.settings = settings + group * sizeof(_Settings)
    params.lr_scales = settings + len(options.rules) * sizeof(_Settings)
    params.weight_decays = params.lr_scales + tensors * WORD_BYTES
    return params


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def settings_words(options: Options, of_tensors: Sequence[tuple[float, float]], table: int = 0) -> NDArray[np.uint32]:
    """The settings that an update reads, in words of 32 bits: an `OptimizerSettings` for each group, and the tensors'.

    Args:
        of_tensors: the factor of the learning rate, and the weight decay, of each tensor.
        table: device address of the values of the schedule, if it is a `Table`.

    Returns:
        A vector: the words of each group's `OptimizerSettings`, all factors, then all weight decays.
    """
    schedule = options.schedule
    if isinstance(schedule, Table):
        shared = 0, 0, len(schedule.values), 0.0, 0, table
    else:
        decay = DECAYS.index(schedule.decay)
        shared = decay, schedule.warmup_steps, schedule.total_steps, schedule.final_factor, 0, 0
    groups = b"".join(bytes(_Settings(rule.lr, *shared)) for rule in options.rules)
    numbers = np.array(of_tensors, np.float32).T.reshape(-1)
    return np.concatenate([np.frombuffer(groups, np.uint32), numbers.view(np.uint32)])


def update_macros(rule: Rule, moments: DType, *, stochastic: bool) -> Macros:
    """The definitions that a group's update is compiled under.

    Args:
        moments: type of the moments; without meaning for a rule that has none.
        stochastic: whether any parameter below FP32 is updated in place.
    """
    name = "lt::Momentum" if isinstance(rule, SGD) and rule.momentum else _RULES[type(rule)]
    return define(RULE=name, MOMENT=moments if rule.moments else DType.FLOAT32, STOCHASTIC=stochastic)


def update_tiling(rows: int) -> Tiling:
    """The blocks and threads of an update whose table has `rows` rows."""
    return Tiling((rows * _UPDATE_BLOCKS, 1), (UPDATE_THREADS, 1))


def launches_by_row(entry: Entry, params: Struct, rows: int, device: int, macros: Macros = ()) -> Launches:
    """A kernel other than `UPDATE`, with a block for each row of its table; `params` has all addresses."""
    return Launches(entry, macros, device, Tiling((rows, 1), (THREADS, 1)), params)


class Tensor(NamedTuple):
    """One parameter's arrays.

    Attributes:
        size: elements.
        arrays: address and type of each array that exists, by its name in the table's struct. In `OptimizerChunk`,
            "value" is what the update reads and writes, the parameter or its master copy; "copy" is the parameter where
            it has a master copy; "gradient"; "m" and "v"; "v_max" with AMSGrad. In `EmaChunk`, "average" and then
            "value".
    """

    size: int
    arrays: Mapping[str, tuple[int, DType]]


class Fp8Copy(NamedTuple):
    """The FP8 copy of a weight, which the weight's update writes. The weight's arrays begin at multiples of 16 bytes.

    Attributes:
        shape: a multiple of 16 rows, and of `FP8_COLUMNS` columns.
        out, transposed: addresses of the copy and its transpose, multiples of 16; 0 for a transpose that is not wanted.
        scale, amax: addresses of the scale that the copy is cast with, and of the largest magnitude, which is raised.
    """

    shape: tuple[int, int]
    out: int
    transposed: int
    scale: int
    amax: int


def update_table(tensors: Sequence[Tensor], first: int = 0, without: Collection[int] = ()) -> NDArray[Any]:
    """The table of an update: an `OptimizerChunk` for each chunk; at least one row, whose blocks advance the step.

    Args:
        first: number of the first tensor among the tensors of all groups.
        without: numbers of tensors that another kernel updates.
    """
    numbered = [(number, each) for number, each in enumerate(tensors, first) if number not in without]
    return _table("OptimizerChunk", UPDATE_CHUNK, numbered)


def fp8_table(tensors: Mapping[int, tuple[Tensor, Fp8Copy]]) -> NDArray[Any]:
    """The table of an update that writes FP8: an `OptimizerTile` for each tile.

    Args:
        tensors: maps the number of a tensor, among the tensors of all groups, to the tensor and its copy.
    """
    return np.concatenate([_tiles(number, *each) for number, each in tensors.items()])


def _tiles(number: int, tensor: Tensor, copy: Fp8Copy) -> NDArray[Any]:
    rows, cols = copy.shape
    down, across = np.mgrid[0:rows:_FP8_ROWS, 0:cols:FP8_COLUMNS].astype(np.uint64).reshape(2, -1)
    starts = down * np.uint64(cols) + across
    made = np.zeros(starts.size, np.dtype(struct("OptimizerTile")))
    _fill(made["chunk"], number, tensor, starts)
    made["rows"] = np.minimum(np.uint64(rows) - down, np.uint64(_FP8_ROWS))
    made["pitch"], made["transposed_pitch"] = cols, rows
    made["out"], made["scale"], made["amax"] = np.uint64(copy.out) + starts, copy.scale, copy.amax
    if copy.transposed:
        made["transposed"] = np.uint64(copy.transposed) + across * np.uint64(rows) + down
    return made


def norm_table(tensors: Sequence[Tensor]) -> NDArray[Any]:
    """A row of type `GradientChunk` for each block, at least one. The number of elements decides a chunk's length."""
    chunk, total = _NORM_CHUNK, sum(tensor.size for tensor in tensors)
    while chunk * _NORM_CHUNKS < total:
        chunk *= 2
    gradients = (Tensor(size, {"data": arrays["gradient"]}) for size, arrays in tensors)
    return _table("GradientChunk", chunk, enumerate(gradients))


def ema_table(tensors: Sequence[Tensor]) -> NDArray[Any]:
    """The table of the averages: an `EmaChunk` for each chunk, at least one."""
    return _table("EmaChunk", _EMA_CHUNK, enumerate(tensors))


def _table(kind: str, chunk: int, tensors: Iterable[tuple[int, Tensor]]) -> NDArray[Any]:
    """A kernel's table: a row of the struct `kind` for each chunk of each tensor; one row of zeros if all are empty.

    Args:
        tensors: pairs of a tensor's number and the tensor.
    """
    dtype = np.dtype(struct(kind))
    tables = [np.zeros(0, dtype)]
    for number, tensor in tensors:
        starts = np.arange(0, tensor.size, chunk, dtype=np.uint64)
        rows = np.zeros(starts.size, dtype)
        _fill(rows, number, tensor, starts)
        rows["count"] = np.minimum(np.uint64(tensor.size) - starts, np.uint64(chunk))
        tables.append(rows)
    made = np.concatenate(tables)
    return made if made.size else np.zeros(1, dtype)


def _fill(rows: NDArray[Any], number: int, tensor: Tensor, starts: NDArray[np.uint64]) -> None:
    """Writes the rows of one tensor in a table, except their counts: the values for which their struct has a field.

    The field `type` gets the type of the tensor's last array.

    Args:
        starts: number of each row's first element.
    """
    arrays = tensor.arrays
    values: dict[str, Any] = {"tensor": number, "octet": starts // np.uint64(OCTET)}
    values["aligned"] = all(address % VECTOR_BYTES == 0 for address, _ in arrays.values())
    for name, (address, dtype) in arrays.items():
        values[name] = np.uint64(address) + starts * np.uint64(dtype.itemsize)
        values[f"{name}_type"] = values["type"] = _TYPES[dtype]
    for name in values.keys() & set(rows.dtype.names or ()):
        rows[name] = values[name]
