"""Modules with the parameters, initial values and state_dict keys of PyTorch's."""

from __future__ import annotations

from typing import Any

import torch

from lt_runtime.problem import Activation, ActivationName
from lt_runtime.torch.functional import linear_layers
from lt_runtime.torch.linear import forms_of
from lt_runtime.torch.operators import Tensor


class Linear(torch.nn.Linear):
    """`torch.nn.Linear`, followed by an activation and dropout: y = dropout(act(x · weightᵀ + bias)) + add.

    Args:
        in_features, out_features, bias, device, dtype: as for `torch.nn.Linear`, whose initial values it has.
        activation: a name of `lt.ACTIVATIONS`, or an `lt.Activation`.
        dropout: probability of dropout in training, in [0, 1).

    Raises:
        ArgumentError: an unknown activation; `dropout` outside [0, 1).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: ActivationName | Activation = "none",
        dropout: float = 0.0,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        (form,) = forms_of((activation,), (0.01,), (dropout,), False)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation, self.negative_slope = form.activation.name, form.activation.negative_slope
        self.dropout = form.dropout

    def forward(self, x: Tensor, add: Tensor = None) -> Tensor:
        """y (..., out_features) for x (..., in_features) and add (..., out_features)."""
        options = (self.activation,), (self.negative_slope,), (self.dropout if self.training else 0.0,)
        return linear_layers(x, (self.weight, self.bias), options, add)

    def extra_repr(self) -> str:
        """The options, for `repr`."""
        return f"{super().extra_repr()}, activation={self.activation}, dropout={self.dropout}"
