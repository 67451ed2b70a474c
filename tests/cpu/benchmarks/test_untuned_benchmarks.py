"""The suite `untuned`: its blocks, and a row on the pretended GPU."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from benchmarks import untuned
from benchmarks.wide import FIT, JUDGE
from tests.support.fake_gpu import FakeGpu
from tests.support.hurry import hurry


def test_the_blocks_are_drawn_and_the_halves_share_none() -> None:
    found = untuned.blocks()
    halves = {half: [each for each in found if each.group.endswith(half)] for half in (FIT, JUDGE)}
    assert [each.layer for each in found[:3]] == [(285, 207, 136), (777, 333, 555), (330, 115, 752)], "as measured"
    assert {len(half) for half in halves.values()} == {200}
    whole = {half: {(each.layer, each.kind, each.activation) for each in blocks} for half, blocks in halves.items()}
    assert not whole[FIT] & whole[JUDGE]
    for half in halves.values():
        counts = Counter((each.kind, each.activation) for each in half)
        assert len(counts) == 24, "every activation in every type"
        assert min(counts.values()) >= 8


@pytest.fixture
def suite(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("untuned")


@pytest.mark.parametrize(("half", "activation"), [(FIT, "silu"), (JUDGE, "none")])
def test_a_row(gpu: FakeGpu, suite: Any, half: str, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(gpu, monkeypatch)

    def measure(builders: Any, sets: int, count: int, rounds: int, stream: Any) -> Any:
        for build in builders.values():
            build().run(0, 0)
        return suite.timing.Measured(dict.fromkeys(builders, suite.timing.Timing(2.0, 0.0)), {})

    import cupy as cp

    monkeypatch.setattr(suite.layers, "arrays", partial(suite.layers.arrays, make=cp.zeros))
    monkeypatch.setattr(suite.timing, "cache_size", lambda: 50 << 20)
    monkeypatch.setattr(suite.timing, "measure", measure)
    block = suite.Block(f"odd {half}", 12, 17, 9, "fp32", activation)
    row = suite.measure(block, argparse.Namespace(rounds=3), None).as_json()
    assert row["us"] == {"lt": 2.0, "lt_priors": 2.0}
    if half == FIT:
        assert [*row["strategies"]] == ["forward", "last forward", "backward preactivation", "last backward"]
        assert all(us > 0 for times in row["strategies"].values() for us in times.values())
    else:
        assert "strategies" not in row
    gpu.synchronize_all()
