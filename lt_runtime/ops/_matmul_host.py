"""Matrix products over NumPy arrays: the reference, rounded once to D's type."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lt_runtime.arrays import check_shape
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import DTypeError, OverlapError
from lt_runtime.ops._matmul_types import MatmulOperands, MatmulOptions, MatmulShape, product_shape, result_type
from lt_runtime.ops._place import host_output
from lt_runtime.problem import Compute, DType
from lt_runtime.reference import matmul, pack_mask, unpack_mask

Array = NDArray[Any]


def run(operands: MatmulOperands, options: MatmulOptions) -> Array:
    """See `matmul`."""
    a, b, c, out = operands.a, operands.b, operands.c, operands.out
    dtype = DType.parse("a", a.dtype, fp64=True)
    Compute.parse(options.compute, dtype)
    d_dtype = result_type(dtype, options.dtype, options.epilogue)
    shape = product_shape(a.shape, b.shape)
    _check(operands, options.epilogue, shape, dtype, d_dtype)
    inputs = {"a": a, "b": b, "bias": operands.bias, "aux": operands.aux, "bias_gradient": operands.bias_gradient}
    d = host_output("out", out, shape.of(shape.m, shape.n), d_dtype, inputs if c is out else {**inputs, "c": c})
    column_major = _is_column_major(d)
    with np.errstate(all="ignore"):  # overflow and NaN are results here, as they are on a GPU
        result = matmul(
            a,
            b,
            c,
            alpha=_number("alpha", options.alpha),
            beta=_number("beta", options.beta),
            epilogue=options.epilogue,
            bias=operands.bias,
            aux=_read_aux(operands.aux, options.epilogue, shape, column_major),
        )
        _write_aux(operands.aux, result.aux, options.epilogue, column_major)
        if result.bias_gradient is not None:
            operands.bias_gradient[...] = result.bias_gradient.astype(d_dtype.numpy)
        d[...] = result.d.astype(d_dtype.numpy)
    return d


def _check(operands: MatmulOperands, epilogue: Epilogue, shape: MatmulShape, dtype: DType, d_dtype: DType) -> None:
    if operands.b.dtype != dtype.numpy:
        raise DTypeError(f"b is {operands.b.dtype.name} but a is {dtype.value}; types must be equal")
    is_mask = epilogue.activation == "relu"
    sum_size = shape.m if epilogue is Epilogue.BGRADA else shape.n
    expected = {
        "c": shape.of(shape.m, shape.n),
        "bias": (shape.n,),
        "aux": None if is_mask else shape.of(shape.m, shape.n),
        "bias_gradient": shape.of(sum_size),
    }
    for name, wanted in expected.items():
        array = getattr(operands, name)
        if array is None:
            continue
        kind = np.dtype(np.uint8) if name == "aux" and is_mask else d_dtype.numpy
        if array.dtype != kind:
            raise DTypeError(f"{name} is {array.dtype.name}; it must be {kind.name}")
        if wanted is not None:
            check_shape(name, array.shape, wanted, "as the product")
    aux, gradient = operands.aux, operands.bias_gradient
    if aux is not None and gradient is not None and np.shares_memory(aux, gradient):
        raise OverlapError("bias_gradient shares memory with aux; it must not")


def _number(name: str, value: Any) -> float:
    if isinstance(value, np.ndarray) and value.size != 1:
        raise DTypeError(f"{name} has shape {value.shape}; accepted are a number or an array of one")
    return float(np.asarray(value).reshape(()))


def _is_column_major(d: Array) -> bool:
    return d.strides[-1] != d.itemsize and d.strides[-2] == d.itemsize and d.shape[-1] > 1


def _read_aux(aux: Array | None, epilogue: Epilogue, shape: MatmulShape, column_major: bool) -> Array | None:
    if aux is None or not epilogue.is_derivative or epilogue.activation != "relu":
        return aux
    bits = unpack_mask(aux, shape.m if column_major else shape.n)
    return (np.swapaxes(bits, -1, -2) if column_major else bits).astype(np.float64)


def _write_aux(aux: Array | None, values: Array | None, epilogue: Epilogue, column_major: bool) -> None:
    if aux is None or values is None:
        return
    if epilogue.activation != "relu":
        aux[...] = values.astype(aux.dtype)
        return
    bits = pack_mask(np.swapaxes(values > 0, -1, -2) if column_major else values > 0)
    width = min(bits.shape[-1], aux.shape[-1])
    aux[..., :width] = bits[..., :width]
