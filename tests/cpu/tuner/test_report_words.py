"""How reports describe problems, strategies and algorithms in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from lt_runtime.cublaslt import AlgoConfigAttribute, MatmulStages, MatmulTile
from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu import compiler
from lt_runtime.plans.strategies import BackwardStrategy, ForwardStrategy, MadeBy
from lt_runtime.problem import Activation, Compute, DType, Saved
from lt_runtime.store.keys import parse_key, to_json
from lt_runtime.tuner.chain import LayerChain
from lt_runtime.tuner.report import algorithm_in_words, describe, progress_bar, strategy_in_words
from tests.support.chain_problems import backward_of, by_themselves, forward_of
from tests.support.plan_entries import layer_key, product_key

CHAIN = LayerChain.of_mlp(8, (3, 5, 7), Activation("relu"), DType.FLOAT32, Compute.TF32)


def test_problems() -> None:
    product = parse_key(product_key(8192))
    assert describe(product) == "matmul 8192x3072x768 bfloat16 none"
    assert describe(replace(product, batch=12)) == "matmul 8192x3072x768 batch 12 bfloat16 none"  # type: ignore[call-arg]
    assert describe(parse_key(layer_key(8192))) == "forward 8192x3072x768 bfloat16 gelu"
    added = replace(forward_of(CHAIN), addend=forward_of(CHAIN).y)
    assert describe(added) == "forward 8x5x3 tf32 relu and an addend"
    assert describe(backward_of(CHAIN, 1)) == "backward 8x7x5 tf32 none through relu"
    assert describe(backward_of(by_themselves(CHAIN), 0)) == "backward 8x5x3 tf32 relu"


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (to_json(ForwardStrategy(Epilogue.GELU_AUX_BIAS, Saved.PREACTIVATION)), "gelu_aux_bias, keeps preactivation"),
        (to_json(ForwardStrategy(Epilogue.NONE, Saved.NOTHING)), "none"),
        (to_json(ForwardStrategy(Epilogue.BIAS, Saved.NOTHING, product_adds=True)), "bias, adds C"),
        (to_json(BackwardStrategy()), "products alone"),
        (
            to_json(BackwardStrategy(MadeBy.KERNEL, MadeBy.EPILOGUE, MadeBy.KERNEL)),
            "db by kernel, derivative by epilogue, db below by kernel",
        ),
        (to_json(BackwardStrategy(MadeBy.EPILOGUE, dw_concurrent=True)), "db by epilogue, dw beside dx"),
        ({"unheard": "of"}, "unheard by of"),
    ],
)
def test_strategies(strategy: Mapping[str, object], words: str) -> None:
    assert strategy_in_words(strategy) == words


def test_algorithms() -> None:
    config = dict.fromkeys((each.name for each in AlgoConfigAttribute), 0)
    config |= {"ID": 66, "TILE_ID": MatmulTile.TILE_128x256, "STAGES_ID": MatmulStages.STAGES_16x3, "SPLITK_NUM": 4}
    config |= {"REDUCTION_SCHEME": 2, "CLUSTER_SHAPE_ID": 3}
    assert algorithm_in_words(config) == (
        "id 66, tile 128x256, stages 16x3, split-K 4, reduction compute_type, swizzle 0, option 0, inner shape any, "
        "cluster 2x1x1"
    )
    unknown = algorithm_in_words({"TILE_ID": 5000, "FUTURE": 3})
    assert unknown == "tile 5000, FUTURE 3", "numbers of a newer cuBLASLt"


def test_a_bar_shows_the_kernel_that_is_being_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("LT_RUNTIME_CACHE_DIR", str(tmp_path))
    with progress_bar() as progress:
        assert progress is not None
        progress(0, 2, "forward 8x5x3")
        monkeypatch.setattr(compiler, "compile_cubin", lambda *_: b"code")
        compiler.compile_kernel("epilogue_fwd.cu", (), "sm_90")
    assert "forward 8x5x3 (compiling epilogue_fwd.cu)" in capsys.readouterr().err
    assert not compiler.watchers
