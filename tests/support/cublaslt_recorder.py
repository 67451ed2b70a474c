"""A layer between the bindings and cuBLASLt that records calls, makes one fail, and replaces calls that need a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lt_runtime.cublaslt import library

FAILURE = 14  # the status INTERNAL_ERROR
_TEXTS = ("cublasLtGetStatusName", "cublasLtGetStatusString")


class Recorder:
    """Takes the place of the loaded library. Its functions are the real ones, except those that `stand_ins` replace.

    Attributes:
        calls: names of the called functions, in order, without the two that return the text of a status.
        fail_at: index of the call that returns a failure without being made.
        created, destroyed: how often each address was created and destroyed.
    """

    def __init__(self, stand_ins: Mapping[str, Callable[..., int]] | None = None) -> None:
        self.calls: list[str] = []
        self.fail_at: int | None = None
        self.created: Counter[int] = Counter()
        self.destroyed: Counter[int] = Counter()
        self._stand_ins = dict(stand_ins or {})
        self._real = library.loaded()
        self.version, self.path = self._real.version, self._real.path

    @classmethod
    def install(
        cls, monkeypatch: pytest.MonkeyPatch, stand_ins: Mapping[str, Callable[..., int]] | None = None
    ) -> Recorder:
        """Puts a recorder in the library's place, and forgets all handles, until the test ends."""
        recorder = cls(stand_ins)
        monkeypatch.setattr(library, "loaded", lambda: recorder)
        monkeypatch.setattr(library, "_handles", {})
        return recorder

    def function(self, name: str) -> Callable[..., Any]:
        known = self._stand_ins.get(name) or self._real.function(name)
        return known if name in _TEXTS else self._recorded(name, known)

    def _recorded(self, name: str, real: Callable[..., int]) -> Callable[..., int]:
        def run(*arguments: Any) -> int:
            index = len(self.calls)
            self.calls.append(name)
            # A failing call counts as a destruction, because the caller must not destroy the object again.
            if name.endswith("Destroy"):
                self.destroyed[getattr(arguments[0], "value", arguments[0])] += 1
            if index == self.fail_at:
                return FAILURE
            status = real(*arguments)
            if name.endswith("Create") and status == 0:
                self.created[arguments[0]._obj.value] += 1
            return status

        return run

    def forget(self) -> None:
        """Forgets all recorded calls and addresses, and lets no call fail."""
        self.calls, self.fail_at = [], None
        self.created.clear()
        self.destroyed.clear()


def creates(address: int) -> Callable[..., int]:
    """Stands in for cublasLtCreate: returns consecutive addresses."""
    addresses = iter(range(address, address + 1000))

    def create(out: Any) -> int:
        out._obj.value = next(addresses)
        return 0

    return create


def succeeds(*_: Any) -> int:
    """Stands in for a function: does nothing and reports success."""
    return 0


def offers(count: int, *, workspace_size: int = 0, states: Mapping[int, int] | None = None) -> Callable[..., int]:
    """Stands in for the heuristic: offers `count` algorithms, whose ids are 0, 1, ..."""

    def query(*arguments: Any) -> int:
        results, returned = arguments[8]._obj, arguments[9]._obj
        given = min(count, arguments[7])
        for index in range(given):
            result = results[index]
            result.algo[0] = index
            result.workspace_size, result.waves_count = workspace_size, 2.0
            result.state = (states or {}).get(index, 0)
        returned.value = given
        return 0

    return query
