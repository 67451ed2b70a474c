"""The model of the cost of sums over many GPUs, in cases whose result is known."""

from __future__ import annotations

import pytest

from benchmarks.scaling_cost import GPUS, NETWORKS, Net, Network, predictions, sum_us


def test_the_rate_of_large_sums_is_that_of_the_slowest_link() -> None:
    """Two GPUs send each byte once, eight of them 1.75 times; two machines send each once."""
    size, slow = 1e9, Network("slow", 1e4)
    assert sum_us(size, 2, slow, 2e5) == pytest.approx(5000, rel=0.01)
    assert sum_us(size, 8, slow, 2e5) == pytest.approx(8750, rel=0.01)
    assert sum_us(size, 16, slow, 2e5) == pytest.approx(100_000, rel=0.01)


def test_a_step_is_as_long_as_its_products_or_its_sums() -> None:
    wide = (4096, 4096, 4096, 4096)
    hidden = Net.of(wide, 1e6).on(8, NETWORKS[0])
    assert 1e6 < hidden < 1.001e6  # the sums take some hundred microseconds
    assert Net.of(wide, 1e3).on(1024, Network("slow", 1e2)) == pytest.approx(2 * 2 * 3 * 4096**2 / 1e2, rel=0.01)


def test_predictions_grow_with_the_number_of_gpus() -> None:
    rows = [{"case": "a", "dims": [512, 2048, 512], "us": {"lt": 400.0}}, {"case": "failed", "us": {}}]
    found = predictions(rows)["predicted_us"]
    for network in NETWORKS:
        times = [found[network.name]["a"][str(gpus)] for gpus in GPUS]
        assert times == sorted(times)
        assert times[0] > 400
