"""Faults of narrow MLPs in one kernel a pass."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Table

_TESTS: Final = "tests/host_kernels/test_mlp.py"

FAULTS: Final[Table] = {
    "cuda_src/mlp.cuh": {
        "padded columns keep infinities": (
            "if (columns == WIDTH) return;",
            "return;",
            f"{_TESTS}::test_infinities_stay_in_their_rows_and_columns",
        ),
        "rows beyond the last are copied": (
            "const bool exists = row < left;",
            "const bool exists = row <= left;",
            f"{_TESTS}::test_exact_sums[0-dims1-70]",
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
    },
}
