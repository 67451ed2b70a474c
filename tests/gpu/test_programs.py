"""The programs of tests/programs and of examples on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy as cp
import pytest

from tests.programs.checks import CHECKS, EXAMPLES, check_example, check_weights
from tests.support.peers import NEEDS_TORCH
from tests.support.torch_weights import weights_of


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("check", CHECKS)
def test_program(check: Callable[[Any, str], None]) -> None:
    check(cp, "cuda")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path) -> None:
    check_example(path, "cuda")


@NEEDS_TORCH
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_of_pytorch(dtype: str) -> None:
    state, x, outputs = weights_of(dtype)
    check_weights(cp, "cuda", dtype, state, x, outputs)
