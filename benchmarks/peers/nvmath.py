"""nvmath-python's contenders in the suite `host`. They are planned beforehand, and allocate their results."""

from __future__ import annotations

from typing import Any

from nvmath.linalg.advanced import Matmul, MatmulEpilog

from benchmarks.host import Layer
from benchmarks.timing import Call


def matmul(a: Any, b: Any, _: Any) -> Call:
    """D = A·B."""
    product = Matmul(a, b)
    product.plan()
    call: Call = product.execute
    return call


def linear_forward(at: Layer) -> Call:
    """yᵀ = GELU(w · xᵀ + bias), because nvmath's bias runs along rows; on PyTorch tensors, because CuPy has no BF16."""
    from benchmarks.peers.torch_kernels import tensor

    x, w, bias = (tensor(each) for each in (at.x, at.w, at.bias))
    product = Matmul(w, x.T)
    product.plan(epilog=MatmulEpilog.GELU_BIAS, epilog_inputs={"bias": bias})
    call: Call = product.execute
    return call
