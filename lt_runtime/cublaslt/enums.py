"""Values of `cublasLt.h`, `cublas_api.h` and `library_types.h`; a test holds them against the installed headers.

Names are the headers' without their prefixes. One that would then begin with a digit keeps the prefix's last word:
CUBLAS_COMPUTE_32F is `ComputeType.COMPUTE_32F`. Left out are the enumerators that stand for no value: those named
_END and RESERVED. The attributes' numbers are in `attribute_ids`, the tiles' and stages' in `shapes`.
"""

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


class LibraryProperty(enum.IntEnum):
    """`libraryPropertyType`, no prefix."""

    MAJOR_VERSION = 0
    MINOR_VERSION = 1
    PATCH_LEVEL = 2


class DataType(enum.IntEnum):
    """`cudaDataType`, prefix CUDA_: R for real, C for complex; F float, I signed, U unsigned, with its bits."""

    R_32F = 0
    R_64F = 1
    R_16F = 2
    R_8I = 3
    C_32F = 4
    C_64F = 5
    C_16F = 6
    C_8I = 7
    R_8U = 8
    C_8U = 9
    R_32I = 10
    C_32I = 11
    R_32U = 12
    C_32U = 13
    R_16BF = 14
    C_16BF = 15
    R_4I = 16
    C_4I = 17
    R_4U = 18
    C_4U = 19
    R_16I = 20
    C_16I = 21
    R_16U = 22
    C_16U = 23
    R_64I = 24
    C_64I = 25
    R_64U = 26
    C_64U = 27
    R_8F_E4M3 = 28
    R_8F_UE4M3 = 28
    R_8F_E5M2 = 29
    R_8F_UE8M0 = 30
    R_6F_E2M3 = 31
    R_6F_E3M2 = 32
    R_4F_E2M1 = 33
    R_8F_UE5M3 = 34


class ComputeType(enum.IntEnum):
    """`cublasComputeType_t`, prefix CUBLAS_COMPUTE_: precision of the products and of their sum."""

    COMPUTE_16F = 64
    COMPUTE_16F_PEDANTIC = 65
    COMPUTE_32F = 68
    COMPUTE_32F_PEDANTIC = 69
    COMPUTE_64F = 70
    COMPUTE_64F_PEDANTIC = 71
    COMPUTE_32I = 72
    COMPUTE_32I_PEDANTIC = 73
    COMPUTE_32F_FAST_16F = 74
    COMPUTE_32F_FAST_16BF = 75
    COMPUTE_32F_FAST_TF32 = 77
    COMPUTE_32F_EMULATED_16BFX9 = 78
    COMPUTE_64F_EMULATED_FIXEDPOINT = 79


class Operation(enum.IntEnum):
    """`cublasOperation_t`, prefix CUBLAS_OP_."""

    N = 0
    T = 1
    C = 2
    HERMITAN = 2
    CONJG = 3


class FillMode(enum.IntEnum):
    """`cublasFillMode_t`, prefix CUBLAS_FILL_MODE_."""

    LOWER = 0
    UPPER = 1
    FULL = 2


class PointerMode(enum.IntEnum):
    """`cublasLtPointerMode_t`, prefix CUBLASLT_POINTER_MODE_: where α and β are."""

    HOST = 0
    DEVICE = 1
    DEVICE_VECTOR = 2
    ALPHA_DEVICE_VECTOR_BETA_ZERO = 3
    ALPHA_DEVICE_VECTOR_BETA_HOST = 4


class PointerModeMask(enum.IntFlag):
    """`cublasLtPointerModeMask_t`, prefix CUBLASLT_POINTER_MODE_MASK_."""

    HOST = 1
    DEVICE = 2
    DEVICE_VECTOR = 4
    ALPHA_DEVICE_VECTOR_BETA_ZERO = 8
    ALPHA_DEVICE_VECTOR_BETA_HOST = 16


class Order(enum.IntEnum):
    """`cublasLtOrder_t`, prefix CUBLASLT_ORDER_."""

    COL = 0
    ROW = 1
    COL32 = 2
    COL4_4R2_8C = 3
    COL32_2R_4R4 = 4


class BatchMode(enum.IntEnum):
    """`cublasLtBatchMode_t`, prefix CUBLASLT_BATCH_MODE_."""

    STRIDED = 0
    POINTER_ARRAY = 1
    GROUPED = 2


class IntegerWidth(enum.IntEnum):
    """`cublasLtIntegerWidth_t`, prefix CUBLASLT_INTEGER_WIDTH_."""

    WIDTH_32 = 0
    WIDTH_64 = 1


class MatmulMatrixScale(enum.IntEnum):
    """`cublasLtMatmulMatrixScale_t`, prefix CUBLASLT_MATMUL_MATRIX_SCALE_."""

    SCALAR_32F = 0
    VEC16_UE4M3 = 1
    VEC32_UE8M0 = 2
    OUTER_VEC_32F = 3
    VEC128_32F = 4
    BLK128x128_32F = 5
    PER_BATCH_SCALAR_32F = 6
    VEC128_MN_K4_UE8M0 = 12
    VEC32_MN_K4_UE8M0 = 13


class ReductionScheme(enum.IntFlag):
    """`cublasLtReductionScheme_t`, prefix CUBLASLT_REDUCTION_SCHEME_: how the parts of a split K are summed."""

    NONE = 0
    INPLACE = 1
    COMPUTE_TYPE = 2
    OUTPUT_TYPE = 4
    MASK = 7


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


class MatmulSearch(enum.IntEnum):
    """`cublasLtMatmulSearch_t`, prefix CUBLASLT_SEARCH_."""

    BEST_FIT = 0
    LIMITED_BY_ALGO_ID = 1


class BatchInvariance(enum.IntEnum):
    """`cublasLtMatmulBatchInvarianceFlags_t`, prefix CUBLASLT_BATCH_INVARIANCE_."""

    DISABLED = 0
    ALIGN_2B = 1
    ALIGN_4B = 2
    ALIGN_8B = 3
    ALIGN_16B = 4
    AUTO = 8
    UNSET = 0x8000


class NumericalImplFlags(enum.IntFlag):
    """`cublasLtNumericalImplFlags_t`, prefix CUBLASLT_NUMERICAL_IMPL_FLAGS_ of the header's macros."""

    FMA = 1
    HMMA = 1 << 1
    IMMA = 1 << 2
    DMMA = 1 << 3
    TENSOR_OP_MASK = 0xFE
    OP_TYPE_MASK = 0xFF
    ACCUMULATOR_16F = 1 << 8
    ACCUMULATOR_32F = 1 << 9
    ACCUMULATOR_64F = 1 << 10
    ACCUMULATOR_32I = 1 << 11
    ACCUMULATOR_TYPE_MASK = 0xFF << 8
    INPUT_16F = 1 << 16
    INPUT_16BF = 1 << 17
    INPUT_TF32 = 1 << 18
    INPUT_32F = 1 << 19
    INPUT_64F = 1 << 20
    INPUT_8I = 1 << 21
    INPUT_8F_E4M3 = 1 << 22
    INPUT_8F_E5M2 = 1 << 23
    OP_INPUT_TYPE_MASK = 0xFF << 16
    GAUSSIAN = 1 << 32


class EmulationStrategy(enum.IntEnum):
    """`cublasEmulationStrategy_t`, prefix CUBLAS_EMULATION_STRATEGY_."""

    DEFAULT = 0
    PERFORMANT = 1
    EAGER = 2


class EmulationMantissaControl(enum.IntEnum):
    """`cudaEmulationMantissaControl`, prefix CUDA_EMULATION_MANTISSA_CONTROL_."""

    DYNAMIC = 0
    FIXED = 1


class EmulationSpecialValues(enum.IntFlag):
    """`cudaEmulationSpecialValuesSupport`, prefix CUDA_EMULATION_SPECIAL_VALUES_SUPPORT_."""

    NONE = 0
    INFINITY = 1
    NAN = 2
    DEFAULT = 0xFFFF
