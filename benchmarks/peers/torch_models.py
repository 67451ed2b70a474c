"""PyTorch's contenders in the suite `models`."""

from __future__ import annotations

import torch

from benchmarks.models import ModelCase
from benchmarks.peers import torch_steps
from benchmarks.peers.torch_networks import network
from benchmarks.steps import Setup, StepContender


def contender(setup: Setup, mode: str | None = None) -> StepContender:
    """A whole step in a graph, with BF16 parameters and moments.

    Args:
        mode: in which torch.compile makes forward, loss and their gradients; None to run them eagerly.
    """
    return torch_steps.contender(setup, "bf16", compiled=mode, make=_network)


def _network(setup: Setup, dtype: torch.dtype) -> torch.nn.Module:
    assert isinstance(setup.case, ModelCase)
    return torch_steps.with_values(network(setup.case, device="cuda", dtype=dtype), setup)
