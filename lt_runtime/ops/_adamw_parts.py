"""A step of AdamW over several launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lt_runtime.errors import ArgumentError


class StepInParts:
    """One step, given to streams part by part; each parameter is updated once.

    The kernels count their blocks until all of the step have read its number, and then advance it. So a step that was
    begun must be finished, and the next may begin only after all launches of this one. Nothing is launched before the
    first `update`.

    Args:
        launch: updates the tensors in a range of the table's rows, on a stream.
        rows: of the table, by parameter, one after the other.
    """

    def __init__(self, launch: Callable[[range, Any], None], rows: Sequence[range]) -> None:
        self._launch, self._rows = launch, rows
        self._left = set(range(len(rows)))

    def update(self, positions: Iterable[int], stream: Any) -> None:
        """Updates some parameters, whose gradients the stream has made.

        Args:
            positions: in `AdamW.parameters`; none that was given before.
            stream: as in `linear_fwd`.

        Raises:
            ArgumentError: a position that was given before, or that there is not; nothing is launched.
            GpuError: the driver failed.
        """
        chosen = sorted(set(positions))
        if wrong := [position for position in chosen if position not in self._left]:
            raise ArgumentError(f"positions {wrong} are not among those left in this step: {sorted(self._left)}")
        self._left.difference_update(chosen)
        for rows in _joined(self._rows[position] for position in chosen):
            self._launch(rows, stream)

    def finish(self, stream: Any) -> None:
        """Updates all that is left."""
        self.update(tuple(self._left), stream)


def _joined(ranges: Iterable[range]) -> Iterator[range]:
    """Ascending ranges, those that meet made one, and without empty ones."""
    whole = range(0)
    for each in filter(len, ranges):
        if whole and whole.stop != each.start:
            yield whole
            whole = range(0)
        whole = range(whole.start if whole else each.start, each.stop)
    if whole:
        yield whole
