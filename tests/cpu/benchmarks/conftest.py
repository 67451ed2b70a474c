"""The benchmarks' modules on the pretended GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType

import pytest

from tests.support.fake_gpu import FakeGpu


@pytest.fixture
def benchmark_module(gpu: FakeGpu) -> Iterator[Callable[[str], ModuleType]]:
    """Imports modules of the benchmarks so that they use the pretended GPU's copy of the package."""
    others = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "benchmarks"}
    for name in others:
        del sys.modules[name]
    yield lambda name: import_module(f"benchmarks.{name}")
    for name in [each for each in sys.modules if each.split(".")[0] == "benchmarks"]:
        del sys.modules[name]
    sys.modules.update(others)
