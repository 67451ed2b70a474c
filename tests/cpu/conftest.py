"""A pretended GPU for the tests of calls that need one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tests.host_kernels.harness import HostKernels
from tests.support.fake_gpu import FakeGpu
from tests.support.host_memory import host_memory as host_memory  # a fixture


@pytest.fixture(scope="session")
def session_gpu(host: HostKernels, tmp_path_factory: pytest.TempPathFactory) -> FakeGpu:
    return FakeGpu(host, tmp_path_factory.mktemp("fake_gpu"))


@pytest.fixture
def gpu(session_gpu: FakeGpu) -> Iterator[FakeGpu]:
    """The session's pretended GPU, current for one test; nothing may be left undone on it."""
    with session_gpu.active():
        yield session_gpu
        if _steps_wait():
            gc.collect()  # what an error's traceback has kept would be freed later, where there is no GPU
        session_gpu.settle()


def _steps_wait() -> bool:
    """Whether there are training steps that have not freed their graphs yet."""
    waiting = (each.peek() for each in [*weakref.finalize._registry])
    return any(each is not None and str(each[1].__module__).endswith("training.captured") for each in waiting)
