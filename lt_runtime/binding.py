"""Calls bound to their buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from lt_runtime.arguments import shown
from lt_runtime.errors import KindError
from lt_runtime.losses.cross_entropy import cross_entropy
from lt_runtime.losses.elementwise import bce_with_logits, huber_loss, mse_loss
from lt_runtime.ops.call import Binding
from lt_runtime.ops.dropout import dropout
from lt_runtime.ops.linear import linear, linear_bwd, linear_fwd
from lt_runtime.ops.matmul import matmul

_LOSSES: Final = (mse_loss, huber_loss, bce_with_logits, cross_entropy)
_OPERATIONS: Final = (linear_fwd, linear, linear_bwd, matmul, *_LOSSES, dropout)


def bind(operation: Callable[..., Any], /, *arguments: Any, stream: Any = None, **options: Any) -> Callable[[], None]:
    """A call with everything fixed: made as often as one likes, without another look at its arguments.

    ::

        forward = lt.bind(lt.linear_fwd, x, w, bias, activation="gelu", out=y, out_z=z)
        forward()  # y and z from what x, w and bias hold now

    On a GPU its launches are captured once into a graph, so that a call costs the host one launch, whatever it consists
    of. It holds no arrays: they have to stay alive and where they are. On NumPy arrays each call runs the reference. A
    dropout mask is the same at each call unless the step of `rng` is an array that lives with the operands.

    Args:
        operation: `lt.linear_fwd`, `lt.linear`, `lt.linear_bwd`, `lt.matmul`, `lt.dropout`, or one of the losses.
        arguments, options: its own, with a buffer for every result, and for the pre-activation where it is kept.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others. Each call
            will run on it.

    Returns:
        A callable without arguments and results, to be called with the arrays' GPU current. A failing launch raises
        GpuError; labels that are out of range raise ArgumentError on NumPy arrays, as in `lt.cross_entropy`.

    Raises:
        ArgumentError: another operation, or no buffer for a result.
        TypeError: arguments that the operation does not take.
        CaptureError: the stream is being captured.
        LtError: whatever else the operation raises for such a call.
    """
    if not any(operation is each for each in _OPERATIONS):
        accepted = ", ".join(f"lt.{each.__name__}" for each in _OPERATIONS)
        raise KindError(f"operation is {shown(operation)}; accepted are {accepted}")
    bound: Callable[[], None] = operation(*arguments, stream=Binding(stream), **options)
    return bound
