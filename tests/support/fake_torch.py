"""A stand-in for PyTorch: tensors in a pretended GPU's memory, and a current stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.support.fake_cupy import Array


class Tensor:
    """Stands in for `torch.Tensor`: a wrapper around an array of CuPy's stand-in."""

    is_cuda = True

    def __init__(self, array: Array) -> None:
        self.array = array
        self.shape, self.device = array.shape, SimpleNamespace(index=0)
        self.dtype = f"torch.{array.dtype.name}"

    def data_ptr(self) -> int:
        return int(self.array.data.ptr)

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def get_device(self) -> int:
        return 0


class CpuTensor:
    """A square tensor on the CPU, whose address belongs to no allocation."""

    is_cuda, device, shape, dtype = False, "cpu", (4, 4), "torch.float32"

    def data_ptr(self) -> int:
        return 1 << 40

    def get_device(self) -> int:
        return -1

    def stride(self) -> tuple[int, ...]:
        return 4, 1


class ExternalStream:
    """Stands in for `torch.cuda.ExternalStream`."""

    def __init__(self, handle: int, device: Any = None) -> None:
        self.cuda_stream = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream


def fake_torch(cupy: Any) -> ModuleType:
    """Makes the module that stands in for torch."""
    module: Any = ModuleType("torch")
    current = [ExternalStream(0)]

    @contextlib.contextmanager
    def stream(entered: ExternalStream) -> Iterator[None]:
        current.append(entered)
        try:
            yield
        finally:
            current.pop()

    module.Tensor = Tensor
    module.nn = SimpleNamespace(Parameter=type("Parameter", (Tensor,), {}))
    module.empty = lambda shape, dtype, device: Tensor(cupy.ndarray(shape, dtype))
    module.empty_strided = lambda shape, strides, dtype, device: Tensor(cupy.ndarray(shape, dtype))
    module.device = lambda kind, index: f"{kind}:{index}"
    for name in ("float32", "float16", "uint8"):
        setattr(module, name, np.dtype(name))
    module.bfloat16 = cupy.bfloat16
    module.cuda = SimpleNamespace(
        ExternalStream=ExternalStream,
        stream=stream,
        current_stream=lambda _=None: current[-1],
        is_initialized=lambda: True,
    )
    module._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda _: current[-1].cuda_stream)
    return module  # type: ignore[no-any-return]
