"""Replaces the functions of cuBLASLt that find algorithms and need a GPU: heuristic, ids, capabilities, check."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import pytest

from lt_runtime.cublaslt import (
    AlgoCapAttribute,
    AlgoConfigAttribute,
    Algorithm,
    MatmulTile,
    PreferenceAttribute,
    Status,
)
from lt_runtime.gpu.devices import DeviceInfo
from tests.support.cublaslt_recorder import Recorder, creates

WORKSPACE = 32 << 20
BOTH, NONE = 2, 0
"""Reduction masks: partial sums of a split K are added in the compute type, or K is not split."""
TILES = (MatmulTile.TILE_64x64, MatmulTile.TILE_128x128, MatmulTile.TILE_128x256, 5000)
STAGES = (35, 36)


class FakeLibrary:
    """Simulates the algorithm functions of cuBLASLt 13.1 on a Hopper GPU until the test ends.

    Attributes:
        offered: ids that the heuristic offers, by workspace limit and reduction mask; none for other pairs.
        asked: pairs of workspace limit and reduction mask, in the order of the queries.
        ids: ids that AlgoGetIds returns.
        refuses: whether AlgoCheck refuses an algorithm.
        workspace: bytes of workspace that an algorithm needs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        info = DeviceInfo(0, "pretended", 90, 132, 1 << 36)
        for module in ("products.matmul", "plans.priors"):
            monkeypatch.setattr(f"lt_runtime.{module}.device_info", lambda _: info)
        monkeypatch.setattr("lt_runtime.products.matmul.workspace_size", lambda _: WORKSPACE)
        self.offered: dict[tuple[int, int], list[int]] = {}
        self.asked: list[tuple[int, int]] = []
        self.ids: list[int] = []
        self.refuses: Callable[[Algorithm], bool] = lambda _: False
        self.workspace: Callable[[Algorithm], int] = lambda _: 0
        self.capabilities = {
            AlgoCapAttribute.TILE_IDS: struct.pack("4I", *TILES),
            AlgoCapAttribute.STAGES_IDS: struct.pack("2I", *STAGES),
            AlgoCapAttribute.SPLITK_SUPPORT: struct.pack("i", 1),
            AlgoCapAttribute.REDUCTION_SCHEME_MASK: struct.pack("I", 2),
            AlgoCapAttribute.CTA_SWIZZLING_SUPPORT: struct.pack("I", 1),
            AlgoCapAttribute.CUSTOM_OPTION_MAX: struct.pack("i", 1),
            AlgoCapAttribute.MIN_ALIGNMENT_D_BYTES: struct.pack("I", 16),
        }
        stand_ins = {
            "cublasLtCreate": creates(0x7000),
            "cublasLtMatmulAlgoGetHeuristic": self._query,
            "cublasLtMatmulAlgoGetIds": self._list,
            "cublasLtMatmulAlgoInit": self._init,
            "cublasLtMatmulAlgoCapGetAttribute": self._capability,
            "cublasLtMatmulAlgoCheck": self._check,
        }
        self.recorder = Recorder.install(monkeypatch, stand_ins)
        self.recorder.version = 130100

    def _query(self, *arguments: Any) -> int:
        limit, mask = ctypes.c_uint64(), ctypes.c_uint32()
        get, written = self.recorder._real.function("cublasLtMatmulPreferenceGetAttribute"), ctypes.c_size_t()
        for attribute, cell in (
            (PreferenceAttribute.MAX_WORKSPACE_BYTES, limit),
            (PreferenceAttribute.REDUCTION_SCHEME_MASK, mask),
        ):
            get(arguments[6], attribute, ctypes.byref(cell), ctypes.sizeof(cell), ctypes.byref(written))
        asked = limit.value, mask.value
        self.asked.append(asked)
        ids = self.offered.get(asked, [])
        for result, number in zip(arguments[8]._obj, ids, strict=False):
            result.algo[0] = number
        arguments[9]._obj.value = len(ids)
        return 0

    def _list(self, *arguments: Any) -> int:
        arguments[8]._obj[: len(self.ids)] = self.ids
        arguments[9]._obj.value = len(self.ids)
        return 0

    def _init(self, *arguments: Any) -> int:
        if arguments[7] not in self.ids:
            return int(Status.NOT_SUPPORTED)
        arguments[8][0] = arguments[7]
        return 0

    def _capability(self, _: Any, attribute: int, buffer: Any, size: int, written: Any) -> int:
        value = self.capabilities[AlgoCapAttribute(attribute)]
        written._obj.value = len(value)
        if size:
            ctypes.memmove(buffer, value, len(value))
        return 0

    def _check(self, *arguments: Any) -> int:
        algorithm, result = Algorithm(bytes(arguments[6])), arguments[7]._obj
        if self.refuses(algorithm):
            return int(Status.NOT_SUPPORTED)
        result.waves_count, result.workspace_size = waves(algorithm), self.workspace(algorithm)
        return 0


def waves(algorithm: Algorithm) -> float:
    """Waves of an algorithm for a column-major D of 1024×512, with one block on each of 132 multiprocessors."""
    rows, cols = algorithm.tile or (1024, 512)
    return float(-(-1024 // rows) * -(-512 // cols) * max(1, algorithm.get(AlgoConfigAttribute.SPLITK_NUM)) / 132)
