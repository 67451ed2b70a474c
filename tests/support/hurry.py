"""A pretended GPU on which tuning takes as little as it can, and the same on any machine."""

from __future__ import annotations

import itertools
import time
from typing import Final

import pytest

from tests.support.fake_gpu import FakeGpu

_TICK_S: Final = 0.05
_LONG_US: Final = 1000.0


def hurry(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives it a clock that counts the looks at it, and long work."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: _TICK_S * next(ticks))
    make_work_long(gpu, monkeypatch)


def make_work_long(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all work so long that one launch is enough to time it."""
    monkeypatch.setattr(gpu.streams, "costs_us", {"kernel": _LONG_US, "matmul": _LONG_US})
