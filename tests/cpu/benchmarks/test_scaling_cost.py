"""The model of the cost of sums over many GPUs, in cases whose result is known."""

from __future__ import annotations

import pytest

from benchmarks.scaling_cost import GPUS, NETWORKS, Network, predictions, step_us, sum_us


def test_the_rate_of_large_sums_is_that_of_the_slowest_link() -> None:
    """Two GPUs send each byte once, eight of them 1.75 times; two machines send each once."""
    size, slow = 1e9, Network("slow", 1e4)
    within = sum_us(size, 2, slow)
    assert sum_us(size, 8, slow) == pytest.approx(1.75 * within, rel=0.01)
    assert sum_us(size, 16, slow) == pytest.approx(100_000, rel=0.01)


@pytest.mark.parametrize(("count", "size", "measured"), [(1, 18.9e6, 96.9), (2, 117.5e6, 902), (3, 1.47e6, 72.5)])
def test_two_gpus_take_what_was_measured_for_sums(count: int, size: float, measured: float) -> None:
    assert count * sum_us(size, 2, NETWORKS[0]) == pytest.approx(measured, rel=0.1)


def test_two_gpus_take_what_was_measured_for_steps() -> None:
    assert step_us((768, 3072, 768, 3072, 768), 887, 2, NETWORKS[0]) == pytest.approx(991, rel=0.06)
    assert step_us((4096, 14336, 4096), 4083, 2, NETWORKS[0]) == pytest.approx(4519, rel=0.02)


def test_predictions_grow_with_the_number_of_gpus() -> None:
    rows = [{"case": "a", "dims": [512, 2048, 512], "us": {"lt": 400.0}}, {"case": "failed", "us": {}}]
    found = predictions(rows)["predicted_us"]
    for network in NETWORKS:
        times = [found[network.name]["a"][str(gpus)] for gpus in GPUS]
        assert times == sorted(times)
        assert times[0] > 400
