"""Holds the attribute tables against the loaded library, which tells the width of each of its attributes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from lt_runtime.cublaslt import attributes
from lt_runtime.cublaslt.enums import ComputeType, DataType, Status
from lt_runtime.cublaslt.values import Attribute
from lt_runtime.errors import AbiError

_DESCRIPTORS: Final[tuple[tuple[str, tuple[int, ...], Mapping[Any, Attribute]], ...]] = (
    ("MatmulDesc", (ComputeType.COMPUTE_32F, DataType.R_32F), attributes.MATMUL_DESC),
    ("MatrixLayout", (DataType.R_32F, 1, 1, 1), attributes.MATRIX_LAYOUT),
    ("MatmulPreference", (), attributes.PREFERENCE),
    ("MatrixTransformDesc", (DataType.R_32F,), attributes.MATRIX_TRANSFORM_DESC),
    ("EmulationDesc", (), attributes.EMULATION_DESC),
)
_ALGO_BYTES: Final = 64

Find = Callable[[str], Callable[..., int] | None]


def check(find: Find, version: int, path: str) -> None:
    """Refuses a library that stores an attribute in another width than ours.

    An attribute that the library does not know is left for the call that uses it, and so is one with a number that
    meant something else before the version that introduced it.

    Args:
        find: gives a C function by name, None where the library has none.
        version: of the library, major·10000 + minor·100 + patch.
        path: where it lies, for the message.

    Raises:
        AbiError: a width differs, or a descriptor cannot be made.
    """
    for attribute, known, theirs in _widths(find, path):
        if version >= known.since and theirs not in (None, known.size):
            raise AbiError(
                f"{type(attribute).__name__}.{attribute.name} has {known.size} bytes here and {theirs} in cuBLASLt "
                f"{version} ({path}): this version is not one that these bindings can use"
            )


def _widths(find: Find, path: str) -> Iterator[tuple[Any, Attribute, int | None]]:
    for kind, arguments, table in _DESCRIPTORS:
        create, get = find(f"cublasLt{kind}Create"), find(f"cublasLt{kind}GetAttribute")
        destroy = find(f"cublasLt{kind}Destroy")
        if create is None or get is None or destroy is None:
            continue
        descriptor = ctypes.c_void_p()
        status = create(ctypes.byref(descriptor), *arguments)
        if status:
            raise AbiError(f"cublasLt{kind}Create of {path} returned status {status}")
        measured = [(attribute, known, width(get, descriptor, attribute)) for attribute, known in table.items()]
        destroy(descriptor)
        yield from measured
    get = find("cublasLtMatmulAlgoConfigGetAttribute")
    if get is not None:
        for attribute, known in attributes.ALGO_CONFIG.items():
            yield attribute, known, width(get, bytes(_ALGO_BYTES), attribute)


def width(get: Callable[..., int], owner: Any, attribute: int) -> int | None:
    """Bytes that the library needs for an attribute; None if it does not know it."""
    needed = ctypes.c_size_t()
    status = get(owner, attribute, None, 0, ctypes.byref(needed))
    return needed.value if status == Status.SUCCESS else None
