"""What a matrix product with an epilogue adds to the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from lt_runtime import reference
from lt_runtime.arrays import Operand, check_same, check_shape
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import ArgumentError, DTypeError, LayoutError, ShapeError
from lt_runtime.kernels.call import Call
from lt_runtime.layout import Layout, Order, batch_of, packed
from lt_runtime.ops.call import Known, New, Operation, Reading
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec

_C, _AUX, _BIAS_GRADIENT, _D = 2, 6, 7, 8  # places among the arrays
_MASK_BITS: Final = 128  # cuBLASLt's granularity of a ReLU mask's leading dimension
_AUX_ELEMENTS: Final = 8  # and of a GELU auxiliary matrix's


class MatmulOptions(NamedTuple):
    """The options of `matmul` that a call's course depends on.

    Attributes:
        reads_c: whether β is other than 0, or on the device.
        in_place: C is the caller's buffer for D.
    """

    epilogue: str | Epilogue
    dtype: Any
    compute: str
    reads_c: bool
    in_place: bool


class _Shape(NamedTuple):
    """Sizes of a product; `batch` is None where neither operand is a batch."""

    m: int
    n: int
    k: int
    batch: int | None

    def of(self, *axes: int) -> tuple[int, ...]:
        """`axes`, with the batch in front if there is one."""
        return axes if self.batch is None else (self.batch, *axes)


class _Product(NamedTuple):
    """What the host needs again: the epilogue, sizes, and the order of D."""

    options: MatmulOptions
    epilogue: Epilogue
    shape: _Shape
    order: Order


class Matmul(Operation):
    """D = epilogue(α·A·B + β·C + bias); a call's extras are α and β where they are numbers."""

    names = ("a", "b", "c", "bias", "alpha", "beta", "aux", "bias_gradient", "out")
    required = 2
    is_scaled = True

    def read(self, operands: Sequence[Operand | None], asked: Any, extras: Any) -> Reading:
        """See `Operation`."""
        given = {name: each for name, each in zip(self.names, operands, strict=True) if each is not None}
        options = MatmulOptions(*asked)
        epilogue = options.epilogue if isinstance(options.epilogue, Epilogue) else Epilogue.parse(options.epilogue)
        _check_presence(epilogue, given)
        a, b = given["a"], given["b"]
        dtype = DType.parse("a", a.dtype, fp64=True)
        check_same(a, b)
        compute = Compute.parse(options.compute, dtype)
        d_dtype = _result_type(dtype, options.dtype, epilogue)
        shape = _shape_of(a, b)
        _check_operands(given, epilogue, shape, d_dtype)
        _check_scalars(given, dtype)
        d = _spec(given["out"]) if "out" in given else _new_spec(shape)
        if "aux" in given:
            _check_aux(given["aux"], d.layout.order, epilogue, shape)
        problem = _problem(given, d, options, epilogue, shape, (dtype, d_dtype, compute))
        new = {} if "out" in given else {_D: New(shape.of(shape.m, shape.n), d_dtype.numpy, a.library)}
        written = (*((_AUX,) if epilogue.has_aux_output else ()), _BIAS_GRADIENT, _D)
        detail = _Product(options, epilogue, shape, d.layout.order)
        return Reading(problem, written, new, detail, same=(_C, _D))

    def call(self, known: Known, addresses: tuple[int, ...], extras: Any, stream: int) -> Call:
        """See `Operation`."""
        a, b, c, bias, alpha, beta, aux, bias_gradient, d = addresses
        problem = known.reading.problem
        if problem.c is None:
            c = 0
        elif known.reading.detail.options.in_place:
            c = d
        scalars = (alpha, beta) if problem.device_scalars else extras
        return Call((a, b, c, bias or bias_gradient, aux, d), stream, scalars)

    def on_host(self, reading: Reading, arrays: Sequence[Any], extras: Any) -> None:
        """See `Operation`."""
        a, b, c, bias, alpha, beta, aux, bias_gradient, d = arrays
        product: _Product = reading.detail
        scalars = extras if alpha is None else (alpha.item(), beta.item())
        result = reference.matmul(
            a,
            b,
            d if product.options.in_place else c,
            alpha=scalars[0],
            beta=scalars[1],
            epilogue=product.epilogue,
            bias=bias,
            aux=_read_aux(aux, product),
        )
        _write_aux(aux, result.aux, product)
        if result.bias_gradient is not None:
            bias_gradient[...] = result.bias_gradient.astype(bias_gradient.dtype)
        d[...] = result.d.astype(d.dtype)

    def result(self, known: Known, arrays: Sequence[Any], extras: Any) -> Any:
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
    return _Shape(a.shape[-2], b.shape[-1], a.shape[-1], next(iter(counts - {1} or counts), None))


def _result_type(operand: DType, requested: Any, epilogue: Epilogue) -> DType:
    """D's type.

    Raises:
        DTypeError: the type asked for does not go with the operands'.
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
        kind = "uint8" if is_mask else dtype.value
        if operand.dtype != kind:
            raise DTypeError(f"{name} is {operand.dtype}; it must be {kind}")
        if name in expected:
            check_shape(name, operand.shape, expected[name], "as the product")
    if "bias" in given:
        given["bias"].check_vector()
    if "bias_gradient" in given:
        given["bias_gradient"].check_packed()


def _check_scalars(given: Mapping[str, Operand], dtype: DType) -> None:
    kind = "float64" if dtype is DType.FLOAT64 else "float32"
    for name in ("alpha", "beta"):
        operand = given.get(name)
        if operand is not None and (operand.dtype != kind or any(extent != 1 for extent in operand.shape)):
            raise DTypeError(f"{name} is {operand.dtype} of shape {operand.shape}; accepted are a number or one {kind}")


def _check_aux(aux: Operand, order: Order, epilogue: Epilogue, shape: _Shape) -> None:
    if epilogue.activation == "gelu":
        check_shape("aux", aux.shape, shape.of(shape.m, shape.n), "as the product")
        layout = _layout(aux)
        if layout.order is not order and layout.size > 1:
            raise LayoutError(f"aux is {layout.order.value}-major and out {order.value}-major; orders must be equal")
        if _lines(layout) > 1 and layout.leading_dimension % _AUX_ELEMENTS:
            raise LayoutError(f"aux has leading dimension {layout.leading_dimension}; it must be a multiple of 8")
        return
    lines, bits = (shape.m, shape.n) if order is Order.ROW else (shape.n, shape.m)
    check_shape("aux", aux.shape[:-1], shape.of(lines), "one row of bits a row (column) of the product")
    if not lines * bits:
        return
    pitch = 8 * aux.strides[-2]
    if aux.strides[-1] != 1 or 8 * aux.shape[-1] < bits or pitch < bits or pitch % _MASK_BITS:
        raise LayoutError(
            f"aux has shape {aux.shape} and strides {aux.strides}; its rows must hold {bits} bits without "
            "gaps, and lie a multiple of 16 bytes apart"
        )


def _lines(layout: Layout) -> int:
    """Rows of a row-major matrix, columns of a column-major one; a single line has no leading dimension."""
    return layout.rows if layout.order is Order.ROW else layout.cols


def _layout(operand: Operand) -> Layout:
    return batch_of(operand.name, operand.shape, operand.strides)[0]


def _spec(operand: Operand) -> Spec:
    layout, _, stride = batch_of(operand.name, operand.shape, operand.strides)
    return Spec(layout, operand.alignment, stride)


def _new_spec(shape: _Shape) -> Spec:
    """How a D lies that is made for the caller."""
    stride = shape.m * shape.n if shape.batch is not None and shape.batch > 1 else 0
    return Spec(packed(shape.m, shape.n), batch_stride=stride)


def _problem(
    given: Mapping[str, Operand],
    d: Spec,
    options: MatmulOptions,
    epilogue: Epilogue,
    shape: _Shape,
    types: tuple[DType, DType, Compute],
) -> MatmulProblem:
    dtype, d_dtype, compute = types
    vector = given.get("bias") or given.get("bias_gradient")
    c = d if options.in_place else _spec(given["c"]) if "c" in given else None
    c = c if options.reads_c else None
    if c is not None and (d_dtype is DType.FLOAT64 or epilogue.sums_operand) and c.layout.order is not d.layout.order:
        orders = f"c is {c.layout.order.value}-major and out {d.layout.order.value}-major"
        raise LayoutError(f"{orders}; with float64, bgrada and bgradb they must agree")
    return MatmulProblem(
        dtype,
        d_dtype,
        compute,
        _spec(given["a"]),
        _spec(given["b"]),
        d,
        epilogue,
        c=c,
        batch=1 if shape.batch is None else shape.batch,
        vector=vector.alignment if vector else 256,
        aux=_aux_spec(given["aux"], epilogue, shape, d.layout.order) if "aux" in given else None,
        device_scalars="alpha" in given,
    )


def _aux_spec(aux: Operand, epilogue: Epilogue, shape: _Shape, order: Order) -> Spec:
    """GELU's auxiliary matrix as it lies; ReLU's mask as a matrix of bits."""
    if epilogue.activation == "gelu":
        spec = _spec(aux)
        rounded = -(-spec.layout.leading_dimension // _AUX_ELEMENTS) * _AUX_ELEMENTS
        return Spec(replace(spec.layout, leading_dimension=rounded), spec.alignment, spec.batch_stride)
    stride = 8 * aux.strides[0] if len(aux.shape) == 3 and aux.shape[0] > 1 else 0
    return Spec(Layout(shape.m, shape.n, order, 8 * aux.strides[-2]), aux.alignment, stride)


def _read_aux(aux: Any, product: _Product) -> Any:
    """The pre-activation that a derivative is taken from; a mask's bits as 0 and 1."""
    if aux is None or not product.epilogue.is_derivative or product.epilogue.activation != "relu":
        return aux
    is_row = product.order is Order.ROW
    bits = reference.unpack_mask(aux, product.shape.n if is_row else product.shape.m)
    return (bits if is_row else np.swapaxes(bits, -1, -2)).astype(np.float64)


def _write_aux(aux: Any, values: Any, product: _Product) -> None:
    if aux is None or values is None:
        return
    if product.epilogue.activation != "relu":
        aux[...] = values.astype(aux.dtype)
        return
    positive = values > 0
    bits = reference.pack_mask(positive if product.order is Order.ROW else np.swapaxes(positive, -1, -2))
    width = min(bits.shape[-1], aux.shape[-1])
    aux[..., :width] = bits[..., :width]
