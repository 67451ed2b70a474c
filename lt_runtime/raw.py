"""The linear layer over raw device addresses: FP32, packed row-major matrices.

Y[m,n] = act(op(A)[m,k] · op(B)[k,n] + bias[n]). Addresses are ints; the address 0 means that a matrix or vector is
absent. `trans_a` says that A is stored (k, m), `trans_b` that B is stored (n, k); both are read in place. `stream` None
means CuPy's current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lt_runtime.arguments import flag, integer, number, one_of, shown
from lt_runtime.arrays.checks import check_device, check_no_overlap
from lt_runtime.arrays.operand import CUPY, HOST, Operand, device_of_address
from lt_runtime.errors import AlignmentError, ArgumentError, ShapeError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.layout import Layout, packed
from lt_runtime.ops._linear import BACKWARD, FORWARD, Layer
from lt_runtime.ops.call import Operation, addresses_of, prepare
from lt_runtime.problem import ACTIVATIONS, Activation, Saved

__all__ = ["backward_raw", "forward_raw"]

_ITEMSIZE = 4
_MOST = 1 << 48
_LAST_ADDRESS = 1 << 57


def __dir__() -> list[str]:
    return __all__


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
    activation, has_bias, has_z = _activation(act, leaky_slope), flag("with_bias", with_bias), flag("save_z", save_z)
    x, w, y = _layouts(m, k, n, trans_a, trans_b)
    operands = [_operand("A", A, x), _operand("B", B, w), _operand("bias", bias, y.cols) if has_bias else None]
    operands += [_operand("Y", Y, y), _operand("Z", Z, y) if has_z else None, None]
    options = (activation, activation.negative_slope, 0.0, "float32", False, False)
    _run(FORWARD, operands, 3, options, stream)


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
    activation, with_bias = _activation(act, leaky_slope), flag("with_bias", with_bias)
    has_z, (x, w, y) = activation.name != "none", _layouts(m, k, n, trans_a, trans_b)
    saved = _operand("Z", Z, y) if has_z else None
    operands = [_operand("gY", gY, y), _operand("A", A, x), _operand("B", B, w), saved, None]
    outputs = [_optional("gA", gA, x), _optional("gB", gB, w), _optional("gBias", gBias, y.cols) if with_bias else None]
    wanted = [each is not None for each in outputs]
    outputs += [_optional("gC", gC, y), None]
    saved_as = Saved.PREACTIVATION if has_z else Saved.NOTHING
    layer = Layer((y.rows, y.cols, x.cols), saved_as, None, activation, 0.0, "float32", "float32", with_bias)
    options = (layer, None, False, *wanted, False, False, True, False)
    _run(BACKWARD, [*operands, *outputs, _optional("C", C, y)], 5, options, stream)


def _activation(name: str, slope: float) -> Activation:
    return Activation(one_of("act", name, ACTIVATIONS), number("leaky_slope", slope))


def _layouts(m: int, k: int, n: int, trans_a: bool, trans_b: bool) -> tuple[Layout, Layout, Layout]:
    """Layouts of x (m, k), w (n, k) and y (m, n): B is the transpose of w."""
    m, k, n = integer("m", m), integer("k", k), integer("n", n)
    for name, size in (("m", m), ("k", k), ("n", n)):
        if size < 0:
            raise ShapeError(f"{name} is {shown(size)}; it must not be negative")
        if size >= _MOST:
            raise ShapeError(f"{name} is {shown(size)}; it must be below 2**48, as no memory holds more")
    x = packed(k, m).transposed if flag("trans_a", trans_a) else packed(m, k)
    w = packed(n, k) if flag("trans_b", trans_b) else packed(k, n).transposed
    return x, w, packed(m, n)


def _run(operation: Operation, given: Sequence[Operand | None], first_output: int, options: Any, stream: Any) -> None:
    """Runs an operation. Operands that the operation does not name are only checked to be on the same device."""
    for place in range(first_output, len(operation.names)):
        if out := given[place]:
            check_no_overlap(out, *filter(None, given[:place]))
    # An empty operand may have address 0, from which no device can be found: the other operands' device is used for it.
    somewhere = next((each.address for each in given if each and each.address), 0)
    placed = [each and replace(each, device=device_of_address(each.name, each.address or somewhere)) for each in given]
    first, *others = filter(None, placed)
    check_device(first, *others)
    handle, operands = stream_handle(stream, first.device), placed[: len(operation.names)]
    with activated(first.device):
        prepared = prepare(operation, operands, options, (None, None), handle)
        prepared.put(operation.call(prepared, addresses_of(operands), (None, None), handle))


def _optional(name: str, given: int, lies: Layout | int) -> Operand | None:
    return _operand(name, given, lies) if integer(name, given) else None


def _operand(name: str, given: int, lies: Layout | int) -> Operand:
    """Makes an `Operand` from an address and a layout; `_run` later finds the address's device.

    Args:
        lies: the layout of a matrix, or the length of a vector.
    """
    address = integer(name, given)
    shape, strides = ((lies,), (1,)) if isinstance(lies, int) else (lies.shape, lies.strides)
    if address == 0 and 0 not in shape:
        raise ArgumentError(f"{name} is 0; an address is needed for its {'x'.join(map(str, shape))} elements")
    if address >= _LAST_ADDRESS:
        raise ArgumentError(f"{name} is {shown(address)}; it must be an address, below 2**57")
    if address < 0 or address % _ITEMSIZE:
        raise AlignmentError(f"{name} is {address:#x}; it must be a multiple of {_ITEMSIZE}, the size of FP32")
    return Operand(name, address, shape, strides, "float32", _ITEMSIZE, HOST, CUPY, None)
