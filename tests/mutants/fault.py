"""A planted fault: a change of one line that tests must notice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class StaleFaultError(Exception):
    """Raised when a fault does not fit its file."""


@dataclass(frozen=True)
class Fault:
    """A planted fault: a text of a file that is replaced by a wrong one, and the tests that must then fail.

    Attributes:
        name: what is wrong, in a few words.
        path: the file, relative to the repository's root.
        old: text that is in the file exactly once.
        new: the text that replaces it.
        tests: pytest's ids of the tests that must fail, the fewest and fastest.
    """

    name: str
    path: str
    old: str
    new: str
    tests: Sequence[str]

    @property
    def needs_gpu(self) -> bool:
        """Whether the fault can only be seen on a GPU."""
        return all(test.startswith("tests/gpu/") for test in self.tests)

    def concerns(self, paths: set[str]) -> bool:
        """Whether one of the files contains the fault or its tests."""
        return self.path in paths or any(test.partition("::")[0] in paths for test in self.tests)

    def planted(self, text: str) -> str:
        """Returns the file's text with the fault.

        Raises:
            StaleFaultError: the old text is not there exactly once, or equals the new one.
        """
        count = text.count(self.old)
        if count != 1 or self.old == self.new:
            raise StaleFaultError(f"{self.name!r}: {self.path} has {self.old!r} {count} times, not once")
        return text.replace(self.old, self.new)


Table = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Table of faults, by file and by name: the old text, the new text and the tests that must notice."""


def faults_of(table: Table) -> list[Fault]:
    return [
        Fault(name, path, old, new, tests) for path, rows in table.items() for name, (old, new, *tests) in rows.items()
    ]
