"""`lt.bind`: makes a callable that repeats an operation on fixed buffers without checking its arguments again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from lt_runtime.arguments import shown
from lt_runtime.errors import ArgumentError, KindError
from lt_runtime.ops._linear import LinearContext
from lt_runtime.ops.add import add
from lt_runtime.ops.call import Binding
from lt_runtime.ops.dropout import dropout
from lt_runtime.ops.gated import gated_bwd, gated_fwd
from lt_runtime.ops.linear import linear, linear_bwd, linear_fwd
from lt_runtime.ops.losses import bce_with_logits, cross_entropy, huber_loss, mse_loss
from lt_runtime.ops.matmul import matmul
from lt_runtime.ops.norm import layer_norm_bwd, layer_norm_fwd, rms_norm_bwd, rms_norm_fwd

_LOSSES: Final = (mse_loss, huber_loss, bce_with_logits, cross_entropy)
_NORMS: Final = (layer_norm_fwd, layer_norm_bwd, rms_norm_fwd, rms_norm_bwd)
_OPERATIONS: Final = (linear_fwd, linear, linear_bwd, matmul, *_LOSSES, add, dropout, gated_fwd, gated_bwd, *_NORMS)


def bind(operation: Callable[..., Any], /, *arguments: Any, stream: Any = None, **options: Any) -> Callable[[], None]:
    """Checks a call's arguments once, and returns a callable that repeats the call without checking them.

    ::

        forward = lt.bind(lt.linear_fwd, x, w, bias, activation="gelu", out=y, out_z=z)
        forward() # computes y and z from the present content of x, w and bias

    On a GPU the call's launches are captured here into a graph, so that a bound call costs the host one launch. While
    this function runs, other threads must not synchronise with the whole device (`torch.cuda.synchronize()`,
    `cupy.cuda.Device().synchronize()`, cuCtxSynchronize) nor call cudaMalloc or cudaFree: during a capture such calls
    fail, and may invalidate the capture. On NumPy arrays each bound call runs the reference.

    The bound call does not keep the arrays alive: they must stay where they are. A dropout mask is the same at each
    call unless the step of `rng` is an array on the operands' device.

    Args:
        operation: `lt.linear_fwd`, `lt.linear`, `lt.linear_bwd`, `lt.matmul`, `lt.add`, `lt.dropout`, `lt.gated_fwd`,
            `lt.gated_bwd`, one of the losses, or `lt.layer_norm_fwd`, `lt.rms_norm_fwd` and their backward.
        arguments, options: the operation's, with a buffer for every result, and for a pre-activation that is kept. A
            `precision`, and a context of a layer in FP8, are refused.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others. Each bound call runs
            on this stream.

    Returns:
        A callable without arguments and results, to be called while the arrays' GPU is current. It raises GpuError if
        a launch fails and, on NumPy arrays, ArgumentError for labels out of range, as `lt.cross_entropy` does.

    Raises:
        KindError: `operation` is not in the list of operations above.
        ArgumentError: a result has no buffer, or the layer is in FP8.
        TypeError: the operation does not take one of the arguments.
        CaptureError: the stream is being captured.
        LtError: the operation does not accept the call, or failed.
    """
    if not any(operation is each for each in _OPERATIONS):
        accepted = ", ".join(f"lt.{each.__name__}" for each in _OPERATIONS)
        raise KindError(f"operation is {shown(operation)}; accepted are {accepted}")
    if options.get("precision") is not None or any(
        isinstance(each, LinearContext) and each.state is not None for each in (*arguments, *options.values())
    ):
        found = "a call with a precision, or with the context of a layer in FP8, cannot be bound"
        instead = "drop precision, or capture the calls in a graph of your own or by lt.TrainStep"
        raise ArgumentError(f"{found}: its casts to FP8 make new arrays each time; {instead}")
    bound: Callable[[], None] = operation(*arguments, stream=Binding(stream), **options)
    return bound
