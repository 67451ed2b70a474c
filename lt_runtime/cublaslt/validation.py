"""Checks of a whole product: what no descriptor on its own can know, and the library does not look at."""

from __future__ import annotations

from typing import Final

from lt_runtime.cublaslt.attribute_ids import MatmulDescAttribute, MatrixLayoutAttribute
from lt_runtime.cublaslt.descriptors import MatmulDesc, MatrixLayout, check_leading_dimension
from lt_runtime.cublaslt.enums import BatchMode, DataType, Epilogue, Operation, Order
from lt_runtime.cublaslt.type_rules import NARROW, check_types
from lt_runtime.errors import ArgumentError, DTypeError, LayoutError, ShapeError

_M, _L = MatmulDescAttribute, MatrixLayoutAttribute
_AUX_UNITS: Final = {
    **dict.fromkeys((Epilogue.RELU_AUX, Epilogue.RELU_AUX_BIAS, Epilogue.DRELU, Epilogue.DRELU_BGRAD), 128),
    **dict.fromkeys((Epilogue.GELU_AUX, Epilogue.GELU_AUX_BIAS, Epilogue.DGELU, Epilogue.DGELU_BGRAD), 8),
}
"""What an auxiliary matrix's leading dimension is a multiple of: bits of ReLU's mask, elements of GELU's input."""
_AUX_OUTPUTS: Final = (Epilogue.RELU_AUX, Epilogue.RELU_AUX_BIAS, Epilogue.GELU_AUX, Epilogue.GELU_AUX_BIAS)
_BIASES: Final = (Epilogue.BIAS, Epilogue.RELU_BIAS, Epilogue.RELU_AUX_BIAS, Epilogue.GELU_BIAS, Epilogue.GELU_AUX_BIAS)
_GRADIENTS: Final = (Epilogue.DRELU_BGRAD, Epilogue.DGELU_BGRAD, Epilogue.BGRADA, Epilogue.BGRADB)
_VECTORS: Final = frozenset(_BIASES + _GRADIENTS)


def validate(desc: MatmulDesc, a: MatrixLayout, b: MatrixLayout, c: MatrixLayout, d: MatrixLayout) -> None:
    """Checks a product's descriptor and layouts against each other.

    That takes some time, and is done once for each state that they are in.

    Raises:
        ArgumentError: a leading dimension is too small, of an operand or of the auxiliary matrix, or that one's is not
            a multiple of 128 (ReLU) or 8 (GELU).
        ShapeError: the shapes do not fit.
        LayoutError: the matrices of the batch D overlap.
        DTypeError: the types do not go together.
    """
    state = (desc.revision, a.revision, b.revision, c.revision, d.revision)
    if state != desc.validated:
        _validate(desc, a, b, c, d)
        desc.validated = state


def _validate(desc: MatmulDesc, a: MatrixLayout, b: MatrixLayout, c: MatrixLayout, d: MatrixLayout) -> None:
    layouts = {"A": a, "B": b, "C": c, "D": d}
    if not any(layout.recall(_L.BATCH_MODE) == BatchMode.GROUPED for layout in layouts.values()):
        for name, layout in layouts.items():
            check_layout(name, layout)
        _check_shapes(desc, a, b, c, d)
        _check_batch(d)
    types = [layout.recall(_L.TYPE) for layout in layouts.values()]
    check_types(desc.recall(_M.COMPUTE_TYPE), desc.recall(_M.SCALE_TYPE), *types)
    _check_epilogue(desc, a, d)


def check_pointers(desc: MatmulDesc) -> None:
    """Refuses an epilogue whose bias or auxiliary pointer is not set, which the library would dereference.

    Raises:
        ArgumentError: names the attribute.
    """
    epilogue = Epilogue(desc.recall(_M.EPILOGUE))
    for attribute, epilogues in ((_M.BIAS_POINTER, _VECTORS), (_M.EPILOGUE_AUX_POINTER, _AUX_UNITS)):
        if epilogue in epilogues and not desc.recall(attribute):
            raise ArgumentError(f"MatmulDescAttribute.{attribute.name} is 0; epilogue {epilogue.name} needs an address")


def check_layout(name: str, layout: MatrixLayout) -> None:
    """Refuses a layout whose columns overlap, whichever attribute was set last."""
    order, rows, cols, leading = (layout.recall(attribute) for attribute in (_L.ORDER, _L.ROWS, _L.COLS, _L.LD))
    try:
        check_leading_dimension(order, rows, cols, leading)
    except ArgumentError as error:
        raise ArgumentError(f"layout of {name}: {error}") from None


def read_shape(layout: MatrixLayout, operation: int) -> tuple[int, int]:
    """Rows and columns of op(X)."""
    rows, cols = layout.recall(_L.ROWS), layout.recall(_L.COLS)
    return (rows, cols) if operation in (Operation.N, Operation.CONJG) else (cols, rows)


def _check_shapes(desc: MatmulDesc, a: MatrixLayout, b: MatrixLayout, c: MatrixLayout, d: MatrixLayout) -> None:
    (m, k), (k_b, n) = read_shape(a, desc.recall(_M.TRANSA)), read_shape(b, desc.recall(_M.TRANSB))
    if k != k_b:
        raise ShapeError(f"op(A) is {m}×{k} and op(B) is {k_b}×{n}; op(A) must have as many columns as op(B) has rows")
    for name, layout in (("C", c), ("D", d)):
        shape = read_shape(layout, Operation.N)
        if shape != (m, n):
            raise ShapeError(f"{name} is {shape[0]}×{shape[1]}; op(A)·op(B) is {m}×{n}")


def _check_batch(d: MatrixLayout) -> None:
    count, order = d.recall(_L.BATCH_COUNT), d.recall(_L.ORDER)
    if count == 1 or d.recall(_L.BATCH_MODE) != BatchMode.STRIDED or order not in (Order.COL, Order.ROW):
        return
    length, lines = read_shape(d, Operation.N if order == Order.COL else Operation.T)
    leading, stride = d.recall(_L.LD), d.recall(_L.STRIDED_BATCH_OFFSET)
    follows = stride >= leading * (lines - 1) + length
    interleaved = stride >= length and stride * (count - 1) + length <= leading
    if length and lines and not follows and not interleaved:
        raise LayoutError(f"D's {count} matrices overlap: they are {length}×{lines}, {leading} apart, every {stride}")


def _check_epilogue(desc: MatmulDesc, a: MatrixLayout, d: MatrixLayout) -> None:
    epilogue = Epilogue(desc.recall(_M.EPILOGUE))
    if epilogue in _AUX_UNITS:
        _check_aux(desc, epilogue, d)
    if epilogue in _GRADIENTS and d.recall(_L.BATCH_COUNT) > 1:
        length = d.recall(_L.COLS if epilogue == Epilogue.BGRADB else _L.ROWS)
        _check_stride(desc, _M.BIAS_BATCH_STRIDE, epilogue, 1, length)
    if epilogue in _VECTORS and a.recall(_L.TYPE) not in (*NARROW, DataType.R_8I):
        _check_bias_type(desc, d)


def _check_bias_type(desc: MatmulDesc, d: MatrixLayout) -> None:
    kind, own = desc.recall(_M.BIAS_DATA_TYPE), d.recall(_L.TYPE)
    if kind not in (-1, own):
        raise DTypeError(
            f"MatmulDescAttribute.BIAS_DATA_TYPE is {DataType(kind).name}; accepted: D's type, {DataType(own).name}"
        )


def _check_aux(desc: MatmulDesc, epilogue: Epilogue, d: MatrixLayout) -> None:
    unit, rows, leading = _AUX_UNITS[epilogue], d.recall(_L.ROWS), desc.recall(_M.EPILOGUE_AUX_LD)
    if leading % unit or leading < rows:
        raise ArgumentError(
            f"MatmulDescAttribute.EPILOGUE_AUX_LD is {leading}; accepted with epilogue {epilogue.name}: a multiple of "
            f"{unit}, at least {rows}, the rows of D"
        )
    if d.recall(_L.BATCH_COUNT) > 1:
        least = leading * d.recall(_L.COLS) if epilogue in _AUX_OUTPUTS else 0
        _check_stride(desc, _M.EPILOGUE_AUX_BATCH_STRIDE, epilogue, unit, least)


def _check_stride(desc: MatmulDesc, attribute: MatmulDescAttribute, epilogue: Epilogue, unit: int, least: int) -> None:
    stride = desc.recall(attribute)
    if stride % unit or stride < least:
        raise ArgumentError(
            f"MatmulDescAttribute.{attribute.name} is {stride}; accepted with epilogue {epilogue.name}: a multiple of "
            f"{unit}, at least {least}, so that the batch does not overlap"
        )
