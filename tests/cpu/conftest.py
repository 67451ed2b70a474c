"""A pretended GPU for the tests of calls that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.host_kernels.harness import HostKernels
from tests.support.fake_gpu import FakeGpu


@pytest.fixture(scope="session")
def session_gpu(host: HostKernels, tmp_path_factory: pytest.TempPathFactory) -> FakeGpu:
    return FakeGpu(host, tmp_path_factory.mktemp("fake_gpu"))


@pytest.fixture
def gpu(session_gpu: FakeGpu) -> Iterator[FakeGpu]:
    """The session's pretended GPU, current for one test; nothing may be left undone on it."""
    with session_gpu.active():
        yield session_gpu
        session_gpu.settle()
