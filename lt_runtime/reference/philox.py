"""The random numbers of Philox4x32-10, and the dropout mask that they decide.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.errors import DeviceError, DTypeError
from lt_runtime.problem import Philox, check_dropout, keep_scale, keep_threshold

_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
# Calls of Philox that are computed at a time: their words stay in the processor's cache.
_BLOCK: Final = 4096
LANES: Final = 8  # 16-bit numbers (lanes) in the 128 bits that one call of Philox gives


def round_keys(key: tuple[int, int], rounds: int = 10) -> list[tuple[int, int]]:
    """The keys of the rounds of Philox4x32, two 32-bit words each; all are derived from the first round's key."""
    return [((key[0] + i * _WEYL[0]) & 0xFFFFFFFF, (key[1] + i * _WEYL[1]) & 0xFFFFFFFF) for i in range(rounds)]


def philox4x32(counter: NDArray[Any], key: tuple[int, int], rounds: int = 10) -> NDArray[np.uint32]:
    """Applies Philox4x32 to many counters at once.

    Args:
        counter: (n, 4) 32-bit words.
        key: two 32-bit words, the low one first.
        rounds: 10 for Philox4x32-10.

    Returns:
        (n, 4) uint32 words.
    """
    words = np.empty(counter.shape, np.uint32)
    for first in range(0, len(counter), _BLOCK):
        block = slice(first, first + _BLOCK)
        state = np.array(counter[block].T, np.uint64, order="C")
        for keys in round_keys(key, rounds):
            _mix(state, keys)
        words[block] = state.T
    return words


def _mix(state: NDArray[np.uint64], key: tuple[int, int]) -> None:
    """Applies one round of Philox in place.

    Words 0 and 1 become the high and the low half of word 2's product, words 2 and 3 those of word 0's product. Each
    high half is also XORed with a word of the key, and with the old word that the low half replaces.
    """
    first, second = state[0] * _MULTIPLIERS[0], state[2] * _MULTIPLIERS[1]
    for word, product, other, mixed in ((0, second, 1, key[0]), (2, first, 3, key[1])):
        np.right_shift(product, _HALF, out=state[word])
        state[word] ^= state[other]
        state[word] ^= np.uint64(mixed)
        np.bitwise_and(product, _LOW, out=state[other])


def random_lanes(calls: NDArray[np.uint64], third: int, fourth: int, seed: int) -> NDArray[np.uint16]:
    """The 16-bit lanes (n, 8) of the calls of Philox with given numbers (n,); lane 0 is the low half of word 0.

    The counter of a call has four words: the low and the high word of the call's number, then `third` and `fourth`. The
    key of all calls is the seed.
    """
    counter = np.empty((calls.size, 4), np.uint64)
    counter[:, 0], counter[:, 1] = calls & _LOW, calls >> _HALF
    counter[:, 2], counter[:, 3] = third, fourth
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return words.astype("<u4", copy=False).view("<u2")


def dropout_mask(shape: tuple[int, ...], p: float, philox: Philox) -> NDArray[np.bool_]:
    """The mask of dropout with probability `p`: true for the elements that it keeps.

    One call of Philox gives the 16-bit lanes of eight elements. Its counter is four words: the low and the high word of
    the call's number, the layer, the step; its key is the seed. Element i, in row-major order, takes lane i mod 8 of
    call i div 8; lane 0 is the low half of word 0. The element is kept if its lane is less than `keep_threshold(p)`.
    """
    size = int(np.prod(shape, dtype=np.int64))
    calls = np.arange(-(-size // LANES), dtype=np.uint64)
    lanes = random_lanes(calls, philox.layer, int(np.asarray(philox.step).reshape(())), philox.seed).reshape(-1)
    kept: NDArray[np.bool_] = (lanes[:size] < keep_threshold(p)).reshape(shape)
    return kept


def dropout_scale(shape: tuple[int, ...], p: float, philox: Philox) -> NDArray[np.float64]:
    """The factors by which dropout multiplies elements: 0 for a dropped element, `keep_scale` for a kept element."""
    return np.where(dropout_mask(shape, p, philox), keep_scale(keep_threshold(p)), 0.0)


def dropout_factors(shape: tuple[int, ...], p: float, rng: Philox | None) -> NDArray[np.float64] | None:
    """Checks a caller's arguments, and returns their `dropout_scale`; None without dropout.

    Raises:
        ArgumentError: see `check_dropout`.
        DeviceError: the step is an array outside of host memory.
        DTypeError: the step is an array, but not of one uint32.
    """
    philox = check_dropout(p, rng)
    if philox is None:
        return None
    step: Any = philox.step
    if not isinstance(step, (int, np.ndarray)):
        raise DeviceError(f"step is a {type(step).__name__}; with NumPy arrays, accepted are an int or one uint32")
    if not isinstance(step, int) and (step.dtype != np.uint32 or step.size != 1):
        raise DTypeError(f"step is {step.dtype.name} of shape {step.shape}; accepted are an int or one uint32")
    return dropout_scale(shape, p, philox)
