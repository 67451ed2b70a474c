"""Problems, strategies and algorithms in a few words, for people."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from lt_runtime.cublaslt import ClusterShape, MatmulInnerShape, MatmulStages, MatmulTile, ReductionScheme
from lt_runtime.plans.strategies import MadeBy
from lt_runtime.problem import BackwardProblem, Compute, ForwardProblem, MatmulProblem, Saved
from lt_runtime.store.keys import Problem

_PARTS: Final = {
    "PADDED": ("padded", None),
    "K_MAJOR": ("along K", None),
    "ID": ("id", None),
    "TILE_ID": ("tile", MatmulTile),
    "STAGES_ID": ("stages", MatmulStages),
    "SPLITK_NUM": ("split-K", None),
    "REDUCTION_SCHEME": ("reduction", ReductionScheme),
    "CTA_SWIZZLING": ("swizzle", None),
    "CUSTOM_OPTION": ("option", None),
    "INNER_SHAPE_ID": ("inner shape", MatmulInnerShape),
    "CLUSTER_SHAPE_ID": ("cluster", ClusterShape),
}
_PREFIXES: Final = ("TILE_", "STAGES_", "SHAPE_")


def describe(problem: Problem) -> str:
    """A problem in a few words, M×N×K among them, such as "matmul 8192x3072x768 bfloat16 gelu_aux_bias"."""
    match problem:
        case MatmulProblem(m=m, n=n, k=k, epilogue=epilogue, batch=batch):
            times = f" batch {batch}" if batch > 1 else ""
            return f"matmul {m}x{n}x{k}{times} {_type(problem)} {epilogue.value}"
        case ForwardProblem(x=x, y=out):
            return f"forward {_shape(out.layout.shape, x.layout.cols)} {_type(problem)} {problem.activation.name}"
        case BackwardProblem(x=x, dy=out, own=own, through=through):
            below = "" if through is None else f" through {through.activation.name}"
            shape = _shape(out.layout.shape, x.layout.cols)
            return f"backward {shape} {_type(problem)} {own.activation.name}{below}"


def _shape(output: tuple[int, int], inputs: int) -> str:
    rows, cols = output
    return f"{rows}x{cols}x{inputs}"


def _type(problem: Problem) -> str:
    return "tf32" if problem.compute is Compute.TF32 else problem.dtype.value


def strategy_in_words(strategy: Mapping[str, object]) -> str:
    """A strategy, as it stands in the plan cache, such as "gelu_aux_bias, keeps preactivation"."""
    if strategy.keys() == {"epilogue", "saved"}:
        keeps = "" if strategy["saved"] == Saved.NOTHING.value else f", keeps {strategy['saved']}"
        return f"{strategy['epilogue']}{keeps}"
    makers = {name.replace("_", " "): maker for name, maker in strategy.items() if isinstance(maker, str)}
    parts = [f"{name} by {maker}" for name, maker in makers.items() if maker != MadeBy.NOBODY.value]
    beside = ", dw beside dx" if strategy.get("beside") else ""
    return (", ".join(parts) or "products alone") + beside


def algorithm_in_words(config: Mapping[str, int]) -> str:
    """An algorithm's configuration, by the names of the attributes, such as "id 66, tile 128x256, split-K 1".

    Our kernel for narrow products has none.
    """
    if not config:
        return "our kernel for narrow products"
    known = [name for name in _PARTS if name in config]
    return ", ".join(_part(name, config[name]) for name in dict.fromkeys((*known, *config)))


def _part(name: str, value: int) -> str:
    word, kind = _PARTS.get(name, (name, None))
    return f"{word} {value if kind is None else _member(kind, value)}"


def _member(kind: type[enum.IntEnum | enum.IntFlag], value: int) -> str:
    try:
        name = kind(value).name or str(value)
    except ValueError:  # of a version of the library that these bindings do not know
        return str(value)
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return "any" if name == "UNDEFINED" else name.lower()
