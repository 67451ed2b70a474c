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
from benchmarks.__main__ import options_of
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
def suite(gpu: FakeGpu, benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `untuned`, whose contenders run once instead of being timed."""
    made: Any = benchmark_module("untuned")
    hurry(gpu, monkeypatch)

    def measure(builders: Any, sets: int, count: int, rounds: int, stream: Any) -> Any:
        contenders, left_out = made.timing.built(builders)
        for each in contenders.values():
            each.run(0, 0)
        return made.timing.Measured(dict.fromkeys(contenders, made.timing.Timing(2.0, 0.0)), left_out)

    import cupy as cp

    monkeypatch.setattr(made.layers, "arrays", partial(made.layers.arrays, make=cp.zeros))
    monkeypatch.setattr(made.timing, "cache_size", lambda: 50 << 20)
    monkeypatch.setattr(made.timing, "measure", measure)
    return made


@pytest.mark.parametrize(("half", "activation"), [(FIT, "silu"), (JUDGE, "none")])
def test_a_row(gpu: FakeGpu, suite: Any, half: str, activation: str) -> None:
    block = suite.Block(f"odd {half}", 12, 17, 9, "fp32", activation)
    row = suite.measure(block, argparse.Namespace(rounds=3), None).as_json()
    assert row["us"] == {"lt": 2.0, "lt_priors": 2.0}
    if half == FIT:
        assert [*row["strategies"]] == ["forward", "last forward", "backward preactivation", "last backward"]
        assert all(us > 0 for times in row["strategies"].values() for us in times.values())
    else:
        assert "strategies" not in row
    gpu.synchronize_all()


def test_a_block_has_contenders_by_other_strategies_and_is_tuned_for_the_suite_tuning(
    gpu: FakeGpu, suite: Any, benchmark_module: Callable[[str], ModuleType], tmp_path: Any
) -> None:
    block, options = suite.Block("small", 12, 16, 8, "fp32", "gelu"), options_of(["layers", "--rounds", "1"])
    row = suite.layers.measure_block(block, options, None).as_json()
    assert {*row["us"]} == {"lt", "lt_priors", "lt_fused_top1", "lt_split_top1"}
    assert {*row["left_out"]} == {"torch_graph"}
    assert row["chosen_vs_best"] == 1.0
    assert row["candidates"]
    tuned = benchmark_module("tuning").measure(block, options, str(tmp_path), None).as_json()
    assert ({*tuned["us"]}, len(tuned["tuned"]) > 0) == ({"lt"}, True)
    gpu.synchronize_all()
