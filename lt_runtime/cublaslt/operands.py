"""The arguments of a launch besides descriptors: α and β, the addresses of matrices, the workspace."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Final

from lt_runtime.cublaslt.attributes import MatrixLayoutAttribute
from lt_runtime.cublaslt.descriptors import MatrixLayout
from lt_runtime.cublaslt.enums import BatchMode, DataType, PointerMode
from lt_runtime.cublaslt.validation import element_bytes
from lt_runtime.cublaslt.values import MAX_ADDRESS
from lt_runtime.errors import AlignmentError, ArgumentError

Scalar = int | float | complex
Reader = Callable[[Scalar], bytes | int | None]
"""Converts α or β to what the library reads: the number's bytes, or its address."""

_WORKSPACE_ALIGNMENT: Final = 256
_POINTER_BYTES: Final = 8
_SCALARS: Final = {
    # "=" rather than native: a native float turns a number that is too large into infinity.
    DataType.R_16F: struct.Struct("=e"),
    DataType.R_32F: struct.Struct("=f"),
    DataType.R_64F: struct.Struct("=d"),
    DataType.R_32I: struct.Struct("=i"),
    DataType.C_32F: struct.Struct("=ff"),
    DataType.C_64F: struct.Struct("=dd"),
}
_COMPLEX: Final = (DataType.C_32F, DataType.C_64F)


def scalar_readers(mode: int, scale_type: int) -> tuple[Reader, Reader]:
    """How α and β are passed in a pointer mode: as a number of the scale type, as an address, or not at all.

    Raises:
        ArgumentError: the library does not have this scale type.
    """
    kind = DataType(scale_type)
    if kind not in _SCALARS:
        raise ArgumentError(f"the scale type is {kind.name}; accepted: {', '.join(known.name for known in _SCALARS)}")
    number, address = partial(_number, kind=kind), partial(check_address, alignment=_SCALARS[kind].size)
    alpha, beta = partial(address, "alpha"), partial(address, "beta")
    match mode:
        case PointerMode.HOST:
            return partial(number, "alpha"), partial(number, "beta")
        case PointerMode.ALPHA_DEVICE_VECTOR_BETA_HOST:
            return alpha, partial(number, "beta")
        case PointerMode.ALPHA_DEVICE_VECTOR_BETA_ZERO:
            return alpha, lambda _: None
        case _:
            return alpha, beta


def _number(name: str, value: Scalar, kind: DataType) -> bytes:
    pack = _SCALARS[kind].pack
    try:
        if kind is DataType.R_32I and isinstance(value, float) and value.is_integer():
            value = int(value)
        return pack(value.real, value.imag) if kind in _COMPLEX else pack(value)
    except (struct.error, OverflowError, AttributeError) as error:
        raise ArgumentError(f"{name} is {value!r}; accepted: a number of type {kind.name}") from error


def check_address(name: str, address: object, alignment: int) -> int:
    """The address, unless it cannot be one of a device.

    Raises:
        ArgumentError: it is not an int, or not positive, or too large.
        AlignmentError: it is not a multiple of `alignment`.
    """
    if not isinstance(address, int) or not 0 < address <= MAX_ADDRESS:
        raise ArgumentError(f"{name} is {address!r}; accepted: a device address")
    if address % alignment:
        raise AlignmentError(f"{name} is {address:#x}; accepted: a multiple of {alignment}")
    return address


def alignment_of(layout: MatrixLayout) -> int:
    """What a matrix's address must be a multiple of: the size of an element; of a pointer in an array of pointers."""
    if layout.recall(MatrixLayoutAttribute.BATCH_MODE) == BatchMode.STRIDED:
        return element_bytes(layout.recall(MatrixLayoutAttribute.TYPE))
    return _POINTER_BYTES


def check_workspace(workspace: int, size: int, needed: int) -> None:
    """Raises `ArgumentError` for a workspace that is too small, `AlignmentError` for one not aligned to 256 bytes."""
    if not needed <= size <= MAX_ADDRESS:
        raise ArgumentError(f"workspace_size is {size}; accepted: {needed} or more, which the algorithm needs")
    if size:
        check_address("workspace", workspace, _WORKSPACE_ALIGNMENT)
