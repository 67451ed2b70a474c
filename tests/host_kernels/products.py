"""What tests of passes and of our own products share: a stream's memory, a small GPU, launches on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import pytest
from hypothesis import assume

from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.devices import DeviceInfo
from lt_runtime.gpu.memory import MAX_TICKETS
from lt_runtime.kernels import kernel as kernels
from lt_runtime.kernels import tiling
from lt_runtime.kernels.kernel import Entry
from lt_runtime.problem import ALIGNMENT, DType, Spec
from tests.host_kernels.arrays import Guarded, vector
from tests.host_kernels.harness import HostKernels, Turns

SMALL_GPU: Final = DeviceInfo(0, "", 90, multiprocessors=3, memory=0)


@pytest.fixture(scope="module", autouse=True)
def on_a_small_gpu() -> Iterator[None]:
    """Has passes share their work out as on a GPU of three multiprocessors, in the modules that import it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "device_info", lambda _: SMALL_GPU)
        yield


@contextmanager
def launching(host: HostKernels, macros: Macros, order: int) -> Iterator[pytest.MonkeyPatch]:
    """Runs the runtime's launches on the CPU, their threads in an order; skips cases of which it asks other macros."""

    def get(entry: Entry, asked: Macros, device: int) -> Turns:
        # the CPU's kernels are the same however many blocks a multiprocessor shall hold
        assume(tuple((name, "1" if name == "BLOCKS" else value) for name, value in asked) == macros)
        return Turns(host, entry, macros, order)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "get_kernel", get)
        yield patch


class Memory:
    """A stream's workspace, just as large as it is needed, and tickets."""

    def __init__(self, size: int) -> None:
        self._workspace = vector(np.full(size // 4, np.nan), DType.FLOAT32) if size else None
        self.workspace = 0 if self._workspace is None else self._workspace.address
        self.stream = 0
        self._tickets = vector(np.zeros(MAX_TICKETS), DType.FLOAT32)
        self.tickets = self._tickets.address

    def check(self) -> None:
        """Fails if anything around the workspace was written, or tickets are not zero again."""
        self._tickets.assert_unchanged()
        if self._workspace is not None:
            self._workspace.values()


def spec_of(matrix: Guarded) -> Spec:
    """A matrix as a product's plan takes it."""
    return Spec(matrix.layout, min(ALIGNMENT, matrix.address & -matrix.address))
