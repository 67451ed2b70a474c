"""The programs of tests/programs on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy as cp
import pytest

from tests.programs.checks import CHECKS, check_weights
from tests.support.peers import NEEDS_TORCH
from tests.support.torch_weights import weights_of


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("check", CHECKS)
def test_program(check: Callable[[Any, str], None]) -> None:
    check(cp, "cuda")


@NEEDS_TORCH
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_of_pytorch(dtype: str) -> None:
    state, x, outputs = weights_of(dtype)
    check_weights(cp, "cuda", dtype, state, x, outputs)
