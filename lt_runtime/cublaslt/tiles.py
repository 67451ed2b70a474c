"""The enum `MatmulTile` of cuBLASLt's tiles. This module is imported only when the enum is first used."""

from __future__ import annotations

import enum

from lt_runtime.cublaslt.enums import TILE_NAMES

MatmulTile = enum.IntEnum("MatmulTile", TILE_NAMES, start=0)
MatmulTile.__doc__ = "`cublasLtMatmulTile_t`, prefix CUBLASLT_MATMUL_TILE_: rows × columns of D that a block computes."
