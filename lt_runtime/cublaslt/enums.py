"""Values of `cublasLt.h`, `cublas_api.h` and `library_types.h`; a test holds them against the installed headers."""

from __future__ import annotations

import enum


class Status(enum.IntEnum):
    """`cublasStatus_t`, prefix CUBLAS_STATUS_."""

    SUCCESS = 0
    NOT_INITIALIZED = 1
    ALLOC_FAILED = 3
    INVALID_VALUE = 7
    ARCH_MISMATCH = 8
    MAPPING_ERROR = 11
    EXECUTION_FAILED = 13
    INTERNAL_ERROR = 14
    NOT_SUPPORTED = 15
    LICENSE_ERROR = 16


class DataType(enum.IntEnum):
    """`cudaDataType_t`, prefix CUDA_."""

    R_32F = 0
    R_64F = 1
    R_16F = 2
    R_16BF = 14


class ComputeType(enum.IntEnum):
    """`cublasComputeType_t`, prefix CUBLAS_COMPUTE_."""

    F32 = 68
    F32_FAST_TF32 = 77
    F64 = 70


class Operation(enum.IntEnum):
    """`cublasOperation_t`, prefix CUBLAS_OP_."""

    N = 0
    T = 1


class Epilogue(enum.IntEnum):
    """`cublasLtEpilogue_t`, prefix CUBLASLT_EPILOGUE_."""

    DEFAULT = 1
    RELU = 2
    RELU_AUX = 130
    BIAS = 4
    RELU_BIAS = 6
    RELU_AUX_BIAS = 134
    DRELU = 136
    DRELU_BGRAD = 152
    GELU = 32
    GELU_AUX = 160
    GELU_BIAS = 36
    GELU_AUX_BIAS = 164
    DGELU = 192
    DGELU_BGRAD = 208
    BGRADA = 256
    BGRADB = 512


class ReductionScheme(enum.IntFlag):
    """`cublasLtReductionScheme_t`, prefix CUBLASLT_REDUCTION_SCHEME_."""

    NONE = 0
    INPLACE = 1
    COMPUTE_TYPE = 2
    OUTPUT_TYPE = 4


class MatmulDescAttribute(enum.IntEnum):
    """`cublasLtMatmulDescAttributes_t`, prefix CUBLASLT_MATMUL_DESC_."""

    COMPUTE_TYPE = 0
    SCALE_TYPE = 1
    TRANSA = 3
    TRANSB = 4
    EPILOGUE = 7
    BIAS_POINTER = 8
    BIAS_DATA_TYPE = 26


class MatrixLayoutAttribute(enum.IntEnum):
    """`cublasLtMatrixLayoutAttribute_t`, prefix CUBLASLT_MATRIX_LAYOUT_."""

    TYPE = 0
    ORDER = 1
    ROWS = 2
    COLS = 3
    LD = 4


class PreferenceAttribute(enum.IntEnum):
    """`cublasLtMatmulPreferenceAttributes_t`, prefix CUBLASLT_MATMUL_PREF_."""

    MAX_WORKSPACE_BYTES = 1
    REDUCTION_SCHEME_MASK = 3
    MIN_ALIGNMENT_A_BYTES = 5
    MIN_ALIGNMENT_B_BYTES = 6
    MIN_ALIGNMENT_C_BYTES = 7
    MIN_ALIGNMENT_D_BYTES = 8


class AlgoConfigAttribute(enum.IntEnum):
    """`cublasLtMatmulAlgoConfigAttributes_t`, prefix CUBLASLT_ALGO_CONFIG_."""

    ID = 0
    TILE_ID = 1
    SPLITK_NUM = 2
    REDUCTION_SCHEME = 3
    CTA_SWIZZLING = 4
    CUSTOM_OPTION = 5
    STAGES_ID = 6
