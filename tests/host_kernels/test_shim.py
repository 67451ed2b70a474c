"""The shim, which runs kernels on the CPU, runs grids as CUDA does, and reports faulty kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


@pytest.fixture(params=range(5))
def run(host: HostKernels, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Runs a kernel of the probe, its threads in each of several orders; returns what each thread wrote."""
    return lambda entry, **more: run_probe(host.kernel(PROBE, entry), order=request.param, **more)[0]


LANES = np.arange(64) % 32
SHUFFLED_DOWN = np.where(LANES % 8 < 6, LANES + 2, LANES)
WRITTEN: dict[str, tuple[dict[str, Any], Any]] = {
    "mirror": ({}, MIRRORED),
    "votes": ({"grid": (2, 1)}, 604),
    # A thread that has returned counts as arrived at a barrier.
    "early_return": ({}, np.where(np.arange(16) < 8, MIRRORED, -1.0)),
    "named_barriers": ({"block": (64, 1)}, [*[0.0] * 32, *(100.0 + 2 * np.arange(32)[::-1])]),
    # Warps count threads with x fastest; the last warp has few of them.
    "warp_sum": ({"block": (8, 12), "grid": (2, 1)}, np.arange(192.0).reshape(2, 3, 32).sum(axis=2).repeat(32, axis=1)),
    "segments": ({"block": (64, 1)}, 10000 * (LANES ^ 3) + 100 * SHUFFLED_DOWN + LANES // 8 * 8 + 5),
    "beyond_the_segment": ({"block": (64, 1)}, np.where(LANES & 8, LANES ^ 8, LANES)),
    "warp_barrier": ({"block": (64, 1)}, np.arange(64) ^ 15),
}
"""Launches of kernels whose threads work together, with the numbers that they must write."""


@pytest.mark.parametrize("entry", WRITTEN)
def test_threads_work_together(run: Callable[..., Any], entry: str) -> None:
    launch, expected = WRITTEN[entry]
    found = run(entry, **launch)
    assert np.array_equal(found, np.broadcast_to(expected, found.shape))


@pytest.mark.parametrize(
    ("entry", "threads", "poisoned"),
    [
        ("missing_barrier", 16, 8),
        # A missing barrier shows, because the warp that runs first reads what the other has not written yet.
        ("barrier_of_warps_alone", 64, 32),
    ],
)
def test_a_missing_barrier_shows_as_nan(run: Callable[..., Any], entry: str, threads: int, poisoned: int) -> None:
    assert np.isnan(run(entry, block=(threads, 1))).sum() == poisoned


def test_a_divergent_barrier_is_an_error(run: Callable[..., Any]) -> None:
    with pytest.raises(
        HostKernelError, match=r"block \(0, 0, 0\): divergent barrier: thread .* waits at shim_probe.cu"
    ):
        run("divergent_barrier")
    assert np.array_equal(run("mirror")[0], MIRRORED), "the next kernel runs correctly after the failure"


def test_a_misaligned_address_is_an_error(run: Callable[..., Any]) -> None:
    with pytest.raises(HostKernelError, match=r"block \(0, 0, 0\): misaligned address: thread .* vector.cuh:\d+"):
        run("misaligned_vector")
    assert np.array_equal(run("mirror")[0], MIRRORED), "the next kernel runs correctly after the failure"


def test_barriers_that_never_open_are_errors(run: Callable[..., Any]) -> None:
    with pytest.raises(HostKernelError, match="for ever: 32 of 64 threads have come to barrier 1"):
        run("named_barrier_without_all", block=(64, 1))
    with pytest.raises(HostKernelError, match=r"barrier 2 stays closed: .* 32 of 64 threads"):
        run("named_barrier_that_nobody_awaits", block=(64, 1))
    with pytest.raises(HostKernelError, match=r"barrier 1 is not one of (64|96) threads"):
        run("named_barrier_of_two_sizes", block=(64, 1))


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


def test_parts_of_a_warp_exchange_by_themselves(run: Callable[..., Any]) -> None:
    out = run("parted_halves", block=(32, 1))
    assert np.array_equal(out[0, :16], [5.0] * 16)
    assert np.array_equal(out[0, 16:29], np.arange(19.0, 32.0))


@pytest.mark.parametrize(
    ("entry", "poisoned"),
    [
        ("shuffle_of_returned_lanes", [4, 5, 6, 7]),
        ("shuffle_outside_the_mask", [7]),
        ("shuffle_of_no_width", range(16)),
    ],
)
def test_lanes_that_cannot_be_read_give_nan(run: Callable[..., Any], entry: str, poisoned: list[int]) -> None:
    assert np.flatnonzero(np.isnan(run(entry)[0])).tolist() == list(poisoned)


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("divergent_shuffle", r"thread .* waits at shim_probe.cu:\d+ for lanes 0xFFFFFFFF, thread .* waits at .*"),
        ("shuffle_by_some_lanes", r"thread .* waits at .* for lanes 0xFFFFFFFF, thread \(3, 0, 0\) waits at .*:\d+$"),
        ("shuffle_with_different_masks", "thread .* for lanes 0x0000000F, thread .* for lanes 0x0000FFFF"),
        ("shuffle_without_itself", r"thread \(1, 0, 0\) waits at .* for lanes 0x00000001, not its own"),
    ],
)
def test_a_divergent_exchange_is_an_error(run: Callable[..., Any], entry: str, complaint: str) -> None:
    with pytest.raises(HostKernelError, match=rf"block \(0, 0, 0\): divergent exchange in a warp: {complaint}"):
        run(entry)
    assert np.array_equal(run("warp_sum", block=(32, 1))[0], [496.0] * 32), "the next kernel runs correctly"
