"""PyTorch's contenders in the suites `kernels` and `layers`; tensors and captures for all suites."""

from __future__ import annotations

import collections
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cupy as cp
import numpy as np
import torch

from benchmarks.buffers import Sets, normal
from benchmarks.layers import Arrays, Block
from benchmarks.suite import AUTOTUNE
from benchmarks.timing import Contender, Replay, Run, warm_up

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Newer versions of PyTorch warn that this option has a new name.
    torch.backends.cuda.matmul.allow_tf32 = True

_aten = torch.ops.aten

Shapes = tuple[tuple[int, ...], ...]


def tensor(array: Any) -> torch.Tensor:
    """A tensor over a CuPy array's memory; BF16 is exchanged as int16, which every version of DLPack knows."""
    if array.dtype == np.dtype("bfloat16"):
        return torch.from_dlpack(array.view(cp.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def capture(run: Run, repetitions: int, sets: int, stream: Any) -> Replay:
    """Captures the launches that PyTorch makes on a CuPy stream into a graph that has its own memory.

    The results of `run` are kept until the same buffer set is used again, so that the results of consecutive
    repetitions lie in different memory.
    """
    outside = torch.cuda.ExternalStream(stream.ptr)
    with torch.cuda.stream(outside):
        warm_up(run, sets, stream)
    graph = torch.cuda.CUDAGraph()
    kept: collections.deque[object] = collections.deque(maxlen=sets)
    with torch.cuda.graph(graph, stream=outside):
        for i in range(repetitions):
            kept.append(run(i % sets, stream.ptr))

    def replay() -> None:
        with torch.cuda.stream(outside):
            graph.replay()

    return replay


def _over(sets: list[tuple[torch.Tensor, ...]], task: Callable[..., object]) -> Contender:
    """Runs the task on the tensors of each buffer set, on the current stream, which is being captured."""
    return Contender(lambda i, _: task(*sets[i]), capture)


def _compiled(task: Callable[..., Any], *, wanted: bool = True, mode: str = AUTOTUNE) -> Callable[..., Any]:
    """The task compiled by torch.compile, by default at its greatest effort; the task itself if `wanted` is false."""
    if not wanted:
        return task
    torch._dynamo.reset()  # After eight compilations of the same code for other shapes, the code would run uncompiled.
    return torch.compile(task, mode=mode, dynamic=False)


def _inputs(buffers: Sets, count: int) -> list[tuple[torch.Tensor, ...]]:
    """The first `count` arrays of each buffer set as tensors, the task's inputs; PyTorch allocates its own results."""
    return [tuple(tensor(array) for array in arrays[:count]) for arrays in buffers]


def _scalar(value: float) -> torch.Tensor:
    """A number in the GPU's memory."""
    return torch.full((), value, device="cuda")


def gelu_backward(buffers: Sets) -> Contender:
    """PyTorch's kernels for dz alone, without the bias gradient."""
    return _over(_inputs(buffers, 2), lambda dy, z: _aten.gelu_backward(dy, z, approximate="tanh"))


def epilogue_backward(buffers: Sets, dropout: float = 0.0, *, compiled: bool = False) -> Contender:
    """dz, and its column sums as the bias gradient, by PyTorch."""

    def task(dy: torch.Tensor, z: torch.Tensor) -> object:
        dz = _aten.gelu_backward(dy, z, approximate="tanh")
        return dz, dz.sum(0)

    def task_with_dropout(dy: torch.Tensor, z: torch.Tensor, mask: torch.Tensor) -> object:
        return task(_aten.native_dropout_backward(dy, mask, 1 / (1 - dropout)), z)

    inputs = _inputs(buffers, 2)
    if not dropout:
        return _over(inputs, _compiled(task, wanted=compiled))
    masked = [(dy, z, torch.rand_like(dy) >= dropout) for dy, z in inputs]
    return _over(masked, _compiled(task_with_dropout, wanted=compiled))


def epilogue_forward(buffers: Sets, dropout: float, *, compiled: bool = False) -> Contender:
    """GELU, then PyTorch's dropout, which stores its mask."""

    def task(z: torch.Tensor) -> object:
        return torch.native_dropout(torch.nn.functional.gelu(z, approximate="tanh"), dropout, True)

    return _over(_inputs(buffers, 1), _compiled(task, wanted=compiled))


def _swiglu(h: torch.Tensor) -> torch.Tensor:
    gate, value = h.chunk(2, -1)
    return torch.nn.functional.silu(gate) * value


def _swiglu_gradient(h: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    gate, value = h.chunk(2, -1)
    return torch.cat([_aten.silu_backward(dy * value, gate), dy * torch.nn.functional.silu(gate)], -1)


def gated_forward(buffers: Sets, dropout: float, *, compiled: bool = False) -> Contender:
    """SwiGLU, and PyTorch's dropout, which stores its mask."""

    def task(h: torch.Tensor) -> object:
        return torch.native_dropout(_swiglu(h), dropout, True) if dropout else _swiglu(h)

    return _over(_inputs(buffers, 1), _compiled(task, wanted=compiled))


def gated_backward(buffers: Sets, dropout: float, *, compiled: bool = False) -> Contender:
    """The gradient of SwiGLU and dropout, in one array."""

    def task_with_dropout(h: torch.Tensor, dy: torch.Tensor, mask: torch.Tensor) -> object:
        return _swiglu_gradient(h, _aten.native_dropout_backward(dy, mask, 1 / (1 - dropout)))

    inputs = _inputs(buffers, 2)
    if not dropout:
        return _over(inputs, _compiled(_swiglu_gradient, wanted=compiled))
    masked = [(h, dy, torch.rand_like(dy) >= dropout) for h, dy in inputs]
    return _over(masked, _compiled(task_with_dropout, wanted=compiled))


def _in_fp8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Any:
    """x · scale in FP8, saturated, row-major and transposed, and the largest absolute value of x."""
    most = torch.finfo(dtype).max
    cast = (x.float() * scale).clamp(-most, most).to(dtype)
    return cast, cast.t().contiguous(), x.abs().amax()


def cast_fp8(buffers: Sets, *, compiled: bool = False) -> Contender:
    """Casts x to E4M3, row-major and transposed, and finds the largest absolute value of x."""
    scale = _scalar(1.0)
    return _over([(x, scale) for (x,) in _inputs(buffers, 1)], _compiled(_in_fp8, wanted=compiled))


def epilogue_fp8(buffers: Sets, *, backward: bool, compiled: bool = False) -> Contender:
    """GELU in E4M3, in both orientations; backward, its derivative in E5M2, only transposed, and the bias gradient."""
    scale = _scalar(1.0)

    def forward(z: torch.Tensor) -> object:
        return _in_fp8(torch.nn.functional.gelu(z, approximate="tanh"), scale)

    def gradient(z: torch.Tensor, dy: torch.Tensor) -> object:
        dz = _aten.gelu_backward(dy, z, approximate="tanh")
        return _in_fp8(dz, scale, torch.float8_e5m2)[1:], dz.sum(0)

    return _over(_inputs(buffers, 1 + backward), _compiled(gradient if backward else forward, wanted=compiled))


def gated_fp8(buffers: Sets, *, compiled: bool = False) -> Contender:
    """SwiGLU of h in E4M3; or, of h and dy, its gradient in E5M2. Both results are in both orientations."""
    scale = _scalar(1.0)

    def task(h: torch.Tensor, *dy: torch.Tensor) -> object:
        return _in_fp8(_swiglu_gradient(h, *dy), scale, torch.float8_e5m2) if dy else _in_fp8(_swiglu(h), scale)

    return _over(_inputs(buffers, 2), _compiled(task, wanted=compiled))


def norm_forward(buffers: Sets, vectors: tuple[Any, ...], *, compiled: bool = False) -> Contender:
    """LayerNorm (weight and bias) or RMSNorm (weight) of the first arrays, or of their sums with the second arrays."""
    weights = [tensor(each) for each in vectors]
    shape = tuple(weights[0].shape)

    def task(x: torch.Tensor, *residual: torch.Tensor) -> object:
        total = x + residual[0] if residual else x
        if len(weights) == 2:
            return total, torch.native_layer_norm(total, shape, *weights, 1e-5)
        return total, torch.nn.functional.rms_norm(total, shape, weights[0], 1e-6)

    return _over(_inputs(buffers, 2), _compiled(task, wanted=compiled))


def norm_backward(buffers: Sets, vectors: tuple[Any, ...], *, compiled: bool = False) -> Contender:
    """The gradients of a norm's x, weight and bias. A buffer set is (x, dy) or (x, dy, add); `add` is added to dx."""
    weights = [tensor(each) for each in vectors]
    shape, inputs = tuple(weights[0].shape), _inputs(buffers, 3)
    if len(weights) == 2:
        statistics = [torch.native_layer_norm(x, shape, *weights, 1e-5)[1:] for x, *_ in inputs]
    else:
        statistics = [(torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6),) for x, *_ in inputs]

    def layer(x: torch.Tensor, dy: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> Any:
        return _aten.native_layer_norm_backward(dy, x, shape, mean, rstd, *weights, [True] * 3)

    def rms(x: torch.Tensor, dy: torch.Tensor, rstd: torch.Tensor) -> Any:
        if not compiled:
            return _aten._fused_rms_norm_backward(dy, x, shape, rstd, weights[0], [True] * 2)
        normalised, g = x.float() * rstd, dy.float() * weights[0].float()
        dx = (g - normalised * (g * normalised).mean(-1, keepdim=True)) * rstd
        return dx.to(x.dtype), (dy.float() * normalised).sum(0).to(x.dtype)

    def task(operands: tuple[torch.Tensor, ...], of_rows: tuple[torch.Tensor, ...]) -> object:
        x, dy, *add = operands
        dx, *others = (layer if len(weights) == 2 else rms)(x, dy, *of_rows)
        return (dx + add[0] if add else dx), *others

    made = _compiled(task, wanted=compiled)
    return Contender(lambda i, _: made(inputs[i], statistics[i]), capture)


def dropout(buffers: Sets, p: float, *, compiled: bool = False) -> Contender:
    """The operations behind F.dropout and its derivative, which store the mask as one byte an element."""

    def task(x: torch.Tensor, dy: torch.Tensor) -> object:
        y, mask = torch.native_dropout(x, p, True)
        return y, mask, _aten.native_dropout_backward(dy, mask, 1 / (1 - p))

    return _over(_inputs(buffers, 2), _compiled(task, wanted=compiled))


def _parameters(shapes: Shapes, dtype: str) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(tensor(normal(shape, dtype))) for shape in shapes]
    for parameter in made:
        parameter.grad = tensor(normal(tuple(parameter.shape), dtype))
    return made


def adamw(
    shapes: Shapes, dtype: str = "float32", max_norm: float | None = None, *, kept: str = "float32", casts: bool = False
) -> Contender:
    """PyTorch's fused AdamW on parameters of the type `kept`.

    For BF16 parameters with FP32 masters the contender does all work of a step in mixed precision: it converts the
    gradients to FP32, clips them, updates the masters, and converts these to BF16 parameters. With `casts`, it then
    casts the parameters to E4M3.
    """
    parameters = _parameters(shapes, kept)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True, capturable=True)
    has_masters, scale = dtype != kept, _scalar(1.0)
    copies = [tensor(normal(shape, dtype)) for shape in shapes] if has_masters else parameters
    gradients = [tensor(normal(shape, dtype)) for shape in shapes] if has_masters else []

    @torch.no_grad()
    def run(*_: int) -> object:
        if has_masters:
            torch._foreach_copy_([parameter.grad for parameter in parameters], gradients)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
        optimizer.step()
        if has_masters:
            torch._foreach_copy_(copies, parameters)
        return [_in_fp8(each, scale) for each in copies] if casts else None

    is_plain = not has_masters and max_norm is None and not casts  # `optimizer.step()` is then all of it
    return Contender((lambda *_: optimizer.step()) if is_plain else run, capture)


def flat_adamw(
    shapes: Shapes, dtype: str = "float32", max_norm: float | None = None, *, kept: str = "float32", casts: bool = False
) -> Contender:
    """AdamW by torch.compile over one flat tensor, with the arguments of `adamw`; `casts` needs a single shape."""
    size = sum(map(math.prod, shapes))
    value, gradient = tensor(normal((size,), kept)), tensor(normal((size,), dtype))
    mean, square = torch.zeros_like(value), torch.zeros_like(value)
    number, scale = _scalar(0.0), _scalar(1.0)
    copies = () if dtype == kept else (value.to(torch.bfloat16),)
    rate, decay, (first, second) = 1e-5, 0.01, (0.9, 0.999)

    def update(*tensors: torch.Tensor) -> object:
        value, gradient, mean, square, number, *copies = tensors
        slope = gradient.float()
        if max_norm is not None:
            slope = slope * (max_norm / (torch.linalg.vector_norm(slope) + 1e-6)).clamp(max=1.0)
        number.add_(1)
        mean.mul_(first).add_(slope, alpha=1 - first)
        square.mul_(second).addcmul_(slope, slope, value=1 - second)
        size = (square / (1 - second**number)).sqrt() + 1e-8
        value.mul_(1 - rate * decay).sub_(rate * (mean / (1 - first**number)) / size)
        for copy in copies:
            copy.copy_(value)
        return _in_fp8([*copies, value][0].view(shapes[0]), scale) if casts else None

    return _over([(value, gradient, mean, square, number, *copies)], _compiled(update))


def linear(buffers: Sets, *, compiled: bool = False) -> Contender:
    """Computes a layer by F.linear and GELU."""

    def task(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(torch.nn.functional.linear(x, w, bias), approximate="tanh")

    return _over(_inputs(buffers, 3), _compiled(task, wanted=compiled))


def addmm_activation(buffers: Sets) -> Contender:
    """F.linear and GELU by PyTorch's private product with a fused bias and GELU."""
    return _over(_inputs(buffers, 3), lambda x, w, bias: torch._addmm_activation(bias, x, w.T, use_gelu=True))


def cross_entropy(
    buffers: Sets, targets: Any, *, row_weights: Any = None, class_weights: Any = None, compiled: bool = False
) -> Contender:
    """F.cross_entropy and its gradient through autograd; with weights, the rows are weighted by hand."""
    labels, weights = tensor(targets), [tensor(each) for each in (row_weights, class_weights) if each is not None]

    def cost(logits: torch.Tensor) -> torch.Tensor:
        if not weights:
            return torch.nn.functional.cross_entropy(logits, labels)
        of_rows, of_classes = weights
        losses = torch.nn.functional.cross_entropy(logits, labels, of_classes.to(logits.dtype), reduction="none")
        return (losses * of_rows).sum() / of_classes[labels].sum()

    return _with_gradient(cost, _inputs(buffers, 1), compiled)


def log_softmax_gradient(buffers: Sets, targets: Any) -> Contender:
    """Loss and gradient by hand from log_softmax: autograd would also write the gradient of log_softmax's output."""
    labels, inputs = tensor(targets)[:, None], _inputs(buffers, 1)
    minus_one = torch.full(labels.shape, -1.0, device="cuda", dtype=inputs[0][0].dtype)

    def task(logits: torch.Tensor) -> object:
        log_p = torch.log_softmax(logits, 1)
        loss = -log_p.gather(1, labels).mean()
        return loss, log_p.exp_().scatter_add_(1, labels, minus_one).mul_(1 / len(labels))

    return _over(inputs, task)


def elementwise_loss(
    loss: str, buffers: Sets, *, row_weights: Any = None, pos_weight: Any = None, compiled: bool = False
) -> Contender:
    """The function of `torch.nn.functional` for our loss of that name, and its gradient through autograd."""
    functional = torch.nn.functional
    of_rows = None if row_weights is None else tensor(row_weights)[:, None]
    of_columns = None if pos_weight is None else tensor(pos_weight).to(torch.bfloat16)
    function = getattr(functional, loss.replace("bce", "binary_cross_entropy"))
    if loss == "bce_with_logits":
        function = partial(function, pos_weight=of_columns)

    def cost(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        reduction = "mean" if of_rows is None else "none"
        losses = function(prediction, target, reduction=reduction)
        return losses if of_rows is None else (losses * of_rows).mean()

    return _with_gradient(cost, _inputs(buffers, 2), compiled)


def _with_gradient(cost: Callable[..., Any], sets: Sequence[tuple[torch.Tensor, ...]], compiled: bool) -> Contender:
    """Returns a loss's value, and its gradient with respect to the first tensor."""
    run = _compiled(cost, wanted=compiled)

    def task(first: torch.Tensor, *others: torch.Tensor) -> object:
        value = run(first, *others)
        return value.detach(), *torch.autograd.grad(value, first)

    return _over([(first.requires_grad_(), *others) for first, *others in sets], task)


def block(case: Block, buffers: Sequence[Arrays], mode: str | None = None) -> Contender:
    """Forward and all gradients of a block of two layers, by autograd.

    Args:
        mode: in which torch.compile makes the block; None for PyTorch's own kernels.
    """
    functional = torch.nn.functional

    def forward(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor) -> Any:
        z = functional.linear(x, w1, b1)
        y = torch.relu(z) if case.activation == "relu" else functional.gelu(z, approximate="tanh")
        return functional.linear(y, w2, b2)

    def run(i: int, _: int) -> object:
        operands, dy = inputs[i]
        y = made(*operands)
        # A thread that autograd starts would warn that it has no CUDA context.
        with torch.autograd.set_multithreading_enabled(False):
            return y.detach(), torch.autograd.grad(y, operands, dy)

    made = forward if mode is None else _compiled(forward, mode=mode)
    operands = ((at.x, at.w1, at.b1, at.w2, at.b2) for at in buffers)
    leaves = (tuple(tensor(each).requires_grad_() for each in some) for some in operands)
    inputs = [(some, tensor(at.dy)) for some, at in zip(leaves, buffers, strict=True)]
    return Contender(run, capture)
