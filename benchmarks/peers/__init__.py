"""Contenders of other libraries: PyTorch and JAX. Each module imports its library."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def peer(module: str, name: str, *arguments: Any, **options: Any) -> Callable[[], Any]:
    """Returns a function that imports `benchmarks.peers.MODULE` and then builds one of its contenders.

    The library is imported only when a contender is built: if it is not installed, only its own contenders are missing.
    """
    return lambda: getattr(import_module(f"benchmarks.peers.{module}"), name)(*arguments, **options)
