"""The fixtures `gpu`, a pretended GPU, and `hurried`, the same with fast tuning."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from tests.host_kernels.harness import HostKernels
from tests.support.fake_gpu import FakeGpu
from tests.support.host_memory import host_memory as host_memory  # a fixture
from tests.support.hurry import hurry


@pytest.fixture(scope="session")
def session_gpu(host: HostKernels, tmp_path_factory: pytest.TempPathFactory) -> FakeGpu:
    return FakeGpu(host, tmp_path_factory.mktemp("fake_gpu"))


@pytest.fixture
def gpu(session_gpu: FakeGpu) -> Iterator[FakeGpu]:
    """Activates the session's pretended GPU during one test; fails if the test leaves pending work.

    Repeated calls are forgotten first: a call with the addresses of calls in earlier tests could become a graph.
    """
    with session_gpu.active():
        importlib.import_module("lt_runtime.plans.cache").repeats.clear()
        yield session_gpu
        if _steps_wait():
            # An error's traceback may keep training steps alive, which must be freed while the pretended GPU is active.
            gc.collect()
        session_gpu.settle()
        stores = importlib.import_module("lt_runtime.store.plan_store")
        if stores.plan_store(0)._paused_until:
            # A group has replaced its entries, or the disk was slow: the next test opens the plan file anew.
            stores._opened.cache_clear()


@pytest.fixture
def hurried(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The pretended GPU with a tuner that times few launches."""
    hurry(gpu, monkeypatch)
    return gpu


def _steps_wait() -> bool:
    """Whether a training step exists whose graphs have not been freed."""
    waiting: Any = [*weakref.finalize._registry.values()]
    return any(str(each.func.__module__).endswith("training.captured") for each in waiting)
