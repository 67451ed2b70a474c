"""Weights on the GPU: PyTorch's go in and out bit for bit, graphs go on with them, stale master copies are refused."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from tests.support.peers import NEEDS_TORCH
from tests.support.torch_state import sequential_names

DIMS, BATCH = [40, 96, 10], 64
TYPES = ["float32", "float16", "bfloat16"]


class _Run:
    def __init__(self, dtype: str, *, graph: bool = True, **options: Any) -> None:
        self.model = lt.MLP(DIMS, activation="gelu", dtype=dtype, dropout=0.2, seed=3, device="cuda")
        self.optimizer = lt.AdamW(self.model.parameters(), **options)
        self.step = lt.TrainStep(self.model, self.optimizer, batch_size=BATCH, graph=graph)

    def train(self, steps: range) -> None:
        for i in steps:
            generator = np.random.default_rng(i)
            x = self.model.device.asarray(generator.standard_normal((BATCH, 40)).astype(self.model.dtype.numpy))
            self.step(x, cp.asarray(generator.integers(0, 10, BATCH)))

    def bits(self) -> dict[str, bytes]:
        return {name: cp.asnumpy(array).tobytes() for name, array in self.model.state_dict().items()}


def _sequential(dtype: str, device: str) -> Any:
    import torch

    torch.manual_seed(5)
    layers = torch.nn.Linear(40, 96), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(96, 10)
    return torch.nn.Sequential(*layers).to(device, getattr(torch, dtype))


@NEEDS_TORCH
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", TYPES)
def test_pytorchs_weights_stay_bit_for_bit(dtype: str, place: str, graph: bool) -> None:
    import torch

    module, names, run = _sequential(dtype, place), sequential_names(2), _Run(dtype, graph=graph, lr=0.0)
    run.train(range(2))  # the graph is captured before the weights are loaded
    assert run.model.load_state_dict(module.state_dict(), names=names) == ([], [])
    x = torch.ones(8, 40, device="cuda", dtype=getattr(torch, dtype))
    expected = module.to("cuda")(x).float().detach()
    torch.testing.assert_close(run.model(x).float(), expected, rtol=2e-2, atol=2e-2)
    run.train(range(10))
    back = _sequential(dtype, "cuda")
    for each in back.parameters():
        each.data.zero_()
    given = run.model.state_dict(names=names)
    back.load_state_dict({name: _tensor(array, dtype) for name, array in given.items()})
    for (name, one), (other_name, other) in zip(module.state_dict().items(), back.state_dict().items(), strict=True):
        assert name == other_name
        assert torch.equal(one, other), name


def _tensor(array: Any, dtype: str) -> Any:
    """Converts an array of CuPy's into a tensor; DLPack has no BF16 in every version of CuPy."""
    import torch

    if dtype != "bfloat16":
        return torch.from_dlpack(array)
    return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("more", [(), (np.inf, -np.inf, np.nan)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_updates_round_is_never_stale(dtype: str, more: tuple[float, ...]) -> None:
    run = _Run(dtype, lr=1e-3)
    weight = run.model.layers[0].weight
    extremes = [0.0, -0.0, 1e-8, -6e-8, 1.0 + 2.0**-9, 65504.0, -1e-5, *more]
    weight.assign(np.resize(np.array(extremes, np.float32), weight.data.shape))
    for parameter in run.model.parameters():
        gradient = np.random.default_rng(3).standard_normal(parameter.grad.shape)
        parameter.grad.set(gradient.astype(parameter.grad.dtype))
    for _ in range(3):
        run.optimizer.step()
        lt.AdamW(run.model.parameters())  # the first load checks every value of the state
