"""The tiles that an algorithm may work with. The module is imported when the enum is used for the first time."""

from __future__ import annotations

import enum

from lt_runtime.cublaslt.enums import TILE_NAMES

MatmulTile = enum.IntEnum("MatmulTile", TILE_NAMES, start=0)
MatmulTile.__doc__ = "`cublasLtMatmulTile_t`, prefix CUBLASLT_MATMUL_TILE_: rows × columns of D that a block computes."
