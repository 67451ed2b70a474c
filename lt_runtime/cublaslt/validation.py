"""Checks that a product's descriptor and layouts fit together, which cuBLASLt itself does not check.

The table of types, `RULES`, follows cuBLAS's documentation of cublasLtMatmul.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lt_runtime.cublaslt.attributes import MatmulDescAttribute, MatrixLayoutAttribute
from lt_runtime.cublaslt.descriptors import MatmulDesc, MatrixLayout
from lt_runtime.cublaslt.enums import BatchMode, ComputeType, DataType, Epilogue, Operation, Order
from lt_runtime.errors import ArgumentError, DTypeError, LayoutError, ShapeError

_M, _L, _C, _T = MatmulDescAttribute, MatrixLayoutAttribute, ComputeType, DataType
_Rule = tuple[DataType, DataType, DataType]

_HALF: Final[tuple[_Rule, ...]] = ((_T.R_16F, _T.R_16F, _T.R_16F),)
_INTEGER: Final[tuple[_Rule, ...]] = ((_T.R_32I, _T.R_8I, _T.R_32I), (_T.R_32F, _T.R_8I, _T.R_8I))
_FAST: Final[tuple[_Rule, ...]] = ((_T.R_32F, _T.R_32F, _T.R_32F), (_T.C_32F, _T.C_32F, _T.C_32F))
_SINGLE: Final[tuple[_Rule, ...]] = (
    *_FAST,
    *((_T.R_32F, ab, cd) for ab in (_T.R_16F, _T.R_16BF) for cd in (ab, _T.R_32F)),
    *((_T.C_32F, ab, cd) for ab in (_T.C_16F, _T.C_16BF) for cd in (ab, _T.C_32F)),
    (_T.R_32F, _T.R_8I, _T.R_32F),
    (_T.C_32F, _T.C_8I, _T.C_32F),
)
_DOUBLE: Final[tuple[_Rule, ...]] = ((_T.R_64F, _T.R_64F, _T.R_64F), (_T.C_64F, _T.C_64F, _T.C_64F))

RULES: Final[Mapping[ComputeType, tuple[_Rule, ...]]] = {
    **dict.fromkeys((_C.COMPUTE_16F, _C.COMPUTE_16F_PEDANTIC), _HALF),
    **dict.fromkeys((_C.COMPUTE_32I, _C.COMPUTE_32I_PEDANTIC), _INTEGER),
    **dict.fromkeys((_C.COMPUTE_32F, _C.COMPUTE_32F_PEDANTIC), _SINGLE),
    **dict.fromkeys((_C.COMPUTE_32F_FAST_16F, _C.COMPUTE_32F_FAST_16BF, _C.COMPUTE_32F_FAST_TF32), _FAST),
    _C.COMPUTE_32F_EMULATED_16BFX9: _FAST,
    **dict.fromkeys((_C.COMPUTE_64F, _C.COMPUTE_64F_PEDANTIC, _C.COMPUTE_64F_EMULATED_FIXEDPOINT), _DOUBLE),
}
"""For each compute type, the accepted triples: type of α and β, type of A and B, type of C and D."""

_NARROW: Final = (_T.R_8F_E4M3, _T.R_8F_E5M2, _T.R_6F_E2M3, _T.R_6F_E3M2, _T.R_4F_E2M1)
"""Float types of 8 bits and fewer. Their accepted combinations depend on their scaling and on the GPU."""


def element_bytes(data_type: int) -> int:
    """The size of an element in bytes, which is also its address's alignment; 1 if several elements share a byte."""
    kind, width = DataType(data_type).name.split("_")[:2]  # the name R_16BF, for example, gives "R" and "16BF"
    bits = int(width.rstrip("BFIU"))
    return max(1, bits * (2 if kind == "C" else 1) // 8)


def validate(desc: MatmulDesc, a: MatrixLayout, b: MatrixLayout, c: MatrixLayout, d: MatrixLayout) -> None:
    """Checks a product's descriptor and layouts against each other.

    The checks are repeated only after one of the descriptors has changed.

    Raises:
        ArgumentError: the leading dimension of an operand or of the auxiliary matrix is too small, or the auxiliary
            matrix's is not a multiple of 128 (ReLU) or 8 (GELU); or matrices of a batch would overlap in the auxiliary
            matrix or in the bias gradient.
        ShapeError: the shapes do not fit.
        LayoutError: the matrices of the batch D overlap.
        DTypeError: the library does not support this combination of types.
    """
    state = (desc.revision, a.revision, b.revision, c.revision, d.revision)
    if state == desc.validated:
        return
    layouts = {"A": a, "B": b, "C": c, "D": d}
    if not any(layout.recall(_L.BATCH_MODE) == BatchMode.GROUPED for layout in layouts.values()):
        for name, layout in layouts.items():
            # the constructor checked this too, but `set` may have changed the layout since
            layout.check_leading_dimension(f"layout of {name}: ")
        _check_shapes(desc, a, b, c, d)
        _check_batch(d)
    types = [layout.recall(_L.TYPE) for layout in layouts.values()]
    _check_types(desc.recall(_M.COMPUTE_TYPE), desc.recall(_M.SCALE_TYPE), *types)
    _check_epilogue(desc, a, d)
    desc.validated = state


def check_pointers(desc: MatmulDesc) -> None:
    """Refuses an epilogue whose bias or auxiliary pointer is not set: the kernels would dereference address 0.

    Raises:
        ArgumentError: a pointer that the epilogue needs is 0.
    """
    epilogue = Epilogue(desc.recall(_M.EPILOGUE))
    needs_bias = epilogue.has_bias or epilogue.has_bias_gradient
    for attribute, is_needed in ((_M.BIAS_POINTER, needs_bias), (_M.EPILOGUE_AUX_POINTER, epilogue.has_aux)):
        if is_needed and not desc.recall(attribute):
            raise ArgumentError(f"{attribute} is 0; epilogue {epilogue.name} needs an address")


def read_shape(layout: MatrixLayout, operation: int) -> tuple[int, int]:
    """Rows and columns of an operand after its transposition."""
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


def _check_types(compute: int, scale: int, a: int, b: int, c: int, d: int) -> None:
    """Refuses combinations of types that no version of the library supports."""
    computed, scaled = ComputeType(compute), DataType(scale)
    if a in _NARROW or b in _NARROW:
        if computed is not _C.COMPUTE_32F or scaled is not _T.R_32F:
            found = f"compute type {computed.name} with scale type {scaled.name}"
            raise DTypeError(f"{found}: operands of 8 bits and fewer take COMPUTE_32F with R_32F")
        if a == b == _T.R_8F_E5M2:
            raise DTypeError("A and B are both R_8F_E5M2; one of them must be R_8F_E4M3")
    elif a != b or c != d or (scale, a, c) not in RULES[computed]:
        accepted = "; ".join(f"{first.name}: {ab.name} -> {cd.name}" for first, ab, cd in RULES[computed])
        given = ", ".join(f"{name} {DataType(kind).name}" for name, kind in zip("ABCD", (a, b, c, d), strict=True))
        found = f"{given} with compute type {computed.name} and scale type {scaled.name} is not supported"
        raise DTypeError(f"{found}; {computed.name} takes, as scale type: A and B -> C and D, {accepted}")


def _check_epilogue(desc: MatmulDesc, a: MatrixLayout, d: MatrixLayout) -> None:
    epilogue, own = Epilogue(desc.recall(_M.EPILOGUE)), d.recall(_L.TYPE)
    is_batch = d.recall(_L.BATCH_COUNT) > 1
    if epilogue.has_aux:
        # The leading dimension must be a multiple of this: of elements for GELU, of bits for ReLU's mask.
        unit = 8 if epilogue.has_gelu else 128
        rows, leading = d.recall(_L.ROWS), desc.recall(_M.EPILOGUE_AUX_LD)
        if leading % unit or leading < rows:
            accepted = f"accepted with epilogue {epilogue.name}: a multiple of {unit}, at least {rows}, the rows of D"
            raise ArgumentError(f"{_M.EPILOGUE_AUX_LD} is {leading}; {accepted}")
        if is_batch:
            least = 0 if epilogue.has_derivative else leading * d.recall(_L.COLS)
            _check_stride(desc, _M.EPILOGUE_AUX_BATCH_STRIDE, epilogue, unit, least)
    if epilogue.has_bias_gradient and is_batch:
        length = d.recall(_L.COLS if epilogue == Epilogue.BGRADB else _L.ROWS)
        _check_stride(desc, _M.BIAS_BATCH_STRIDE, epilogue, 1, length)
    if (epilogue.has_bias or epilogue.has_bias_gradient) and a.recall(_L.TYPE) not in (*_NARROW, DataType.R_8I):
        kind = desc.recall(_M.BIAS_DATA_TYPE)
        if kind not in (-1, own):
            raise DTypeError(f"{_M.BIAS_DATA_TYPE} is {DataType(kind).name}; accepted: D's type, {DataType(own).name}")


def _check_stride(desc: MatmulDesc, attribute: MatmulDescAttribute, epilogue: Epilogue, unit: int, least: int) -> None:
    stride = desc.recall(attribute)
    if stride % unit or stride < least:
        accepted = f"accepted with epilogue {epilogue.name}: a multiple of {unit}, at least {least}"
        raise ArgumentError(f"{attribute} is {stride}; {accepted}, so that the batch does not overlap")
