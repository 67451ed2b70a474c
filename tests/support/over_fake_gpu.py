"""The package that is over a pretended GPU: its modules, and calls through it."""

from __future__ import annotations

import importlib
from typing import Any

from tests.support.fake_gpu import FakeGpu


def own(name: str) -> Any:
    """A module of the package, while the pretended GPU is active."""
    return importlib.import_module(f"lt_runtime.{name}")


def within(name: str) -> Any:
    """A range."""
    return own("ranges").range_of(name)


def call(name: str, *arguments: Any) -> Any:
    """A call of the driver."""
    return own("gpu.driver").call(name, *arguments)


def current(gpu: FakeGpu) -> int:
    """The handle of CuPy's current stream."""
    return int(gpu.cp.cuda.get_current_stream().ptr)
