"""Faults of narrow MLPs in one kernel a pass."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Fault, fault

_FORWARD: Final = "cuda_src/mlp_fwd.cu"
_BACKWARD: Final = "cuda_src/mlp_bwd.cu"
_TESTS: Final = "tests/host_kernels/test_mlp.py"

FAULTS: Final[tuple[Fault, ...]] = (
    fault(
        "padded columns keep infinities",
        "cuda_src/mlp.cuh",
        "if (columns == WIDTH) return;",
        "return;",
        f"{_TESTS}::test_infinities_stay_in_their_rows_and_columns",
    ),
    fault(
        "rows beyond the last are copied",
        "cuda_src/mlp.cuh",
        "const bool exists = row < left;",
        "const bool exists = row <= left;",
        f"{_TESTS}::test_exact_sums[0-dims1-70]",
    ),
    fault(
        "a warp of mlp_fwd goes on with its first rows",
        _FORWARD,
        "copy_x(turn ^ 1, row + stride);",
        "copy_x(turn ^ 1, row);",
        f"{_TESTS}::test_blocks_go_from_tile_to_tile[0]",
    ),
    fault(
        "a row warp writes before its last rows have been read",
        _BACKWARD,
        "if (chunk != first) wait_at_barrier(empty(warp), kTogether);",
        "if (chunk != first) pass_barrier(empty(warp), kTogether);",
        f"{_TESTS}::test_blocks_go_from_tile_to_tile[0]",
    ),
    fault(
        "the inputs of one tile are those of the tile before",
        _BACKWARD,
        "if (++row_warp == ROW_WARPS) row_warp = 0, turn ^= 1;",
        "if (++row_warp == ROW_WARPS) row_warp = 0;",
        f"{_TESTS}::test_blocks_go_from_tile_to_tile[0]",
    ),
    fault(
        "a part goes on below its first layer",
        _BACKWARD,
        "if (i == FIRST) break;",
        "if (i == 0) break;",
        f"{_TESTS}::test_parts_make_what_one_launch_does",
    ),
    fault(
        "rows beyond the last have a loss",
        _BACKWARD,
        "if (!has_row || at >= columns) left = LossTerm{};",
        "if (at >= columns) left = LossTerm{};",
        f"{_TESTS}::test_losses",
    ),
    fault(
        "a loss is that of sums that nobody has rounded",
        _BACKWARD,
        "Pair<SCALAR>::unpack(Pair<SCALAR>::pack(float2{four[i % 2 * 2], four[i % 2 * 2 + 1]}));",
        "float2{four[i % 2 * 2], four[i % 2 * 2 + 1]};",
        f"{_TESTS}::test_a_loss_is_that_of_rounded_outputs",
    ),
    fault(
        "gradients of an MLP replace each other",
        "cuda_src/mlp_gradients.cu",
        "p.accumulate ? to_float(*place) + sum : sum",
        "sum",
        f"{_TESTS}::test_gradients_are_added",
    ),
    fault(
        "a part of the blocks' sums is left out",
        "cuda_src/mlp_gradients.cu",
        "for (int i = 1; i < kParts; ++i)",
        "for (int i = 2; i < kParts; ++i)",
        f"{_TESTS}::test_the_sums_of_many_blocks_are_added_up",
    ),
)
