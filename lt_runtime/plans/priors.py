"""Strategies of unmeasured problems, in the order in which to try them.

A table for each architecture, `priors_sm*.json`, holds decision trees for the strategy to try first. `python -m
benchmarks derive-priors` fits the trees to measurements, which the table names. For a problem that the table does not
cover, a fixed rule holds: cuBLASLt fuses everything if no tensor has to be saved, and our kernels compute derivatives
and bias gradients, because on Hopper they are up to four times as fast as cuBLASLt's epilogues. An architecture without
a table uses the table of the nearest architecture.
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
from lt_runtime.plans import strategies
from lt_runtime.problem import BackwardProblem, Compute, DType, ForwardProblem, Saved
from lt_runtime.store.keys import to_json

Tree: TypeAlias = Mapping[str, Any]
"""A decision tree from a JSON file. A leaf is a strategy in the form of the plan cache. An inner node has the name of a
feature, a limit, a subtree for values below the limit, and a subtree for all others.
"""

RAGGED: Final = "ragged"
"""Prefix of the names of the decision trees for problems whose products are computed by our kernel for ragged rows."""
_FILES: Final = "priors_sm*.json"
OTHER: Final = "other"
"""Name of the decision tree of backward passes with an activation for which cuBLASLt has no epilogue."""
_TALL: Final = 1 << 15
"""Number of rows from which FP32 and TF32 products without ragged rows are bound by memory bandwidth."""
_FEW_COLUMNS: Final = OCTET
"""Number of columns up to which, for ragged products, our kernel for narrow products beats the one for ragged rows."""


def forward_priors(problem: ForwardProblem, device: int) -> Iterable[strategies.ForwardStrategy]:
    """The forward strategies that a problem allows, in the order in which to try them.

    Strategies in which the product adds the addend precede all others. Within each of the two groups, the choice of the
    table of decision trees comes first, then strategies whose epilogue has no auxiliary output, then the remaining
    strategies.
    """
    is_ours = is_preferred(problem.dtype, problem.x, problem.w.transposed, problem.y)
    wanted: dict[str, Any] = {}
    if problem.backward:
        tree = _tree(device, "forward", problem, problem.activation.name, is_ours=is_ours)
        wanted |= leaf_of(tree, forward_features(problem))
    if is_ours and problem.y.layout.cols <= _FEW_COLUMNS:
        wanted["epilogue"] = Epilogue.BIAS.value
    if wanted and problem.bias is None:
        wanted["epilogue"] = wanted["epilogue"].removesuffix("bias").removesuffix("_") or "none"
    allowed = strategies.forward_strategies(problem)
    # If the product adds the addend, no separate pass over three matrices is needed.
    order = sorted(
        allowed, key=lambda each: (not wanted.items() <= to_json(each).items(), each.epilogue.has_aux_output)
    )
    return sorted(order, key=lambda each: not each.product_adds)


def backward_priors(problem: BackwardProblem, device: int) -> Iterable[strategies.BackwardStrategy]:
    """Allowed backward strategies, sorted by distance from the table's choice; ties prefer our kernels."""
    kernel = strategies.MadeBy.KERNEL.value
    features, is_ours = backward_features(problem), is_preferred(problem.dtype, problem.dy, problem.w, problem.x)
    wanted = dict(leaf_of(_tree(device, "backward", problem, _below(problem), is_ours=is_ours), features))
    # If dz differs from dy, our kernel reads dy in any case, and sums the bias gradient at hardly any extra cost.
    # cuBLASLt is slow if it sums a bias gradient of ragged 16-bit rows: on an H200 BF16 256x7x6156 takes 245 µs with
    # it, and 9 µs without.
    sums_slowly = problem.dtype.itemsize == 2 and not features["whole"] and not is_ours
    # Our kernel computes the derivatives of tall FP32 and TF32 problems: FP32 65536x40x24 takes 32 µs with it, 44 µs
    # with cuBLASLt's epilogue.
    if problem.dtype.itemsize == 4 and features["whole"] and features["rows"] >= _TALL:
        wanted |= {"derivative": kernel, "db_below": kernel} if wanted else {}
    if not problem.output_derivative.is_identity or sums_slowly:
        wanted["db"] = kernel
    return sorted(strategies.backward_strategies(problem), key=lambda each: _distance(each, wanted))


def _tree(device: int, part: str, problem: ForwardProblem | BackwardProblem, rest: str, *, is_ours: bool) -> Tree:
    """The table's decision tree for problems of this kind; an empty tree if the table has none.

    FP16 and BF16 share a tree, because they move equally many bytes.

    Args:
        rest: the part of the tree's name after the type.
        is_ours: whether our kernel for ragged rows computes the products. In this kernel an epilogue with a column sum
            or a derivative costs little, unless many blocks share the work, so that the table may have separate trees
            for it.
    """
    trees: Mapping[str, Tree] = _nearest(device_info(device).capability)[part]
    kind = "bf16" if problem.dtype.itemsize == 2 else "tf32" if problem.compute is Compute.TF32 else "fp32"
    kinds = [f"{RAGGED} {kind}"] * is_ours + [kind]
    names = [f"{each} {name}" for name in (rest, OTHER) for each in kinds]
    return next((trees[name] for name in names if name in trees), {})


def forward_features(problem: ForwardProblem) -> dict[str, int]:
    """Features of a forward problem for the decision trees: the sizes of its matrix product, see `features_of`."""
    return features_of(problem.y.layout, problem.x.layout.cols, problem.dtype)


def backward_features(problem: BackwardProblem) -> dict[str, int]:
    """Features of a backward problem for the decision trees: sizes of the product dx, even if dx is not requested."""
    return features_of(problem.x.layout, problem.dy.layout.cols, problem.dtype)


def features_of(output: Layout, inner: int, dtype: DType) -> dict[str, int]:
    """Maps names of features in the fitted decision trees to sizes of a product with `inner` terms in each sum.

    The sizes are the output's bytes and rows, the number of terms, the number of weights (columns · terms), and the
    smaller of columns and terms. The flag "whole" is 1 if columns and terms are multiples of eight, which cuBLASLt's
    fast kernels require, otherwise 0.
    """
    sizes = {"output_bytes": output.size * dtype.itemsize, "inner": inner, "rows": output.rows}
    sizes |= {"weights": output.cols * inner, "least": min(output.cols, inner)}
    return sizes | {"whole": int(output.cols % OCTET == inner % OCTET == 0)}


def leaf_of(tree: Tree, features: Mapping[str, int]) -> Mapping[str, Any]:
    """The strategy at the leaf that the tree reaches for these features."""
    while "feature" in tree:
        tree = tree["then"] if features[tree["feature"]] < tree["below"] else tree["otherwise"]
    return tree


def _below(problem: BackwardProblem) -> str:
    """Tree name: activation and saved tensor of the layer below, or "products" if dx is a plain product."""
    below, output = problem.input_derivative, problem.output_derivative
    if below is not None:
        return f"{below.activation.name} {below.saved.value}"
    return "products" if output.db is None and output.is_identity else f"none {Saved.NOTHING.value}"


def _distance(strategy: strategies.BackwardStrategy, wanted: Mapping[str, Any]) -> tuple[int, int]:
    """Sort key: number of fields that differ from `wanted`, then number of cuBLASLt's epilogues that are used."""
    parts = {name: value for name, value in to_json(strategy).items() if value != strategies.MadeBy.NOBODY.value}
    differences = sum(wanted.get(name, value) != value for name, value in parts.items())
    return differences, [*parts.values()].count(strategies.MadeBy.EPILOGUE.value)


@functools.cache
def _nearest(capability: int) -> Mapping[str, Any]:
    """The table of the architecture, or of the architecture with the nearest compute capability."""
    known = {int(path.stem.removeprefix("priors_sm")): path for path in Path(__file__).parent.glob(_FILES)}
    table: Mapping[str, Any] = json.loads(known[min(known, key=lambda each: abs(each - capability))].read_text())
    return table
