"""Stochastic rounding to BF16, and the random bits that an optimizer's update draws for it."""

from __future__ import annotations

import enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.problem import DType
from lt_runtime.reference.philox import philox4x32

_STREAMS: Final = 1 << 31  # apart from the ids of dropout's layers
_TILE: Final = 256
_LANES: Final = 8


class RoundedTensor(enum.IntEnum):
    """What an update rounds: an element's three take different lanes. AMSGrad's largest v shares that of v."""

    PARAMETER = 0
    M = 1
    V = 2


_ORDER: Final = {
    RoundedTensor.PARAMETER: (0, 1, 2, 3, 4, 5, 6, 7),
    RoundedTensor.M: (1, 0, 3, 2, 5, 4, 7, 6),
    RoundedTensor.V: (2, 3, 4, 5, 6, 7, 0, 1),
}
"""Which lane of a call each of its eight elements takes: one call does for all three."""


def rounding_lanes(
    size: int, seed: int, tensor: int, step: int, part: RoundedTensor, first: int = 0
) -> NDArray[np.uint16]:
    """Sixteen random bits for each element of a tensor.

    A call of Philox4x32-10, whose key is the seed and whose counter is (number of the call: low word, high word;
    2³¹ + tensor; step), gives eight lanes, low half of word 0 first. Elements 256·t + 4·l + i and
    256·t + 128 + 4·l + i, where l < 32 and i < 4, are the i-th and (4 + i)-th of call 32·t + l, and one thread's. The
    j-th takes lane j for the parameter, lane j ^ 1 for m, and lane j + 2 modulo 8 for v.

    Args:
        size: elements.
        tensor: its place among the optimizer's parameters.
        step: number of the update, from 1.
        first: element to begin at, a multiple of 256.

    Returns:
        (size,), those of the elements from `first` on.
    """
    tiles = -(-size // _TILE)
    call = np.arange(tiles * (_TILE // _LANES), dtype=np.uint64) + np.uint64(first // _LANES)
    counter = np.empty((call.size, 4), np.uint64)
    counter[:, 0], counter[:, 1] = call & np.uint64(0xFFFFFFFF), call >> np.uint64(32)
    counter[:, 2], counter[:, 3] = _STREAMS + tensor, step
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=2).astype(np.uint16)
    lanes = halves.reshape(-1, _LANES)[:, _ORDER[part]]
    in_order: NDArray[np.uint16] = lanes.reshape(tiles, _TILE // _LANES, 2, 4).swapaxes(1, 2).reshape(-1)
    return in_order[:size]


def round_stochastically(values: NDArray[np.float32], lanes: NDArray[np.uint16]) -> NDArray[Any]:
    """FP32 to BF16, away from zero with the probability that the bits cut off say.

    They and the lane are added: a carry rounds up. What that carries past BF16's largest number becomes infinite; NaN
    stays NaN.
    """
    rounded = (values.view(np.uint32).astype(np.uint64) + lanes) >> np.uint64(16)
    bits = np.where(np.isnan(values), np.uint64(0x7FFF), rounded)
    return bits.astype(np.uint16).view(DType.BFLOAT16.numpy)
