"""PyTorch models and losses for the suites that measure training steps. They run on the host too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.nn import functional

from benchmarks.models import NORM_EPSILON, TAKEN, ModelCase
from benchmarks.steps import LEARNING_RATE, WEIGHT_DECAY, StepCase


def _loss_of_taken(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    actions = outputs.shape[1]
    error = target[:, :actions] * (outputs - target[:, actions:])
    return error.square().sum() / len(outputs)


LOSSES: Final = {"cross_entropy": functional.cross_entropy, "mse": functional.mse_loss, TAKEN: _loss_of_taken}


ACTIVATIONS: Final[dict[str, Callable[[], torch.nn.Module]]] = {
    "relu": torch.nn.ReLU,
    "tanh": torch.nn.Tanh,
    "silu": torch.nn.SiLU,
    "gelu": partial(torch.nn.GELU, approximate="tanh"),
}


def network(case: StepCase, **place: Any) -> torch.nn.Module:
    """PyTorch's model of a case, with its parameters in lt_runtime's order; `place` has device and type."""
    if not isinstance(case, ModelCase):
        return layers(case.dims, case.activation, **place)
    makers = {"stack": _stack, "feed_forward": _feed_forward, "towers": _Towers, "autoencoder": _TiedAutoencoder}
    return (makers | {"mixture": _Mixture, "dqn": _dqn})[case.form](case, **place)


def layers(sizes: Sequence[int], activation: str, **place: Any) -> torch.nn.Sequential:
    """Linear layers with activations between them."""
    made: list[torch.nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        made += [torch.nn.Linear(inputs, outputs, **place), ACTIVATIONS[activation]()]
    return torch.nn.Sequential(*made[:-1])


def train(case: ModelCase, values: Sequence[Any], batches: Iterable[Any], device: str, dtype: str) -> list[float]:
    """The losses of training steps over NumPy's batches, each before its update, without TF32.

    Args:
        values: the initial values of the parameters, as NumPy arrays.
    """
    torch.set_float32_matmul_precision("highest")
    place = {"device": device, "dtype": getattr(torch, dtype)}
    made = network(case, **place)
    with torch.no_grad():
        for parameter, value in zip(made.parameters(), values, strict=True):
            parameter.copy_(torch.as_tensor(value))
    optimizer, losses = torch.optim.AdamW(made.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY), []
    for x, target in batches:
        optimizer.zero_grad()
        loss = LOSSES[case.loss](made(torch.as_tensor(x).to(**place)), torch.as_tensor(target).to(**place))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(each) for each in losses]


def _stack(case: ModelCase, **place: Any) -> torch.nn.Module:
    return torch.nn.Sequential(*(_GatedBlock(case.dims[0], case.hidden, **place) for _ in range(case.layers)))


def _feed_forward(case: ModelCase, **place: Any) -> torch.nn.Module:
    width, outputs = case.dims
    norm = torch.nn.RMSNorm(width, NORM_EPSILON, **place)
    return torch.nn.Sequential(*_stack(case, **place), norm, torch.nn.Linear(width, outputs, **place))


class _GatedBlock(torch.nn.Module):
    """x + SwiGLU(RMSNorm(x)); the gate's and the up projection's weights are stacked, for one product."""

    def __init__(self, width: int, hidden: int, **place: Any) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.empty(width, **place))
        self.up = torch.nn.Parameter(torch.empty(2 * hidden, width, **place))
        self.down = torch.nn.Parameter(torch.empty(width, hidden, **place))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.rms_norm(x, self.norm.shape, self.norm, NORM_EPSILON)
        gate, value = functional.linear(y, self.up).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * value, self.down)


class _TiedAutoencoder(torch.nn.Module):
    """An autoencoder whose decoder's weight is the transpose of the encoder's."""

    def __init__(self, case: ModelCase, **place: Any) -> None:
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

    def __init__(self, case: ModelCase, **place: Any) -> None:
        super().__init__()
        sizes = case.dims[0], case.hidden, case.hidden
        towers = (layers(sizes, "gelu", **place).append(ACTIVATIONS["gelu"]()) for _ in range(2))
        self.towers = torch.nn.ModuleList(towers)
        self.head = torch.nn.Linear(2 * case.hidden, case.dims[-1], **place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([tower(x) for tower in self.towers], dim=-1))


class _Mixture(torch.nn.Module):
    """Two experts over the same inputs, weighed by the softmax of a gate."""

    def __init__(self, case: ModelCase, **place: Any) -> None:
        super().__init__()
        (inputs, outputs), hidden = case.dims, case.hidden
        self.gate = torch.nn.Linear(inputs, 2, **place)
        self.experts = torch.nn.ModuleList(layers((inputs, hidden, outputs), "gelu", **place) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = torch.softmax(self.gate(x), -1)
        first, second = (expert(x) for expert in self.experts)
        return p[..., :1] * first + p[..., 1:] * second


def _dqn(case: ModelCase, **place: Any) -> torch.nn.Module:
    return layers((case.dims[0], case.hidden, case.hidden, case.dims[1]), case.activation, **place)
