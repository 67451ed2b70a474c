"""Matrix products over arrays on a GPU: operands to problem to plan to launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lt_runtime.arrays import Operand, Signature, check_device, check_no_overlap, check_same, check_shape
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import ArgumentError, DTypeError, LayoutError, OverlapError
from lt_runtime.gpu.bound import BoundPlan
from lt_runtime.gpu.devices import activated
from lt_runtime.kernels.call import ProductCall
from lt_runtime.layout import Layout, Order, batch_of, overlaps_itself
from lt_runtime.ops._known_calls import KnownCall, New, address_of, note, repeated
from lt_runtime.ops._matmul_types import MatmulOperands, MatmulOptions, MatmulShape, product_shape, result_type
from lt_runtime.ops._place import Place
from lt_runtime.plans.cache import age, product_plan
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec
from lt_runtime.products.product import ProductPlan

_INPUTS = 5  # a, b, c, bias, aux
_MASK_BITS = 128  # cuBLASLt's granularity of a ReLU mask's leading dimension
_AUX_ELEMENTS = 8  # and of a GELU auxiliary matrix's


@dataclass(frozen=True, slots=True)
class KnownMatmul:
    """What is remembered of a call.

    Attributes:
        d: what is made where the caller brings no buffer; None where he does.
        in_place: C is the caller's buffer for D.
    """

    plan: ProductPlan
    d: New | None
    in_place: bool

    def product_call(self, at: tuple[int, ...], new_d: int, alpha: Any, beta: Any, stream: int) -> ProductCall:
        """The launch.

        Args:
            at: addresses of a, b, c, bias, aux, bias_gradient and out.
        """
        a, b, c, bias, aux, bias_gradient, d = at
        d = d or new_d
        c = 0 if self.plan.problem.c is None else d if self.in_place else c
        return ProductCall(a, b, d, stream, c, bias or bias_gradient, aux, alpha, beta)


def run(arrays: MatmulOperands, options: MatmulOptions, stream: Any, signature: Signature | None) -> Any:
    """See `matmul`. The call is remembered by its signature, if it has one."""
    place = Place.of("a", arrays.a, stream)
    with activated(place.device):
        call, addresses, d, alpha, beta = _look(place, arrays, options, signature)
        call.plan.run(call.product_call(addresses, d.address, alpha, beta, place.stream))
        return arrays.out if call.d is None else call.d.export(d.array, place.stream)


def bind(arrays: MatmulOperands, options: MatmulOptions, stream: Any) -> BoundPlan:
    """See `bind`; arguments as of `run`."""
    if arrays.out is None:
        raise ArgumentError("out is None; a bound call makes no arrays: give it a buffer")
    place = Place.of("a", arrays.a, stream)
    with activated(place.device):
        call, addresses, d, alpha, beta = _look(place, arrays, options, None)
        return call.plan.bind(call.product_call(addresses, d.address, alpha, beta, place.stream))


def _look(
    place: Place, arrays: MatmulOperands, options: MatmulOptions, signature: Signature | None
) -> tuple[KnownMatmul, tuple[int, ...], Operand, Any, Any]:
    """What is made of a call, the addresses of its arrays, D, and α and β, all operands having been checked."""
    since, a, b = age(), place.read("a", arrays.a), place.read("b", arrays.b)
    check_same(a, b)
    dtype = DType.parse("a", a.dtype, fp64=True)
    compute = Compute.parse(options.compute, dtype)
    d_dtype = result_type(dtype, options.dtype, options.epilogue)
    shape = product_shape(a.shape, b.shape)
    named = {name: getattr(arrays, name) for name in ("c", "bias", "aux", "bias_gradient", "out")}
    given = {name: place.read(name, array) for name, array in named.items() if array is not None}
    check_device(a, *given.values())
    new = New(shape.of(shape.m, shape.n), d_dtype.numpy, a.library, place.device)
    d = given.get("out") or place.read("out", new.make(place.stream)[0])
    _check_operands(given, d, options.epilogue, shape, d_dtype)
    _check_overlaps(a, b, given, d)
    on_device, alpha, beta = _scalars(place, options, dtype)
    problem = _problem(a, b, d, given, options.epilogue, shape, (dtype, d_dtype, compute), on_device, options.beta)
    plan = product_plan(problem, place.device, place.stream)
    call = KnownMatmul(plan, None if "out" in given else new, arrays.c is arrays.out)
    operands = [given.get(name) for name in named]
    if signature is not None:
        note(signature, KnownCall(call, (a, b, *_apart(operands, call)), inputs=_INPUTS), since)
    return call, tuple(map(address_of, (a, b, *operands))), d, alpha, beta


def _apart(operands: list[Operand | None], call: KnownMatmul) -> list[Operand | None]:
    """The operands as a signature has them, without a C that is D."""
    return [None, *operands[1:]] if call.in_place else operands


def run_again(signature: Signature, out: Any, alpha: float, beta: float, stream: Any) -> Any:
    """What `matmul` returns for a call like one made before; None if it is not, or takes another look."""
    known = repeated(signature, stream)
    if known is None:
        return None
    call: KnownMatmul = known.call
    d, new_d = (out, 0) if call.d is None else call.d.make(known.stream)
    differing = (new_d, alpha, beta)
    launch = known.bound(differing)
    if launch is not None:
        launch()
    else:
        product_call = call.product_call(known.addresses, new_d, float(alpha), float(beta), known.stream)
        call.plan.run(product_call)
        known.came_with(differing, lambda: call.plan.bind(product_call))
    return out if call.d is None else call.d.export(d, known.stream)


def _check_operands(
    given: dict[str, Operand], d: Operand, epilogue: Epilogue, shape: MatmulShape, dtype: DType
) -> None:
    full = shape.of(shape.m, shape.n)
    check_shape("out", d.shape, full, "the product's shape")
    if overlaps_itself(d.shape, d.strides):
        raise OverlapError(f"out has strides {d.strides}: its elements share memory; they must not")
    sums = shape.of(shape.m if epilogue is Epilogue.BGRADA else shape.n)
    expected = {"c": full, "bias": (shape.n,), "bias_gradient": sums, "out": full}
    for name, operand in given.items():
        is_mask = name == "aux" and epilogue.activation == "relu"
        kind = "uint8" if is_mask else dtype.value
        if operand.dtype != kind:
            raise DTypeError(f"{name} is {operand.dtype}; it must be {kind}")
        if name in expected:
            check_shape(name, operand.shape, expected[name], "as the product")
    if "bias" in given:
        given["bias"].check_vector()
    if "bias_gradient" in given:
        given["bias_gradient"].check_packed()
    if "aux" in given:
        _check_aux(given["aux"], d, epilogue, shape)


def _check_aux(aux: Operand, d: Operand, epilogue: Epilogue, shape: MatmulShape) -> None:
    order = _layout(d).order
    if epilogue.activation == "gelu":
        check_shape("aux", aux.shape, d.shape, "as the product")
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
    """Rows of a row-major matrix, columns of a column-major one: a single one has no leading dimension to speak of."""
    return layout.rows if layout.order is Order.ROW else layout.cols


def _layout(operand: Operand) -> Layout:
    return batch_of(operand.name, operand.shape, operand.strides)[0]


def _check_overlaps(a: Operand, b: Operand, given: dict[str, Operand], d: Operand) -> None:
    """D may be C itself; no other output shares memory with anything."""
    c = given.get("c")
    in_place = c is not None and (c.address, c.strides) == (d.address, d.strides)
    inputs = [a, b, *(given[name] for name in ("bias", "aux", "bias_gradient") if name in given)]
    check_no_overlap(d, *inputs, *([c] if c is not None and not in_place else []))
    if "bias_gradient" in given:
        others = [a, b, *(given[name] for name in ("aux", "c") if name in given)]
        check_no_overlap(given["bias_gradient"], *others)


def _scalars(place: Place, options: MatmulOptions, dtype: DType) -> tuple[bool, Any, Any]:
    """Whether α and β are on the device, and their values or addresses."""
    on_device = [not isinstance(value, (int, float)) for value in (options.alpha, options.beta)]
    if on_device[0] != on_device[1]:
        raise ArgumentError("alpha and beta must both be numbers, or both be arrays of one on the device")
    if not on_device[0]:
        return False, float(options.alpha), float(options.beta)
    kind = "float64" if dtype is DType.FLOAT64 else "float32"
    return (
        True,
        _scalar_address(place, "alpha", options.alpha, kind),
        _scalar_address(place, "beta", options.beta, kind),
    )


def _scalar_address(place: Place, name: str, value: Any, kind: str) -> int:
    operand = place.read(name, value)
    if operand.dtype != kind or any(extent != 1 for extent in operand.shape):
        raise DTypeError(f"{name} is {operand.dtype} of shape {operand.shape}; accepted are a number or one {kind}")
    return operand.address


def _problem(
    a: Operand,
    b: Operand,
    d: Operand,
    given: dict[str, Operand],
    epilogue: Epilogue,
    shape: MatmulShape,
    types: tuple[DType, DType, Compute],
    on_device: bool,
    beta: Any,
) -> MatmulProblem:
    dtype, d_dtype, compute = types
    vector = given.get("bias") or given.get("bias_gradient")
    reads_c = "c" in given and (on_device or beta != 0)
    if reads_c and (d_dtype is DType.FLOAT64 or epilogue.sums_operand):
        _check_same_order(given["c"], d)
    return MatmulProblem(
        dtype,
        d_dtype,
        compute,
        _spec(a),
        _spec(b),
        _spec(d),
        epilogue,
        c=_spec(given["c"]) if reads_c else None,
        batch=1 if shape.batch is None else shape.batch,
        vector=vector.alignment if vector else 256,
        aux=_aux_spec(given.get("aux"), epilogue, shape, d),
        device_scalars=on_device,
    )


def _check_same_order(c: Operand, d: Operand) -> None:
    orders = [_layout(operand).order.value for operand in (c, d)]
    if orders[0] != orders[1]:
        raise LayoutError(
            f"c is {orders[0]}-major and out {orders[1]}-major; with float64, bgrada and bgradb they must agree"
        )


def _spec(operand: Operand) -> Spec:
    layout, _, stride = batch_of(operand.name, operand.shape, operand.strides)
    return Spec(layout, operand.alignment, stride)


def _aux_spec(aux: Operand | None, epilogue: Epilogue, shape: MatmulShape, d: Operand) -> Spec | None:
    """GELU's auxiliary matrix as it lies; ReLU's mask as a matrix of bits."""
    if aux is None:
        return None
    if epilogue.activation == "gelu":
        spec = _spec(aux)
        rounded = -(-spec.layout.leading_dimension // _AUX_ELEMENTS) * _AUX_ELEMENTS
        return Spec(replace(spec.layout, leading_dimension=rounded), spec.alignment, spec.batch_stride)
    stride = 8 * aux.strides[0] if len(aux.shape) == 3 and aux.shape[0] > 1 else 0
    return Spec(Layout(shape.m, shape.n, _layout(d).order, 8 * aux.strides[-2]), aux.alignment, stride)
