"""The comparison of two profilers: what counts, and what only one of them saw."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import profiles


def test_only_long_kernels_that_both_saw_count() -> None:
    seen = {
        "long": {"lt": 101.0, "torch": 100.0},
        "short": {"lt": 9.0, "torch": 6.0},
        "alone": {"lt": 500.0},
    }
    lines = profiles.table(seen).splitlines()
    assert [line.split()[-1] for line in lines[1:-1]] == ["alone", "long", "short"]
    assert "seen by lt alone" in lines[1]
    assert lines[-1] == "the most of kernels over 20 us: 1.00%; the target is 3 %"


def test_processes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def run(command: list[str], **_: Any) -> Any:
        name = command[command.index("--process") + 1]
        order.append(name)
        durations = [float(len(order) + i) for i in range(3)]
        return SimpleNamespace(stdout="a warning\n" + json.dumps({"kernel": durations, "few": [1.0]}))

    monkeypatch.setattr(subprocess, "run", run)
    found = profiles.measured(3, 3)
    assert order == ["lt", "torch", "torch", "lt", "lt", "torch"]
    assert found == {"kernel": {"lt": 5.0, "torch": 4.0}}
