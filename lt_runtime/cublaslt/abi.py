"""The binary interface of `cublasLt.h`: prototypes of the functions, and the versions that they came with."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Final

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
