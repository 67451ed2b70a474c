"""Fixtures that make the runtime launch its kernels on the CPU, divided as for a GPU of three multiprocessors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lt_runtime.gpu.devices import DeviceInfo
from lt_runtime.kernels import kernel as kernels
from lt_runtime.kernels import tiling
from tests.host_kernels.harness import HostKernels


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu(host: HostKernels) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "get_kernel", host.get)
        patch.setattr(tiling, "device_info", lambda _: DeviceInfo(0, "", 90, multiprocessors=3, memory=0))
        yield
