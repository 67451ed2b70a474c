"""Our side of the host's suite: public calls, and below them the plans that they come to."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import lt_runtime as lt
from benchmarks.buffers import labels, normal
from benchmarks.cases import AdamWStep
from benchmarks.host_cases import StepSizes
from benchmarks.host_timing import Call
from lt_runtime.kernels.call import ProductCall
from lt_runtime.layout import packed
from lt_runtime.plans.cache import forward_plan, product_plan
from lt_runtime.problem import Activation, Compute, DType, ForwardProblem, MatmulProblem, Spec

_ALIGNED: Final = 256  # bytes, as all memory is that comes from an allocator
_PLACES: Final = 20_000  # more than there are calls


class Layer(NamedTuple):
    """Operands and results of one layer, forward and backward; `z` is its pre-activation."""

    x: Any
    w: Any
    bias: Any
    dy: Any
    y: Any
    z: Any
    dx: Any
    dw: Any
    db: Any


def layer(m: int, n: int, k: int) -> Layer:
    """In BF16, on random data."""
    shapes = ((m, k), (n, k), (n,), (m, n), (m, n), (m, n), (m, k), (n, k), (n,))
    return Layer(*(normal(shape, DType.BFLOAT16) for shape in shapes))


def product(m: int, n: int, k: int) -> tuple[Any, Any, Any]:
    """A, B and D in FP32."""
    a, b, d = (normal(shape, DType.FLOAT32) for shape in ((m, k), (k, n), (m, n)))
    return a, b, d


def matmul(a: Any, b: Any, d: Any) -> Call:
    """Into a given buffer."""
    return lambda: lt.matmul(a, b, out=d)


def matmul_plan(a: Any, b: Any, d: Any) -> Call:
    """The launch alone: a plan and its addresses made beforehand."""
    a_spec, b_spec, d_spec = (Spec(packed(*array.shape)) for array in (a, b, d))
    problem = MatmulProblem(DType.FLOAT32, DType.FLOAT32, Compute.FLOAT32, a_spec, b_spec, d_spec)
    plan = product_plan(problem, 0, 0)
    call = ProductCall(a.data.ptr, b.data.ptr, d.data.ptr, stream=0)
    return lambda: plan.run(call)


def matmul_bound(a: Any, b: Any, d: Any) -> Call:
    """`lt.bind` of the same."""
    return lt.bind(lt.matmul, a, b, out=d)


def linear_forward(at: Layer) -> Call:
    """With `out=`; what is kept for backward is allocated."""
    return lambda: lt.linear_fwd(at.x, at.w, at.bias, activation="gelu", out=at.y)


def linear_forward_buffers(at: Layer) -> Call:
    """With `out=` and `out_z=`: nothing is allocated."""
    return lambda: lt.linear_fwd(at.x, at.w, at.bias, activation="gelu", out=at.y, out_z=at.z)


def linear_forward_elsewhere(at: Layer) -> Call:
    """The same with x where no call has had it before: nothing but the plan is known."""
    step = _ALIGNED // at.x.itemsize
    memory = normal((at.x.size + _PLACES * step,), DType.BFLOAT16)
    places = iter([memory[i * step : i * step + at.x.size].reshape(at.x.shape) for i in range(_PLACES)])
    return lambda: lt.linear_fwd(next(places), at.w, at.bias, activation="gelu", out=at.y, out_z=at.z)


def linear_bound(at: Layer) -> Call:
    """`lt.bind` of `linear_forward_buffers`."""
    return lt.bind(lt.linear_fwd, at.x, at.w, at.bias, activation="gelu", out=at.y, out_z=at.z)


def linear_inference(at: Layer) -> Call:
    """Nothing is kept."""
    return lambda: lt.linear(at.x, at.w, at.bias, activation="gelu", out=at.y)


def linear_plan(at: Layer) -> Call:
    """The launches alone of `linear_forward_buffers`: a plan made beforehand."""
    x, w, y = (Spec(packed(*array.shape)) for array in (at.x, at.w, at.y))
    problem = ForwardProblem(
        DType.BFLOAT16, Compute.FLOAT32, Activation("gelu"), x, w, y, bias=256, preactivation=y, backward=True
    )
    plan = forward_plan(problem, 0, 0)
    x_at, w_at, bias_at, y_at, z_at = (int(array.data.ptr) for array in (at.x, at.w, at.bias, at.y, at.z))
    return lambda: plan.run(x_at, w_at, bias_at, y_at, z_at, None, 0)


def linear_both(at: Layer) -> Call:
    """Forward and all gradients, each into a given buffer."""

    def call() -> object:
        _, ctx = lt.linear_fwd(at.x, at.w, at.bias, activation="gelu", out=at.y, out_z=at.z)
        return lt.linear_bwd(at.dy, ctx, out_dx=at.dx, out_dw=at.dw, out_db=at.db)

    return call


def adamw(case: AdamWStep) -> Call:
    """One step over all tensors."""
    parameters = [lt.Parameter(normal(shape, case.dtype), normal(shape, case.dtype)) for shape in case.shapes]
    return lt.AdamW(parameters, lr=1e-5).step


def batch(sizes: StepSizes) -> tuple[Any, Any]:
    """Inputs in BF16, and labels."""
    return normal((sizes.rows, sizes.dims[0]), DType.BFLOAT16), labels(sizes.rows, sizes.dims[-1])


def train_step(sizes: StepSizes, x: Any, targets: Any) -> Call:
    """Copies of the batch into the graph's buffers, and the launch of the graph."""
    model = lt.MLP(sizes.dims, activation="relu", dtype="bfloat16", device="cuda")
    optimizer = lt.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    step = lt.TrainStep(model, optimizer, loss="cross_entropy", batch_size=sizes.rows)
    return lambda: step(x, targets)
