"""Tuning an MLP and explaining its plans on the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import lt_runtime as lt
from lt_runtime.paths import CACHE_VARIABLE
from lt_runtime.plans import cache


def test_tune_report_and_explanation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_plans", {})
    stack = {"activation": "gelu", "dtype": "bfloat16", "device": 0}
    first, second = (lt.tune([256, 512, 256], 256, **stack) for _ in range(2))  # type: ignore[arg-type]
    print(first)
    assert all(each.measured and each.before_us > 0 for each in first)
    assert not any(each.measured for each in second)
    found = lt.explain([256, 512, 256], 256, **stack)  # type: ignore[arg-type]
    assert all(each.us is not None for each in found)
    assert all(0 < each.roofline_fraction < 1 for each in found if each.roofline_fraction is not None)
    assert "by the priors" not in str(found)
