"""What came of tuning, as data and as a table."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

from lt_runtime.store.keys import problem_key
from lt_runtime.tuner.names import describe

if TYPE_CHECKING:
    from rich.table import Table

    from lt_runtime.tuner.tuning import Tuned

_WIDTH = 140  # columns of the table as text


class TuningReport(Sequence["Tuned"]):
    """What was decided, one `Tuned` for each group of problems that were decided together; as text, a table."""

    def __init__(self, tuned: Iterable[Tuned]) -> None:
        self._tuned = tuple(tuned)

    @overload
    def __getitem__(self, index: int) -> Tuned: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tuned]: ...
    def __getitem__(self, index: int | slice) -> Tuned | Sequence[Tuned]:
        return self._tuned[index]

    def __len__(self) -> int:
        return len(self._tuned)

    @property
    def gain(self) -> float:
        """How many times as fast as before: the geometric mean over what was measured now; 1.0 if nothing was."""
        gains = [gain for each in self._tuned if (gain := gain_of(each)) is not None]
        return math.exp(math.fsum(map(math.log, gains)) / len(gains)) if gains else 1.0

    @property
    def seconds(self) -> float:
        """What it all took."""
        return math.fsum(each.seconds for each in self._tuned)

    def table(self) -> Table:
        """The groups with their times before and after, the gain, and the strategy."""
        from rich.box import SIMPLE
        from rich.markup import escape
        from rich.table import Column, Table

        numbers = [Column(name, justify="right", no_wrap=True) for name in ("Before µs", "After µs", "Gain", "Tried")]
        table = Table(Column("Problem", ratio=1), *numbers, Column("Strategy", ratio=1), box=SIMPLE)
        for each in self._tuned:
            names = "\n".join(dict.fromkeys(map(describe, each.problems)))
            times = (_time(each.before_us), _time(each.after_us), _gain(each), str(each.measured or ""))
            table.add_row(escape(names), *times, escape(each.strategy))
        return table

    @property
    def summary(self) -> str:
        """One line under the table."""
        rejected = sum(len(each.rejected) for each in self._tuned)
        count = f"{len(self)} group{'' if len(self) == 1 else 's'} of problems decided in {self.seconds:.1f} s"
        return f"{count}; {self.gain:.2f}× in the geometric mean; {rejected} candidates rejected"

    def to_json(self) -> list[dict[str, Any]]:
        """The same as plain data, the problems by name and by key."""
        return [_plain(each) for each in self._tuned]

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
        with console.capture() as captured:
            console.print(self.table())
            console.print(self.summary, highlight=False)
        return captured.get().strip("\n")

    def __repr__(self) -> str:
        return f"<TuningReport: {self.summary}>"


def gain_of(tuned: Tuned) -> float | None:
    """How many times as fast as before; None where nothing was measured now."""
    if not tuned.measured or not tuned.before_us or not tuned.after_us:
        return None
    return tuned.before_us / tuned.after_us


def _gain(tuned: Tuned) -> str:
    gain = gain_of(tuned)
    if gain is not None:
        return f"{gain:.2f}×"
    return "known" if tuned.after_us else ""


def _time(us: float) -> str:
    return f"{us:.2f}" if us else ""


def _plain(tuned: Tuned) -> dict[str, Any]:
    return {
        "problems": [describe(each) for each in tuned.problems],
        "keys": [problem_key(each) for each in tuned.problems],
        "before_us": tuned.before_us,
        "after_us": tuned.after_us,
        "gain": gain_of(tuned),
        "strategy": tuned.strategy,
        "measured": tuned.measured,
        "rejected": list(tuned.rejected),
        "seconds": tuned.seconds,
    }
