"""Calls bound to their buffers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from lt_runtime.arrays import on_host
from lt_runtime.errors import ArgumentError, DeviceError
from lt_runtime.gpu.bound import BoundPlan
from lt_runtime.ops import _linear_gpu_backward, _linear_gpu_forward, _matmul_gpu
from lt_runtime.ops._linear_types import Gradients, Source
from lt_runtime.ops._matmul_types import MatmulOperands
from lt_runtime.ops.linear import linear, linear_bwd, linear_fwd, of_use, options_of, wanted_of
from lt_runtime.ops.matmul import matmul
from lt_runtime.ops.matmul import options_of as matmul_options_of


def bind(operation: Callable[..., Any], /, *arguments: Any, **options: Any) -> BoundPlan:
    """A call with everything fixed: made as often as one likes, without another look at its arguments.

    ::

        forward = lt.bind(lt.linear_fwd, x, w, bias, activation="gelu", out=y, out_z=z)
        forward()  # y and z from what x, w and bias hold now

    Its launches are captured once into a graph, so that a call costs the host one launch, whatever it consists of. It
    holds no arrays: they have to stay alive and where they are. A dropout mask is the same at each call unless the
    step of `rng` is an array on the device.

    Args:
        operation: `lt.linear_fwd`, `lt.linear`, `lt.linear_bwd` or `lt.matmul`.
        arguments, options: its own, with a buffer for every result, and for the pre-activation where it is kept;
            `stream` is the one that each call will run on.

    Returns:
        A callable without arguments and results, to be called with the arrays' GPU current. A failing launch raises
        GpuError.

    Raises:
        ArgumentError: another operation, or a buffer is missing.
        DeviceError: NumPy arrays, which need no launch.
        TypeError: arguments that the operation does not take.
        CaptureError: the stream is being captured.
        LtError: whatever else the operation raises for such a call.
    """
    binder = _BINDERS.get(operation)
    if binder is None:
        accepted = ", ".join(f"lt.{each.__name__}" for each in _BINDERS)
        raise ArgumentError(f"operation is {operation!r}; accepted are {accepted}")
    given = inspect.signature(operation).bind(*arguments, **options)
    given.apply_defaults()
    return binder(**given.arguments)


def _refuse_host(name: str, array: Any) -> None:
    if on_host({name: array}):
        raise DeviceError(f"{name} is in host memory (NumPy); bound calls are for arrays on a GPU")


def _linear_fwd(
    x: Any, w: Any, bias: Any, *, rng: Any = None, out: Any, out_z: Any = None, stream: Any, **options: Any
) -> BoundPlan:
    _refuse_host("x", x)
    checked = options_of(rng=rng, **options)
    return _linear_gpu_forward.bind_forward((x, w, bias, out, out_z), checked, stream)


def _linear(x: Any, w: Any, bias: Any, *, out: Any, stream: Any, **options: Any) -> BoundPlan:
    _refuse_host("x", x)
    checked = options_of(dropout=0.0, rng=None, inference=True, **options)
    return _linear_gpu_forward.bind_forward((x, w, bias, out, None), checked, stream)


def _linear_bwd(dy: Any, ctx: Any, *, before_activation: bool, through: Any, stream: Any, **options: Any) -> BoundPlan:
    _refuse_host("dy", dy)
    buffers = Gradients(*(options.pop(f"out_{name}") for name in Gradients._fields))
    source = Source(ctx, through, before_activation)
    wanted = wanted_of(source, **options)
    return _linear_gpu_backward.bind_backward(dy, source, wanted, of_use(buffers, wanted), stream)


def _matmul(*, epilogue: Any, alpha: Any, beta: Any, dtype: Any, compute: str, stream: Any, **arrays: Any) -> BoundPlan:
    _refuse_host("a", arrays["a"])
    operands = MatmulOperands(**arrays)
    checked = matmul_options_of(operands, epilogue, alpha, beta, dtype, compute)
    return _matmul_gpu.bind(operands, checked, stream)


_BINDERS: dict[Callable[..., Any], Callable[..., BoundPlan]] = {
    linear_fwd: _linear_fwd,
    linear: _linear,
    linear_bwd: _linear_bwd,
    matmul: _matmul,
}
