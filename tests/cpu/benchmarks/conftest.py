"""The benchmarks' modules on the pretended GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Final

import pytest

from tests.support.fake_gpu import FakeGpu

_RELOADED: Final = ("benchmarks", "examples")  # packages whose modules import the package under test


@pytest.fixture
def benchmark_module(gpu: FakeGpu) -> Iterator[Callable[[str], ModuleType]]:
    """Imports modules of the benchmarks so that they use the pretended GPU's copy of the package."""
    others = {name: module for name, module in sys.modules.items() if name.split(".")[0] in _RELOADED}
    for name in others:
        del sys.modules[name]
    yield lambda name: import_module(f"benchmarks.{name}")
    for name in [each for each in sys.modules if each.split(".")[0] in _RELOADED]:
        del sys.modules[name]
    sys.modules.update(others)
