"""Which types go together in a product, from the tables in cuBLAS's documentation of cublasLtMatmul."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lt_runtime.cublaslt.enums import ComputeType, DataType
from lt_runtime.errors import DTypeError

_C, _T = ComputeType, DataType
_Rule = tuple[DataType, DataType, DataType]

_HALF: Final[tuple[_Rule, ...]] = ((_T.R_16F, _T.R_16F, _T.R_16F),)
_INTEGER: Final[tuple[_Rule, ...]] = ((_T.R_32I, _T.R_8I, _T.R_32I), (_T.R_32F, _T.R_8I, _T.R_8I))
_FAST: Final[tuple[_Rule, ...]] = ((_T.R_32F, _T.R_32F, _T.R_32F), (_T.C_32F, _T.C_32F, _T.C_32F))
_SINGLE: Final[tuple[_Rule, ...]] = (
    *_FAST,
    (_T.R_32F, _T.R_16F, _T.R_16F),
    (_T.R_32F, _T.R_16BF, _T.R_16BF),
    (_T.R_32F, _T.R_16F, _T.R_32F),
    (_T.R_32F, _T.R_16BF, _T.R_32F),
    (_T.R_32F, _T.R_8I, _T.R_32F),
    (_T.C_32F, _T.C_8I, _T.C_32F),
    (_T.C_32F, _T.C_16F, _T.C_16F),
    (_T.C_32F, _T.C_16BF, _T.C_16BF),
    (_T.C_32F, _T.C_16F, _T.C_32F),
    (_T.C_32F, _T.C_16BF, _T.C_32F),
)
_DOUBLE: Final[tuple[_Rule, ...]] = ((_T.R_64F, _T.R_64F, _T.R_64F), (_T.C_64F, _T.C_64F, _T.C_64F))

RULES: Final[Mapping[ComputeType, tuple[_Rule, ...]]] = {
    _C.COMPUTE_16F: _HALF,
    _C.COMPUTE_16F_PEDANTIC: _HALF,
    _C.COMPUTE_32I: _INTEGER,
    _C.COMPUTE_32I_PEDANTIC: _INTEGER,
    _C.COMPUTE_32F: _SINGLE,
    _C.COMPUTE_32F_PEDANTIC: _SINGLE,
    _C.COMPUTE_32F_FAST_16F: _FAST,
    _C.COMPUTE_32F_FAST_16BF: _FAST,
    _C.COMPUTE_32F_FAST_TF32: _FAST,
    _C.COMPUTE_32F_EMULATED_16BFX9: _FAST,
    _C.COMPUTE_64F: _DOUBLE,
    _C.COMPUTE_64F_PEDANTIC: _DOUBLE,
    _C.COMPUTE_64F_EMULATED_FIXEDPOINT: _DOUBLE,
}
"""By compute type: the type of α and β, that of A and B, that of C and D."""

NARROW: Final = frozenset((_T.R_8F_E4M3, _T.R_8F_E5M2, _T.R_6F_E2M3, _T.R_6F_E3M2, _T.R_4F_E2M1))
"""Types of 8 bits and fewer that floats are scaled into: what goes with what depends on the scaling and the GPU."""

_BITS: Final[Mapping[DataType, int]] = {
    **dict.fromkeys((_T.R_4I, _T.R_4U, _T.R_4F_E2M1), 4),
    **dict.fromkeys((_T.R_6F_E2M3, _T.R_6F_E3M2), 6),
    **dict.fromkeys((_T.R_8I, _T.R_8U, _T.C_4I, _T.C_4U, _T.R_8F_E4M3, _T.R_8F_E5M2, _T.R_8F_UE8M0, _T.R_8F_UE5M3), 8),
    **dict.fromkeys((_T.R_16F, _T.R_16BF, _T.R_16I, _T.R_16U, _T.C_8I, _T.C_8U), 16),
    **dict.fromkeys((_T.R_32F, _T.R_32I, _T.R_32U, _T.C_16F, _T.C_16BF, _T.C_16I, _T.C_16U), 32),
    **dict.fromkeys((_T.R_64F, _T.R_64I, _T.R_64U, _T.C_32F, _T.C_32I, _T.C_32U), 64),
    **dict.fromkeys((_T.C_64F, _T.C_64I, _T.C_64U), 128),
}


def element_bytes(data_type: int) -> int:
    """Bytes of an element, and what its address must be a multiple of; 1 where several share a byte."""
    return max(1, _BITS[DataType(data_type)] // 8)


def check_types(compute: int, scale: int, a: int, b: int, c: int, d: int) -> None:
    """Refuses types that no version of the library multiplies.

    Raises:
        DTypeError: says which types the compute type goes with.
    """
    if a in NARROW or b in NARROW:
        _check_narrow(compute, scale, a, b)
        return
    rules = RULES[ComputeType(compute)]
    if a != b or c != d or (scale, a, c) not in rules:
        accepted = "; ".join(f"{rule[0].name}: {rule[1].name} -> {rule[2].name}" for rule in rules)
        raise DTypeError(
            f"{_described(compute, scale, a, b, c, d)} is not supported; {ComputeType(compute).name} takes, "
            f"as scale type: A and B -> C and D, {accepted}"
        )


def _check_narrow(compute: int, scale: int, a: int, b: int) -> None:
    if compute != _C.COMPUTE_32F or scale != _T.R_32F:
        raise DTypeError(
            f"compute type {ComputeType(compute).name} with scale type {DataType(scale).name}: operands of "
            "8 bits and fewer take COMPUTE_32F with R_32F"
        )
    if a == b == _T.R_8F_E5M2:
        raise DTypeError("A and B are both R_8F_E5M2; one of them must be R_8F_E4M3")


def _described(compute: int, *types: int) -> str:
    scale, *operands = (DataType(number).name for number in types)
    named = ", ".join(f"{name} {kind}" for name, kind in zip("ABCD", operands, strict=True))
    return f"{named} with compute type {ComputeType(compute).name} and scale type {scale}"
