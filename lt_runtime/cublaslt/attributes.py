"""The attributes of descriptors and algorithms: number, C type, accepted values, first version.

The C types are the header's, with one exception. The header's comments give the three GROUPED preferences as uint32_t,
but every version that has them (13.2 to 13.10) stores them in 8 bytes.
"""

from __future__ import annotations

from typing import Final

from lt_runtime.cublaslt import enums, values
from lt_runtime.cublaslt.values import Attribute

_R = enums.ReductionScheme
_TYPE: Final = values.member(enums.DataType)
_TYPE_OR_UNSET: Final = values.member(enums.DataType, -1)
_OPERATION: Final = values.member(enums.Operation)
_POINTER_MODE: Final = values.member(enums.PointerMode)
_SCALE_MODE: Final = values.member(enums.MatmulMatrixScale)
_STAGES: Final = values.member(enums.MatmulStages)
_WIDTH: Final = values.member(enums.IntegerWidth)
_COUNT: Final = values.at_least(0)
# The heuristic looks at the values of the two vector pointers, not at the preferences: the kernels that it chooses
# fault below 16 bytes of alignment.
_VECTOR: Final = values.address(16)
_WORD: Final = values.address(4)  # one FP32 or int32 number, or a block of scales, which the library wants at 16 bytes
_READ_ONLY: Final = values.nothing("it is read only")


def _tile() -> values.Accepted:
    from lt_runtime.cublaslt.tiles import MatmulTile  # imported late: it is only made then

    return values.member(MatmulTile)


class MatmulDescAttribute(Attribute):
    """`cublasLtMatmulDescAttributes_t`, prefix CUBLASLT_MATMUL_DESC_."""

    COMPUTE_TYPE = 0, "i", values.member(enums.ComputeType)
    SCALE_TYPE = 1, "i", _TYPE
    POINTER_MODE = 2, "i", _POINTER_MODE
    TRANSA, TRANSB = values.alike(range(3, 5), "i", _OPERATION)
    TRANSC = 5, "i", values.one_of(enums.Operation.N)
    FILL_MODE = 6, "i", values.member(enums.FillMode)
    EPILOGUE = 7, "I", values.member(enums.Epilogue)
    BIAS_POINTER = 8, "Q", _VECTOR
    BIAS_BATCH_STRIDE = 10, "q", _COUNT
    EPILOGUE_AUX_POINTER = 11, "Q", _VECTOR
    EPILOGUE_AUX_LD = 12, "q", _COUNT
    EPILOGUE_AUX_BATCH_STRIDE, ALPHA_VECTOR_BATCH_STRIDE = values.alike(range(13, 15), "q", _COUNT)
    SM_COUNT_TARGET = 15, "i", _COUNT
    A_SCALE_POINTER, B_SCALE_POINTER, C_SCALE_POINTER, D_SCALE_POINTER = values.alike(range(17, 21), "Q", _WORD)
    AMAX_D_POINTER = 21, "Q", _WORD
    EPILOGUE_AUX_DATA_TYPE = 22, "i", _TYPE_OR_UNSET
    EPILOGUE_AUX_SCALE_POINTER, EPILOGUE_AUX_AMAX_POINTER = values.alike(range(23, 25), "Q", _WORD)
    FAST_ACCUM = 25, "b", values.between(0, 1)
    BIAS_DATA_TYPE = 26, "i", _TYPE_OR_UNSET
    A_SCALE_MODE, B_SCALE_MODE, C_SCALE_MODE, D_SCALE_MODE = values.alike(range(31, 35), "i", _SCALE_MODE, 120800)
    EPILOGUE_AUX_SCALE_MODE = 35, "i", _SCALE_MODE, 120800
    D_OUT_SCALE_POINTER = 36, "Q", _WORD, 120800
    D_OUT_SCALE_MODE = 37, "i", _SCALE_MODE, 120800
    EMULATION_DESCRIPTOR = 38, "Q", values.address(8), 130100  # 12.9 and 13.0 use this number for another attribute
    ALPHA_BATCH_STRIDE, BETA_BATCH_STRIDE = values.alike(range(39, 41), "q", _COUNT, 130200)
    BATCH_INVARIANCE_FLAGS = 41, "I", values.member(enums.BatchInvariance), 130800


class MatrixLayoutAttribute(Attribute):
    """`cublasLtMatrixLayoutAttribute_t`, prefix CUBLASLT_MATRIX_LAYOUT_, or CUBLASLT_GROUPED_MATRIX_LAYOUT_."""

    TYPE = 0, "I", _TYPE
    ORDER = 1, "i", values.member(enums.Order)
    ROWS, COLS = values.alike(range(2, 4), "Q", _COUNT)
    LD = 4, "q", _COUNT
    BATCH_COUNT = 5, "i", values.at_least(1)
    STRIDED_BATCH_OFFSET = 6, "q", _COUNT
    PLANE_OFFSET = 7, "q", values.ANYTHING
    BATCH_MODE = 8, "I", values.member(enums.BatchMode)
    GROUPED_ROWS_ARRAY, GROUPED_COLS_ARRAY, GROUPED_LD_ARRAY = values.alike(range(9, 12), "Q", _WORD, 130200)
    GROUPED_ROWS_COLS_ARRAY_INTEGER_WIDTH = 12, "i", _WIDTH, 130200
    GROUPED_LD_ARRAY_INTEGER_WIDTH = 13, "i", _WIDTH, 130200


class MatrixTransformDescAttribute(Attribute):
    """`cublasLtMatrixTransformDescAttributes_t`, prefix CUBLASLT_MATRIX_TRANSFORM_DESC_."""

    SCALE_TYPE = 0, "i", _TYPE
    POINTER_MODE = 1, "i", _POINTER_MODE
    TRANSA, TRANSB = values.alike(range(2, 4), "i", _OPERATION)


class EmulationDescAttribute(Attribute):
    """`cublasLtEmulationDescAttributes_t`, prefix CUBLASLT_EMULATION_DESC_."""

    STRATEGY = 0, "i", values.member(enums.EmulationStrategy)
    SPECIAL_VALUES_SUPPORT = 1, "i", values.mask(enums.EmulationSpecialValues)
    FIXEDPOINT_MANTISSA_CONTROL = 2, "i", values.member(enums.EmulationMantissaControl)
    FIXEDPOINT_MAX_MANTISSA_BIT_COUNT = 3, "i", _COUNT
    FIXEDPOINT_MANTISSA_BIT_OFFSET = 4, "i", values.ANYTHING
    FIXEDPOINT_MANTISSA_BIT_COUNT_POINTER = 5, "Q", _WORD


class PreferenceAttribute(Attribute):
    """`cublasLtMatmulPreferenceAttributes_t`, prefix CUBLASLT_MATMUL_PREF_."""

    SEARCH_MODE = 0, "I", values.member(enums.MatmulSearch)
    MAX_WORKSPACE_BYTES = 1, "Q", _COUNT
    REDUCTION_SCHEME_MASK = 3, "I", values.mask(enums.ReductionScheme)
    MIN_ALIGNMENT_A_BYTES, MIN_ALIGNMENT_B_BYTES = values.alike(range(5, 7), "I", values.POWER_OF_TWO)
    MIN_ALIGNMENT_C_BYTES, MIN_ALIGNMENT_D_BYTES = values.alike(range(7, 9), "I", values.POWER_OF_TWO)
    MAX_WAVES_COUNT = 9, "f", values.FRACTION
    IMPL_MASK = 12, "Q", _COUNT
    GROUPED_AVERAGE_REDUCTION_DIM, GROUPED_DESC_D_AVERAGE_ROWS = values.alike(range(13, 15), "Q", _COUNT, 130200)
    GROUPED_DESC_D_AVERAGE_COLS = 15, "Q", _COUNT, 130200


class AlgoConfigAttribute(Attribute):
    """`cublasLtMatmulAlgoConfigAttributes_t`, prefix CUBLASLT_ALGO_CONFIG_."""

    ID = 0, "i", values.nothing("it is fixed by algo_init")
    TILE_ID = 1, "I", _tile
    SPLITK_NUM = 2, "i", _COUNT
    REDUCTION_SCHEME = 3, "I", values.one_of(_R.NONE, _R.INPLACE, _R.COMPUTE_TYPE, _R.OUTPUT_TYPE)
    CTA_SWIZZLING = 4, "I", values.between(0, 1)
    CUSTOM_OPTION = 5, "I", _COUNT
    STAGES_ID = 6, "I", _STAGES
    INNER_SHAPE_ID = 7, "H", values.member(enums.MatmulInnerShape)
    CLUSTER_SHAPE_ID = 8, "H", values.member(enums.ClusterShape)


class AlgoCapAttribute(Attribute):
    """`cublasLtMatmulAlgoCapAttributes_t`, prefix CUBLASLT_ALGO_CAP_."""

    SPLITK_SUPPORT = 0, "i", _READ_ONLY
    REDUCTION_SCHEME_MASK = 1, "I", values.mask(enums.ReductionScheme)
    CTA_SWIZZLING_SUPPORT = 2, "I", _READ_ONLY
    STRIDED_BATCH_SUPPORT, OUT_OF_PLACE_RESULT_SUPPORT, UPLO_SUPPORT = values.alike(range(3, 6), "i", _READ_ONLY)
    TILE_IDS = 6, "I", _tile
    CUSTOM_OPTION_MAX = 7, "i", _READ_ONLY
    CUSTOM_MEMORY_ORDER = 10, "i", _READ_ONLY
    POINTER_MODE_MASK = 11, "I", values.mask(enums.PointerModeMask)
    EPILOGUE_MASK = 12, "I", _READ_ONLY
    STAGES_IDS = 13, "I", _STAGES
    LD_NEGATIVE = 14, "i", _READ_ONLY
    NUMERICAL_IMPL_FLAGS = 15, "Q", values.mask(enums.NumericalImplFlags)
    MIN_ALIGNMENT_A_BYTES, MIN_ALIGNMENT_B_BYTES = values.alike(range(16, 18), "I", _READ_ONLY)
    MIN_ALIGNMENT_C_BYTES, MIN_ALIGNMENT_D_BYTES = values.alike(range(18, 20), "I", _READ_ONLY)
    POINTER_ARRAY_BATCH_SUPPORT, FLOATING_POINT_EMULATION_SUPPORT = values.alike(range(21, 23), "i", _READ_ONLY)
    POINTER_ARRAY_GROUPED_SUPPORT = 23, "i", _READ_ONLY, 130200


ARRAYS: Final = frozenset((AlgoCapAttribute.TILE_IDS, AlgoCapAttribute.STAGES_IDS))
"""The capabilities that have several values."""
