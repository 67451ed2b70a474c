"""The linear layer over raw device addresses: FP32, row-major, matrices without gaps.

Y[m,n] = act(op(A)[m,k] · op(B)[k,n] + bias[n]). Addresses are ints, 0 means absent. `trans_a` says that A is stored
(k, m), `trans_b` that B is stored (n, k); no other copy is ever made. `stream` None means CuPy's current stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lt_runtime.arrays import CUPY, HOST, Operand, check_device, check_no_overlap, device_of_address
from lt_runtime.errors import AlignmentError, ArgumentError, ShapeError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.layout import Layout, packed
from lt_runtime.ops._context import Layer
from lt_runtime.ops._linear_backward import LinearBackward
from lt_runtime.ops._linear_forward import LinearForward
from lt_runtime.ops.call import Known, Operation, addresses_of, look
from lt_runtime.problem import Activation, Saved

_ITEMSIZE = 4


class _RawForward(LinearForward):
    """The forward pass, whose results are where the caller says."""

    def result(self, known: Known, arrays: Sequence[Any], extras: Any) -> Any:
        """See `Operation`."""


class _RawBackward(LinearBackward):
    """The backward pass, whose results are where the caller says."""

    def result(self, known: Known, arrays: Sequence[Any], extras: Any) -> Any:
        """See `Operation`."""


_FORWARD = _RawForward()
_BACKWARD = _RawBackward()


def forward_raw(
    A: int,
    B: int,
    bias: int,
    Y: int,
    m: int,
    k: int,
    n: int,
    trans_a: bool,
    trans_b: bool,
    act: str,
    with_bias: bool,
    leaky_slope: float,
    save_z: bool,
    Z: int,
    stream: Any = None,
) -> None:
    """Y = act(Z), Z = op(A)·op(B) + bias.

    Args:
        A: (m, k), or (k, m) if `trans_a`. B: (k, n), or (n, k) if `trans_b`.
        bias: (n,), used if `with_bias`.
        Y: (m, n).
        act: a name of `lt.ACTIVATIONS`, "gelu" being the tanh form; `leaky_slope` is that of "leaky_relu".
        save_z: also write Z (m, n), which `backward_raw` takes the derivative from.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, CuPy's current stream.

    Raises:
        ArgumentError: an unknown activation, or an address that is needed and 0.
        ShapeError: a negative size.
        OperandError: an address that is misaligned, no GPU address, on another GPU, or shared with Y or Z.
        CaptureError, GpuError: as in `lt.linear_fwd`.
    """
    activation = Activation(act, leaky_slope)
    x, w, y = _layouts(m, k, n, trans_a, trans_b)
    inputs = {"A": (A, x), "B": (B, w), "bias": (bias, n) if with_bias else None}
    outputs = {"Y": (Y, y), "Z": (Z, y) if save_z else None}
    asked = (activation, leaky_slope, 0.0, "float32", False, True)
    _run(_FORWARD, inputs, outputs, {}, asked, None, stream)


def backward_raw(
    A: int,
    B: int,
    C: int,
    gY: int,
    Z: int,
    gA: int,
    gB: int,
    gC: int,
    gBias: int,
    m: int,
    k: int,
    n: int,
    trans_a: bool,
    trans_b: bool,
    act: str,
    with_bias: bool,
    leaky_slope: float,
    stream: Any = None,
) -> None:
    """Gradients of Y = act(Z), Z = op(A)·op(B) + C + bias. An absent gradient is not computed.

    Args:
        A, B: as in `forward_raw`.
        C: (m, n), a matrix added to the product. No gradient depends on its values, so it may be absent even where
            `gC` is wanted.
        gY: (m, n), the gradient with respect to Y.
        Z: (m, n), as `forward_raw` saved it; may be absent for "none".
        gA, gB: as A and B. gC: (m, n), the gradient with respect to C, and to Z. gBias: (n,), used if `with_bias`.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, CuPy's current stream.

    Raises:
        As `forward_raw`.
    """
    activation, has_z = Activation(act, leaky_slope), act != "none"
    x, w, y = _layouts(m, k, n, trans_a, trans_b)
    inputs = {"gY": (gY, y), "A": (A, x), "B": (B, w), "Z": (Z, y) if has_z else None, "Z below": None}
    outputs = {
        "gA": (gA, x) if gA else None,
        "gB": (gB, w) if gB else None,
        "gBias": (gBias, n) if gBias and with_bias else None,
        "gC": (gC, y) if gC else None,
        "gBias below": None,
    }
    saved_as = Saved.PREACTIVATION if has_z else Saved.NOTHING
    layer = Layer((m, n, k), saved_as, None, activation, 0.0, "float32", with_bias)
    wanted = [outputs[name] is not None for name in ("gA", "gB", "gBias")]
    asked = (layer, None, False, *wanted, False, False)
    _run(_BACKWARD, inputs, outputs, {"C": (C, y)} if C else {}, asked, (None, None), stream)


def _layouts(m: int, k: int, n: int, trans_a: bool, trans_b: bool) -> tuple[Layout, Layout, Layout]:
    """Layouts of x (m, k), w (n, k) and y (m, n): B is the transpose of w."""
    for name, size in (("m", m), ("k", k), ("n", n)):
        if size < 0:
            raise ShapeError(f"{name} is {size}; it must not be negative")
    x = packed(k, m).transposed if trans_a else packed(m, k)
    w = packed(n, k) if trans_b else packed(k, n).transposed
    return x, w, packed(m, n)


_Named = Mapping[str, tuple[int, Layout | int] | None]
"""Addresses, and how the operands lie there: a layout, or a vector's length; None for an absent operand."""


def _run(
    operation: Operation, inputs: _Named, outputs: _Named, unread: _Named, asked: Any, extras: Any, stream: Any
) -> None:
    """Runs the operation on these operands; what is `unread` only has to be on the same device."""
    given = {name: each and _operand(name, *each) for name, each in {**inputs, **outputs}.items()}
    others = [_operand(name, *each) for name, each in unread.items() if each]
    seen = [given[name] for name in inputs]
    for name in outputs:
        out = given[name]
        if out is not None:
            check_no_overlap(out, *(each for each in seen if each is not None))
            seen.append(out)
    device = _device_of([each for each in (*given.values(), *others) if each is not None])
    operands = [each and replace(each, device=device) for each in given.values()]
    handle = stream_handle(stream, device)
    with activated(device):
        known = look(operation, operands, asked, extras, handle)
        known.put(operation.call(known, addresses_of(operands), extras, handle))


def _operand(name: str, address: int, lies: Layout | int) -> Operand:
    is_vector = isinstance(lies, int)
    layout = packed(1, lies) if isinstance(lies, int) else lies
    if address == 0 and layout.size:
        raise ArgumentError(f"{name} is 0; an address is needed for its {layout.rows}x{layout.cols} elements")
    if address < 0 or address % _ITEMSIZE:
        raise AlignmentError(f"{name} is {address:#x}; it must be a multiple of {_ITEMSIZE}, the size of FP32")
    shape, strides = ((layout.cols,), (1,)) if is_vector else (layout.shape, layout.strides)
    return Operand(name, address, shape, strides, "float32", _ITEMSIZE, HOST, CUPY, None)


def _device_of(operands: Sequence[Operand]) -> int:
    """The one device that all addresses belong to; the current one if there are none."""
    placed = [replace(each, device=device_of_address(each.name, each.address)) for each in operands if each.address]
    if not placed:
        return device_of_address(operands[0].name, 0)
    check_device(*placed)
    return placed[0].device
