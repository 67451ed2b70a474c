"""Bindings to cuBLASLt through ctypes, usable on their own.

The library is found and loaded on first use. Every call's status is checked. Names are the header's
(`cublasLt.h`) without their prefixes. What is bound so far is what a matrix product with an epilogue needs.
"""

from lt_runtime.cublaslt.descriptors import MatmulDesc, MatmulPreference, MatrixLayout
from lt_runtime.cublaslt.enums import (
    AlgoConfigAttribute,
    ComputeType,
    DataType,
    Epilogue,
    MatmulDescAttribute,
    MatrixLayoutAttribute,
    Operation,
    PreferenceAttribute,
    ReductionScheme,
    Status,
)
from lt_runtime.cublaslt.known_bad import Candidate, is_known_bad
from lt_runtime.cublaslt.library import get_version, handle, library_path
from lt_runtime.cublaslt.matmul import Algorithm, algo_config, get_heuristics, matmul

__all__ = [
    "AlgoConfigAttribute",
    "Algorithm",
    "Candidate",
    "ComputeType",
    "DataType",
    "Epilogue",
    "MatmulDesc",
    "MatmulDescAttribute",
    "MatmulPreference",
    "MatrixLayout",
    "MatrixLayoutAttribute",
    "Operation",
    "PreferenceAttribute",
    "ReductionScheme",
    "Status",
    "algo_config",
    "get_heuristics",
    "get_version",
    "handle",
    "is_known_bad",
    "library_path",
    "matmul",
]
