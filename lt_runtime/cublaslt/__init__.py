"""Bindings to cuBLASLt through ctypes, which can be used without the rest of the package.

The first call finds and loads the library, of CUDA 12 or 13: the installed one, or the file that the environment
variable LT_RUNTIME_CUBLASLT names. The library itself refuses an attribute whose width in bytes differs from the
bindings'. The status of every call is checked; an error names the call, the status and the library's explanation. Names
are those of the header (`cublasLt.h`) without their prefixes. A name that would begin with a digit keeps the last word
of the prefix: `ComputeType.COMPUTE_32F`. `set` and `get` write and read attributes; a value that the header does not
define is refused by name, though the library itself would accept it. Descriptors and `Handle` are context managers.

All functions of the headers of 13.0 to 13.10:

| function | here |
| --- | --- |
| cublasLtCreate | `Handle`, `handle` |
| cublasLtDestroy | `Handle.close` |
| cublasLtGetVersion | `get_version` |
| cublasLtGetCudartVersion | `get_cudart_version` |
| cublasLtGetProperty | not bound: `get_version` has all parts |
| cublasLtGetStatusName | `get_status_name` |
| cublasLtGetStatusString | `get_status_string` |
| cublasLtHeuristicsCacheGetCapacity | `heuristics_cache_get_capacity` |
| cublasLtHeuristicsCacheSetCapacity | `heuristics_cache_set_capacity` |
| cublasLtDisableCpuInstructionsSetMask | not bound: no library up to 13.10 exports it |
| cublasLtMatmulDescCreate | `MatmulDesc` |
| cublasLtMatmulDescDestroy | `MatmulDesc.close` |
| cublasLtMatmulDescSetAttribute | `MatmulDesc.set` |
| cublasLtMatmulDescGetAttribute | `MatmulDesc.get` |
| cublasLtMatrixLayoutCreate | `MatrixLayout` |
| cublasLtGroupedMatrixLayoutCreate | `MatrixLayout.grouped`; since 13.2 |
| cublasLtMatrixLayoutDestroy | `MatrixLayout.close` |
| cublasLtMatrixLayoutSetAttribute | `MatrixLayout.set` |
| cublasLtMatrixLayoutGetAttribute | `MatrixLayout.get` |
| cublasLtMatmulPreferenceCreate | `MatmulPreference` |
| cublasLtMatmulPreferenceDestroy | `MatmulPreference.close` |
| cublasLtMatmulPreferenceSetAttribute | `MatmulPreference.set` |
| cublasLtMatmulPreferenceGetAttribute | `MatmulPreference.get` |
| cublasLtMatrixTransformDescCreate | `MatrixTransformDesc` |
| cublasLtMatrixTransformDescDestroy | `MatrixTransformDesc.close` |
| cublasLtMatrixTransformDescSetAttribute | `MatrixTransformDesc.set` |
| cublasLtMatrixTransformDescGetAttribute | `MatrixTransformDesc.get` |
| cublasLtEmulationDescCreate | `EmulationDesc`; since 13.1 |
| cublasLtEmulationDescDestroy | `EmulationDesc.close` |
| cublasLtEmulationDescSetAttribute | `EmulationDesc.set` |
| cublasLtEmulationDescGetAttribute | `EmulationDesc.get` |
| cublasLtMatmulAlgoGetHeuristic | `get_heuristics` |
| cublasLtMatmulAlgoGetHeuristicForStream | `get_heuristics` with `stream=`; since 13.5 |
| cublasLtMatmulAlgoGetIds | `algo_get_ids` |
| cublasLtMatmulAlgoInit | `algo_init` |
| cublasLtMatmulAlgoCheck | `algo_check` |
| cublasLtMatmulAlgoCheckForStream | `algo_check` with `stream=`; since 13.5 |
| cublasLtMatmulAlgoCapGetAttribute | `Algorithm.capability`, `Algorithm.capabilities` |
| cublasLtMatmulAlgoConfigSetAttribute | `Algorithm.set` |
| cublasLtMatmulAlgoConfigGetAttribute | `Algorithm.get` |
| cublasLtMatmul | `matmul`, `PreparedMatmul` |
| cublasLtMatrixTransform | `matrix_transform` |
| cublasLtLoggerSetCallback | `logger_set_callback` |
| cublasLtLoggerSetFile | not bound: takes a C `FILE *`; `logger_open_file` takes /dev/stderr and /dev/fd/N too |
| cublasLtLoggerOpenFile | `logger_open_file` |
| cublasLtLoggerSetLevel | `logger_set_level` |
| cublasLtLoggerSetMask | `logger_set_mask` |
| cublasLtLoggerForceDisable | `logger_force_disable` |
| cublasLtMatmulDescInit | not bound: writes into the caller's memory, of a size that changes between versions |
| cublasLtMatrixLayoutInit | not bound: the same |
| cublasLtGroupedMatrixLayoutInit | not bound: the same |
| cublasLtMatmulPreferenceInit | not bound: the same |
| cublasLtMatrixTransformDescInit | not bound: the same |
| cublasLtEmulationDescInit | not bound: the same |
| cublasLtMatmulDescInit_internal | not bound: called by the inline function of that name, "do not use directly" |
| cublasLtMatrixLayoutInit_internal | not bound: the same |
| cublasLtGroupedMatrixLayoutInit_internal | not bound: the same |
| cublasLtMatmulPreferenceInit_internal | not bound: the same |
| cublasLtMatrixTransformDescInit_internal | not bound: the same |
| cublasLtEmulationDescInit_internal | not bound: the same |
"""

# fmt: off
# isort: off
from typing import TYPE_CHECKING, Any

from lt_runtime.cublaslt.algorithms import Algorithm, algo_check, algo_get_ids, algo_init, get_heuristics, is_refusal
from lt_runtime.cublaslt.attributes import (
    AlgoCapAttribute, AlgoConfigAttribute, EmulationDescAttribute, MatmulDescAttribute, MatrixLayoutAttribute,
    MatrixTransformDescAttribute, PreferenceAttribute,
)
from lt_runtime.cublaslt.descriptors import (
    EmulationDesc, MatmulDesc, MatmulPreference, MatrixLayout, MatrixTransformDesc,
)
from lt_runtime.cublaslt.enums import (
    BatchInvariance, BatchMode, ClusterShape, ComputeType, DataType, EmulationMantissaControl, EmulationSpecialValues,
    EmulationStrategy, Epilogue, FillMode, IntegerWidth, MatmulInnerShape, MatmulMatrixScale,
    MatmulSearch, MatmulStages, NumericalImplFlags, Operation, Order, PointerMode, PointerModeMask, ReductionScheme,
    Status,
)
from lt_runtime.cublaslt.execute import PreparedMatmul, matmul, matrix_transform
from lt_runtime.cublaslt.known_bad import Candidate, is_inaccurate, is_known_bad
from lt_runtime.cublaslt.library import (
    Handle, get_cudart_version, get_status_name, get_status_string, get_version, handle, heuristics_cache_get_capacity,
    heuristics_cache_set_capacity, library_path, logger_force_disable, logger_open_file, logger_set_callback,
    logger_set_level, logger_set_mask,
)
from lt_runtime.cublaslt.validation import validate
# isort: on

if TYPE_CHECKING:
    from lt_runtime.cublaslt.tiles import MatmulTile

__all__ = [
    "AlgoCapAttribute", "AlgoConfigAttribute", "Algorithm", "BatchInvariance", "BatchMode", "Candidate", "ClusterShape",
    "ComputeType", "DataType", "EmulationDesc", "EmulationDescAttribute", "EmulationMantissaControl",
    "EmulationSpecialValues", "EmulationStrategy", "Epilogue", "FillMode", "Handle", "IntegerWidth", "MatmulDesc",
    "MatmulDescAttribute", "MatmulInnerShape", "MatmulMatrixScale", "MatmulPreference", "MatmulSearch", "MatmulStages",
    "MatmulTile", "MatrixLayout", "MatrixLayoutAttribute", "MatrixTransformDesc", "MatrixTransformDescAttribute",
    "NumericalImplFlags", "Operation", "Order", "PointerMode", "PointerModeMask", "PreferenceAttribute",
    "PreparedMatmul", "ReductionScheme", "Status", "algo_check", "algo_get_ids", "algo_init", "get_cudart_version",
    "get_heuristics", "get_status_name", "get_status_string", "get_version", "handle", "heuristics_cache_get_capacity",
    "heuristics_cache_set_capacity", "is_inaccurate", "is_known_bad", "is_refusal", "library_path",
    "logger_force_disable", "logger_open_file", "logger_set_callback", "logger_set_level", "logger_set_mask", "matmul",
    "matrix_transform", "validate",
]
# fmt: on


def __getattr__(name: str) -> Any:
    if name != "MatmulTile":
        raise AttributeError(f"module 'lt_runtime.cublaslt' has no attribute {name!r}")
    # Imported at the first use, because making the enum takes milliseconds.
    from lt_runtime.cublaslt.tiles import MatmulTile

    return MatmulTile
