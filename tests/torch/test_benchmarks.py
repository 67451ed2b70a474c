"""The suite `torch` of the benchmarks, with small models on the CPU."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks import timing, torch_training
from benchmarks.torch import CASES, measure

BERT = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 40}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = {
    "gpt2": {"batch": 2, "tokens": 8, "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 40},
    "bert": {"batch": 2, "tokens": 8, **BERT, **NO_DROPOUT},
    "vit": {"batch": 2, "classes": 8, **BERT, "image_size": 8, "patch_size": 4},
    "t5": {"batch": 2, "tokens": 8, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 1, "num_heads": 2}
    | {"vocab_size": 40, "dropout_rate": 0.0},
    "stack": {"rows": 16, "width": 16, "hidden": 48, "layers": 2},
    "mlp": {"rows": 16, "dims": (5, 16, 8, 1)},
    "head": {"rows": 8, "width": 16, "classes": 24},
    "layer": {"size": 8},
}
OPTIONS = argparse.Namespace(rounds=1, keep_plans=True, no_compile=True, max_autotune=False, contenders=None)


@pytest.mark.filterwarnings("ignore:there is no GPU")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_contenders_of_a_row_take_the_same_steps(case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_training, "_TURN_US", 1.0)  # so short that a turn of a contender is a single step
    monkeypatch.setattr(torch_training, "_SUSTAINED_S", 0.0)
    monkeypatch.setattr(torch_training, "_MOST_TURNS", 1)
    monkeypatch.setattr(timing, "WARM_UP", 0)
    sizes = {**case.sizes, **SMALL[case.task]}
    case = dataclasses.replace(case, sizes=sizes, steps=5, device="cpu", dtype="float32")
    row = measure(case, OPTIONS)
    assert row.left_out.keys() <= {"liger", "torchao"}, row.left_out
    ways = ("eager",) if case.is_host else ("eager", "graph")
    assert sorted(row.timings) == sorted(f"{library}_{way}" for library in case.libraries[:2] for way in ways)
    launched = [] if case.is_host else [f"{library}_eager" for library in case.libraries[:2]]
    assert sorted(row.setting["sustained_us"]) == sorted(launched)
    ours, theirs = (row.setting["losses"][library] for library in case.libraries[:2])
    is_fp8 = "lt_fp8" in case.libraries
    assert ours == pytest.approx(theirs, rel=2e-2 if is_fp8 else 2e-5)
    assert not is_fp8 or ours != theirs
    is_untrained = case.task in ("head", "layer")
    assert ({*theirs[4:]} <= {theirs[0]}) == is_untrained  # the fifth step has the first batch again
