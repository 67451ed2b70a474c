"""Strategies of unmeasured problems, in the order in which to try them.

A table for each architecture, `priors_sm*.json`, says which comes first. `python -m benchmarks derive-priors` writes it
from measurements, and the table says which those were. Where a table says nothing, a fixed rule holds: fused where
nothing has to be kept, derivatives and bias gradients by our kernels, which on Hopper beat the library's epilogues up
to four times. An architecture without a table goes by that of the nearest.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.devices import device_info
from lt_runtime.kernels.tile_matmul import is_preferred
from lt_runtime.kernels.tiling import OCTET
from lt_runtime.layout import Layout
from lt_runtime.plans.strategies import (
    BackwardStrategy,
    ForwardStrategy,
    MadeBy,
    backward_strategies,
    forward_strategies,
)
from lt_runtime.problem import BackwardProblem, Compute, DType, ForwardProblem, Saved
from lt_runtime.store.keys import to_json

Tree: TypeAlias = Mapping[str, Any]
"""A strategy as in the plan cache; or a feature, a limit, and a tree each for below it and for the rest."""

RAGGED: Final = "ragged"
"""Prefix of the names of trees for products by our kernel for ragged rows."""
_FILES: Final = "priors_sm*.json"
OTHER: Final = "other"
"""Key of the backward tree for activations that cuBLASLt has no epilogue for: our kernel takes their derivatives."""
_TALL: Final = 1 << 15
"""Rows from which on products with whole rows are bound by the memory's bandwidth in FP32 and TF32."""
_FEW_COLUMNS: Final = OCTET
"""Columns up to which our kernel for narrow products makes ragged ones faster than the one for ragged rows."""


def forward_priors(problem: ForwardProblem, device: int) -> Iterable[ForwardStrategy]:
    """Forward strategies sorted: the table's choice first.

    Then come strategies in which our kernel does the work for which cuBLASLt would need an auxiliary output.
    """
    is_ours = is_preferred(problem.dtype, problem.x, problem.w.transposed, problem.y)
    wanted: dict[str, Any] = {}
    if problem.backward:
        tree = _tree(device, "forward", _kind(problem), problem.activation.name, is_ours=is_ours)
        wanted |= leaf_of(tree, forward_features(problem))
    if is_ours and problem.y.layout.cols <= _FEW_COLUMNS:
        wanted["epilogue"] = Epilogue.BIAS.value
    if wanted and problem.bias is None:
        wanted["epilogue"] = wanted["epilogue"].removesuffix("bias").removesuffix("_") or "none"
    strategies = sorted(forward_strategies(problem), key=lambda each: each.epilogue.has_aux_output)
    return sorted(strategies, key=lambda each: to_json(each) != wanted)


def backward_priors(problem: BackwardProblem, device: int) -> Iterable[BackwardStrategy]:
    """Backward strategies sorted by distance from the table's choice; ties prefer our kernels."""
    features, is_ours = backward_features(problem), is_preferred(problem.dtype, problem.dy, problem.w, problem.x)
    wanted = dict(leaf_of(_tree(device, "backward", _kind(problem), _below(problem), is_ours=is_ours), features))
    # Our kernel reads a dy that changes in any case, and sums it at hardly any cost. The library's kernels that sum
    # 16-bit rows which are no whole octets are far slower: BF16 256x7x6156 takes 245 µs, 9 without the sum (H200).
    sums_slowly = problem.dtype.itemsize == 2 and not features["whole"] and not is_ours
    # In FP32 65536x40x24 takes 44 µs with the derivative in the product, and 32 by our kernel.
    if problem.dtype.itemsize == 4 and features["whole"] and features["rows"] >= _TALL:
        wanted |= {"derivative": MadeBy.KERNEL.value, "db_below": MadeBy.KERNEL.value} if wanted else {}
    if not problem.output_derivative.is_identity or sums_slowly:
        wanted["db"] = MadeBy.KERNEL.value
    strategies = sorted(backward_strategies(problem), key=_by_library)
    return sorted(strategies, key=lambda each: _differences(each, wanted))


def _tree(device: int, part: str, kind: str, rest: str, *, is_ours: bool) -> Tree:
    """The table's tree for problems of this kind, or an empty one.

    Args:
        is_ours: whether our kernel for ragged rows makes the products. To that kernel sums and derivatives beside a
            product cost little, unless many blocks share them, so that the table may have other trees for it.
    """
    trees: Mapping[str, Tree] = _nearest(device_info(device).capability)[part]
    kinds = [f"{RAGGED} {kind}"] * is_ours + [kind]
    names = [f"{each} {name}" for name in (rest, OTHER) for each in kinds]
    return next((trees[name] for name in names if name in trees), {})


def forward_features(problem: ForwardProblem) -> dict[str, int]:
    """Features of a forward tree: sizes of the output and the number of terms of each sum.

    See `features_of`.
    """
    return features_of(problem.y.layout, problem.x.layout.cols, problem.dtype)


def backward_features(problem: BackwardProblem) -> dict[str, int]:
    """Features of a backward tree: those of the input gradient's product, whether or not it is wanted."""
    return features_of(problem.x.layout, problem.dy.layout.cols, problem.dtype)


def features_of(output: Layout, inner: int, dtype: DType) -> dict[str, int]:
    """The sizes of a product with `inner` terms in each sum, by their names in the fitted decision trees.

    They are the output's bytes and rows, the terms, the number of weights, the least of the columns and the terms, and
    whether (1) or not (0) both are whole octets, as the library's fast kernels ask for.
    """
    sizes = {"output_bytes": output.size * dtype.itemsize, "inner": inner, "rows": output.rows}
    sizes |= {"weights": output.cols * inner, "least": min(output.cols, inner)}
    return sizes | {"whole": int(output.cols % OCTET == inner % OCTET == 0)}


def leaf_of(tree: Tree, features: Mapping[str, int]) -> Mapping[str, Any]:
    """The strategy at the leaf that a tree's limits lead to."""
    while "feature" in tree:
        tree = tree["then"] if features[tree["feature"]] < tree["below"] else tree["otherwise"]
    return tree


def _kind(problem: ForwardProblem | BackwardProblem) -> str:
    """The name of the types in the tables: both 16-bit types move the same bytes, at the same speed."""
    if problem.dtype.itemsize == 2:
        return "bf16"
    return "tf32" if problem.compute is Compute.TF32 else "fp32"


def _below(problem: BackwardProblem) -> str:
    """Table key: the input layer's activation and its saved tensor, or "products" if only the two products run."""
    below, output = problem.input_derivative, problem.output_derivative
    if below is not None:
        return f"{below.activation.name} {below.saved.value}"
    return "products" if output.db is None and output.is_identity else f"none {Saved.NOTHING.value}"


def _by_library(strategy: BackwardStrategy) -> int:
    return (strategy.db, strategy.derivative, strategy.db_below).count(MadeBy.EPILOGUE)


def _differences(strategy: BackwardStrategy, wanted: Mapping[str, Any]) -> int:
    """The number of parts of the problem in which a strategy differs from the wanted one."""
    parts = {name: value for name, value in to_json(strategy).items() if value != MadeBy.NOBODY.value}
    return sum(wanted.get(name, value) != value for name, value in parts.items())


@functools.cache
def _nearest(capability: int) -> Mapping[str, Any]:
    """The table of the architecture, or of that with the nearest number."""
    known = {int(path.stem.removeprefix("priors_sm")): path for path in Path(__file__).parent.glob(_FILES)}
    table: Mapping[str, Any] = json.loads(known[min(known, key=lambda each: abs(each - capability))].read_text())
    return table
