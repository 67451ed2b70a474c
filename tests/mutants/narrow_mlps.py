"""Faults of narrow MLPs in one kernel a pass."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Fault, fault

_FORWARD: Final = "cuda_src/mlp_fwd.cu"
_BACKWARD: Final = "cuda_src/mlp_bwd.cu"
_SUMS: Final = "tests/host_kernels/test_mlp.py::test_exact_sums[0-dims3-129]"
_ON_GPU: Final = "tests/cpu/test_fake_gpu_narrow.py"

FAULTS: Final[tuple[Fault, ...]] = (
    fault(
        "padded columns keep infinities",
        "cuda_src/mlp.cuh",
        "if (columns == WIDTH) return;",
        "return;",
        "tests/host_kernels/test_mlp.py::test_infinities_stay_in_their_rows_and_columns",
    ),
    fault(
        "rows beyond the last are copied",
        "cuda_src/mlp.cuh",
        "const bool exists = row < left;",
        "const bool exists = row <= left;",
        "tests/host_kernels/test_mlp.py::test_exact_sums[0-dims1-70]",
    ),
    fault(
        "a warp of mlp_fwd goes on with its first rows",
        _FORWARD,
        "copy_x(turn ^ 1, row + stride);",
        "copy_x(turn ^ 1, row);",
        "tests/host_kernels/test_mlp.py::test_blocks_go_from_tile_to_tile[0]",
    ),
    fault(
        "gradients of a hidden layer take the place of what is still read",
        _BACKWARD,
        "i + 1 < hidden ? tile_of(i + 1) : tile_of(hidden + 1)",
        "i + 1 < hidden ? tile_of(i + 1) : tile_of(i)",
        _SUMS,
    ),
    fault(
        "the last tile's gradients of the first layer are lost",
        _BACKWARD,
        "  if (!has_rows) {\n    add_products(",
        "  if (false) {\n    add_products(",
        _SUMS,
    ),
    fault(
        "each unit of sums has a bias",
        _BACKWARD,
        "    if (first == 0) {\n      if (is_whole)",
        "    if (true) {\n      if (is_whole)",
        "tests/host_kernels/test_mlp.py::test_exact_sums[0-dims9-200]",
    ),
    fault(
        "gradients of an MLP replace each other",
        "cuda_src/mlp_gradients.cu",
        "p.accumulate ? to_float(*place) + sum : sum",
        "sum",
        "tests/host_kernels/test_mlp.py::test_gradients_are_added",
    ),
    fault(
        "a part of the blocks' sums is left out",
        "cuda_src/mlp_gradients.cu",
        "for (int i = 1; i < kParts; ++i)",
        "for (int i = 2; i < kParts; ++i)",
        "tests/host_kernels/test_mlp.py::test_the_sums_of_many_blocks_are_added_up",
    ),
    fault(
        "training leaves dropout out of a narrow MLP",
        "lt_runtime/training/narrow.py",
        "(backward and any(each.dropout for each in self._layers))",
        "False",
        f"{_ON_GPU}::test_inference_has_no_dropout_and_training_has_it",
    ),
    fault(
        "what was measured of a narrow MLP is not asked for again",
        "lt_runtime/training/narrow.py",
        "if self._generation is not cache.generation:",
        "if self._generation is None:",
        f"{_ON_GPU}::test_the_plan_cache_decides",
    ),
    fault(
        "gradients of micro-batches of a narrow MLP replace each other",
        "lt_runtime/training/body.py",
        "narrow.backward(x, gradient, accumulate=index > 0, stream=stream)",
        "narrow.backward(x, gradient, accumulate=False, stream=stream)",
        f"{_ON_GPU}::test_a_step_makes_the_layers_gradients[{{'accumulate': 2}}]",
    ),
    fault(
        "the plan cache does not decide how a narrow MLP runs",
        "lt_runtime/plans/mlp.py",
        "is_likely_faster(problem, device) if entry is None else entry.strategy[ONE_KERNEL] is True",
        "is_likely_faster(problem, device)",
        f"{_ON_GPU}::test_the_plan_cache_decides",
    ),
    fault(
        "a slower way to run a narrow MLP is taken",
        "lt_runtime/tuner/chain_search.py",
        "by_layer = wrong is not None or fastest(timings, True)",
        "by_layer = wrong is not None",
        f"{_ON_GPU}::test_tuning[kernel-18]",
    ),
)
