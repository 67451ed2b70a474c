"""Access to the copy of the package that runs on the pretended GPU: its modules, ranges and driver calls."""

from __future__ import annotations

import importlib
from typing import Any

from tests.support.fake_gpu import FakeGpu


def own(name: str) -> Any:
    """Imports a module of the package's copy that runs on the active pretended GPU."""
    return importlib.import_module(f"lt_runtime.{name}")


def within(name: str) -> Any:
    """Enters a named range of the package's copy."""
    return own("ranges").range_of(name)


def call(name: str, *arguments: Any) -> Any:
    """Calls a function of the pretended driver by name."""
    return own("gpu.driver").call(name, *arguments)


def current(gpu: FakeGpu) -> int:
    """Returns the handle of CuPy's current stream."""
    return int(gpu.cp.cuda.get_current_stream().ptr)
