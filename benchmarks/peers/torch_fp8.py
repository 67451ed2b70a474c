"""torchao's contenders in the suite `fp8`: PyTorch's MLP whose linear layers torchao computes in FP8."""

from __future__ import annotations

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from benchmarks.peers import torch_steps
from benchmarks.steps import Setup, StepContender


def contender(setup: Setup, way: str, recipe: str) -> StepContender:
    """A whole step in a graph, its forward, loss and gradients compiled by torch.compile.

    Args:
        way: see `StepCase.ways`.
        recipe: the name of a recipe of torchao's.
    """

    def network(setup: Setup, dtype: torch.dtype) -> torch.nn.Module:
        config = Float8LinearConfig.from_recipe_name(recipe)
        return convert_to_float8_training(torch_steps.network_of(setup, dtype), config=config)

    return torch_steps.contender(setup, way, compiled="default", make=network)
