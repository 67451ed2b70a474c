"""Philox4x32-10 and the dropout mask drawn from it.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.problem import Philox, keep_scale, keep_threshold

_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_LANES: Final = 8  # 16-bit lanes in one call's 128 bits


def round_keys(key: tuple[int, int], rounds: int = 10) -> list[tuple[int, int]]:
    """The two 32-bit words that each round of Philox4x32 takes, from the key's."""
    return [((key[0] + i * _WEYL[0]) & 0xFFFFFFFF, (key[1] + i * _WEYL[1]) & 0xFFFFFFFF) for i in range(rounds)]


def philox4x32(counter: NDArray[Any], key: tuple[int, int], rounds: int = 10) -> NDArray[np.uint32]:
    """Philox4x32 of counters.

    Args:
        counter: (n, 4) 32-bit words.
        key: two 32-bit words, the low one first.
        rounds: 10 in every published use.

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


def dropout_mask(shape: tuple[int, ...], p: float, philox: Philox) -> NDArray[np.bool_]:
    """Which elements dropout with probability `p` keeps.

    Element i (row-major) looks at 16-bit lane i mod 8, low half of word 0 first, of the call whose counter is
    (i div 8: low word, high word; layer; step) and whose key is the seed. It is kept below `keep_threshold(p)`.
    """
    size = int(np.prod(shape, dtype=np.int64))
    block = np.arange(-(-size // _LANES), dtype=np.uint64)
    counter = np.empty((block.size, 4), np.uint64)
    counter[:, 0], counter[:, 1] = block & _LOW, block >> _HALF
    counter[:, 2], counter[:, 3] = philox.layer, int(np.asarray(philox.step).reshape(()))
    words = philox4x32(counter, (philox.seed & 0xFFFFFFFF, philox.seed >> 32))
    lanes = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=2).reshape(-1)
    kept: NDArray[np.bool_] = (lanes[:size] < keep_threshold(p)).reshape(shape)
    return kept


def dropout_scale(shape: tuple[int, ...], p: float, philox: Philox) -> NDArray[np.float64]:
    """What dropout multiplies each element by: 0 where dropped, `keep_scale` where kept."""
    return np.where(dropout_mask(shape, p, philox), keep_scale(keep_threshold(p)), 0.0)
