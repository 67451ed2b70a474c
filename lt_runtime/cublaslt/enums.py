"""The enums of `cublasLt.h`, `cublas_api.h` and `library_types.h`; a test compares them with the installed headers.

A member has the header's name without the prefix. A name that would begin with a digit keeps the last word of the
prefix: CUBLAS_COMPUTE_32F is `ComputeType.COMPUTE_32F`. Enumerators that stand for no value (those named _END and
RESERVED) are left out. The numbers of attributes are in `attributes`, those of tiles in `tiles`.
"""

from __future__ import annotations

import enum


class Status(enum.IntEnum):
    """`cublasStatus_t`, prefix CUBLAS_STATUS_."""

    SUCCESS, NOT_INITIALIZED, ALLOC_FAILED, INVALID_VALUE, ARCH_MISMATCH, MAPPING_ERROR = 0, 1, 3, 7, 8, 11
    EXECUTION_FAILED, INTERNAL_ERROR, NOT_SUPPORTED, LICENSE_ERROR = range(13, 17)


class DataType(enum.IntEnum):
    """`cudaDataType`, prefix CUDA_: R is real, C complex; then the bits, and F float, I signed, U unsigned."""

    R_32F, R_64F, R_16F, R_8I, C_32F, C_64F, C_16F, C_8I, R_8U, C_8U = range(10)
    R_32I, C_32I, R_32U, C_32U, R_16BF, C_16BF, R_4I, C_4I, R_4U, C_4U = range(10, 20)
    R_16I, C_16I, R_16U, C_16U, R_64I, C_64I, R_64U, C_64U = range(20, 28)
    R_8F_E4M3, R_8F_E5M2, R_8F_UE8M0, R_6F_E2M3, R_6F_E3M2, R_4F_E2M1, R_8F_UE5M3 = range(28, 35)
    R_8F_UE4M3 = 28


class ComputeType(enum.IntEnum):
    """`cublasComputeType_t`, prefix CUBLAS_COMPUTE_: the precision of the products and of their sum."""

    COMPUTE_16F, COMPUTE_16F_PEDANTIC = 64, 65
    COMPUTE_32F, COMPUTE_32F_PEDANTIC = 68, 69
    COMPUTE_64F, COMPUTE_64F_PEDANTIC = 70, 71
    COMPUTE_32I, COMPUTE_32I_PEDANTIC = 72, 73
    COMPUTE_32F_FAST_16F, COMPUTE_32F_FAST_16BF, COMPUTE_32F_FAST_TF32 = 74, 75, 77
    COMPUTE_32F_EMULATED_16BFX9, COMPUTE_64F_EMULATED_FIXEDPOINT = 78, 79


class Operation(enum.IntEnum):
    """`cublasOperation_t`, prefix CUBLAS_OP_."""

    N, T, C, HERMITAN, CONJG = 0, 1, 2, 2, 3


class FillMode(enum.IntEnum):
    """`cublasFillMode_t`, prefix CUBLAS_FILL_MODE_."""

    LOWER, UPPER, FULL = range(3)


class PointerMode(enum.IntEnum):
    """`cublasLtPointerMode_t`, prefix CUBLASLT_POINTER_MODE_: where α and β are stored."""

    HOST, DEVICE, DEVICE_VECTOR, ALPHA_DEVICE_VECTOR_BETA_ZERO, ALPHA_DEVICE_VECTOR_BETA_HOST = range(5)


class PointerModeMask(enum.IntFlag):
    """`cublasLtPointerModeMask_t`, prefix CUBLASLT_POINTER_MODE_MASK_."""

    HOST, DEVICE, DEVICE_VECTOR, ALPHA_DEVICE_VECTOR_BETA_ZERO, ALPHA_DEVICE_VECTOR_BETA_HOST = 1, 2, 4, 8, 16


class Order(enum.IntEnum):
    """`cublasLtOrder_t`, prefix CUBLASLT_ORDER_."""

    COL, ROW, COL32, COL4_4R2_8C, COL32_2R_4R4 = range(5)


class BatchMode(enum.IntEnum):
    """`cublasLtBatchMode_t`, prefix CUBLASLT_BATCH_MODE_."""

    STRIDED, POINTER_ARRAY, GROUPED = range(3)


class IntegerWidth(enum.IntEnum):
    """`cublasLtIntegerWidth_t`, prefix CUBLASLT_INTEGER_WIDTH_."""

    WIDTH_32, WIDTH_64 = 0, 1


class MatmulMatrixScale(enum.IntEnum):
    """`cublasLtMatmulMatrixScale_t`, prefix CUBLASLT_MATMUL_MATRIX_SCALE_."""

    SCALAR_32F, VEC16_UE4M3, VEC32_UE8M0, OUTER_VEC_32F, VEC128_32F, BLK128x128_32F = range(6)
    PER_BATCH_SCALAR_32F, VEC128_MN_K4_UE8M0, VEC32_MN_K4_UE8M0 = 6, 12, 13


class ReductionScheme(enum.IntFlag):
    """`cublasLtReductionScheme_t`, prefix CUBLASLT_REDUCTION_SCHEME_: how the parts of a split K are added."""

    NONE, INPLACE, COMPUTE_TYPE, OUTPUT_TYPE, MASK = 0, 1, 2, 4, 7


class Epilogue(enum.IntEnum):
    """`cublasLtEpilogue_t`, prefix CUBLASLT_EPILOGUE_.

    Every part of an epilogue has a bit of its own: 2 ReLU, 4 bias, 8 ReLU's derivative, 16 bias gradient, 32 GELU,
    64 GELU's derivative, 128 auxiliary matrix, 256 and 512 the sums of A and of B.
    """

    DEFAULT, RELU, BIAS, RELU_BIAS = 1, 2, 4, 6
    RELU_AUX, RELU_AUX_BIAS, DRELU, DRELU_BGRAD = 130, 134, 136, 152
    GELU, GELU_BIAS, GELU_AUX, GELU_AUX_BIAS = 32, 36, 160, 164
    DGELU, DGELU_BGRAD, BGRADA, BGRADB = 192, 208, 256, 512

    @property
    def has_bias(self) -> bool:
        """Whether it adds a bias."""
        return bool(self & 4)

    @property
    def has_bias_gradient(self) -> bool:
        """Whether it writes a bias gradient, be it of the product or of an operand."""
        return bool(self & (16 | 256 | 512))

    @property
    def has_gelu(self) -> bool:
        """Whether it applies GELU or GELU's derivative."""
        return bool(self & (32 | 64))

    @property
    def has_derivative(self) -> bool:
        """Whether it multiplies by the derivative of ReLU or GELU, which reads the auxiliary matrix."""
        return bool(self & (8 | 64))

    @property
    def has_aux(self) -> bool:
        """Whether it reads or writes an auxiliary matrix: the mask of ReLU, or the input of GELU."""
        return bool(self & 128)


class MatmulSearch(enum.IntEnum):
    """`cublasLtMatmulSearch_t`, prefix CUBLASLT_SEARCH_."""

    BEST_FIT, LIMITED_BY_ALGO_ID = 0, 1


class BatchInvariance(enum.IntEnum):
    """`cublasLtMatmulBatchInvarianceFlags_t`, prefix CUBLASLT_BATCH_INVARIANCE_."""

    DISABLED, ALIGN_2B, ALIGN_4B, ALIGN_8B, ALIGN_16B, AUTO, UNSET = 0, 1, 2, 3, 4, 8, 0x8000


class NumericalImplFlags(enum.IntFlag):
    """`cublasLtNumericalImplFlags_t`, prefix CUBLASLT_NUMERICAL_IMPL_FLAGS_ of the header's macros."""

    FMA, HMMA, IMMA, DMMA = 1 << 0, 1 << 1, 1 << 2, 1 << 3
    TENSOR_OP_MASK, OP_TYPE_MASK = 0xFE, 0xFF
    ACCUMULATOR_16F, ACCUMULATOR_32F, ACCUMULATOR_64F, ACCUMULATOR_32I = 1 << 8, 1 << 9, 1 << 10, 1 << 11
    ACCUMULATOR_TYPE_MASK = 0xFF << 8
    INPUT_16F, INPUT_16BF, INPUT_TF32, INPUT_32F, INPUT_64F = 1 << 16, 1 << 17, 1 << 18, 1 << 19, 1 << 20
    INPUT_8I, INPUT_8F_E4M3, INPUT_8F_E5M2 = 1 << 21, 1 << 22, 1 << 23
    OP_INPUT_TYPE_MASK = 0xFF << 16
    GAUSSIAN = 1 << 32


class EmulationStrategy(enum.IntEnum):
    """`cublasEmulationStrategy_t`, prefix CUBLAS_EMULATION_STRATEGY_."""

    DEFAULT, PERFORMANT, EAGER = range(3)


class EmulationMantissaControl(enum.IntEnum):
    """`cudaEmulationMantissaControl`, prefix CUDA_EMULATION_MANTISSA_CONTROL_."""

    DYNAMIC, FIXED = 0, 1


class EmulationSpecialValues(enum.IntFlag):
    """`cudaEmulationSpecialValuesSupport`, prefix CUDA_EMULATION_SPECIAL_VALUES_SUPPORT_."""

    NONE, INFINITY, NAN, DEFAULT = 0, 1, 2, 0xFFFF


class MatmulStages(enum.IntEnum):
    """`cublasLtMatmulStages_t`, prefix CUBLASLT_MATMUL_STAGES_: depth along K × buffers in shared memory."""

    UNDEFINED, STAGES_16x1, STAGES_16x2, STAGES_16x3, STAGES_16x4, STAGES_16x5, STAGES_16x6, STAGES_32x1 = range(8)
    STAGES_32x2, STAGES_32x3, STAGES_32x4, STAGES_32x5, STAGES_32x6, STAGES_64x1, STAGES_64x2 = range(8, 15)
    STAGES_64x3, STAGES_64x4, STAGES_64x5, STAGES_64x6, STAGES_128x1, STAGES_128x2, STAGES_128x3 = range(15, 22)
    STAGES_128x4, STAGES_128x5, STAGES_128x6, STAGES_32x10, STAGES_8x4, STAGES_16x10, STAGES_8x5 = range(22, 29)
    STAGES_8x3, STAGES_8xAUTO, STAGES_16xAUTO, STAGES_32xAUTO, STAGES_64xAUTO, STAGES_128xAUTO = range(31, 37)
    STAGES_256xAUTO, STAGES_768xAUTO = range(37, 39)


class MatmulInnerShape(enum.IntEnum):
    """`cublasLtMatmulInnerShape_t`, prefix CUBLASLT_MATMUL_INNER_SHAPE_."""

    UNDEFINED, MMA884, MMA1684, MMA1688, MMA16816 = range(5)


class ClusterShape(enum.IntEnum):
    """`cublasLtClusterShape_t`, prefix CUBLASLT_CLUSTER_SHAPE_: blocks of a cluster."""

    AUTO = 0
    SHAPE_1x1x1, SHAPE_2x1x1, SHAPE_4x1x1, SHAPE_1x2x1, SHAPE_2x2x1, SHAPE_4x2x1, SHAPE_1x4x1 = range(2, 9)
    SHAPE_2x4x1, SHAPE_4x4x1, SHAPE_8x1x1, SHAPE_1x8x1, SHAPE_8x2x1, SHAPE_2x8x1, SHAPE_16x1x1 = range(9, 16)
    SHAPE_1x16x1, SHAPE_3x1x1, SHAPE_5x1x1, SHAPE_6x1x1, SHAPE_7x1x1, SHAPE_9x1x1, SHAPE_10x1x1 = range(16, 23)
    SHAPE_11x1x1, SHAPE_12x1x1, SHAPE_13x1x1, SHAPE_14x1x1, SHAPE_15x1x1, SHAPE_3x2x1, SHAPE_5x2x1 = range(23, 30)
    SHAPE_6x2x1, SHAPE_7x2x1, SHAPE_1x3x1, SHAPE_2x3x1, SHAPE_3x3x1, SHAPE_4x3x1, SHAPE_5x3x1 = range(30, 37)
    SHAPE_3x4x1, SHAPE_1x5x1, SHAPE_2x5x1, SHAPE_3x5x1, SHAPE_1x6x1, SHAPE_2x6x1, SHAPE_1x7x1 = range(37, 44)
    SHAPE_2x7x1, SHAPE_1x9x1, SHAPE_1x10x1, SHAPE_1x11x1, SHAPE_1x12x1, SHAPE_1x13x1, SHAPE_1x14x1 = range(44, 51)
    SHAPE_1x15x1 = 51
