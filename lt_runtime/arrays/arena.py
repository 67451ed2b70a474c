"""Arenas: many arrays in one allocation, each aligned as if allocated alone, so that their plans are the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lt_runtime.problem import ALIGNMENT

_Shapes = Sequence[tuple[int, ...]]


def arena_size(shapes: _Shapes, itemsize: int) -> int:
    """Elements of an arena for arrays of these shapes, each of which begins at a multiple of `ALIGNMENT` bytes."""
    return _starts(shapes, itemsize)[-1]


def arena_views(flat: Any, shapes: _Shapes) -> list[Any]:
    """Arrays within `flat`, which has `arena_size` elements and begins on `ALIGNMENT` bytes."""
    starts = _starts(shapes, flat.itemsize)
    return [flat[start : start + math.prod(shape)].reshape(shape) for start, shape in zip(starts, shapes, strict=False)]


def host_zeros(size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A flat NumPy array of zeros that begins on `ALIGNMENT` bytes."""
    memory = np.zeros(size * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size * dtype.itemsize].view(dtype)


def _starts(shapes: _Shapes, itemsize: int) -> list[int]:
    """Offsets of the arrays in elements, followed by the end of the last array."""
    step = ALIGNMENT // itemsize
    sizes = (-(-math.prod(shape) // step) * step for shape in shapes)
    return [*itertools.accumulate(sizes, initial=0)]
