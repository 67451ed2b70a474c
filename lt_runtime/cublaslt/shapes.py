"""Stages and shapes that algorithms are made of: the values of `cublasLt.h`, several to a line."""

from __future__ import annotations

import enum


class MatmulStages(enum.IntEnum):
    """`cublasLtMatmulStages_t`, prefix CUBLASLT_MATMUL_STAGES_: depth along K × number of buffers in shared memory."""

    UNDEFINED, STAGES_16x1, STAGES_16x2, STAGES_16x3, STAGES_16x4, STAGES_16x5, STAGES_16x6 = 0, 1, 2, 3, 4, 5, 6
    STAGES_32x1, STAGES_32x2, STAGES_32x3, STAGES_32x4, STAGES_32x5, STAGES_32x6, STAGES_64x1 = 7, 8, 9, 10, 11, 12, 13
    STAGES_64x2, STAGES_64x3, STAGES_64x4, STAGES_64x5, STAGES_64x6, STAGES_128x1 = 14, 15, 16, 17, 18, 19
    STAGES_128x2, STAGES_128x3, STAGES_128x4, STAGES_128x5, STAGES_128x6, STAGES_32x10 = 20, 21, 22, 23, 24, 25
    STAGES_8x4, STAGES_16x10, STAGES_8x5, STAGES_8x3, STAGES_8xAUTO, STAGES_16xAUTO = 26, 27, 28, 31, 32, 33
    STAGES_32xAUTO, STAGES_64xAUTO, STAGES_128xAUTO, STAGES_256xAUTO, STAGES_768xAUTO = 34, 35, 36, 37, 38


class MatmulInnerShape(enum.IntEnum):
    """`cublasLtMatmulInnerShape_t`, prefix CUBLASLT_MATMUL_INNER_SHAPE_."""

    UNDEFINED, MMA884, MMA1684, MMA1688, MMA16816 = 0, 1, 2, 3, 4


class ClusterShape(enum.IntEnum):
    """`cublasLtClusterShape_t`, prefix CUBLASLT_CLUSTER_SHAPE_: thread blocks in a cluster."""

    AUTO, SHAPE_1x1x1, SHAPE_2x1x1, SHAPE_4x1x1, SHAPE_1x2x1, SHAPE_2x2x1, SHAPE_4x2x1 = 0, 2, 3, 4, 5, 6, 7
    SHAPE_1x4x1, SHAPE_2x4x1, SHAPE_4x4x1, SHAPE_8x1x1, SHAPE_1x8x1, SHAPE_8x2x1, SHAPE_2x8x1 = 8, 9, 10, 11, 12, 13, 14
    SHAPE_16x1x1, SHAPE_1x16x1, SHAPE_3x1x1, SHAPE_5x1x1, SHAPE_6x1x1, SHAPE_7x1x1 = 15, 16, 17, 18, 19, 20
    SHAPE_9x1x1, SHAPE_10x1x1, SHAPE_11x1x1, SHAPE_12x1x1, SHAPE_13x1x1, SHAPE_14x1x1 = 21, 22, 23, 24, 25, 26
    SHAPE_15x1x1, SHAPE_3x2x1, SHAPE_5x2x1, SHAPE_6x2x1, SHAPE_7x2x1, SHAPE_1x3x1 = 27, 28, 29, 30, 31, 32
    SHAPE_2x3x1, SHAPE_3x3x1, SHAPE_4x3x1, SHAPE_5x3x1, SHAPE_3x4x1, SHAPE_1x5x1 = 33, 34, 35, 36, 37, 38
    SHAPE_2x5x1, SHAPE_3x5x1, SHAPE_1x6x1, SHAPE_2x6x1, SHAPE_1x7x1, SHAPE_2x7x1 = 39, 40, 41, 42, 43, 44
    SHAPE_1x9x1, SHAPE_1x10x1, SHAPE_1x11x1, SHAPE_1x12x1, SHAPE_1x13x1, SHAPE_1x14x1 = 45, 46, 47, 48, 49, 50
    SHAPE_1x15x1 = 51
