"""The other libraries that do the same work: PyTorch, JAX and nvmath-python. Each module imports its library."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def peer(module: str, name: str, *arguments: Any, **options: Any) -> Callable[[], Any]:
    """A function that builds a contender of `benchmarks.peers.MODULE`, and imports that module only then.

    So a library that is not installed leaves its own contenders out, and nothing else.
    """
    return lambda: getattr(import_module(f"benchmarks.peers.{module}"), name)(*arguments, **options)
