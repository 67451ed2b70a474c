"""adamw.cu, gradient_norm.cu and ema.cu: the kernels over all parameters, and the tables that they find them in.

A table is on the device. It has a row for every chunk of a tensor. The update has eight blocks for each row of its
table; the norm and the averages have one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ctypes import Structure, c_float, c_int, c_uint8, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lt_runtime.grad_scaler import GradScaler
from lt_runtime.kernels.kernel import SCALAR, Entry, Launches, fields
from lt_runtime.kernels.tiling import OCTET, THREADS, VECTOR_BYTES, Tiling
from lt_runtime.problem import DType
from lt_runtime.reference import AdamWHyper
from lt_runtime.schedules import DECAYS

UPDATE_THREADS: Final = 128
_UPDATE_BLOCKS: Final = 8  # blocks that share a chunk
UPDATE_CHUNK: Final = (
    _UPDATE_BLOCKS * UPDATE_THREADS * OCTET
)  # elements of a chunk: a thread loads all of its own at once
UPDATE_TICKETS: Final = 32 * 64  # words of memory for 32 counters of blocks, which lie 64 words apart
_EMA_CHUNK: Final = THREADS * OCTET
_NORM_CHUNK: Final = 16384  # elements, at least
_NORM_CHUNKS: Final = 8192  # about the most sums that are left to the last block
WORD_BYTES: Final = 4
_TYPES: Final = {DType.FLOAT32: 0, DType.FLOAT16: 1, DType.BFLOAT16: 2}


class OptimizerState(Structure):
    """`lt::OptimizerState`: an optimizer's state on the device, without the moments."""

    _fields_ = fields(
        ("steps skipped nonfinite", c_uint32),
        ("norm", c_float),
        ("update_ticket norm_ticket reserved0 reserved1", c_uint32),
    )


class AdamWChunk(Structure):
    """`lt::AdamWChunk`: an entry of the optimizer's table on the device, a chunk that eight blocks update."""

    _fields_ = fields(
        ("value copy gradient m v v_max", c_void_p),
        ("octet", c_uint64),
        ("tensor count", c_uint32),
        ("value_type copy_type gradient_type aligned", c_uint8),
        ("reserved", c_uint32 * 3),
    )


class AdamWSettings(Structure):
    """`lt::AdamWSettings`: the settings of all tensors that may change between two updates."""

    _fields_ = fields(
        ("lr", c_float),
        ("decay", c_int),
        ("warmup_steps total_steps", c_uint32),
        ("final_factor", c_float),
        ("reserved", c_uint32 * 3),
    )


SETTINGS_WORDS: Final = sizeof(AdamWSettings) // WORD_BYTES


class AdamWParams(Structure):
    """`lt::AdamWParams`."""

    _fields_ = fields(
        ("chunks state tickets settings lr_scales weight_decays scale growth_tracker", c_void_p),
        ("seed", c_uint64),
        ("log_beta1 log_beta2 beta1 beta2 one_minus_beta1 one_minus_beta2 eps max_norm", c_float),
        ("skip_nonfinite", c_int),
        ("growth_factor backoff_factor", c_float),
        ("growth_interval", c_int),
    )


class GradientChunk(Structure):
    """`lt::GradientChunk`: an entry of the table of gradients on the device, a chunk that one block reads."""

    _fields_ = fields(("data", c_void_p), ("count", c_uint32), ("type aligned", c_uint8), ("reserved", c_uint8 * 2))


class GradientNormParams(Structure):
    """`lt::GradientNormParams`."""

    _fields_ = fields(("chunks partial state scale", c_void_p))


class EmaChunk(Structure):
    """`lt::EmaChunk`: an entry of the table of averages on the device, a chunk that one block averages."""

    _fields_ = fields(
        ("average value", c_void_p), ("count", c_uint32), ("type aligned", c_uint8), ("reserved", c_uint8 * 2)
    )


class EmaParams(Structure):
    """`lt::EmaParams`."""

    _fields_ = fields(("chunks", c_void_p), ("weight", c_float))


@dataclass(frozen=True, slots=True)
class Options:
    """Everything about an optimizer but its parameters.

    Attributes:
        hyper: settings of every parameter that has none of its own.
        max_norm: norm that the gradients are clipped to; None does not clip.
        skip_nonfinite: whether an update with a NaN or infinite gradient is left out; always with a scaler.
        moments: FP32 or BF16.
    """

    hyper: AdamWHyper
    amsgrad: bool
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


ADAMW: Final = Entry("adamw", "adamw.cu", AdamWParams)
GRADIENT_NORM: Final = Entry("gradient_norm", "gradient_norm.cu", GradientNormParams)
EMA: Final = Entry("ema", "ema.cu", EmaParams)


def adamw_params(options: Options) -> AdamWParams:
    """The update's argument block without addresses."""
    scaler, beta1, beta2 = options.scaler, options.hyper.beta1, options.hyper.beta2
    params = AdamWParams(seed=options.seed, eps=options.hyper.eps)
    params.beta1, params.one_minus_beta1, params.log_beta1 = beta1, 1.0 - beta1, _log(beta1)
    params.beta2, params.one_minus_beta2, params.log_beta2 = beta2, 1.0 - beta2, _log(beta2)
    params.max_norm, params.skip_nonfinite = options.max_norm or 0.0, options.skip_nonfinite
    if scaler:
        params.growth_factor, params.backoff_factor = scaler.growth_factor, scaler.backoff_factor
        params.growth_interval = scaler.growth_interval
    return params


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def settings_words(hyper: AdamWHyper, of_tensors: Sequence[tuple[float, float]]) -> NDArray[np.uint32]:
    """The settings that an update reads, in words of 32 bits: `AdamWSettings`, then the numbers of each tensor.

    Args:
        of_tensors: the factor of the learning rate, and the weight decay, of each tensor.

    Returns:
        (`SETTINGS_WORDS` + 2·tensors,): after the settings come all factors, then all weight decays.
    """
    schedule = hyper.schedule
    decay = DECAYS.index(schedule.decay)
    common = AdamWSettings(hyper.lr, decay, schedule.warmup_steps, schedule.total_steps, schedule.final_factor)
    numbers = np.array(of_tensors, np.float32).T.reshape(-1)
    return np.concatenate([np.frombuffer(bytes(common), np.uint32), numbers.view(np.uint32)])


def set_addresses(params: AdamWParams, settings: int, tensors: int) -> None:
    """Sets the device address from which an update reads its settings, in the form that `settings_words` returns."""
    params.settings = settings
    params.lr_scales = settings + SETTINGS_WORDS * WORD_BYTES
    params.weight_decays = params.lr_scales + tensors * WORD_BYTES


def update_launches(
    params: AdamWParams, rows: int, device: int, options: Options, *, stochastic: bool
) -> Launches[AdamWParams]:
    """The update of all tensors.

    Args:
        params: with all addresses.
        rows: of the table.
        stochastic: whether any parameter below FP32 is updated in place.
    """
    amsgrad, moment = str(int(options.amsgrad)), SCALAR[options.moments]
    macros = ("MOMENT", moment), ("AMSGRAD", amsgrad), ("STOCHASTIC", str(int(stochastic)))
    return Launches(ADAMW, macros, device, update_tiling(rows), params)


def update_tiling(rows: int) -> Tiling:
    """The blocks of an update whose table has so many rows."""
    return Tiling((rows * _UPDATE_BLOCKS, 1), (UPDATE_THREADS, 1))


def norm_launches(params: GradientNormParams, rows: int, device: int) -> Launches[GradientNormParams]:
    """The norm of all gradients; `params` has all addresses, the table so many rows."""
    return Launches(GRADIENT_NORM, (), device, Tiling((rows, 1), (THREADS, 1)), params)


def ema_launches(params: EmaParams, rows: int, device: int) -> Launches[EmaParams]:
    """The update of all averages; `params` has the table's address, the table so many rows."""
    return Launches(EMA, (), device, Tiling((rows, 1), (THREADS, 1)), params)


class Tensor(NamedTuple):
    """One parameter's arrays.

    Attributes:
        size: elements.
        arrays: address and type of each array that exists, by its name in `AdamWChunk`: "value" is what the update
            reads and writes, the parameter or its master copy; "copy" is the parameter where it has a master copy;
            "gradient"; "m" and "v"; "v_max" with AMSGrad.
    """

    size: int
    arrays: Mapping[str, tuple[int, DType]]


def update_table(tensors: Sequence[Tensor]) -> NDArray[Any]:
    """A row of type `AdamWChunk` for each chunk; at least one, since blocks of an empty chunk advance the step too."""
    return _joined([_update_rows(i, tensor) for i, tensor in enumerate(tensors)], AdamWChunk)


def _update_rows(index: int, tensor: Tensor) -> NDArray[Any]:
    rows = _rows(AdamWChunk, tensor.size, UPDATE_CHUNK, **tensor.arrays)
    for name in {"value", "copy", "gradient"} & set(
        tensor.arrays
    ):  # moments have the type that the kernel is compiled for
        rows[f"{name}_type"] = _TYPES[tensor.arrays[name][1]]
    rows["octet"], rows["tensor"] = np.arange(rows.size) * (UPDATE_CHUNK // OCTET), index
    return rows


def norm_table(tensors: Sequence[Tensor]) -> NDArray[Any]:
    """A row of type `GradientChunk` for each block, at least one. The number of elements decides a chunk's length."""
    chunk, total = _NORM_CHUNK, sum(tensor.size for tensor in tensors)
    while chunk * _NORM_CHUNKS < total:
        chunk *= 2
    parts = []
    for tensor in tensors:
        gradient = tensor.arrays["gradient"]
        parts.append(_rows(GradientChunk, tensor.size, chunk, data=gradient))
        parts[-1]["type"] = _TYPES[gradient[1]]
    return _joined(parts, GradientChunk)


def ema_table(tensors: Sequence[tuple[int, int, DType, int]]) -> NDArray[Any]:
    """A row of type `EmaChunk` for each block, at least one.

    Args:
        tensors: of each, the addresses of the FP32 average and of the value, the value's type, and the size.
    """
    parts = []
    for average, value, dtype, size in tensors:
        parts.append(_rows(EmaChunk, size, _EMA_CHUNK, average=(average, DType.FLOAT32), value=(value, dtype)))
        parts[-1]["type"] = _TYPES[dtype]
    return _joined(parts, EmaChunk)


def _rows(struct: type[Structure], size: int, chunk: int, **arrays: tuple[int, DType]) -> NDArray[Any]:
    """Rows for the chunks of a tensor: where each array's part begins, its elements, and whether all are aligned.

    Args:
        arrays: address and type of each array, by its name in the struct.
    """
    starts = np.arange(0, size, chunk, dtype=np.uint64)
    rows = np.zeros(starts.size, np.dtype(struct))
    for name, (address, dtype) in arrays.items():
        rows[name] = np.uint64(address) + starts * np.uint64(dtype.itemsize)
    rows["count"] = np.minimum(np.uint64(size) - starts, np.uint64(chunk))
    rows["aligned"] = all(address % VECTOR_BYTES == 0 for address, _ in arrays.values())
    return rows


def _joined(parts: list[NDArray[Any]], struct: type[Structure]) -> NDArray[Any]:
    rows = np.concatenate(parts)
    return rows if rows.size else np.zeros(1, np.dtype(struct))
