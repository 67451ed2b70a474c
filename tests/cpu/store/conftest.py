"""Fixtures and helpers for plan files that tests write and read."""

from __future__ import annotations

from pathlib import Path

import pytest

from lt_runtime.store.entries import ProductEntry
from lt_runtime.store.plan_store import PlanStore
from tests.cpu.cli.conftest import cli as cli  # a fixture
from tests.support.plan_entries import H200, KEY, product


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of a plan file in a subdirectory of the cache directory; neither the file nor the subdirectory exists
    yet.
    """
    return tmp_path / "cache" / "plans" / H200.file_name


@pytest.fixture
def filled(path: Path) -> ProductEntry:
    """Writes the plan file with this entry under KEY."""
    entry = product()
    assert PlanStore(path, H200).put({KEY: entry})
    return entry
