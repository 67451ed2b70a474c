"""Environment variables: an invalid value causes one warning, also without a GPU, and is ignored."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest

from lt_runtime.environment import RECORD_VARIABLE, TUNE_VARIABLE, setting

SCRIPT = "import lt_runtime as lt, numpy as np; x = np.ones((2, 2), np.float32); lt.matmul(x, x); lt.linear(x, x)"


@pytest.mark.parametrize(
    ("name", "meaningless", "accepted"),
    [
        (TUNE_VARIABLE, "first_use", "'off' and 'first-use'"),
        (RECORD_VARIABLE, "1", "names of files, such as met.jsonl"),
    ],
)
def test_a_meaningless_value_costs_one_warning(
    name: str, meaningless: str, accepted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = os.environ | {name: meaningless}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("Warning") == 1
    assert f"{name} is '{meaningless}'; accepted are {accepted}; it has no effect" in done.stderr
    monkeypatch.setenv(name, meaningless)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert setting(name) is None


@pytest.mark.parametrize(("name", "value"), [(TUNE_VARIABLE, "off"), (TUNE_VARIABLE, ""), (RECORD_VARIABLE, "met")])
def test_other_values_cost_none(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert setting(name) == (value or None)  # warnings are errors here, so that an additional one would fail the test
