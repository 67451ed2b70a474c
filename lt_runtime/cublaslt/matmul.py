"""Heuristics and the matrix product itself."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

from lt_runtime.cublaslt.descriptors import MatmulDesc, MatmulPreference, MatrixLayout
from lt_runtime.cublaslt.enums import AlgoConfigAttribute, Status
from lt_runtime.cublaslt.library import call, check, function

_ALGO_BYTES: Final = 64


class _HeuristicResult(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`, 96 bytes."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * (_ALGO_BYTES // 8)),
        ("workspace_size", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves_count", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm for one matrix product.

    Attributes:
        blob: the 64 opaque bytes of `cublasLtMatmulAlgo_t`, good for one version of the library.
        workspace_size: bytes of workspace it needs.
        waves_count: how many times it fills the GPU; 1.0 is one full wave.
    """

    blob: bytes
    workspace_size: int
    waves_count: float


def get_heuristics(
    handle: int,
    desc: MatmulDesc,
    a: MatrixLayout,
    b: MatrixLayout,
    d: MatrixLayout,
    preference: MatmulPreference,
    count: int,
) -> list[Algorithm]:
    """At most `count` algorithms for D = op(A)·op(B) (C laid out as D), the most promising first.

    Empty where the library supports none.
    """
    results, returned = (_HeuristicResult * count)(), ctypes.c_int()
    name = "cublasLtMatmulAlgoGetHeuristic"
    layouts = (a.handle, b.handle, d.handle, d.handle)
    status = function(name)(
        handle, desc.handle, *layouts, preference.handle, count, ctypes.byref(results), ctypes.byref(returned)
    )
    if status == Status.NOT_SUPPORTED:
        return []
    check(name, status)
    return [
        Algorithm(bytes(result.algo), result.workspace_size, result.waves_count)
        for result in results[: returned.value]
        if result.state == Status.SUCCESS
    ]


def algo_config(algorithm: Algorithm, attribute: AlgoConfigAttribute) -> int:
    """One configuration attribute of an algorithm."""
    value, written = ctypes.c_int32(), ctypes.c_size_t()
    call(
        "cublasLtMatmulAlgoConfigGetAttribute",
        algorithm.blob,
        attribute,
        ctypes.byref(value),
        ctypes.sizeof(value),
        ctypes.byref(written),
    )
    return value.value


def matmul(
    handle: int,
    desc: MatmulDesc,
    alpha: float,
    a: int,
    a_layout: MatrixLayout,
    b: int,
    b_layout: MatrixLayout,
    beta: float,
    d: int,
    d_layout: MatrixLayout,
    algorithm: Algorithm,
    workspace: int,
    workspace_size: int,
    stream: int,
) -> None:
    """D = α·op(A)·op(B) + β·D with the descriptor's epilogue, on `stream`; α and β are FP32.

    Args:
        a, b, d, workspace: device addresses; the workspace is 256-byte aligned.
        workspace_size: its bytes, at least `algorithm.workspace_size`.
        stream: a stream handle.

    Raises:
        CublasLtError: the library refused the call.
    """
    alpha_cell, beta_cell = ctypes.c_float(alpha), ctypes.c_float(beta)
    call(
        "cublasLtMatmul",
        handle,
        desc.handle,
        ctypes.byref(alpha_cell),
        a,
        a_layout.handle,
        b,
        b_layout.handle,
        ctypes.byref(beta_cell),
        d,
        d_layout.handle,
        d,
        d_layout.handle,
        algorithm.blob,
        workspace,
        workspace_size,
        stream,
    )
