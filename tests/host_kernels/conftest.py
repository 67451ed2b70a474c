"""The kernels, built for the CPU once and kept in pytest's cache, which all processes of a run share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.host_kernels.build import BUILD_DIRECTORY, Builder
from tests.host_kernels.harness import HostKernels


@pytest.fixture(scope="session")
def build_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get(BUILD_DIRECTORY)
    if given:
        return Path(given)
    cache: pytest.Cache | None = getattr(request.config, "cache", None)
    if cache:
        return cache.mkdir("host_kernels")
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    (shared / "host_kernels").mkdir(exist_ok=True)
    return shared / "host_kernels"


@pytest.fixture(scope="session")
def host(build_directory: Path) -> HostKernels:
    return HostKernels(Builder(build_directory))
