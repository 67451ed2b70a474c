"""AdamW of weights with copies in FP8: the bits of the update without copies, and of NumPy's cast of its results."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from lt_runtime.kernels.optimizer import Fp8Copy
from lt_runtime.problem import DType
from lt_runtime.reference.fp8 import FP8_TYPES, amax_of, cast_fp8
from tests.host_kernels.arrays import Guarded
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.optimizer import OPTIONS, HostOptimizer, HostTensor, TensorCase, bits
from tests.host_kernels.variants import ADAMW, BF16, F16, F32, FULL_ADAMW, AdamWVariant

E4M3 = "float8_e4m3fn"


@dataclass(frozen=True)
class Weight:
    """A weight of FP32, of 16 bits with a master copy, or of BF16 that is updated in place."""

    shape: tuple[int, int]
    dtype: DType
    gradient: DType = BF16
    in_place: bool = False
    offset: int = 0
    transposes: bool = True


# Weights whose rows make whole tiles of 32 rows, and weights whose last tile has 16 rows.
WEIGHTS = (
    Weight((64, 256), BF16, in_place=True),
    Weight((80, 512), BF16, in_place=True, offset=8),
    Weight((16, 768), BF16, F32, transposes=False),
    Weight((144, 256), F16, F16, offset=8),
    Weight((32, 512), F32, offset=4),
)


class Copies:
    """The buffers of a weight's copy in FP8, with a scale and an earlier largest magnitude."""

    def __init__(self, weight: Weight) -> None:
        self.weight, self.numbers = weight, np.float32([0.25, 0.5])
        self.out, self.transposed = (Guarded(np.zeros(each, FP8_TYPES[E4M3])) for each in self._shapes())

    def _shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        rows, cols = self.weight.shape
        return (rows, cols), (cols, rows)

    @property
    def row(self) -> Fp8Copy:
        transposed = self.transposed.address * self.weight.transposes
        scale, amax = (self.numbers[i : i + 1].ctypes.data for i in range(2))
        return Fp8Copy(self.weight.shape, self.out.address, transposed, scale, amax)

    def check(self, tensor: HostTensor) -> None:
        """Compares with NumPy's cast of the tensor's parameter."""
        values = tensor.parameter.array.reshape(self.weight.shape)
        with np.errstate(over="ignore"):
            expected = cast_fp8(values, 0.25, E4M3)
        turned = expected.T if self.weight.transposes else np.zeros_like(expected.T)
        for copy, exact in ((self.out, expected), (self.transposed, turned)):
            copy.values()  # fails if bytes around the copy were written
            np.testing.assert_array_equal(copy.array.copy().view(np.uint8), exact.copy().view(np.uint8))
        np.testing.assert_array_equal(self.numbers, [0.25, amax_of(np.array([0.5, amax_of(values)]))])


def made(variant: AdamWVariant, special: bool) -> list[HostTensor]:
    found = []
    for i, weight in enumerate(WEIGHTS):
        in_place = weight.in_place and variant.stochastic
        size, offsets = weight.shape[0] * weight.shape[1], (weight.offset, 0, weight.offset)
        case = TensorCase(size, weight.dtype, weight.gradient, in_place, offsets, lr_scale=0.5 + i)
        found.append(HostTensor(case, variant, seed=i))
        if special:
            found[-1].gradient.array[0, :3] = np.nan, np.inf, -np.inf
    return found


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("variant", ADAMW, ids=str)
def test_updates(host: HostKernels, variant: AdamWVariant, special: bool) -> None:
    options = replace(OPTIONS, seed=7 << 40)
    plain, ours = made(variant, special), made(variant, special)
    HostOptimizer(host, variant, options, 3).update(plain)
    copies = [Copies(each) for each in WEIGHTS]
    HostOptimizer(host, variant, options, 3).update_fp8([(a, b.row) for a, b in zip(ours, copies, strict=True)], 1)
    assert bits(ours) == bits(plain)
    for tensor, copy in zip(ours, copies, strict=True):
        for each in tensor.written:
            each.values()  # fails if bytes around the array were written
        copy.check(tensor)


def test_a_skipped_step_casts_the_present_weights(host: HostKernels) -> None:
    tensors, copies = made(FULL_ADAMW, special=False), [Copies(each) for each in WEIGHTS]
    for tensor in tensors:
        if tensor.master is not None:
            tensor.parameter.array[...] = tensor.master.array
    optimizer, before = HostOptimizer(host, FULL_ADAMW, replace(OPTIONS, skip_nonfinite=True)), bits(tensors)
    optimizer.state["nonfinite"] = 1
    optimizer.update_fp8([(a, b.row) for a, b in zip(tensors, copies, strict=True)])
    assert bits(tensors) == before
    for tensor, copy in zip(tensors, copies, strict=True):
        copy.check(tensor)
