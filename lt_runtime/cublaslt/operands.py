"""What a launch hands over beside descriptors: α and β, matrices, the workspace."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from lt_runtime.cublaslt.attribute_ids import MatrixLayoutAttribute
from lt_runtime.cublaslt.descriptors import MatrixLayout
from lt_runtime.cublaslt.enums import BatchMode, DataType, PointerMode
from lt_runtime.cublaslt.type_rules import element_bytes
from lt_runtime.errors import AlignmentError, ArgumentError

MAX_ADDRESS: Final = 2**64 - 1
_WORKSPACE_ALIGNMENT: Final = 256

Scalar = int | float | complex
Reader = Callable[[Scalar], bytes | int | None]
"""Turns α or β into what the library reads it from: the number's bytes, or its address."""

_SCALARS: Final = {
    # "=" so that a number that overflows is an error, and no infinity
    DataType.R_16F: struct.Struct("=e"),
    DataType.R_32F: struct.Struct("=f"),
    DataType.R_64F: struct.Struct("=d"),
    DataType.R_32I: struct.Struct("=i"),
    DataType.C_32F: struct.Struct("=ff"),
    DataType.C_64F: struct.Struct("=dd"),
}
_COMPLEX: Final = (DataType.C_32F, DataType.C_64F)
_POINTER_BYTES: Final = 8


def scalar_readers(mode: int, scale_type: int) -> tuple[Reader, Reader]:
    """How α and β are passed in a pointer mode: each a number of the scale type, an address, or nothing.

    Raises:
        ArgumentError: the scale type is not one that the library has.
    """
    kind = DataType(scale_type)
    if kind not in _SCALARS:
        raise ArgumentError(f"the scale type is {kind.name}; accepted: {', '.join(known.name for known in _SCALARS)}")
    alpha, beta = _address_reader("alpha", kind), _address_reader("beta", kind)
    match mode:
        case PointerMode.HOST:
            return _number_reader("alpha", kind), _number_reader("beta", kind)
        case PointerMode.ALPHA_DEVICE_VECTOR_BETA_HOST:
            return alpha, _number_reader("beta", kind)
        case PointerMode.ALPHA_DEVICE_VECTOR_BETA_ZERO:
            return alpha, lambda _: None
        case _:
            return alpha, beta


def _number_reader(name: str, kind: DataType) -> Reader:
    pack = _SCALARS[kind].pack

    def read(value: Scalar) -> bytes:
        try:
            if kind is DataType.R_32I and isinstance(value, float) and value.is_integer():
                value = int(value)
            return pack(value.real, value.imag) if kind in _COMPLEX else pack(value)
        except (struct.error, OverflowError, AttributeError) as error:
            raise ArgumentError(f"{name} is {value!r}; accepted: a number of type {kind.name}") from error

    return read


def _address_reader(name: str, kind: DataType) -> Reader:
    alignment = _SCALARS[kind].size

    def read(value: Scalar) -> int:
        return check_address(name, value, alignment)

    return read


def check_address(name: str, address: object, alignment: int) -> int:
    """The address, if it is one that a device may have.

    Raises:
        ArgumentError: it is not an int, or not positive, or too large.
        AlignmentError: it is not a multiple of `alignment`.
    """
    if not isinstance(address, int) or not 0 < address <= MAX_ADDRESS:
        raise ArgumentError(f"{name} is {address!r}; accepted: a device address")
    if address % alignment:
        raise AlignmentError(f"{name} is {address:#x}; accepted: a multiple of {alignment}")
    return address


def matrix_alignment(layout: MatrixLayout) -> int:
    """What a matrix's address must be a multiple of: its element's size, a pointer's for an array of matrices."""
    if layout.recall(MatrixLayoutAttribute.BATCH_MODE) == BatchMode.STRIDED:
        return element_bytes(layout.recall(MatrixLayoutAttribute.TYPE))
    return _POINTER_BYTES


def check_workspace(workspace: int, size: int, needed: int) -> None:
    """Refuses a workspace that is smaller than the algorithm needs, or not 256-byte aligned.

    Raises:
        ArgumentError, AlignmentError: says which.
    """
    if not needed <= size <= MAX_ADDRESS:
        raise ArgumentError(f"workspace_size is {size}; accepted: {needed} or more, which the algorithm needs")
    if size:
        check_address("workspace", workspace, _WORKSPACE_ALIGNMENT)
