"""A pretended GPU for the tests of calls that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host_kernels.build import BUILD_DIRECTORY, Builder
from tests.host_kernels.harness import HostKernels
from tests.support.fake_gpu import FakeGpu


@pytest.fixture(scope="session")
def host_kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostKernels]:
    """Our kernels for the host, kept where `tests/host_kernels` keeps them."""
    given = os.environ.get(BUILD_DIRECTORY)
    cache: pytest.Cache | None = getattr(request.config, "cache", None)
    kept = cache.mkdir("host_kernels") if cache else tmp_path_factory.mktemp("host_kernels")
    kernels = HostKernels(Builder(Path(given) if given else kept))
    yield kernels
    kernels.close()


@pytest.fixture(scope="session")
def session_gpu(host_kernels: HostKernels, tmp_path_factory: pytest.TempPathFactory) -> FakeGpu:
    return FakeGpu(host_kernels, tmp_path_factory.mktemp("fake_gpu"))


@pytest.fixture
def gpu(session_gpu: FakeGpu) -> Iterator[FakeGpu]:
    """The session's pretended GPU, current for one test; nothing may be left undone on it."""
    with session_gpu.active():
        yield session_gpu
        session_gpu.settle()
