"""`ltt.tune` without a GPU: the tuner gets what a forward and backward pass runs, and the model stays as it was."""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

import lt_runtime as lt
import lt_runtime.torch as ltt
from lt_runtime.errors import DeviceError, KindError
from lt_runtime.ops import tuning as operations
from lt_runtime.ops.first_use import is_tuning


class Named(nn.Module):
    """A model that is called by keyword, and returns a dict in which a tensor has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(8), ltt.Linear(8, 4, dropout=0.5)
        self.layer.bias.requires_grad_(False)

    def forward(self, x: Any, *, scale: Any) -> dict[str, Any]:
        y = self.layer(self.norm(x) * scale)
        assert not is_tuning()
        return {"y": y, "rows": torch.tensor(len(x))}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Pretends that there is a GPU, and returns a list that receives the chains that the tuner is to measure."""
    chains: list[Any] = []
    monkeypatch.setattr(operations, "ordinal_of", lambda _: 0)
    monkeypatch.setattr(operations.search, "tune_chains", lambda found, *_, **__: chains.extend(found) or iter(()))
    pretended = {"device": lambda _: contextlib.nullcontext(), "synchronize": lambda _: None}
    for name, value in pretended.items():
        monkeypatch.setattr(torch.cuda, name, value)
    fork = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: fork([]))
    return chains


def test_a_model_is_measured_by_what_it_runs_and_stays_as_it_was(given: list[Any]) -> None:
    model, x = Named(), torch.ones(3, 8)
    model.layer.weight.grad = gradient = torch.ones(4, 8)
    state, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with torch.no_grad():
        report = ltt.tune(model, x, scale=torch.ones(8), progress=False)
    (chain,) = given
    (_, forward), (_, backward) = chain.runs
    assert (forward.y.layout.shape, backward.dy.layout.shape) == ((3, 4), (3, 4))
    assert (backward.dx is not None, backward.dw is not None) == (True, True)
    assert len(report) == 0
    assert model.layer.weight.grad is gradient
    assert float(gradient.sum()) == gradient.numel()
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), generator)


class Scaled(nn.Sequential):
    """Divides x by a running mean of its squares. Each call stores a new tensor as mean, and may raise at its end."""

    def __init__(self) -> None:
        super().__init__(ltt.Linear(256, 32, precision=lt.FP8()), ltt.Linear(32, 16, precision=lt.FP8()))
        self.register_buffer("mean", torch.ones(()))
        self.scales = 3  # an attribute of the model's own, which is no FP8State

    def forward(self, x: Any, *, raises: bool = False) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x.square().mean()
        y = super().forward(x / self.mean)
        if raises:
            raise RuntimeError("the model raises")
        return y


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_training_after_a_measurement_is_as_without(given: list[Any], steps: int, raises: bool) -> None:
    found = []
    for tunes in (False, True):
        torch.manual_seed(0)
        model = Scaled()
        optimizer, batches = ltt.AdamW(model.parameters(), lr=1e-2), iter(torch.randn(6, 32, 256))
        for count in (steps, 3):
            for _ in range(count):
                optimizer.zero_grad()
                model(next(batches)).square().mean().backward()
                optimizer.step()
            if tunes and count == steps:
                with pytest.raises(RuntimeError, match="the model raises") if raises else contextlib.nullcontext():
                    ltt.tune(model, torch.full((32, 256), 1e6), raises=raises, progress=False)
                assert all((each.scales.slots is None) == (steps == 0) for each in model)
        found.append(model.state_dict())
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (SimpleNamespace(), KindError, r"model is .*; it must be a torch\.nn\.Module"),
        (nn.Linear(8, 8), DeviceError, "there is no usable GPU here|device is .*cpu.*; accepted are GPUs"),
    ],
    ids=["no module", "on the CPU"],
)
def test_bad_input_is_refused_by_name(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ltt.tune(model, torch.ones(2, 8))
