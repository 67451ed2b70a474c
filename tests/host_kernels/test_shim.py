"""The shim runs grids as CUDA does, and shows kernels that are wrong."""

from __future__ import annotations

import numpy as np
import pytest

from tests.host_kernels.harness import FORWARD, REVERSE, SHUFFLED, HostKernelError, HostKernels
from tests.host_kernels.probes import PROBE, run_probe

MIRRORED = np.arange(16.0)[::-1]


def test_every_thread_knows_its_place(host: HostKernels) -> None:
    out, _ = run_probe(host.kernel(PROBE, "indices"), block=(4, 3), grid=(2, 5))
    expected = np.arange(10000).reshape(10, 10, 10, 10)[:5, :2, :3, :4]
    assert np.array_equal(out.reshape(5, 2, 3, 4), expected)


def test_orders(host: HostKernels) -> None:
    kernel = host.kernel(PROBE, "turns")
    turns = np.arange(32.0).reshape(2, 16)
    assert np.array_equal(run_probe(kernel, grid=(2, 1), order=FORWARD)[0], turns)
    assert np.array_equal(run_probe(kernel, grid=(2, 1), order=REVERSE)[0], 31 - turns)
    shuffles = [run_probe(kernel, grid=(2, 1), order=SHUFFLED + i)[0] for i in range(3)]
    for shuffle in shuffles:
        assert sorted(shuffle.ravel()) == turns.ravel().tolist()
    assert len({shuffle.tobytes() for shuffle in shuffles}) == 3


def test_atomics_count(host: HostKernels) -> None:
    assert run_probe(host.kernel(PROBE, "turns"), block=(8, 4), grid=(3, 2))[1] == 8 * 4 * 3 * 2


@pytest.mark.parametrize("order", range(5))
def test_barriers_hold(host: HostKernels, order: int) -> None:
    assert np.array_equal(run_probe(host.kernel(PROBE, "mirror"), order=order)[0][0], MIRRORED)


@pytest.mark.parametrize("order", range(5))
def test_a_missing_barrier_shows_as_nan(host: HostKernels, order: int) -> None:
    out, _ = run_probe(host.kernel(PROBE, "missing_barrier"), order=order)
    assert np.isnan(out).sum() == 8


@pytest.mark.parametrize("order", range(5))
def test_a_divergent_barrier_is_an_error(host: HostKernels, order: int) -> None:
    with pytest.raises(
        HostKernelError, match=r"divergent barrier in block \(0, 0, 0\): thread .* waits at shim_probe.cu"
    ):
        run_probe(host.kernel(PROBE, "divergent_barrier"), order=order)
    # and the next kernel runs as if nothing had been
    assert np.array_equal(run_probe(host.kernel(PROBE, "mirror"), order=order)[0][0], MIRRORED)


@pytest.mark.parametrize("order", range(5))
def test_threads_that_have_returned_count_as_arrived(host: HostKernels, order: int) -> None:
    out, _ = run_probe(host.kernel(PROBE, "early_return"), order=order)
    assert np.array_equal(out[0], np.where(np.arange(16) < 8, MIRRORED, -1.0))


def test_shared_memory_is_poisoned_in_every_block(host: HostKernels) -> None:
    out, _ = run_probe(host.kernel(PROBE, "stale_shared_memory"), grid=(3, 1))
    assert np.array_equal(np.isnan(out).all(axis=1), [False, True, True])
    assert (out[0] == 5.0).all()


@pytest.mark.parametrize("block", [(257, 1), (0, 1), (1, 0)])
def test_impossible_launches_are_errors(host: HostKernels, block: tuple[int, int]) -> None:
    with pytest.raises(HostKernelError, match="block"):
        run_probe(host.kernel(PROBE, "indices"), block=block)
