"""`lt.matmul`: matrix products with every epilogue of cuBLASLt."""

from __future__ import annotations

from typing import Any, Final

from lt_runtime.arguments import is_number, shown
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import ArgumentError, KindError
from lt_runtime.ops._matmul import Matmul
from lt_runtime.ops.call import perform
from lt_runtime.problem import ComputeName

MATMUL: Final = Matmul()
_PLAIN: Final = frozenset({int, float})


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
    out: Any = None,
    stream: Any = None,
) -> Any:
    """D = epilogue(α·A·B + β·C + bias), for one pair of matrices or a batch of them.

    Operands are read where they lie: row- or column-major, with any leading dimension, transposed, or a batch with
    any stride, 0 included. On a GPU a call is one kernel of cuBLASLt's, and at most one more: if cuBLASLt refuses an
    epilogue, or is known to get it wrong, a pass of ours follows the plain product. Nothing is converted. cuBLASLt is
    slow for some operands, such as rows that are no multiple of 16 bytes: a kernel before and a kernel after the
    product may then copy operands and result, if that was measured, or for large products estimated, to be faster.

    Products accumulate in FP32, float64 products in float64; D is rounded once, after the epilogue. There are two
    exceptions, seen on an H200 in dozens of shapes: cuBLASLt rounds a 16-bit product before it adds β·C if there is no
    epilogue, or if the epilogue is a bias alone and C is D; and it may round the product before it multiplies by GELU's
    derivative.

    Args:
        a: (M, K) or (batch, M, K), float32, float16, bfloat16 or float64.
        b: (K, N) or (batch, K, N), same type. A matrix, or a batch of one, serves every product of the other's batch.
        c: (M, N) or (batch, M, N), of D's type; may be `out` itself. With float64, "bgrada" and "bgradb" it must be
            row- or column-major as D is.
        alpha, beta: numbers, or both arrays of one float32 (float64 for float64) where the operands live, which a
            captured graph reads at every replay. `beta` is 1 if there is a `c`. Without one it is 0: another number is
            refused, and an array is not read.
        epilogue: a name of `Epilogue`, such as "gelu_aux_bias". Other than "none" not for float64.
        bias: (N,), of D's type, for the epilogues that add one.
        aux: for "relu_aux…" and "gelu_aux…" written, for "drelu…" and "dgelu…" read. GELU's is the pre-activation,
            (M, N) of D's type and order, with a leading dimension that is a multiple of 8. ReLU's is a mask, one bit an
            element along D's contiguous axis, the first in a byte's lowest bit: uint8 (M, bytes), or (N, bytes) for a
            column-major D, 16 bytes or a multiple from one row to the next. A batch has one more axis in front.
        bias_gradient: (N,) buffer of D's type for "…bgrad" and "bgradb", (M,) for "bgrada"; (batch, …) for a batch.
        dtype: of D: that of `a`, or float32 for float16 and bfloat16.
        compute: "float32", or "tf32" to round FP32 operands for the tensor cores; float64 has its own.
        out: buffer for D, (M, N) or (batch, M, N), row- or column-major.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        D, of the kind that a is: (batch, M, N) if a or b is a batch, else (M, N).

    Raises:
        ArgumentError: an unknown epilogue or compute type; an operand that the epilogue needs and does not get, or
            gets and does not need; alpha on the device and beta not, or the other way round; beta without c.
        OperandError: shapes, types, devices or layouts that do not fit; outputs that share memory.
        CaptureError: the stream is being captured and such a product has never run.
        GpuError: the driver, the compiler or cuBLASLt failed.
    """
    if beta is None:
        beta = 0.0 if c is None else 1.0
    in_place = c is not None and c is out
    try:
        is_plain = type(alpha) in _PLAIN and type(beta) in _PLAIN
        scalars, arrays = ((float(alpha), float(beta)), (None, None)) if is_plain else _scalars(alpha, beta)
    except OverflowError as error:
        raise ArgumentError(f"alpha is {shown(alpha)} and beta is {shown(beta)}; floats must hold them") from error
    if c is None and scalars[1] != 0.0 and arrays[1] is None:
        raise ArgumentError(f"beta is {shown(beta)}, but there is no c to multiply; pass c, or leave beta out")
    options = (epilogue, dtype, compute, scalars[1] != 0.0, in_place)
    operands = (a, b, None if in_place else c, bias, *arrays, aux, bias_gradient, out)
    return perform(MATMUL, operands, options, scalars, stream)


def _scalars(alpha: Any, beta: Any) -> tuple[tuple[float, float], tuple[Any, Any]]:
    """α and β as numbers, and as arrays; with arrays, whose values only the device knows, the numbers are 1.

    Raises:
        KindError: one of them is a number, and the other is none.
        OverflowError: an integer larger than any float.
    """
    if is_number(alpha) and is_number(beta):
        return (float(alpha), float(beta)), (None, None)
    if is_number(alpha) or is_number(beta):
        found = f"alpha is {shown(alpha)} and beta is {shown(beta)}"
        raise KindError(f"{found}; alpha and beta must both be numbers, or both be arrays of one on the device")
    return (1.0, 1.0), (alpha, beta)
