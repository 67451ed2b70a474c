"""nvmath-python's side of the host's suite, planned beforehand; the import fails where it is not installed."""

from __future__ import annotations

from typing import Any

from nvmath.linalg.advanced import Matmul, MatmulEpilog

from benchmarks.host_lt import Layer
from benchmarks.host_timing import Call


def matmul(a: Any, b: Any, _: Any) -> Call:
    """The result is allocated."""
    product = Matmul(a, b)
    product.plan()
    call: Call = product.execute
    return call


def linear_forward(at: Layer) -> Call:
    """yᵀ = GELU(w · xᵀ + bias): a bias runs along rows. On PyTorch's tensors, for BF16; the result is allocated."""
    from benchmarks.kernel_torch import tensor

    x, w, bias = (tensor(each) for each in (at.x, at.w, at.bias))
    product = Matmul(w, x.T)
    product.plan(epilog=MatmulEpilog.GELU_BIAS, epilog_inputs={"bias": bias})
    call: Call = product.execute
    return call
