"""`lt.matmul`: matrix products with every epilogue of cuBLASLt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.arguments import flag, is_number, shown
from lt_runtime.arrays.checks import check_device, check_same, check_shape, check_type
from lt_runtime.arrays.operand import Operand
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import ArgumentError, DTypeError, KindError, LayoutError, ShapeError
from lt_runtime.kernels.call import Call
from lt_runtime.layout import Layout, Order, layout_of, packed
from lt_runtime.ops.call import New, Operation, PreparedCall, Request, perform
from lt_runtime.ops.fp8 import product_rules
from lt_runtime.problem import (
    ALIGNMENT,
    SCALES,
    Compute,
    ComputeName,
    DType,
    MatmulProblem,
    Spec,
    aux_type,
    bias_type,
)
from lt_runtime.reference.fp8 import amax_of, cast_fp8

_PLAIN: Final = frozenset({int, float})
# Indices of C, the auxiliary matrix, the bias gradient and D among the arrays of a call.
_C, _AUX, _BIAS_GRADIENT, _D = 2, 6, 7, 8
# cuBLASLt requires the leading dimension of ReLU's mask to be a multiple of this number of bits.
_MASK_BITS: Final = 128
# cuBLASLt requires the leading dimension of GELU's auxiliary matrix to be a multiple of this number of elements.
_AUX_ELEMENTS: Final = 8


class Matmul(Operation):
    """D = epilogue(α·A·B + β·C + bias).

    A call's options are the epilogue, D's type, the compute type, whether C is read (β is not 0, or lies on the
    device), and whether FP8 products may be summed with fewer bits. A call's scalars are α and β if they are numbers.
    """

    names: ClassVar[tuple[str, ...]] = ("a", "b", "c", "bias", "alpha", "beta", "aux", "bias_gradient", "out")
    required = 2
    is_scaled = True
    amax: ClassVar[tuple[int, ...]] = ()
    """The index of the largest magnitude of D among the arrays, in an operation that has it."""

    def read(self, operands: Sequence[Any], options: Any, scalars: Any) -> Request:
        """See `Operation`."""
        epilogue, d_type, compute, reads_c, fast = options
        given = {name: each for name, each in zip(self.names, operands, strict=True) if each is not None}
        epilogue = epilogue if isinstance(epilogue, Epilogue) else Epilogue.parse(epilogue)
        _check_presence(epilogue, given)
        a, b = given["a"], given["b"]
        dtype = a.element_type(fp64=True, fp8=True)
        b_dtype = b.element_type(fp8=True) if dtype.is_float8 else dtype
        if dtype.is_float8 and b_dtype.is_float8:
            check_device(a, b)
        else:
            check_same(a, b)
        compute = Compute.parse(compute, dtype)
        d_dtype = _result_type(dtype, d_type, epilogue)
        shape = _shape_of(a, b)
        (m, n), batch = shape[-2:], shape[0] if len(shape) == 3 else 1
        scales = tuple(name for name in SCALES if name in given)
        vectors = product_rules.has_vectors(given, shape)
        product_rules.check_options(given, (dtype, b_dtype, d_dtype), epilogue, fast=fast, vectors=vectors)
        _check_operands(given, epilogue, shape, dtype, d_dtype)
        _check_scalars(given, dtype)
        stride = m * n if batch > 1 else 0
        d = _spec(given["out"]) if "out" in given else Spec(packed(m, n), batch_stride=stride)
        vector = given.get("bias") or given.get("bias_gradient")
        alignment = vector.alignment if vector else ALIGNMENT
        c = _c_spec(given["c"], d, d_dtype, epilogue) if reads_c and "c" in given else None
        aux = _aux_spec(given["aux"], epilogue, shape, d.layout.order) if "aux" in given else None
        kinds = dtype, d_dtype, compute
        problem = MatmulProblem(*kinds, _spec(a), _spec(b), d, epilogue, c, batch, alignment, aux, "alpha" in given)
        if dtype.is_float8:
            other = None if b_dtype is dtype else b_dtype
            problem = replace(problem, b_dtype=other, scales=scales, fast_accumulation=fast, scale_vectors=vectors)
            product_rules.check_layouts(given, problem)
        new = {} if "out" in given else {_D: New(shape, d_dtype.numpy, a.library)}
        written = (*((_AUX,) if epilogue.has_aux_output else ()), _BIAS_GRADIENT, *self.amax, _D)
        return Request(problem, written, new, same=((_C, _D),))

    def call(self, prepared: PreparedCall, addresses: tuple[int, ...], scalars: Any, stream: int) -> Call:
        """See `Operation`."""
        a, b, c, bias, alpha, beta, aux, bias_gradient, d, *scales = addresses
        problem = prepared.request.problem
        scalars = (alpha, beta) if problem.device_scalars else scalars
        scales = [each for each in scales if each]
        return Call((a, b, c if problem.c else 0, bias or bias_gradient, aux, d, *scales), stream, scalars)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Any) -> None:
        """See `Operation`."""
        a, b, c, bias, alpha, beta, aux, bias_gradient, d, *given = arrays
        problem = request.problem
        factor, c_factor = scalars if alpha is None else (alpha.item(), beta.item())
        scale_a, scale_b, scale_d, amax = given or [None] * len(SCALES)
        factor = factor * _numbers(scale_a).reshape(-1, 1) * _numbers(scale_b)
        values, epilogue = _read_aux(aux, problem), problem.epilogue
        result = reference.matmul(a, b, c, alpha=factor, beta=c_factor, epilogue=epilogue, bias=bias, aux=values)
        if result.aux is not None:
            _write_aux(aux, result.aux, problem)
        if result.bias_gradient is not None:
            bias_gradient[...] = result.bias_gradient.astype(bias_gradient.dtype)
        if amax is not None:
            amax[...] = amax_of(result.d)
        if problem.d_dtype.is_float8:
            d[...] = cast_fp8(result.d, _numbers(scale_d)[0], problem.d_dtype.value)
        else:
            d[...] = result.d.astype(d.dtype)


class ScaledMatmul(Matmul):
    """A product of FP8 matrices with scales on the device; see `SCALES`."""

    names = (*Matmul.names, *SCALES)
    amax = (len(Matmul.names) + SCALES.index("amax_d"),)


def _check_presence(epilogue: Epilogue, given: Mapping[str, Operand]) -> None:
    needs_aux = epilogue.has_aux_output or epilogue.is_derivative
    needs = {"bias": epilogue.has_bias, "aux": needs_aux, "bias_gradient": epilogue.has_bias_gradient}
    for name, needed in needs.items():
        if needed and name not in given:
            raise ArgumentError(f"{name} is None; epilogue {epilogue.value!r} needs it")
        if name in given and not needed:
            raise ArgumentError(f"{name} is given; epilogue {epilogue.value!r} has none")


def _shape_of(a: Operand, b: Operand) -> tuple[int, ...]:
    """The shape of D: (M, N), or (batch, M, N) if an operand is a batch."""
    for each in (a, b):
        if len(each.shape) not in (2, 3):
            raise ShapeError(f"{each.name} has shape {each.shape}; accepted are 2 axes, or 3 for a batch of matrices")
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(f"b has shape {b.shape}; its last axis but one must be {a.shape[-1]}, a's last of {a.shape}")
    counts = {each.shape[0] for each in (a, b) if len(each.shape) == 3}
    if len(counts - {1}) > 1:
        why = f"and a has shape {a.shape}; equal batches or 1 are accepted"
        raise ShapeError(f"b has shape {b.shape}, a batch of {b.shape[0]}, {why}")
    return *(counts - {1} or counts), a.shape[-2], b.shape[-1]


def _result_type(operand: DType, requested: Any, epilogue: Epilogue) -> DType:
    """D's type.

    Raises:
        DTypeError: D's requested type is not possible with the operands' type.
        ArgumentError: an epilogue with float64.
    """
    if operand is DType.FLOAT64 and epilogue is not Epilogue.NONE:
        raise ArgumentError(f"epilogue is {epilogue.value!r}; float64 has none")
    if requested is None:
        return DType.BFLOAT16 if operand.is_float8 else operand
    wanted = DType.parse("dtype", requested, fp64=True, fp8=operand.is_float8)
    if operand.is_float8 and wanted is not DType.FLOAT64:
        return wanted
    if wanted is operand or (wanted is DType.FLOAT32 and operand in (DType.FLOAT16, DType.BFLOAT16)):
        return wanted
    raise DTypeError(f"dtype is {wanted.value}; with {operand.value} operands, that or float32 for 16-bit ones")


def _check_operands(
    given: Mapping[str, Operand], epilogue: Epilogue, shape: tuple[int, ...], operand_type: DType, result_type: DType
) -> None:
    *batch, m, n = shape
    sums = (*batch, m if epilogue is Epilogue.BGRADA else n)
    expected = {"c": shape, "bias": (n,), "bias_gradient": sums, "out": shape}
    bias, aux = bias_type(operand_type, result_type), aux_type(result_type)
    types = {"c": aux, "bias": bias, "aux": aux}
    for name in ("c", "bias", "aux", "bias_gradient", "out"):
        if name not in given:
            continue
        operand, is_mask = given[name], name == "aux" and epilogue.activation == "relu"
        check_type(operand, "uint8" if is_mask else types.get(name, result_type).value)
        if name in expected:
            check_shape(name, operand.shape, expected[name], "as the product")
        if name in ("bias", "bias_gradient"):
            operand.check_packed()


def _check_scalars(given: Mapping[str, Operand], dtype: DType) -> None:
    kind = "float64" if dtype is DType.FLOAT64 else "float32"
    for name in ("alpha", "beta"):
        operand = given.get(name)
        if operand is not None and (operand.dtype != kind or any(extent != 1 for extent in operand.shape)):
            raise DTypeError(f"{name} is {operand.dtype} of shape {operand.shape}; accepted are a number or one {kind}")


def _spec(operand: Operand) -> Spec:
    """The spec of a matrix, or of a batch. With a stride of 0 from matrix to matrix, the batch repeats one matrix.

    Raises:
        LayoutError: see `layout_of`; or the stride between matrices is negative.
    """
    if len(operand.shape) == 2:
        return operand.spec
    count, *shape = operand.shape
    layout = layout_of(operand.name, shape, operand.strides[1:]) if count else packed(*shape)
    stride = operand.strides[0] if count > 1 else 0
    if stride < 0:
        raise LayoutError(f"{operand.name} has strides {operand.strides}; the first must not be negative")
    return Spec(layout, operand.alignment, stride)


def _c_spec(operand: Operand, d: Spec, d_dtype: DType, epilogue: Epilogue) -> Spec:
    c = _spec(operand)
    if (d_dtype is DType.FLOAT64 or epilogue.sums_operand) and c.layout.order is not d.layout.order:
        orders = f"c is {c.layout.order.value}-major and out {d.layout.order.value}-major"
        raise LayoutError(f"{orders}; with float64, bgrada and bgradb they must agree")
    return c


def _aux_spec(aux: Operand, epilogue: Epilogue, shape: tuple[int, ...], order: Order) -> Spec:
    """The spec of GELU's auxiliary matrix, or of ReLU's mask as a matrix of bits.

    Raises:
        ShapeError, LayoutError: cuBLASLt does not accept the auxiliary matrix.
    """
    if epilogue.activation == "gelu":
        check_shape("aux", aux.shape, shape, "as the product")
        spec = _spec(aux)
        layout = spec.layout
        if layout.order is not order and layout.size > 1:
            raise LayoutError(f"aux is {layout.order.value}-major and out {order.value}-major; orders must be equal")
        lines = layout.rows if layout.order is Order.ROW else layout.cols
        if lines > 1 and layout.leading_dimension % _AUX_ELEMENTS:
            raise LayoutError(f"aux has leading dimension {layout.leading_dimension}; it must be a multiple of 8")
        rounded = -(-layout.leading_dimension // _AUX_ELEMENTS) * _AUX_ELEMENTS
        return replace(spec, layout=replace(layout, leading_dimension=rounded))
    *batch, m, n = shape
    lines, bits = (m, n) if order is Order.ROW else (n, m)
    check_shape("aux", aux.shape[:-1], (*batch, lines), "one row of bits a row (column) of the product")
    pitch = 8 * aux.strides[-2]
    if lines * bits and 8 * aux.shape[-1] < bits:
        raise ShapeError(f"aux has shape {aux.shape}; its last axis must be {-(-bits // 8)} or more, for {bits} bits")
    has_gaps = aux.strides[-1] != 1 or pitch < bits or pitch % _MASK_BITS
    if lines * bits and has_gaps:
        found = f"aux has shape {aux.shape} and strides {aux.strides}"
        raise LayoutError(f"{found}; its rows must hold {bits} bits without gaps, and lie a multiple of 16 bytes apart")
    stride = 8 * aux.strides[0] if len(aux.shape) == 3 and aux.shape[0] > 1 else 0
    return Spec(Layout(m, n, order, pitch), aux.alignment, stride)


def _read_aux(aux: Any, problem: MatmulProblem) -> Any:
    """The tensor from which the reference computes the activation's derivative.

    It is the pre-activation, or ReLU's mask unpacked to zeros and ones.
    """
    if aux is None or not problem.epilogue.is_derivative or problem.epilogue.activation != "relu":
        return aux
    is_row = problem.d.layout.order is Order.ROW
    bits = reference.unpack_mask(aux, problem.n if is_row else problem.m)
    return (bits if is_row else np.swapaxes(bits, -1, -2)).astype(np.float64)


def _write_aux(aux: Any, values: Any, problem: MatmulProblem) -> None:
    """Writes the pre-activation, or the mask of its positive elements, one bit an element along D's contiguous axis."""
    if problem.epilogue.activation != "relu":
        aux[...] = values.astype(aux.dtype)
        return
    bits = reference.pack_mask((values if problem.d.layout.order is Order.ROW else np.swapaxes(values, -1, -2)) > 0)
    width = min(bits.shape[-1], aux.shape[-1])
    aux[..., :width] = bits[..., :width]


def _numbers(scale: Any) -> NDArray[np.float64]:
    """The numbers of a scale as a vector; the vector [1] if there is no scale."""
    return np.ones(1) if scale is None else scale.astype(np.float64).reshape(-1)


MATMUL: Final = Matmul()
_SCALED: Final = ScaledMatmul()


def matmul(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: Any = 1.0,
    beta: Any = None,
    epilogue: str | Epilogue = "none",
    bias: Any = None,
    aux: Any = None,
    bias_gradient: Any = None,
    dtype: Any = None,
    compute: ComputeName = "float32",
    scale_a: Any = None,
    scale_b: Any = None,
    scale_d: Any = None,
    amax_d: Any = None,
    fast_accumulation: bool = False,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """D = epilogue(α·A·B + β·C + bias), for one pair of matrices or a batch of them.

    Operands are read where they lie: row- or column-major, with any leading dimension, transposed, or a batch with
    any stride, 0 included, and are never converted. On a GPU cuBLASLt computes the product, or a kernel of ours
    if that is expected to be faster, as for a tiny dimension. If cuBLASLt refuses an epilogue, or is known to get it
    wrong, a pass of ours follows the plain product. cuBLASLt is slow for some operands, such as rows that are no
    multiple of 16 bytes: a kernel before and a kernel after the product may then copy operands and result, if that was
    measured, or for large products estimated, to be faster.

    Products accumulate in FP32, float64 products in float64; D is rounded once, after the epilogue. There are two
    exceptions, seen on an H200 in dozens of shapes: cuBLASLt rounds a 16-bit product before it adds β·C if there is no
    epilogue; and it may round the product before it multiplies by GELU's derivative. With the epilogue "bias"
    cuBLASLt would round several times if C is `out`: C is copied first.

    FP8 matrices (float8_e4m3fn and float8_e5m2, of `ml_dtypes` or PyTorch) give
    D = scale_d · epilogue(scale_a · scale_b · α·A·B + β·C + bias). GPUs of compute capability 8.9 and later multiply
    them, if both are contiguous along K (`a` row-major, `b` column-major), M, N and K are multiples of 16, and
    matrices, biases and scales begin at multiples of 16 bytes. Not both of A and B may be float8_e5m2.

    Args:
        a: (M, K) or (batch, M, K), float32, float16, bfloat16, float64, float8_e4m3fn or float8_e5m2.
        b: (K, N) or (batch, K, N), same type; of FP8 either type. A matrix, or a batch of one, serves every product of
            the other's batch.
        c: (M, N) or (batch, M, N), of D's type; may be `out` itself. None if D is FP8. With float64, "bgrada" and
            "bgradb" it must be row- or column-major as D is.
        alpha, beta: numbers, or both arrays of one float32 (float64 for float64) where the operands live, which a
            captured graph reads at every replay. `beta` is 1 if there is a `c`. Without one it is 0: another number is
            refused, and an array is not read.
        epilogue: a name of `Epilogue`, such as "gelu_aux_bias". Other than "none" not for float64.
        bias: (N,), of D's type, for the epilogues that add one; bfloat16 if A is FP8 and D is float32 or FP8.
        aux: for "relu_aux…" and "gelu_aux…" written, for "drelu…" and "dgelu…" read. GELU's is the pre-activation,
            (M, N) of D's type (bfloat16 if D is FP8) and order, with a leading dimension that is a multiple of 8.
            ReLU's is a mask, one bit an element along D's contiguous axis, the first in a byte's lowest bit: uint8
            (M, bytes), or (N, bytes) for a column-major D, 16 bytes or a multiple from one row to the next. A batch has
            one more axis in front.
        bias_gradient: (N,) buffer of D's type for "…bgrad" and "bgradb", (M,) for "bgrada"; (batch, …) for a batch.
        dtype: of D: that of `a`, or float32 for float16 and bfloat16. If A is FP8: bfloat16 (the default), float16,
            float32 or FP8; float8_e5m2 only if A or B is.
        compute: "float32", or "tf32" to round FP32 operands for the tensor cores; float64 has its own.
        scale_a, scale_b: FP32 number, () or (1,), where the operands live, by which the FP8 matrix is multiplied; 1 if
            None. A captured graph reads it at every replay. Or FP32 vectors, without a batch and if D is not FP8: a
            scale for each row of A, (M,), and for each column of B, (N,); cuBLASLt 12.9 and later has that on GPUs of
            compute capability 9.0.
        scale_d: FP32 number by which D is multiplied before it is rounded to FP8 and saturated; 1 if None.
        amax_d: buffer for an FP32 number, the largest magnitude of D before `scale_d`; only if D is FP8.
        fast_accumulation: whether FP8 products may be summed with about 14 bits, which is faster on Ada and Hopper. An
            element of D is then off by up to 1e-3 of the product of the norms of its row and column.
        out: buffer for D, (M, N) or (batch, M, N), row- or column-major.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        D, an array of a's library as in `linear_fwd`: (batch, M, N) if a or b is a batch, else (M, N).

    Raises:
        ArgumentError: an unknown epilogue or compute type; an operand that the epilogue needs and does not get, or
            gets and does not need; alpha on the device and beta not, or the other way round; beta without c; scales or
            fast accumulation without FP8 matrices.
        OperandError: shapes, types, devices or layouts that do not fit; outputs that share memory.
        CaptureError: the stream is being captured and such a product has never run.
        GpuError: the driver, the compiler or cuBLASLt failed; the GPU does not multiply FP8 matrices, or not with
            vectors of scales.
    """
    if beta is None:
        beta = 0.0 if c is None else 1.0
    try:
        is_plain = type(alpha) in _PLAIN and type(beta) in _PLAIN
        scalars, arrays = ((float(alpha), float(beta)), (None, None)) if is_plain else _scalars(alpha, beta)
    except OverflowError as error:
        raise ArgumentError(f"alpha is {shown(alpha)} and beta is {shown(beta)}; floats must hold them") from error
    if c is None and scalars[1] != 0.0 and arrays[1] is None:
        raise ArgumentError(f"beta is {shown(beta)}, but there is no c to multiply; pass c, or leave beta out")
    options = (epilogue, dtype, compute, scalars[1] != 0.0, flag("fast_accumulation", fast_accumulation))
    given, scales = (a, b, c, bias, *arrays, aux, bias_gradient, out), (scale_a, scale_b, scale_d, amax_d)
    if scale_a is scale_b is scale_d is amax_d is None:
        return perform(MATMUL, given, options, scalars, stream)
    return perform(_SCALED, (*given, *scales), options, scalars, stream)


def _scalars(alpha: Any, beta: Any) -> tuple[tuple[float, float], tuple[Any, Any]]:
    """α and β as a pair of numbers and as a pair of arrays.

    If α and β are arrays, the pair of numbers is (1, 1), because only the device knows the arrays' values.

    Raises:
        KindError: α is a number and β is not, or the other way round.
        OverflowError: an integer larger than any float.
    """
    if is_number(alpha) and is_number(beta):
        return (float(alpha), float(beta)), (None, None)
    if is_number(alpha) or is_number(beta):
        found = f"alpha is {shown(alpha)} and beta is {shown(beta)}"
        raise KindError(f"{found}; alpha and beta must both be numbers, or both be arrays of one on the device")
    return (1.0, 1.0), (alpha, beta)
