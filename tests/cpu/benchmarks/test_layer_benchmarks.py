"""The splits of blocks that the benchmarks measure, and fitting the priors to such measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import priors as derived
from benchmarks import splits
from benchmarks.layers import Block
from benchmarks.priors import Sample, fit
from benchmarks.splits import chain_of, strategy_name
from lt_runtime.errors import PlanError
from lt_runtime.plans import priors
from lt_runtime.plans.strategies import BackwardStrategy
from lt_runtime.store.keys import from_json
from tests.support.chain_problems import backward_of, forward_of

BLOCK = Block("test", 64, 32, 16, "bf16", "gelu")


ENTRIES = {
    "forward": {"bias preactivation": 10.0, "gelu_aux_bias preactivation": 11.0},
    "last forward": {"bias nothing": 5.0, "none nothing": 7.0},
    "backward preactivation": {
        "kernel kernel kernel after": 20.0,
        "epilogue kernel kernel after": 21.0,
        "kernel epilogue epilogue beside": 40.0,
    },
    "last backward": {"nobody nobody nobody beside": 9.0, "nobody nobody nobody after": 9.5},
}


@pytest.fixture(autouse=True)
def few_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a branch of a fitted tree have a single problem on a side."""
    monkeypatch.setattr(derived, "_LEAST_PROBLEMS", 1)


def samples(*times: tuple[int, float, float]) -> list[Sample]:
    return [Sample({"rows": size, "inner": 7}, {"a": a, "b": b}) for size, a, b in times]


def test_a_limit_is_found_where_the_winner_changes() -> None:
    made = fit(samples(*2 * [(100, 1.0, 2.0), (200, 1.0, 2.0), (3000, 2.0, 1.0), (5000, 2.0, 1.0)]))
    assert made.tree == {"feature": "rows", "below": 256, "then": "a", "otherwise": "b"}
    assert derived.decide({**made.tree, "then": {"x": "a"}, "otherwise": {"x": "b"}}, {"rows": 255}) == {"x": "a"}


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=8))
def test_a_tree_is_no_worse_than_the_best_single_strategy(times: list[tuple[int, float, float]]) -> None:
    made = samples(*times)
    alone = min(sum(sample.loss(name) for sample in made) for name in "ab")
    assert fit(made).loss <= alone + 1e-9


def measured(m: int, n: int, k: int, entries: dict[str, dict[str, float]]) -> dict[str, Any]:
    return {"case": f"{m} {n} {k}", "layer": [m, n, k], "type": "bf16", "activation": "gelu", "strategies": entries}


def test_priors_are_derived_from_rows() -> None:
    rows = [measured(256, 512, 784, ENTRIES), measured(8192, 3072, 768, ENTRIES)]
    trees, quality = derived.derive(rows)
    backward = {name: tree for name, tree in trees["backward"].items() if not name.startswith("fp32")}
    by_kernels = dict.fromkeys(("db", "derivative", "db_below"), "kernel") | {"dw_concurrent": False}
    assert {**trees, "backward": backward} == {
        "forward": {
            "bf16 gelu": {"epilogue": "bias", "saved": "preactivation"},
            "bf16 none": {"epilogue": "bias", "saved": "nothing"},
        },
        "backward": {
            **dict.fromkeys(("bf16 gelu preactivation", "bf16 other"), by_kernels),
            "bf16 none nothing": {"db": "kernel", "derivative": "nobody", "db_below": "nobody", "dw_concurrent": False},
            "bf16 products": dict.fromkeys(("db", "derivative", "db_below"), "nobody") | {"dw_concurrent": True},
        },
    }
    assert quality["forward bf16 gelu"] == (2, pytest.approx(0.0))


def test_a_disturbed_time_is_no_time() -> None:
    times = {"epilogue kernel kernel beside": 267.0, "epilogue kernel kernel after": 28.2} | {
        "kernel kernel kernel beside": 27.9,
        "kernel kernel kernel after": 28.8,
    }
    row = measured(2048, 1024, 1024, {"backward preactivation": times})
    (sample,) = derived.backward_samples([row])["bf16 gelu preactivation"]
    assert sample.times == {name: us for name, us in times.items() if us < 200}


def test_forward_is_chosen_with_the_backward_that_follows() -> None:
    relu = {
        "forward": {"relu_bias output": 10.0, "relu_aux_bias mask": 12.0},
        "backward output": {"kernel kernel kernel after": 30.0},
        "backward mask": {"kernel kernel kernel after": 29.0, "kernel epilogue kernel beside": 20.0},
    }
    trees, _ = derived.derive([measured(64, 64, 64, relu) | {"activation": "relu"}] * 2)
    assert trees["forward"]["bf16 relu"] == {"epilogue": "relu_aux_bias", "saved": "mask"}
    assert from_json(BackwardStrategy, trees["backward"]["bf16 relu mask"]).derivative.value == "epilogue"


def test_activations_without_an_epilogue_share_a_tree() -> None:
    by_kernel = {"kernel kernel kernel beside": 9.0, "epilogue kernel kernel beside": 10.0}
    silu = measured(64, 64, 64, {"forward": {"bias preactivation": 5.0}, "backward preactivation": by_kernel})
    gelu = measured(64, 64, 64, {"backward preactivation": {**by_kernel, "kernel epilogue kernel beside": 1.0}})
    trees, quality = derived.derive([silu | {"activation": "silu"}, gelu])
    assert trees["backward"]["bf16 other"]["db"] == "kernel"
    assert quality["backward bf16 other"][0] == 2
    assert not [name for part in trees.values() for name in part if "silu" in name]


@pytest.mark.parametrize("layer", [0, 1])
def test_a_row_s_sizes_are_those_that_the_priors_ask_for(layer: int) -> None:
    chain, plain = chain_of(BLOCK), {"layer": [64, 32, 16], "type": "bf16"}
    forward = priors.forward_features(forward_of(chain, layer))
    assert derived.features(plain, layer, backward=False) == forward
    backward = priors.backward_features(backward_of(chain, layer))
    assert derived.features(plain, layer, backward=True) == backward


def test_the_script_writes_the_table_of_the_architecture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = {"gpu": "a GPU", "capability": 90, "driver": "580", "cublaslt": 130100}
    row = measured(256, 512, 784, ENTRIES) | {"when": "2026-01-01T00:00:00Z"}
    rows = [row | {"half": "fit"}, row | {"half": "judge"}, {"case": "failed", "us": {}}]
    file, out = tmp_path / "strategies.json", tmp_path / "priors.json"
    file.write_text(json.dumps({"machine": machine, "commit": "abc", "rows": rows}))
    derived.main([str(file), "--out", str(out)])
    assert json.loads(out.read_text())["source"] == {
        "gpu": "a GPU",
        "driver": "580",
        "cublaslt": 130100,
        "commit": "abc",
        "when": "2026-01-01T00:00:00Z",
        "blocks": 1,
    }
    assert "backward bf16 gelu preactivation" in capsys.readouterr().out


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The strategies that cuBLASLt is to refuse in a test. Plans are replaced by objects that have only a strategy."""
    names: set[str] = set()

    class Plan:
        def __init__(self, problem: Any, device: int, strategy: Any, choose: Any) -> None:
            if strategy_name(strategy) in names:
                raise PlanError("no algorithm")
            self.strategy = strategy

    monkeypatch.setattr(splits, "ForwardPlan", Plan)
    monkeypatch.setattr(splits, "BackwardPlan", Plan)
    return names


@pytest.mark.parametrize(
    ("activation", "fused"),
    [
        ("gelu", "gelu_aux_bias preactivation | bias nothing | epilogue epilogue epilogue after"),
        ("relu", "relu_aux_bias mask | bias nothing | epilogue epilogue epilogue after"),
    ],
)
def test_all_that_the_library_can_fuse(refused: set[str], activation: str, fused: str) -> None:
    plans, complaints = splits.fused_first(chain_of(replace(BLOCK, activation=activation)))
    assert str(splits.split_of(plans)) == f"{fused} | nobody nobody nobody after"
    assert complaints == []


def test_what_the_library_refuses_is_fused_less_and_told(refused: set[str]) -> None:
    refused |= {"epilogue epilogue epilogue after", "epilogue epilogue kernel after", "gelu_aux_bias preactivation"}
    plans, complaints = splits.fused_first(chain_of(BLOCK))
    found = str(splits.split_of(plans))
    assert found.startswith("bias preactivation | bias nothing | kernel epilogue epilogue after")
    assert sorted(complaints) == sorted(refused)
