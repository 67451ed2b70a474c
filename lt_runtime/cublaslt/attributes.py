"""The C type that each descriptor attribute is written and read as."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Final

from lt_runtime.cublaslt.enums import MatmulDescAttribute, MatrixLayoutAttribute, PreferenceAttribute

MATMUL_DESC: Final[Mapping[MatmulDescAttribute, Any]] = {
    MatmulDescAttribute.COMPUTE_TYPE: ctypes.c_int32,
    MatmulDescAttribute.SCALE_TYPE: ctypes.c_int32,
    MatmulDescAttribute.TRANSA: ctypes.c_int32,
    MatmulDescAttribute.TRANSB: ctypes.c_int32,
    MatmulDescAttribute.EPILOGUE: ctypes.c_uint32,
    MatmulDescAttribute.BIAS_POINTER: ctypes.c_uint64,
    MatmulDescAttribute.BIAS_DATA_TYPE: ctypes.c_int32,
}

MATRIX_LAYOUT: Final[Mapping[MatrixLayoutAttribute, Any]] = {
    MatrixLayoutAttribute.TYPE: ctypes.c_uint32,
    MatrixLayoutAttribute.ORDER: ctypes.c_int32,
    MatrixLayoutAttribute.ROWS: ctypes.c_uint64,
    MatrixLayoutAttribute.COLS: ctypes.c_uint64,
    MatrixLayoutAttribute.LD: ctypes.c_int64,
}

PREFERENCE: Final[Mapping[PreferenceAttribute, Any]] = {
    PreferenceAttribute.MAX_WORKSPACE_BYTES: ctypes.c_uint64,
    PreferenceAttribute.REDUCTION_SCHEME_MASK: ctypes.c_uint32,
    PreferenceAttribute.MIN_ALIGNMENT_A_BYTES: ctypes.c_uint32,
    PreferenceAttribute.MIN_ALIGNMENT_B_BYTES: ctypes.c_uint32,
    PreferenceAttribute.MIN_ALIGNMENT_C_BYTES: ctypes.c_uint32,
    PreferenceAttribute.MIN_ALIGNMENT_D_BYTES: ctypes.c_uint32,
}
