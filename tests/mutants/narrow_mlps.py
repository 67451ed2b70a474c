"""Faults of the kernels that compute a narrow MLP's whole forward or backward pass."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Table

_TESTS: Final = "tests/host_kernels/test_mlp.py"
_BEYOND: Final = f"{_TESTS}::test_infinity_and_nan_stay_in_their_rows_and_columns"
_UNEVEN: Final = f"{_TESTS}::test_exact_sums[0-dims12-31]"

FAULTS: Final[Table] = {
    "cuda_src/mlp.cuh": {
        "padded columns keep infinities": (
            "if (columns == WIDTH) return;",
            "return;",
            f"{_BEYOND}[inf]",
        ),
        "rows beyond the last are copied": (
            "const bool exists = row < left;",
            "const bool exists = row <= left;",
            f"{_TESTS}::test_exact_sums[0-dims1-70]",
        ),
        "rows at any distance are taken for aligned": (
            "columns % kOctet == 0 && m.row_stride % kOctet == 0 &&",
            "columns % kOctet == 0 &&",
            f"{_TESTS}::test_any_layout[placement3]",
        ),
    },
    "cuda_src/mma.cuh": {
        "on the host a ReLU loses NaN": (
            "float2{x <= 0.0f ? 0.0f : x, y <= 0.0f ? 0.0f : y}",
            "float2{x > 0.0f ? x : 0.0f, y > 0.0f ? y : 0.0f}",
            f"{_BEYOND}[nan]",
        ),
    },
    "cuda_src/mlp_fwd.cu": {
        "a warp of mlp_fwd goes on with its first rows": (
            "copy_x(turn ^ 1, row + stride);",
            "copy_x(turn ^ 1, row);",
            f"{_TESTS}::test_blocks_go_from_tile_to_tile[0]",
        ),
    },
    "cuda_src/mlp_bwd.cu": {
        "a row warp writes before its last rows have been read": (
            "if (chunk != first) wait_at_barrier(empty(warp), kTogether);",
            "if (chunk != first) pass_barrier(empty(warp), kTogether);",
            f"{_TESTS}::test_blocks_go_from_tile_to_tile[0]",
        ),
        "the inputs of one tile are those of the tile before": (
            "if (++row_warp == ROW_WARPS) row_warp = 0, turn ^= 1;",
            "if (++row_warp == ROW_WARPS) row_warp = 0;",
            f"{_TESTS}::test_blocks_go_from_tile_to_tile[0]",
        ),
        "a part goes on below its first layer": (
            "if (i == FIRST) break;",
            "if (i == 0) break;",
            f"{_TESTS}::test_parts_make_what_one_launch_does",
        ),
        "every micro-batch of a table is the first": (
            "rows_from(p.table[0], p.first)",
            "rows_from(p.table[0], 0)",
            "tests/cpu/test_fake_gpu_narrow.py::test_a_graph_reads_batches_in_place[16-0-16-0-3]",
        ),
        "GELU's derivative is its output": (
            "return Activated{y, s + (y - y * s) *",
            "return Activated{y, y + (y - y * s) *",
            f"{_TESTS}::test_activations",
        ),
        "rows beyond the last have a loss": (
            "if (!has_row || at >= columns) left = LossTerm{};",
            "if (at >= columns) left = LossTerm{};",
            f"{_TESTS}::test_losses",
        ),
        "a loss is that of sums that nobody has rounded": (
            "Pair<SCALAR>::unpack(Pair<SCALAR>::pack(float2{four[i % 2 * 2], four[i % 2 * 2 + 1]}));",
            "float2{four[i % 2 * 2], four[i % 2 * 2 + 1]};",
            f"{_TESTS}::test_a_loss_is_that_of_rounded_outputs",
        ),
        "a bias gradient sums the second column of tiles": (
            "if (j == 0) multiply_add",
            "if (j == 1) multiply_add",
            _UNEVEN,
        ),
        "a chunk that lacks a row is copied as a whole one": (
            "columns == INPUTS && first + kChunk <= p.rows &&",
            "columns == INPUTS && first + kChunk <= p.rows + 1 &&",
            _UNEVEN,
        ),
        "the derivative of a ReLU is 0 at NaN": (
            "is_positive = __hneu2(",
            "is_positive = __hne2(",
            f"{_BEYOND}[nan]",
        ),
    },
    "cuda_src/mlp_gradients.cu": {
        "gradients of an MLP replace each other": (
            "p.accumulate ? to_float(*place) + sum : sum",
            "sum",
            f"{_TESTS}::test_gradients_are_added",
        ),
        "a part of the blocks' sums is left out": (
            "for (int i = 1; i < kParts; ++i)",
            "for (int i = 2; i < kParts; ++i)",
            f"{_TESTS}::test_the_sums_of_many_blocks_are_added_up",
        ),
        "sums are read while their kernel may still run": (
            "  wait_for_predecessor();\n",
            "",
            "tests/cpu/kernels/test_kernel.py::test_a_kernel_waits_before_it_reads_what_a_predecessor_writes[mlp_gradients]",
        ),
    },
}
