"""Every attribute: the C type that it is written and read as, what it may be, since when it is there.

The types are the header's, but where its comment disagrees with the library: the three GROUPED preferences are said to
be uint32_t and are kept in 8 bytes by every version that has them (13.2 to 13.10).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lt_runtime.cublaslt import enums, shapes
from lt_runtime.cublaslt.attribute_ids import (
    AlgoCapAttribute,
    AlgoConfigAttribute,
    EmulationDescAttribute,
    MatmulDescAttribute,
    MatrixLayoutAttribute,
    MatrixTransformDescAttribute,
    PreferenceAttribute,
)
from lt_runtime.cublaslt.values import (
    Accepted,
    Attribute,
    address,
    anything,
    at_least,
    between,
    fraction,
    mask,
    member,
    nothing,
    one_of,
    power_of_two,
)

_M, _L, _P = MatmulDescAttribute, MatrixLayoutAttribute, PreferenceAttribute
_R = enums.ReductionScheme
_TYPE: Final = member(enums.DataType)
_OPERATION: Final = member(enums.Operation)
_COUNT: Final = at_least(0)
_UNSET: Final = -1
# Below 16 bytes the heuristic's kernels fault: it looks at these two pointers' values, not at preferences.
_VECTOR: Final = Attribute("Q", address(16))
_SCALAR: Final = Attribute("Q", address(4))  # one FP32, or a block of scales, which the library wants at 16
_STRIDE: Final = Attribute("q", _COUNT)
_SCALE_MODE: Final = Attribute("i", member(enums.MatmulMatrixScale), 120800)


def _tile() -> Accepted:
    from lt_runtime.cublaslt.tiles import MatmulTile  # here, because so many members take milliseconds to make

    return member(MatmulTile)


MATMUL_DESC: Final[Mapping[MatmulDescAttribute, Attribute]] = {
    _M.COMPUTE_TYPE: Attribute("i", member(enums.ComputeType)),
    _M.SCALE_TYPE: Attribute("i", _TYPE),
    _M.POINTER_MODE: Attribute("i", member(enums.PointerMode)),
    _M.TRANSA: Attribute("i", _OPERATION),
    _M.TRANSB: Attribute("i", _OPERATION),
    _M.TRANSC: Attribute("i", one_of(enums.Operation.N)),
    _M.FILL_MODE: Attribute("i", member(enums.FillMode)),
    _M.EPILOGUE: Attribute("I", member(enums.Epilogue)),
    _M.BIAS_POINTER: _VECTOR,
    _M.BIAS_BATCH_STRIDE: _STRIDE,
    _M.EPILOGUE_AUX_POINTER: _VECTOR,
    _M.EPILOGUE_AUX_LD: _STRIDE,
    _M.EPILOGUE_AUX_BATCH_STRIDE: _STRIDE,
    _M.ALPHA_VECTOR_BATCH_STRIDE: _STRIDE,
    _M.SM_COUNT_TARGET: Attribute("i", _COUNT),
    _M.A_SCALE_POINTER: _SCALAR,
    _M.B_SCALE_POINTER: _SCALAR,
    _M.C_SCALE_POINTER: _SCALAR,
    _M.D_SCALE_POINTER: _SCALAR,
    _M.AMAX_D_POINTER: _SCALAR,
    _M.EPILOGUE_AUX_DATA_TYPE: Attribute("i", member(enums.DataType, _UNSET)),
    _M.EPILOGUE_AUX_SCALE_POINTER: _SCALAR,
    _M.EPILOGUE_AUX_AMAX_POINTER: _SCALAR,
    _M.FAST_ACCUM: Attribute("b", between(0, 1)),
    _M.BIAS_DATA_TYPE: Attribute("i", member(enums.DataType, _UNSET)),
    _M.A_SCALE_MODE: _SCALE_MODE,
    _M.B_SCALE_MODE: _SCALE_MODE,
    _M.C_SCALE_MODE: _SCALE_MODE,
    _M.D_SCALE_MODE: _SCALE_MODE,
    _M.EPILOGUE_AUX_SCALE_MODE: _SCALE_MODE,
    _M.D_OUT_SCALE_POINTER: Attribute("Q", address(4), 120800),
    _M.D_OUT_SCALE_MODE: _SCALE_MODE,
    _M.EMULATION_DESCRIPTOR: Attribute("Q", address(8), 130100),  # 12.9 and 13.0 kept something else there
    _M.ALPHA_BATCH_STRIDE: Attribute("q", _COUNT, 130200),
    _M.BETA_BATCH_STRIDE: Attribute("q", _COUNT, 130200),
    _M.BATCH_INVARIANCE_FLAGS: Attribute("I", member(enums.BatchInvariance), 130800),
}

MATRIX_LAYOUT: Final[Mapping[MatrixLayoutAttribute, Attribute]] = {
    _L.TYPE: Attribute("I", _TYPE),
    _L.ORDER: Attribute("i", member(enums.Order)),
    _L.ROWS: Attribute("Q", _COUNT),
    _L.COLS: Attribute("Q", _COUNT),
    _L.LD: _STRIDE,
    _L.BATCH_COUNT: Attribute("i", at_least(1)),
    _L.STRIDED_BATCH_OFFSET: _STRIDE,
    _L.PLANE_OFFSET: Attribute("q", anything()),
    _L.BATCH_MODE: Attribute("I", member(enums.BatchMode)),
    _L.GROUPED_ROWS_ARRAY: Attribute("Q", address(4), 130200),
    _L.GROUPED_COLS_ARRAY: Attribute("Q", address(4), 130200),
    _L.GROUPED_LD_ARRAY: Attribute("Q", address(4), 130200),
    _L.GROUPED_ROWS_COLS_ARRAY_INTEGER_WIDTH: Attribute("i", member(enums.IntegerWidth), 130200),
    _L.GROUPED_LD_ARRAY_INTEGER_WIDTH: Attribute("i", member(enums.IntegerWidth), 130200),
}

PREFERENCE: Final[Mapping[PreferenceAttribute, Attribute]] = {
    _P.SEARCH_MODE: Attribute("I", member(enums.MatmulSearch)),
    _P.MAX_WORKSPACE_BYTES: Attribute("Q", _COUNT),
    _P.REDUCTION_SCHEME_MASK: Attribute("I", mask(enums.ReductionScheme)),
    _P.MIN_ALIGNMENT_A_BYTES: Attribute("I", power_of_two()),
    _P.MIN_ALIGNMENT_B_BYTES: Attribute("I", power_of_two()),
    _P.MIN_ALIGNMENT_C_BYTES: Attribute("I", power_of_two()),
    _P.MIN_ALIGNMENT_D_BYTES: Attribute("I", power_of_two()),
    _P.MAX_WAVES_COUNT: Attribute("f", fraction()),
    _P.IMPL_MASK: Attribute("Q", _COUNT),
    _P.GROUPED_AVERAGE_REDUCTION_DIM: Attribute("Q", _COUNT, 130200),
    _P.GROUPED_DESC_D_AVERAGE_ROWS: Attribute("Q", _COUNT, 130200),
    _P.GROUPED_DESC_D_AVERAGE_COLS: Attribute("Q", _COUNT, 130200),
}

MATRIX_TRANSFORM_DESC: Final[Mapping[MatrixTransformDescAttribute, Attribute]] = {
    MatrixTransformDescAttribute.SCALE_TYPE: Attribute("i", _TYPE),
    MatrixTransformDescAttribute.POINTER_MODE: Attribute("i", member(enums.PointerMode)),
    MatrixTransformDescAttribute.TRANSA: Attribute("i", _OPERATION),
    MatrixTransformDescAttribute.TRANSB: Attribute("i", _OPERATION),
}

EMULATION_DESC: Final[Mapping[EmulationDescAttribute, Attribute]] = {
    EmulationDescAttribute.STRATEGY: Attribute("i", member(enums.EmulationStrategy)),
    EmulationDescAttribute.SPECIAL_VALUES_SUPPORT: Attribute("i", mask(enums.EmulationSpecialValues)),
    EmulationDescAttribute.FIXEDPOINT_MANTISSA_CONTROL: Attribute("i", member(enums.EmulationMantissaControl)),
    EmulationDescAttribute.FIXEDPOINT_MAX_MANTISSA_BIT_COUNT: Attribute("i", _COUNT),
    EmulationDescAttribute.FIXEDPOINT_MANTISSA_BIT_OFFSET: Attribute("i", anything()),
    EmulationDescAttribute.FIXEDPOINT_MANTISSA_BIT_COUNT_POINTER: _SCALAR,
}

ALGO_CONFIG: Final[Mapping[AlgoConfigAttribute, Attribute]] = {
    AlgoConfigAttribute.ID: Attribute("i", nothing("it is fixed by algo_init")),
    AlgoConfigAttribute.TILE_ID: Attribute("I", _tile),
    AlgoConfigAttribute.SPLITK_NUM: Attribute("i", _COUNT),
    AlgoConfigAttribute.REDUCTION_SCHEME: Attribute("I", one_of(_R.NONE, _R.INPLACE, _R.COMPUTE_TYPE, _R.OUTPUT_TYPE)),
    AlgoConfigAttribute.CTA_SWIZZLING: Attribute("I", between(0, 1)),
    AlgoConfigAttribute.CUSTOM_OPTION: Attribute("I", _COUNT),
    AlgoConfigAttribute.STAGES_ID: Attribute("I", member(shapes.MatmulStages)),
    AlgoConfigAttribute.INNER_SHAPE_ID: Attribute("H", member(shapes.MatmulInnerShape)),
    AlgoConfigAttribute.CLUSTER_SHAPE_ID: Attribute("H", member(shapes.ClusterShape)),
}

_FLAG: Final = Attribute("i", nothing("it is read only"))
_BYTES: Final = Attribute("I", nothing("it is read only"))
_C: Final = AlgoCapAttribute

ALGO_CAP: Final[Mapping[AlgoCapAttribute, Attribute]] = {
    _C.SPLITK_SUPPORT: _FLAG,
    _C.REDUCTION_SCHEME_MASK: Attribute("I", mask(enums.ReductionScheme)),
    _C.CTA_SWIZZLING_SUPPORT: _BYTES,
    _C.STRIDED_BATCH_SUPPORT: _FLAG,
    _C.OUT_OF_PLACE_RESULT_SUPPORT: _FLAG,
    _C.UPLO_SUPPORT: _FLAG,
    _C.TILE_IDS: Attribute("I", _tile),
    _C.CUSTOM_OPTION_MAX: _FLAG,
    _C.CUSTOM_MEMORY_ORDER: _FLAG,
    _C.POINTER_MODE_MASK: Attribute("I", mask(enums.PointerModeMask)),
    _C.EPILOGUE_MASK: _BYTES,
    _C.STAGES_IDS: Attribute("I", member(shapes.MatmulStages)),
    _C.LD_NEGATIVE: _FLAG,
    _C.NUMERICAL_IMPL_FLAGS: Attribute("Q", mask(enums.NumericalImplFlags)),
    _C.MIN_ALIGNMENT_A_BYTES: _BYTES,
    _C.MIN_ALIGNMENT_B_BYTES: _BYTES,
    _C.MIN_ALIGNMENT_C_BYTES: _BYTES,
    _C.MIN_ALIGNMENT_D_BYTES: _BYTES,
    _C.POINTER_ARRAY_BATCH_SUPPORT: _FLAG,
    _C.FLOATING_POINT_EMULATION_SUPPORT: _FLAG,
    _C.POINTER_ARRAY_GROUPED_SUPPORT: Attribute("i", nothing("it is read only"), 130200),
}
ARRAYS: Final = frozenset((_C.TILE_IDS, _C.STAGES_IDS))
"""The capabilities that are arrays."""
