"""The programs of tests/programs and of examples on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.programs import checks
from tests.support.torch_weights import weights_of


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("check", checks.CHECKS)
def test_program(check: Callable[[Any, str], None]) -> None:
    check(np, "cpu")


@pytest.mark.parametrize("path", checks.EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path) -> None:
    checks.check_example(path, "cpu")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_of_pytorch(dtype: str) -> None:
    state, x, outputs = weights_of(dtype)
    checks.check_weights(np, "cpu", dtype, state, x, outputs)
