"""The CPU shim's tensor-core instructions distribute matrices over lanes as the PTX ISA defines."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from numpy.typing import NDArray

from lt_runtime.problem import DType
from tests.host_kernels.build import Variant
from tests.host_kernels.harness import FORWARD, REVERSE, SHUFFLED, HostKernels
from tests.host_kernels.variants import BF16, F16, scalar_macros

LANES = np.arange(32)
GROUP, IN_GROUP = LANES // 4, LANES % 4  # "groupID" and "threadID_in_group" of the ISA


class MmaProbeParams(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("a", "b", "c", "rows", "plain", "transposed", "source", "copied")
    )


class _Probe:
    """Runs the probe kernel once, on random integers that every type can hold."""

    def __init__(self, host: HostKernels, dtype: DType, order: int) -> None:
        generator = np.random.default_rng(order)
        self.a, self.b = (generator.integers(-8, 9, shape).astype(dtype.numpy) for shape in ((16, 16), (16, 8)))
        self.start = generator.integers(-9, 10, (16, 8)).astype(np.float32)
        self.rows = np.arange(256, dtype=np.uint16).reshape(32, 8)
        self.source = generator.integers(1, 1 << 16, (32, 8), dtype=np.uint16)
        self.c = _as_fragment(self.start)
        self.plain, self.transposed = np.zeros((32, 4, 2), np.uint16), np.zeros((32, 4, 2), np.uint16)
        self.copied = np.full((32, 8), 7, np.uint16)
        arrays = (
            _left(self.a),
            _right(self.b),
            self.c,
            self.rows,
            self.plain,
            self.transposed,
            self.source,
            self.copied,
        )
        kernel = host.kernel(Variant("mma_probe.cu", scalar_macros(dtype)), "mma_probe")
        kernel.launch((1, 1), (32, 1), MmaProbeParams(*(each.ctypes.data for each in arrays)), order=order)


@pytest.fixture(params=[(BF16, FORWARD), (F16, REVERSE), (BF16, SHUFFLED)], ids=str)
def probe(host: HostKernels, request: pytest.FixtureRequest) -> _Probe:
    return _Probe(host, *request.param)


def _left(a: NDArray[np.generic]) -> NDArray[np.generic]:
    """a0, a1 | a2, a3 | a4, a5 | a6, a7 of each lane: row groupID for i in 0, 1, 4, 5, groupID + 8 otherwise; column
    2 · threadID_in_group + i % 2, and 8 more for i of at least 4."""
    found = np.empty((32, 8), a.dtype)
    for i in range(8):
        row = GROUP + (0 if i in (0, 1, 4, 5) else 8)
        found[:, i] = a[row, 2 * IN_GROUP + i % 2 + (8 if i >= 4 else 0)]
    return found


def _right(b: NDArray[np.generic]) -> NDArray[np.generic]:
    """b0, b1 | b2, b3 of each lane: row 2 · threadID_in_group + i % 2, 8 more for i of at least 2; column groupID."""
    found = np.empty((32, 4), b.dtype)
    for i in range(4):
        found[:, i] = b[2 * IN_GROUP + i % 2 + (8 if i >= 2 else 0), GROUP]
    return found


def _as_fragment(c: NDArray[np.float32]) -> NDArray[np.float32]:
    """c0 to c3 of each lane: row groupID, and 8 more for i of at least 2; column 2 · threadID_in_group + i % 2."""
    found = np.empty((32, 4), np.float32)
    for i in range(4):
        found[:, i] = c[GROUP + (8 if i >= 2 else 0), 2 * IN_GROUP + i % 2]
    return found


def test_products(probe: _Probe) -> None:
    exact = probe.start + probe.a.astype(np.float32) @ probe.b.astype(np.float32)
    assert np.array_equal(probe.c, _as_fragment(exact))


def test_matrices_from_shared_memory(probe: _Probe) -> None:
    for matrix in range(4):
        rows = probe.rows[8 * matrix : 8 * matrix + 8]
        for loaded, of in ((probe.plain, rows), (probe.transposed, rows.T)):
            assert np.array_equal(loaded[:, matrix, 0], of[GROUP, 2 * IN_GROUP])
            assert np.array_equal(loaded[:, matrix, 1], of[GROUP, 2 * IN_GROUP + 1])


def test_copies_end_with_zeros(probe: _Probe) -> None:
    exists = np.arange(8) < (LANES % 9)[:, None]
    assert np.array_equal(probe.copied, np.where(exists, probe.source, 0))
