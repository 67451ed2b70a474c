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
LANES: Final = 8  # the 16-bit lanes in the 128 bits of one call


def round_keys(key: tuple[int, int], rounds: int = 10) -> list[tuple[int, int]]:
    """The keys of the rounds of Philox4x32, two 32-bit words each, derived from the first."""
    return [((key[0] + i * _WEYL[0]) & 0xFFFFFFFF, (key[1] + i * _WEYL[1]) & 0xFFFFFFFF) for i in range(rounds)]


def philox4x32(counter: NDArray[Any], key: tuple[int, int], rounds: int = 10) -> NDArray[np.uint32]:
    """Philox4x32 of many counters.

    Args:
        counter: (n, 4) 32-bit words.
        key: two 32-bit words, the low one first.
        rounds: 10 for Philox4x32-10.

    Returns:
        (n, 4) uint32 words.
    """
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    for k0, k1 in round_keys(key, rounds):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def random_lanes(calls: NDArray[np.uint64], third: int, fourth: int, seed: int) -> NDArray[np.uint32]:
    """The lanes (n, 8) of calls with these numbers (n,); lane 0 is the low half of word 0.

    A call's counter is four words: the low and the high word of its number, the third, the fourth; its key is the seed.
    """
    counter = np.empty((calls.size, 4), np.uint64)
    counter[:, 0], counter[:, 1] = calls & _LOW, calls >> _HALF
    counter[:, 2], counter[:, 3] = third, fourth
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=2).reshape(-1, LANES)


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
    """The factors by which dropout multiplies elements: 0 for those dropped, `keep_scale` for those kept."""
    return np.where(dropout_mask(shape, p, philox), keep_scale(keep_threshold(p)), 0.0)


def dropout_factors(shape: tuple[int, ...], p: float, rng: Philox | None) -> NDArray[np.float64] | None:
    """`dropout_scale` as a caller asks for it; None without dropout.

    Raises:
        ArgumentError: see `check_dropout`.
        DeviceError: the step does not live in host memory.
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
