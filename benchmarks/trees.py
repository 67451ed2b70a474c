"""Small decision trees, fitted to measured times: which strategy to take, by a few limits on sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

_DEPTH: Final = 2
_LEAST_GAIN: Final = 0.05  # log of time over all samples, that a further limit has to save
_LEAST_SAMPLES: Final = 2  # on either side of one
_UNKNOWN: Final = 2.0  # what was too slow or refused counts as this multiple of the slowest


class Sample(NamedTuple):
    """A problem: its sizes by name, and microseconds by strategy, of at least one."""

    features: Mapping[str, int]
    times: Mapping[str, float]

    def loss(self, strategy: str) -> float:
        """Logarithm of a strategy's time as a multiple of the best."""
        time = self.times.get(strategy, _UNKNOWN * max(self.times.values()))
        return math.log(time / min(self.times.values()))


class Fitted(NamedTuple):
    """A tree, whose leaves are names of strategies, and the sum of the losses of what it chooses."""

    tree: Any
    loss: float


def fit(samples: Sequence[Sample], depth: int = _DEPTH) -> Fitted:
    """The tree of least loss, of all those of limits that are powers of two; no limit that gains hardly anything."""
    best = _leaf(samples)
    if depth == 0 or best.loss < _LEAST_GAIN:
        return best
    for feature, limit in _limits(samples):
        small = [sample for sample in samples if sample.features[feature] < limit]
        large = [sample for sample in samples if sample.features[feature] >= limit]
        if min(len(small), len(large)) < _LEAST_SAMPLES:
            continue
        then, otherwise = fit(small, depth - 1), fit(large, depth - 1)
        loss = then.loss + otherwise.loss + _LEAST_GAIN
        if loss < best.loss and then.tree != otherwise.tree:
            tree = {"feature": feature, "below": limit, "then": then.tree, "otherwise": otherwise.tree}
            best = Fitted(tree, loss)
    return best


def _leaf(samples: Sequence[Sample]) -> Fitted:
    names = dict.fromkeys(name for sample in samples for name in sample.times)
    losses = {name: sum(sample.loss(name) for sample in samples) for name in names}
    best = min(losses, key=losses.__getitem__)
    return Fitted(best, losses[best])


def _limits(samples: Sequence[Sample]) -> Iterable[tuple[str, int]]:
    """Powers of two between the least and the greatest of each size."""
    for feature in samples[0].features:
        sizes = [sample.features[feature] for sample in samples]
        yield from ((feature, 1 << bits) for bits in range(min(sizes).bit_length(), max(sizes).bit_length()))
