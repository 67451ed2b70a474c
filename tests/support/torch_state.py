"""Replaces PyTorch's tensors in host memory, and the `state_dict` of an `nn.Sequential`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from tests.support.numpy_cases import DTYPES, Array


class HostTensor:
    """Stands in for `torch.Tensor` on the CPU; refuses the same conversions."""

    is_cuda, device = False, "cpu"

    def __init__(self, values: Array, *, requires_grad: bool = False) -> None:
        self.values, self.requires_grad = values, requires_grad
        self.shape, self.dtype = values.shape, f"torch.{values.dtype.name}"

    def detach(self) -> HostTensor:
        return HostTensor(self.values)

    def float(self) -> HostTensor:
        return HostTensor(self.values.astype(np.float32), requires_grad=self.requires_grad)

    def numpy(self) -> Array:
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        if self.values.dtype.name == "bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.values

    def __array__(self, *_: Any, **__: Any) -> Array:
        return self.numpy()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Self:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")


def fake_module() -> Any:
    """Makes a module `torch` for tests that need only tensors in host memory."""
    return SimpleNamespace(Tensor=HostTensor, nn=SimpleNamespace(Parameter=type("Parameter", (HostTensor,), {})))


def sequential_state(dims: list[int], dtype: str, **options: Any) -> dict[str, HostTensor]:
    """Makes the `state_dict` of linear layers with an activation after each; activations take every second index."""
    generator, state = np.random.default_rng(3), {}
    for i, (inputs, outputs) in enumerate(itertools.pairwise(dims)):
        for part, shape in (("weight", (outputs, inputs)), ("bias", (outputs,))):
            values = generator.standard_normal(shape).astype(DTYPES[dtype])
            state[f"{2 * i}.{part}"] = HostTensor(values, **options)
    return state


def sequential_names(layers: int) -> dict[str, str]:
    """Makes the argument `names=` that maps the `state_dict` of an `nn.Sequential` to a model's parameters."""
    return {f"layer{i}.{part}": f"{2 * i}.{part}" for i in range(layers) for part in ("weight", "bias")}
