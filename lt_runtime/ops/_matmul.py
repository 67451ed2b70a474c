"""`Matmul`: a matrix product with an epilogue as an operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from lt_runtime import reference
from lt_runtime.arrays.checks import check_same, check_shape, check_type
from lt_runtime.arrays.operand import Operand
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import ArgumentError, DTypeError, LayoutError, ShapeError
from lt_runtime.kernels.call import Call
from lt_runtime.layout import Layout, Order, batch_of, packed
from lt_runtime.ops.call import PreparedCall
from lt_runtime.ops.operation import New, Operation, Request
from lt_runtime.problem import ALIGNMENT, Compute, DType, MatmulProblem, Spec

_C, _AUX, _BIAS_GRADIENT, _D = 2, 6, 7, 8  # places among the arrays
_MASK_BITS: Final = 128  # a ReLU mask's leading dimension is a multiple of these bits in cuBLASLt
_AUX_ELEMENTS: Final = 8  # and a GELU auxiliary matrix's a multiple of these elements


class _Shape(NamedTuple):
    """Sizes of D; `batch` is None where neither operand is a batch."""

    m: int
    n: int
    batch: int | None

    def of(self, *axes: int) -> tuple[int, ...]:
        """`axes`, with the batch in front if there is one."""
        return axes if self.batch is None else (self.batch, *axes)


class Matmul(Operation):
    """D = epilogue(α·A·B + β·C + bias).

    A call's options are the epilogue, D's type, the compute type, whether C is read (β is not 0, or lies on the
    device), and whether C is the caller's buffer for D, which is also the request's detail. A call's scalars are α and
    β if they are numbers.
    """

    names = ("a", "b", "c", "bias", "alpha", "beta", "aux", "bias_gradient", "out")
    required = 2
    is_scaled = True

    def read(self, operands: Sequence[Any], options: Any, scalars: Any) -> Request:
        """See `Operation`."""
        epilogue, d_type, compute, reads_c, in_place = options
        given = {name: each for name, each in zip(self.names, operands, strict=True) if each is not None}
        epilogue = epilogue if isinstance(epilogue, Epilogue) else Epilogue.parse(epilogue)
        _check_presence(epilogue, given)
        a, b = given["a"], given["b"]
        dtype = a.element_type(fp64=True)
        check_same(a, b)
        compute = Compute.parse(compute, dtype)
        d_dtype = _result_type(dtype, d_type, epilogue)
        shape = _shape_of(a, b)
        _check_operands(given, epilogue, shape, d_dtype)
        _check_scalars(given, dtype)
        d = _spec(given["out"]) if "out" in given else _new_spec(shape)
        vector = given.get("bias") or given.get("bias_gradient")
        problem = MatmulProblem(
            dtype,
            d_dtype,
            compute,
            _spec(a),
            _spec(b),
            d,
            epilogue,
            c=_c_spec(given, d, d_dtype, epilogue, in_place) if reads_c else None,
            batch=1 if shape.batch is None else shape.batch,
            bias_alignment=vector.alignment if vector else ALIGNMENT,
            aux=_aux_spec(given["aux"], epilogue, shape, d.layout.order) if "aux" in given else None,
            device_scalars="alpha" in given,
        )
        new = {} if "out" in given else {_D: New(shape.of(shape.m, shape.n), d_dtype.numpy, a.library)}
        written = (*((_AUX,) if epilogue.has_aux_output else ()), _BIAS_GRADIENT, _D)
        return Request(problem, written, new, in_place, same=(_C, _D))

    def call(self, prepared: PreparedCall, addresses: tuple[int, ...], scalars: Any, stream: int) -> Call:
        """See `Operation`."""
        a, b, c, bias, alpha, beta, aux, bias_gradient, d = addresses
        problem = prepared.request.problem
        if problem.c is None:
            c = 0
        elif prepared.request.detail:
            c = d
        scalars = (alpha, beta) if problem.device_scalars else scalars
        return Call((a, b, c, bias or bias_gradient, aux, d), stream, scalars)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Any) -> None:
        """See `Operation`."""
        a, b, c, bias, alpha, beta, aux, bias_gradient, d = arrays
        problem, in_place = request.problem, request.detail
        scalars = scalars if alpha is None else (alpha.item(), beta.item())
        result = reference.matmul(
            a,
            b,
            d if in_place else c,
            alpha=scalars[0],
            beta=scalars[1],
            epilogue=problem.epilogue,
            bias=bias,
            aux=_read_aux(aux, problem),
        )
        _write_aux(aux, result.aux, problem)
        if result.bias_gradient is not None:
            bias_gradient[...] = result.bias_gradient.astype(bias_gradient.dtype)
        d[...] = result.d.astype(d.dtype)

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> Any:
        """See `Operation`."""
        return arrays[_D]


def _check_presence(epilogue: Epilogue, given: Mapping[str, Operand]) -> None:
    needs = {
        "bias": epilogue.has_bias,
        "aux": epilogue.has_aux_output or epilogue.is_derivative,
        "bias_gradient": epilogue.has_bias_gradient,
    }
    for name, needed in needs.items():
        if needed and name not in given:
            raise ArgumentError(f"{name} is None; epilogue {epilogue.value!r} needs it")
        if name in given and not needed:
            raise ArgumentError(f"{name} is given; epilogue {epilogue.value!r} has none")


def _shape_of(a: Operand, b: Operand) -> _Shape:
    for each in (a, b):
        if len(each.shape) not in (2, 3):
            raise ShapeError(
                f"{each.name} has shape {each.shape}; accepted are a matrix (2 axes) or a batch of them (3)"
            )
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            f"b has shape {b.shape}; its last axis but one must be {a.shape[-1]}, as the last of a of shape {a.shape}"
        )
    counts = {each.shape[0] for each in (a, b) if len(each.shape) == 3}
    if len(counts - {1}) > 1:
        why = f"and a has shape {a.shape}; equal batches or 1 are accepted"
        raise ShapeError(f"b has shape {b.shape}, a batch of {b.shape[0]}, {why}")
    return _Shape(a.shape[-2], b.shape[-1], next(iter(counts - {1} or counts), None))


def _result_type(operand: DType, requested: Any, epilogue: Epilogue) -> DType:
    """D's type.

    Raises:
        DTypeError: D's requested type is not possible with the operands' type.
        ArgumentError: an epilogue with float64.
    """
    if operand is DType.FLOAT64 and epilogue is not Epilogue.NONE:
        raise ArgumentError(f"epilogue is {epilogue.value!r}; float64 has none")
    if requested is None:
        return operand
    wanted = DType.parse("dtype", requested, fp64=True)
    if wanted is operand or (wanted is DType.FLOAT32 and operand in (DType.FLOAT16, DType.BFLOAT16)):
        return wanted
    raise DTypeError(f"dtype is {wanted.value}; with {operand.value} operands, that or float32 for 16-bit ones")


def _check_operands(given: Mapping[str, Operand], epilogue: Epilogue, shape: _Shape, dtype: DType) -> None:
    full = shape.of(shape.m, shape.n)
    sums = shape.of(shape.m if epilogue is Epilogue.BGRADA else shape.n)
    expected = {"c": full, "bias": (shape.n,), "bias_gradient": sums, "out": full}
    for name in ("c", "bias", "aux", "bias_gradient", "out"):
        if name not in given:
            continue
        operand, is_mask = given[name], name == "aux" and epilogue.activation == "relu"
        check_type(operand, "uint8" if is_mask else dtype.value)
        if name in expected:
            check_shape(name, operand.shape, expected[name], "as the product")
    for name in ("bias", "bias_gradient"):
        if name in given:
            given[name].check_packed()


def _check_scalars(given: Mapping[str, Operand], dtype: DType) -> None:
    kind = "float64" if dtype is DType.FLOAT64 else "float32"
    for name in ("alpha", "beta"):
        operand = given.get(name)
        if operand is not None and (operand.dtype != kind or any(extent != 1 for extent in operand.shape)):
            raise DTypeError(f"{name} is {operand.dtype} of shape {operand.shape}; accepted are a number or one {kind}")


def _lines(layout: Layout) -> int:
    """Number of lines: rows of a row-major matrix, columns of a column-major one."""
    return layout.rows if layout.order is Order.ROW else layout.cols


def _spec(operand: Operand) -> Spec:
    layout, _, stride = batch_of(operand.name, operand.shape, operand.strides)
    return Spec(layout, operand.alignment, stride)


def _new_spec(shape: _Shape) -> Spec:
    """The spec of a D that the call makes."""
    stride = shape.m * shape.n if shape.batch is not None and shape.batch > 1 else 0
    return Spec(packed(shape.m, shape.n), batch_stride=stride)


def _c_spec(given: Mapping[str, Operand], d: Spec, d_dtype: DType, epilogue: Epilogue, in_place: bool) -> Spec | None:
    """The spec of C; None without a C."""
    if in_place or "c" not in given:
        return d if in_place else None
    c = _spec(given["c"])
    if (d_dtype is DType.FLOAT64 or epilogue.sums_operand) and c.layout.order is not d.layout.order:
        orders = f"c is {c.layout.order.value}-major and out {d.layout.order.value}-major"
        raise LayoutError(f"{orders}; with float64, bgrada and bgradb they must agree")
    return c


def _aux_spec(aux: Operand, epilogue: Epilogue, shape: _Shape, order: Order) -> Spec:
    """The spec of GELU's auxiliary matrix, or of ReLU's mask as a matrix of bits.

    Raises:
        ShapeError, LayoutError: cuBLASLt does not take it.
    """
    if epilogue.activation == "gelu":
        check_shape("aux", aux.shape, shape.of(shape.m, shape.n), "as the product")
        spec = _spec(aux)
        layout = spec.layout
        if layout.order is not order and layout.size > 1:
            raise LayoutError(f"aux is {layout.order.value}-major and out {order.value}-major; orders must be equal")
        if _lines(layout) > 1 and layout.leading_dimension % _AUX_ELEMENTS:
            raise LayoutError(f"aux has leading dimension {layout.leading_dimension}; it must be a multiple of 8")
        rounded = -(-layout.leading_dimension // _AUX_ELEMENTS) * _AUX_ELEMENTS
        return replace(spec, layout=replace(layout, leading_dimension=rounded))
    lines, bits = (shape.m, shape.n) if order is Order.ROW else (shape.n, shape.m)
    check_shape("aux", aux.shape[:-1], shape.of(lines), "one row of bits a row (column) of the product")
    pitch = 8 * aux.strides[-2]
    if lines * bits and 8 * aux.shape[-1] < bits:
        raise ShapeError(
            f"aux has shape {aux.shape}; its last axis must be at least {-(-bits // 8)}, to hold {bits} bits"
        )
    has_gaps = aux.strides[-1] != 1 or pitch < bits or pitch % _MASK_BITS
    if lines * bits and has_gaps:
        raise LayoutError(
            f"aux has shape {aux.shape} and strides {aux.strides}; its rows must hold {bits} bits without "
            "gaps, and lie a multiple of 16 bytes apart"
        )
    stride = 8 * aux.strides[0] if len(aux.shape) == 3 and aux.shape[0] > 1 else 0
    return Spec(Layout(shape.m, shape.n, order, pitch), aux.alignment, stride)


def _read_aux(aux: Any, problem: MatmulProblem) -> Any:
    """The array that the reference takes a derivative from: the pre-activation, or a mask's bits as 0 and 1."""
    if aux is None or not problem.epilogue.is_derivative or problem.epilogue.activation != "relu":
        return aux
    is_row = problem.d.layout.order is Order.ROW
    bits = reference.unpack_mask(aux, problem.n if is_row else problem.m)
    return (bits if is_row else np.swapaxes(bits, -1, -2)).astype(np.float64)


def _write_aux(aux: Any, values: Any, problem: MatmulProblem) -> None:
    if aux is None or values is None:
        return
    if problem.epilogue.activation != "relu":
        aux[...] = values.astype(aux.dtype)
        return
    positive = values > 0
    is_row = problem.d.layout.order is Order.ROW
    bits = reference.pack_mask(positive if is_row else np.swapaxes(positive, -1, -2))
    width = min(bits.shape[-1], aux.shape[-1])
    aux[..., :width] = bits[..., :width]
