"""The comparison of two profilers: processes take turns, and which kernels count."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import profile


def test_processes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def run(command: list[str], **_: Any) -> Any:
        who = command[command.index("--only") + 1]
        order.append(who)
        kernels = {"long": 100.0 + len(order), "short": 5.0 * len(order), f"of {who}": 1.0}
        return SimpleNamespace(stdout="a warning\n" + json.dumps(kernels))

    monkeypatch.setattr(subprocess, "run", run)
    found = profile.compared()
    assert order == ["torch", "lt", "lt", "torch", "torch", "lt"]
    assert found["us"] == {"long": [103.0, 104.0], "short": [15.0, 20.0]}
    assert found["only_one"] == ["of lt", "of torch"]
    assert found["most_apart"] == pytest.approx(1 / 104)  # a kernel of 20 µs or less does not count
