"""The binary interface of `cublasLt.h`: prototypes of the functions, and a check of the loaded library's attributes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from lt_runtime.cublaslt import attributes
from lt_runtime.cublaslt.enums import ComputeType, DataType, Status
from lt_runtime.cublaslt.values import Attribute
from lt_runtime.errors import AbiError

ALGO_BYTES: Final = 64
"""The size of `cublasLtMatmulAlgo_t`."""

_VOIDP, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_OUT, _OUT_INT, _OUT_SIZE = ctypes.POINTER(_VOIDP), ctypes.POINTER(_INT), ctypes.POINTER(_SIZE)
_TEXT = ctypes.c_char_p
_SET: Final = (_VOIDP, _INT, _VOIDP, _SIZE)
_GET: Final = (_VOIDP, _INT, _VOIDP, _SIZE, _OUT_SIZE)
_TYPES: Final = (_INT,) * 6  # compute, scale, A, B, C, D
_PROBLEM: Final = (_VOIDP,) * 6  # handle, operation, layouts of A, B, C, D
_HEURISTIC: Final = (*_PROBLEM, _VOIDP, _INT, _VOIDP, _OUT_INT)

LoggerCallback = ctypes.CFUNCTYPE(None, _INT, _TEXT, _TEXT)
"""`cublasLtLoggerCallback_t`: level, function, message."""


def _descriptor(kind: str, *create: Any) -> dict[str, tuple[Any, ...]]:
    return {
        f"cublasLt{kind}Create": (_OUT, *create),
        f"cublasLt{kind}Destroy": (_VOIDP,),
        f"cublasLt{kind}SetAttribute": _SET,
        f"cublasLt{kind}GetAttribute": _GET,
    }


ARGUMENTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "cublasLtCreate": (_OUT,),
    "cublasLtDestroy": (_VOIDP,),
    "cublasLtGetStatusName": (_INT,),
    "cublasLtGetStatusString": (_INT,),
    "cublasLtGetVersion": (),
    "cublasLtGetCudartVersion": (),
    "cublasLtHeuristicsCacheGetCapacity": (_OUT_SIZE,),
    "cublasLtHeuristicsCacheSetCapacity": (_SIZE,),
    **_descriptor("MatmulDesc", _INT, _INT),
    **_descriptor("MatrixLayout", _INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtGroupedMatrixLayoutCreate": (_OUT, _INT, _INT, _VOIDP, _VOIDP, _VOIDP),
    **_descriptor("MatmulPreference"),
    **_descriptor("MatrixTransformDesc", _INT),
    **_descriptor("EmulationDesc"),
    "cublasLtMatmulAlgoGetHeuristic": _HEURISTIC,
    "cublasLtMatmulAlgoGetHeuristicForStream": (*_HEURISTIC, _VOIDP),
    "cublasLtMatmulAlgoGetIds": (_VOIDP, *_TYPES, _INT, _VOIDP, _OUT_INT),
    "cublasLtMatmulAlgoInit": (_VOIDP, *_TYPES, _INT, _VOIDP),
    "cublasLtMatmulAlgoCheck": (*_PROBLEM, _VOIDP, _VOIDP),
    "cublasLtMatmulAlgoCheckForStream": (*_PROBLEM, _VOIDP, _VOIDP, _VOIDP),
    "cublasLtMatmulAlgoCapGetAttribute": _GET,
    "cublasLtMatmulAlgoConfigSetAttribute": _SET,
    "cublasLtMatmulAlgoConfigGetAttribute": _GET,
    "cublasLtMatmul": (*(_VOIDP,) * 14, _SIZE, _VOIDP),
    "cublasLtMatrixTransform": (_VOIDP,) * 11,
    "cublasLtLoggerSetCallback": (_VOIDP,),
    "cublasLtLoggerOpenFile": (_TEXT,),
    "cublasLtLoggerSetLevel": (_INT,),
    "cublasLtLoggerSetMask": (_INT,),
    "cublasLtLoggerForceDisable": (),
}

RESULTS: Final[Mapping[str, Any]] = {
    "cublasLtGetStatusName": _TEXT,
    "cublasLtGetStatusString": _TEXT,
    "cublasLtGetVersion": _SIZE,
    "cublasLtGetCudartVersion": _SIZE,
}
"""The result types of the functions that do not return a status."""

SINCE: Final[Mapping[str, int]] = {
    **dict.fromkeys(_descriptor("EmulationDesc"), 130100),
    "cublasLtGroupedMatrixLayoutCreate": 130200,
    "cublasLtMatmulAlgoGetHeuristicForStream": 130501,
    "cublasLtMatmulAlgoCheckForStream": 130501,
}
"""The first version, major·10000 + minor·100 + patch, of the functions that CUDA 12.0 lacks."""

_DESCRIPTORS: Final[tuple[tuple[str, tuple[int, ...], type[Attribute]], ...]] = (
    ("MatmulDesc", (ComputeType.COMPUTE_32F, DataType.R_32F), attributes.MatmulDescAttribute),
    ("MatrixLayout", (DataType.R_32F, 1, 1, 1), attributes.MatrixLayoutAttribute),
    ("MatmulPreference", (), attributes.PreferenceAttribute),
    ("MatrixTransformDesc", (DataType.R_32F,), attributes.MatrixTransformDescAttribute),
    ("EmulationDesc", (), attributes.EmulationDescAttribute),
)

Find = Callable[[str], Callable[..., int] | None]


def check(find: Find, version: int, path: str) -> None:
    """Refuses a library that stores an attribute in another width than these bindings.

    The check skips two kinds of attributes, so that only the call that uses one of them fails: attributes that the
    library does not know, and attributes that are newer than the library, whose numbers may have had another meaning.

    Args:
        find: returns a C function by its name, or None if the library lacks it.
        version: the library's version, major·10000 + minor·100 + patch.
        path: the library's file, for the message.

    Raises:
        AbiError: a width differs, or a descriptor cannot be made.
    """
    for attribute, width in _widths(find, path):
        if version >= attribute.since and width not in (None, attribute.size):
            raise AbiError(
                f"{attribute} has {attribute.size} bytes here and {width} in cuBLASLt {version} ({path}): "
                "this version is not one that these bindings can use"
            )


def _widths(find: Find, path: str) -> Iterator[tuple[Attribute, int | None]]:
    """Every attribute that can be read without a GPU, with its bytes in the library; None if it is unknown there."""
    for kind, arguments, table in _DESCRIPTORS:
        create, get = find(f"cublasLt{kind}Create"), find(f"cublasLt{kind}GetAttribute")
        destroy = find(f"cublasLt{kind}Destroy")
        if create is None or get is None or destroy is None:
            continue
        descriptor = ctypes.c_void_p()
        status = create(ctypes.byref(descriptor), *arguments)
        if status:
            raise AbiError(f"cublasLt{kind}Create of {path} returned status {status}")
        measured = [(attribute, _width(get, descriptor, attribute)) for attribute in table]
        destroy(descriptor)
        yield from measured
    get = find("cublasLtMatmulAlgoConfigGetAttribute")
    if get is not None:
        yield from ((each, _width(get, bytes(ALGO_BYTES), each)) for each in attributes.AlgoConfigAttribute)


def _width(get: Callable[..., int], owner: Any, attribute: int) -> int | None:
    needed = ctypes.c_size_t()
    status = get(owner, attribute, None, 0, ctypes.byref(needed))
    return needed.value if status == Status.SUCCESS else None
