"""Makes tuning on the pretended GPU as short as possible, and the same on every machine."""

from __future__ import annotations

import itertools
import time
from typing import Final

import pytest

from tests.support.fake_gpu import FakeGpu

_TICK_S: Final = 0.05
_LONG_US: Final = 1000.0


def hurry(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the GPU's clock by one that advances at each reading, and makes all work so long that one launch
    is timed.
    """
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: _TICK_S * next(ticks))
    monkeypatch.setattr(gpu.streams, "costs_us", dict.fromkeys(("kernel", "matmul", "float8 matmul"), _LONG_US))
