"""Stochastic rounding to BF16, and the random bits that an optimizer's update draws for it."""

from __future__ import annotations

import enum
import functools
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.problem import DType
from lt_runtime.reference.philox import LANES, random_lanes

# Highest bit of the third word of Philox's counter. Dropout puts a layer's id there, which never has this bit.
_STREAMS: Final = 1 << 31
_TILE: Final = 256


class RoundedTensor(enum.IntEnum):
    """The tensors that an update rounds, with different random lanes; AMSGrad's largest v takes the lanes of v."""

    PARAMETER = 0
    M = 1
    V = 2


_ORDER: Final = ((0, 1, 2, 3, 4, 5, 6, 7), (1, 0, 3, 2, 5, 4, 7, 6), (2, 3, 4, 5, 6, 7, 0, 1))
"""For each `RoundedTensor`, the lanes of the eight elements that share a call of Philox (see `rounding_lanes`). Each
tensor takes different lanes for an element, so that one call serves all three tensors."""


def rounding_lanes(
    size: int, seed: int, tensor: int, step: int, part: RoundedTensor, first: int = 0
) -> NDArray[np.uint16]:
    """Sixteen random bits for each element of a tensor.

    One call of Philox4x32-10 gives eight lanes; lane 0 is the low half of word 0. Its key is the seed, and its counter
    is four words: the low and the high word of the call's number, 2³¹ + tensor, the step. Call 32·t + l, where l < 32,
    serves the eight elements of one thread of the kernel: for i < 4, element 256·t + 4·l + i has place i in the call,
    and element 256·t + 128 + 4·l + i has place 4 + i. The element at place j takes lane j for the parameter,
    lane j ^ 1 for m, and lane (j + 2) mod 8 for v.

    Args:
        size: the number of elements.
        tensor: the tensor's index among the optimizer's parameters.
        step: the number of the update, from 1.
        first: the index of the first element, a multiple of 256.

    Returns:
        (size,), the lanes of the elements from `first` on.
    """
    tiles = -(-size // _TILE)
    lanes = _lanes_of_calls(first // LANES, tiles * (_TILE // LANES), seed, tensor, step)[:, _ORDER[part]]
    in_order: NDArray[np.uint16] = lanes.reshape(tiles, _TILE // LANES, 2, 4).swapaxes(1, 2).reshape(-1)
    return in_order[:size]


# The last result is cached, because m and v use the same calls of Philox as their parameter.
@functools.lru_cache(maxsize=1)
def _lanes_of_calls(first: int, count: int, seed: int, tensor: int, step: int) -> NDArray[np.uint16]:
    return random_lanes(np.arange(first, first + count, dtype=np.uint64), _STREAMS + tensor, step, seed)


def round_stochastically(values: NDArray[np.float32], lanes: NDArray[np.uint16]) -> NDArray[Any]:
    """Rounds FP32 to BF16, away from zero with a probability proportional to the part that is cut off.

    The lane is added to the 16 bits that are cut off, and a carry rounds the number away from zero. A number that is
    rounded past BF16's largest becomes infinite; NaN stays NaN.
    """
    rounded = (values.view(np.uint32).astype(np.uint64) + lanes) >> np.uint64(16)
    bits = np.where(np.isnan(values), np.uint64(0x7FFF), rounded)
    return bits.astype(np.uint16).view(DType.BFLOAT16.numpy)
