"""Collects all kernels that the modules of `lt_runtime.kernels` declare."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Final

from lt_runtime import kernels
from lt_runtime.kernels.kernel import Entry

FAMILIES: Final[tuple[ModuleType, ...]] = tuple(
    importlib.import_module(f"{kernels.__name__}.{module.name}") for module in pkgutil.iter_modules(kernels.__path__)
)
"""All modules of `lt_runtime.kernels`."""
ENTRIES: Final[Mapping[str, Entry]] = {
    value.name: value for family in FAMILIES for value in vars(family).values() if isinstance(value, Entry)
}
"""All kernels by their names."""
