"""The linear layer over raw device addresses: FP32, row-major, matrices without gaps.

Y[m,n] = act(op(A)[m,k] · op(B)[k,n] + bias[n]). Addresses are ints, 0 means absent. `trans_a` says that A is stored
(k, m), `trans_b` that B is stored (n, k); no other copy is ever made. `stream` None means CuPy's current stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lt_runtime.arrays import device_of_address
from lt_runtime.errors import AlignmentError, ArgumentError, DeviceError, OverlapError, ShapeError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.layout import Layout, may_overlap, packed
from lt_runtime.plans.backward import BackwardCall
from lt_runtime.plans.cache import backward_plan, forward_plan
from lt_runtime.problem import Activation, BackwardProblem, Compute, Derivative, DType, ForwardProblem, Saved, Spec

_ITEMSIZE = 4


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
        act: a name of `lt.ACTIVATIONS`; `leaky_slope` is that of "leaky_relu".
        save_z: also write Z (m, n), which `backward_raw` takes the derivative from.
        stream: an int handle, a stream object, or None.

    Raises:
        ArgumentError: an unknown activation, or an address that is needed and 0.
        ShapeError: a negative size.
        OperandError: an address that is misaligned, no GPU address, on another GPU, or shared with Y or Z.
        CaptureError, GpuError: as in `lt.linear_fwd`.
    """
    activation = Activation(act, leaky_slope)
    x, w, y = _layouts(m, k, n, trans_a, trans_b)
    inputs = {"A": (A, x), "B": (B, w), **({"bias": (bias, packed(1, n))} if with_bias else {})}
    outputs = {"Y": (Y, y), **({"Z": (Z, y)} if save_z else {})}
    device = _check(inputs, outputs)
    handle = stream_handle(stream, device)
    with activated(device):
        problem = ForwardProblem(
            DType.FLOAT32,
            Compute.FLOAT32,
            activation,
            _spec(A, x),
            _spec(B, w),
            _spec(Y, y),
            _alignment(bias) if with_bias else None,
            _spec(Z, y) if save_z else None,
        )
        plan = forward_plan(problem, device, handle)
        plan.run(A, B, bias if with_bias else 0, Y, Z if save_z else 0, None, handle)


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

    Raises:
        As `forward_raw`.
    """
    activation = Activation(act, leaky_slope)
    x, w, y = _layouts(m, k, n, trans_a, trans_b)
    has_z = act != "none"
    inputs = {"A": (A, x), "B": (B, w), "gY": (gY, y), **({"Z": (Z, y)} if has_z else {})}
    wanted = {"gA": (gA, x), "gB": (gB, w), "gC": (gC, y), "gBias": (gBias if with_bias else 0, packed(1, n))}
    outputs = {name: operand for name, operand in wanted.items() if operand[0]}
    device = _check(inputs, outputs, {"C": (C, y)})
    handle = stream_handle(stream, device)
    specs = {name: _spec(*operand) for name, operand in outputs.items()}
    wants_db = "gBias" in outputs
    own = Derivative(
        activation,
        Saved.PREACTIVATION if has_z else Saved.NOTHING,
        _spec(Z, y) if has_z else None,
        _alignment(gBias) if wants_db else None,
    )
    problem = BackwardProblem(
        DType.FLOAT32,
        Compute.FLOAT32,
        _spec(A, x),
        _spec(B, w),
        _spec(gY, y),
        own,
        specs.get("gA"),
        specs.get("gB"),
        specs.get("gC"),
    )
    db = gBias if wants_db else 0
    with activated(device):
        plan = backward_plan(problem, device, handle)
        plan.run(BackwardCall(gY, A, B, handle, Z if has_z else 0, dx=gA, dw=gB, db=db, dz=gC))


def _layouts(m: int, k: int, n: int, trans_a: bool, trans_b: bool) -> tuple[Layout, Layout, Layout]:
    """Layouts of x (m, k), w (n, k) and y (m, n): B is the transpose of w."""
    for name, size in (("m", m), ("k", k), ("n", n)):
        if size < 0:
            raise ShapeError(f"{name} is {size}; it must not be negative")
    x = packed(k, m).transposed if trans_a else packed(m, k)
    w = packed(n, k) if trans_b else packed(k, n).transposed
    return x, w, packed(m, n)


def _alignment(address: int) -> int:
    return min(address & -address, 256) or 256


def _spec(address: int, layout: Layout) -> Spec:
    return Spec(layout, _alignment(address))


_Operands = Mapping[str, tuple[int, Layout]]


def _check(inputs: _Operands, outputs: _Operands, unread: _Operands | None = None) -> int:
    """The device that all addresses belong to."""
    operands = {**inputs, **outputs}
    everything = {**operands, **(unread or {})}
    for name, (address, layout) in everything.items():
        if address == 0 and layout.size and name in operands:
            raise ArgumentError(f"{name} is 0; an address is needed for its {layout.rows}x{layout.cols} elements")
        if address < 0 or address % _ITEMSIZE:
            raise AlignmentError(f"{name} is {address:#x}; it must be a multiple of {_ITEMSIZE}, the size of FP32")
    _check_overlap(inputs, outputs)
    device: int | None = None
    for name, (address, _) in everything.items():
        if address:
            device = _same_device(name, address, device)
    return device_of_address("A", 0) if device is None else device


def _same_device(name: str, address: int, device: int | None) -> int:
    own = device_of_address(name, address)
    if device is not None and own != device:
        raise DeviceError(f"{name} is on GPU {own}, the operands before it on GPU {device}; one device is needed")
    return own


def _check_overlap(inputs: _Operands, outputs: _Operands) -> None:
    seen = dict(inputs)
    for name, (address, layout) in outputs.items():
        for other, (other_address, other_layout) in seen.items():
            if may_overlap(address, layout, other_address, other_layout, _ITEMSIZE):
                raise OverlapError(f"{name} shares memory with {other}; it must not")
        seen[name] = (address, layout)
