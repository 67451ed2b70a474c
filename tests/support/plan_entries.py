"""Made-up entries of the plan cache, each with another algorithm."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from lt_runtime.layout import packed
from lt_runtime.problem import Activation, Compute, DType, ForwardProblem, Spec
from lt_runtime.store.document import Fingerprint
from lt_runtime.store.entries import Alternative, LayerEntry, ProductEntry, RejectedAlgorithm, RejectedStrategy
from lt_runtime.store.keys import problem_key
from tests.support.product_problems import input_gradient

H200 = Fingerprint("NVIDIA H200", 90, 132, 130100, "580.95.05", "0123456789abcdef")
DATE = "2026-01-31T12:00:00Z"
LATER = "2026-02-01T00:00:00Z"

_counter = itertools.count(1)


def algorithm() -> bytes:
    return next(_counter).to_bytes(64, "little")


def product(**changes: Any) -> ProductEntry:
    values: dict[str, Any] = {
        "algorithm": algorithm(),
        "config": {"ID": 66, "TILE_ID": 20, "SPLITK_NUM": 1},
        "us": 52.5,
        "first_us": 60.0,
        "spread": 0.25,
        "candidates": 14,
        "rejected": (RejectedAlgorithm(algorithm(), {"ID": 21}, "slow: 3.1 times the best"),),
        "when": DATE,
    }
    return ProductEntry(**(values | changes))


def layer(**changes: Any) -> LayerEntry:
    values: dict[str, Any] = {
        "strategy": {"epilogue": "gelu_aux_bias", "saved": "preactivation"},
        "us": 110.0,
        "alternatives": (Alternative({"epilogue": "none", "saved": "preactivation"}, 121.0),),
        "rejected": (RejectedStrategy({"epilogue": "gelu_bias", "saved": "nothing"}, "not supported"),),
        "when": DATE,
    }
    return LayerEntry(**(values | changes))


def product_key(m: int, n: int = 3072, k: int = 768) -> str:
    return problem_key(input_gradient(m, n, k))


def layer_key(m: int, n: int = 3072, k: int = 768) -> str:
    x, w, y = Spec(packed(m, k)), Spec(packed(n, k)), Spec(packed(m, n))
    return problem_key(ForwardProblem(DType.BFLOAT16, Compute.FLOAT32, Activation("gelu"), x, w, y, bias=256))


KEY, OTHER, LAYER = product_key(64), product_key(128), layer_key(64)


def beside(path: Path) -> set[str]:
    """Lists the suffixes of the files whose names begin with a file's name, except its lock."""
    return {file.name.removeprefix(path.name) for file in path.parent.iterdir()} - {"", ".lock"}
