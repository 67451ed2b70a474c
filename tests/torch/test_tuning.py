"""`ltt.tune` without a GPU: the tuner gets what a forward and backward pass runs, and the model stays as it was."""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

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


def test_a_model_is_measured_by_what_it_runs_and_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(operations, "ordinal_of", lambda _: 0)
    monkeypatch.setattr(operations.search, "tune_chains", lambda chains, *_, **__: given.extend(chains) or iter(()))
    pretended = {"device": lambda _: contextlib.nullcontext(), "synchronize": lambda _: None}
    for name, value in pretended.items():
        monkeypatch.setattr(torch.cuda, name, value)
    fork = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: fork([]))
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
