"""The soak test on the pretended GPU: every operation passes, and a wrong result is reported."""

from __future__ import annotations

import numpy as np
import pytest

from tests import soak
from tests.support import soak_operations
from tests.support.fake_gpu import FakeGpu


@pytest.mark.parametrize("name", soak_operations.OPERATIONS)
def test_every_operation(hurried: FakeGpu, name: str) -> None:
    assert 1 <= soak_operations.run(name, 0, hurried) <= 6


def test_a_soak(hurried: FakeGpu, capsys: pytest.CaptureFixture[str]) -> None:
    options = soak.parse(["--minutes", "0.03", "--threads", "1", "--seed", "3"])
    assert soak.soak(lambda: hurried, options) == 0
    assert "passed: seed 3" in capsys.readouterr().out


def test_a_wrong_result(hurried: FakeGpu, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hurried.library, "fault", lambda call: call._replace(alpha=2 * call.alpha))
    options = soak.parse(["--minutes", "1", "--threads", "1", "--seed", "7", "--only", "bound"])
    assert soak.soak(lambda: hurried, options) == 1
    said = capsys.readouterr().out
    assert "FAULT: --only 'bound' --seed 7" in said
    assert "FAILED: seed 7" in said


@pytest.mark.parametrize("growth", [0, 65 << 20])
def test_memory_that_grows(growth: int) -> None:
    report = soak.Report(gpu_bytes=[*np.linspace(0, 4 * growth, 40).astype(int)], host_bytes=[1] * 40)
    report.check_growth()
    assert bool(report.faults) == (growth > 0)
