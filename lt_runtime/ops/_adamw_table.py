"""The tables on the device that AdamW's kernels find their tensors in: a row for every chunk, a block for every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.kernels.kernel import OCTET, THREADS
from lt_runtime.kernels.params import AdamWChunk, GradientChunk
from lt_runtime.problem import DType

UPDATE_CHUNK: Final = THREADS * OCTET  # elements: a thread loads all of its own at once
_NORM_CHUNK: Final = 16384  # at least
_NORM_CHUNKS: Final = 8192  # about the most sums that the last block is left with
_ALIGNMENT: Final = 16
_TYPES: Final = {DType.FLOAT32: 0, DType.FLOAT16: 1, DType.BFLOAT16: 2}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter's arrays, each by its address and type.

    Attributes:
        size: elements.
        value: what is read and written: the parameter, or its master copy.
        copy: the parameter where `value` is its master copy; None otherwise.
        v_max: None without AMSGrad.
    """

    size: int
    value: tuple[int, DType]
    copy: tuple[int, DType] | None
    gradient: tuple[int, DType]
    m: tuple[int, DType]
    v: tuple[int, DType]
    v_max: tuple[int, DType] | None
    lr_scale: float
    weight_decay: float

    @property
    def arrays(self) -> Mapping[str, tuple[int, DType]]:
        """Those that there are, by their names in `AdamWChunk`."""
        names = ("value", "copy", "gradient", "m", "v", "v_max")
        return {name: array for name in names if (array := getattr(self, name)) is not None}


def update_table(tensors: Sequence[Tensor]) -> NDArray[Any]:
    """Rows of type `AdamWChunk`, at least one: the block that updates nothing still advances the step."""
    return _joined([_update_rows(i, tensor) for i, tensor in enumerate(tensors)], np.dtype(AdamWChunk))


def norm_table(tensors: Sequence[Tensor]) -> NDArray[Any]:
    """Rows of type `GradientChunk`, at least one. Their length depends on the number of elements alone."""
    chunk, total = _NORM_CHUNK, sum(tensor.size for tensor in tensors)
    while chunk * _NORM_CHUNKS < total:
        chunk *= 2
    return _joined([_norm_rows(tensor, chunk) for tensor in tensors], np.dtype(GradientChunk))


def _update_rows(index: int, tensor: Tensor) -> NDArray[Any]:
    starts = np.arange(0, tensor.size, UPDATE_CHUNK, dtype=np.uint64)
    rows = np.zeros(starts.size, np.dtype(AdamWChunk))
    for name, (address, dtype) in tensor.arrays.items():
        rows[name] = np.uint64(address) + starts * np.uint64(dtype.itemsize)
        if name in ("value", "copy", "gradient"):  # the moments' type is the kernel's own
            rows[f"{name}_type"] = _TYPES[dtype]
    rows["octet"], rows["tensor"] = starts // np.uint64(OCTET), index
    rows["count"] = np.minimum(np.uint64(tensor.size) - starts, np.uint64(UPDATE_CHUNK))
    rows["lr_scale"], rows["weight_decay"] = tensor.lr_scale, tensor.weight_decay
    rows["aligned"] = all(address % _ALIGNMENT == 0 for address, _ in tensor.arrays.values())
    return rows


def _norm_rows(tensor: Tensor, chunk: int) -> NDArray[Any]:
    address, dtype = tensor.gradient
    starts = np.arange(0, tensor.size, chunk, dtype=np.uint64)
    rows = np.zeros(starts.size, np.dtype(GradientChunk))
    rows["data"] = np.uint64(address) + starts * np.uint64(dtype.itemsize)
    rows["count"] = np.minimum(np.uint64(tensor.size) - starts, np.uint64(chunk))
    rows["type"], rows["aligned"] = _TYPES[dtype], address % _ALIGNMENT == 0
    return rows


def _joined(parts: list[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    rows = np.concatenate(parts)
    return rows if rows.size else np.zeros(1, dtype)
