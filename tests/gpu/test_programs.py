"""The programs of tests/programs on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np
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


@NEEDS_TORCH
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_modules_of_pytorch_there_and_back(dtype: str, place: str) -> None:
    import torch

    import lt_runtime as lt
    from tests.programs.pytorch_weights import NAMES

    kind = getattr(torch, dtype)
    modules = [torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.Linear(5, 3)) for _ in range(2)]
    first, second = (module.to(place, kind) for module in modules)
    model = lt.MLP([6, 5, 3], "gelu_erf", dtype=dtype, device="cuda")
    model.load_state_dict(first.state_dict(), names=NAMES)
    back = model.state_dict(names=NAMES)
    second.load_state_dict({name: torch.as_tensor(torch.from_dlpack(array)) for name, array in back.items()})
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert np.isfinite(float(model(cp.ones((4, 6), model.dtype.numpy)).astype(np.float32).sum()))
