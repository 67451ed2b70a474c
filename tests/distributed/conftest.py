"""Tests of real processes over MPI; they are skipped without mpi4py, unless LT_REQUIRE_MPI=1."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

if os.environ.get("LT_REQUIRE_MPI") == "1" and find_spec("mpi4py") is None:
    raise ImportError("mpi4py is not installed, and LT_REQUIRE_MPI asks for it: pip install '.[test-mpi]'")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("mpi4py") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip("needs mpi4py: pip install '.[test-mpi]'"))
