"""The kernels, built for the CPU once and kept in pytest's cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host_kernels.build import BUILD_DIRECTORY, SANITIZER, Builder, Sanitizer
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.variants import ALL, SANITIZED


@pytest.fixture(scope="session")
def build_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get(BUILD_DIRECTORY)
    if given:
        return Path(given)
    cache: pytest.Cache | None = getattr(request.config, "cache", None)
    return cache.mkdir("host_kernels") if cache else tmp_path_factory.mktemp("host_kernels")


@pytest.fixture(scope="session")
def host(build_directory: Path) -> Iterator[HostKernels]:
    kernels = HostKernels(Builder(build_directory))
    kernels.announce(ALL if SANITIZER is Sanitizer.NONE else SANITIZED)
    yield kernels
    kernels.close()
