"""PyTorch's contenders in the suite `models`."""

from __future__ import annotations

import torch
from torch.nn import functional

from benchmarks.models import NORM_EPSILON, ModelCase
from benchmarks.peers import torch_steps
from benchmarks.steps import Setup, StepContender


def contender(setup: Setup, mode: str | None = None) -> StepContender:
    """A whole step in a graph, with BF16 parameters and moments.

    Args:
        mode: in which torch.compile makes forward, loss and their gradients; None to run them eagerly.
    """
    return torch_steps.contender(setup, "bf16", compiled=mode, make=_network)


def _network(setup: Setup, dtype: torch.dtype) -> torch.nn.Module:
    case, place = setup.case, {"device": "cuda", "dtype": dtype}
    assert isinstance(case, ModelCase)
    made = {"stack": _stack, "towers": _Towers, "autoencoder": _TiedAutoencoder}[case.form](case, **place)
    return torch_steps.with_values(made, setup)


def _stack(case: ModelCase, **place: object) -> torch.nn.Module:
    return torch.nn.Sequential(*(_GatedBlock(case.dims[0], case.hidden, **place) for _ in range(case.layers)))


class _GatedBlock(torch.nn.Module):
    """x + SwiGLU(RMSNorm(x)); the gate's and the up projection's weights are stacked, for one product."""

    def __init__(self, width: int, hidden: int, **place: object) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.empty(width, **place))
        self.up = torch.nn.Parameter(torch.empty(2 * hidden, width, **place))
        self.down = torch.nn.Parameter(torch.empty(width, hidden, **place))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.rms_norm(x, self.norm.shape, self.norm, NORM_EPSILON)
        gate, value = functional.linear(y, self.up).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * value, self.down)


class _TiedAutoencoder(torch.nn.Module):
    """The decoder's weight is the transpose of the encoder's."""

    def __init__(self, case: ModelCase, **place: object) -> None:
        super().__init__()
        width = case.dims[0]
        self.weight = torch.nn.Parameter(torch.empty(case.hidden, width, **place))
        self.bias = torch.nn.Parameter(torch.empty(case.hidden, **place))
        self.out_bias = torch.nn.Parameter(torch.empty(width, **place))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(functional.linear(x, self.weight, self.bias), approximate="tanh")
        return functional.linear(y, self.weight.t(), self.out_bias)


class _Towers(torch.nn.Module):
    """Two towers over the same inputs, and a layer over their outputs side by side."""

    def __init__(self, case: ModelCase, **place: object) -> None:
        super().__init__()
        self.towers = torch.nn.ModuleList(_tower(case.dims[0], case.hidden, **place) for _ in range(2))
        self.head = torch.nn.Linear(2 * case.hidden, case.dims[-1], **place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([tower(x) for tower in self.towers], dim=-1))


def _tower(inputs: int, hidden: int, **place: object) -> torch.nn.Module:
    layers = torch.nn.Linear(inputs, hidden, **place), torch.nn.Linear(hidden, hidden, **place)
    return torch.nn.Sequential(
        layers[0], torch.nn.GELU(approximate="tanh"), layers[1], torch.nn.GELU(approximate="tanh")
    )
