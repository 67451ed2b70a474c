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
def test_barriers_count(host: HostKernels, order: int) -> None:
    assert (run_probe(host.kernel(PROBE, "votes"), grid=(2, 1), order=order)[0] == 604).all()


@pytest.mark.parametrize("order", range(5))
def test_a_missing_barrier_shows_as_nan(host: HostKernels, order: int) -> None:
    out, _ = run_probe(host.kernel(PROBE, "missing_barrier"), order=order)
    assert np.isnan(out).sum() == 8


@pytest.mark.parametrize("order", range(5))
def test_a_divergent_barrier_is_an_error(host: HostKernels, order: int) -> None:
    with pytest.raises(
        HostKernelError, match=r"block \(0, 0, 0\): divergent barrier: thread .* waits at shim_probe.cu"
    ):
        run_probe(host.kernel(PROBE, "divergent_barrier"), order=order)
    # the next kernel runs correctly after the failure
    assert np.array_equal(run_probe(host.kernel(PROBE, "mirror"), order=order)[0][0], MIRRORED)


@pytest.mark.parametrize("order", range(5))
def test_threads_that_have_returned_count_as_arrived(host: HostKernels, order: int) -> None:
    out, _ = run_probe(host.kernel(PROBE, "early_return"), order=order)
    assert np.array_equal(out[0], np.where(np.arange(16) < 8, MIRRORED, -1.0))


@pytest.mark.parametrize("order", range(5))
def test_barriers_of_some_warps_hold(host: HostKernels, order: int) -> None:
    out, _ = run_probe(host.kernel(PROBE, "named_barriers"), block=(64, 1), order=order)
    assert np.array_equal(out[0], [*[0.0] * 32, *(100.0 + 2 * np.arange(32)[::-1])])


@pytest.mark.parametrize("order", range(3))
def test_barriers_that_never_open_are_errors(host: HostKernels, order: int) -> None:
    with pytest.raises(HostKernelError, match="for ever: 32 of 64 threads have come to barrier 1"):
        run_probe(host.kernel(PROBE, "named_barrier_without_all"), block=(64, 1), order=order)
    with pytest.raises(HostKernelError, match=r"barrier 1 is not one of (64|96) threads"):
        run_probe(host.kernel(PROBE, "named_barrier_of_two_sizes"), block=(64, 1), order=order)


def test_shared_memory_is_poisoned_in_every_block(host: HostKernels) -> None:
    out, _ = run_probe(host.kernel(PROBE, "stale_shared_memory"), grid=(3, 1))
    assert np.array_equal(np.isnan(out).all(axis=1), [False, True, True])
    assert (out[0] == 5.0).all()


@pytest.mark.parametrize(("entry", "threads"), [("at_most_256_threads", 256), ("indices", 1024)])
def test_impossible_launches_are_errors(host: HostKernels, entry: str, threads: int) -> None:
    kernel = host.kernel(PROBE, entry)
    run_probe(kernel, block=(threads // 4, 4))
    for block in ((threads + 1, 1), (0, 1), (1, 0)):
        with pytest.raises(HostKernelError, match="block"):
            run_probe(kernel, block=block)


@pytest.mark.parametrize("order", range(5))
def test_warps_exchange_among_themselves(host: HostKernels, order: int) -> None:
    """Warps count threads with x fastest; the last has few of them."""
    out, _ = run_probe(host.kernel(PROBE, "warp_sum"), block=(8, 12), grid=(2, 1), order=order)
    sums = np.arange(2 * 96.0).reshape(2, 3, 32).sum(axis=2)
    assert np.array_equal(out, np.repeat(sums, 32, axis=1))


@pytest.mark.parametrize("order", range(5))
def test_shuffles_in_segments(host: HostKernels, order: int) -> None:
    lanes = np.arange(64) % 32
    segment = lanes // 8 * 8
    down = np.where(lanes % 8 < 6, lanes + 2, lanes)
    out, _ = run_probe(host.kernel(PROBE, "segments"), block=(64, 1), order=order)
    assert np.array_equal(out[0], 10000 * (lanes ^ 3) + 100 * down + segment + 5)
    out, _ = run_probe(host.kernel(PROBE, "beyond_the_segment"), block=(64, 1), order=order)
    assert np.array_equal(out[0], np.where(lanes & 8, lanes ^ 8, lanes))


@pytest.mark.parametrize("order", range(5))
def test_parts_of_a_warp_exchange_by_themselves(host: HostKernels, order: int) -> None:
    out, _ = run_probe(host.kernel(PROBE, "parted_halves"), block=(32, 1), order=order)
    assert np.array_equal(out[0, :16], [5.0] * 16)
    assert np.array_equal(out[0, 16:29], np.arange(19.0, 32.0))


def test_a_barrier_of_warps(host: HostKernels) -> None:
    for order in range(5):
        out, _ = run_probe(host.kernel(PROBE, "warp_barrier"), block=(64, 1), order=order)
        assert np.array_equal(out[0], np.arange(64) ^ 15)


@pytest.mark.parametrize("order", range(5))
def test_a_barrier_of_warps_is_none_of_the_block(host: HostKernels, order: int) -> None:
    out, _ = run_probe(host.kernel(PROBE, "barrier_of_warps_alone"), block=(64, 1), order=order)
    assert np.isnan(out).sum() == 32, "the first warp to run reads what the other has not written"


@pytest.mark.parametrize(
    ("entry", "poisoned"),
    [
        ("shuffle_of_returned_lanes", [4, 5, 6, 7]),
        ("shuffle_outside_the_mask", [7]),
        ("shuffle_of_no_width", range(16)),
    ],
)
def test_lanes_that_cannot_be_read_give_nan(host: HostKernels, entry: str, poisoned: list[int]) -> None:
    out, _ = run_probe(host.kernel(PROBE, entry))
    assert np.flatnonzero(np.isnan(out[0])).tolist() == list(poisoned)


@pytest.mark.parametrize("order", range(5))
@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("divergent_shuffle", r"thread .* waits at shim_probe.cu:\d+ for lanes 0xFFFFFFFF, thread .* waits at .*"),
        ("shuffle_by_some_lanes", r"thread .* waits at .* for lanes 0xFFFFFFFF, thread \(3, 0, 0\) waits at .*:\d+$"),
        ("shuffle_with_different_masks", "thread .* for lanes 0x0000000F, thread .* for lanes 0x0000FFFF"),
        ("shuffle_without_itself", r"thread \(1, 0, 0\) waits at .* for lanes 0x00000001, not its own"),
    ],
)
def test_a_divergent_exchange_is_an_error(host: HostKernels, entry: str, complaint: str, order: int) -> None:
    with pytest.raises(HostKernelError, match=rf"block \(0, 0, 0\): divergent exchange in a warp: {complaint}"):
        run_probe(host.kernel(PROBE, entry), order=order)
    # the next kernel runs correctly after the failure
    out, _ = run_probe(host.kernel(PROBE, "warp_sum"), block=(32, 1), order=order)
    assert np.array_equal(out[0], [496.0] * 32)
