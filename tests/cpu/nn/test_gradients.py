"""Outputs and gradients of blocks on the host against float64 formulas and their finite differences."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import lt_runtime as lt
from lt_runtime.problem import ACTIVATIONS
from tests.support.block_trees import Tree, build, random_state, trees
from tests.support.exact_blocks import ExactModel
from tests.support.numpy_cases import DTYPES
from tests.support.strategies import COMPILING

TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Accepted error of each type, relative to the largest element of an array."""

_FIRST = Tree("Linear", 4, 3, options=(("activation", "gelu"),), seed=1)
_SQUARE = Tree("Linear", 4, 4, options=(("activation", "tanh"), ("dropout", 0.25)), seed=2)
CASES: dict[str, Tree] = {
    **{name: Tree("Linear", 4, 5, options=(("activation", name), ("dropout", 0.25))) for name in ACTIVATIONS},
    "linear without bias": Tree("Linear", 4, 5, options=(("bias", False),)),
    "mlp": Tree("MLP", 4, 5, options=(("activation", "gelu"), ("dropout", 0.25))),
    "layer norm": Tree("LayerNorm", 6, 6),
    "layer norm without bias": Tree("LayerNorm", 6, 6, options=(("bias", False),)),
    "rms norm": Tree("RMSNorm", 6, 6),
    "gated": Tree("Gated", 4, 4, options=(("activation", "tanh"), ("bias", True))),
    "swiglu": Tree("SwiGLU", 4, 4, options=(("dropout", 0.25),)),
    "geglu": Tree("GEGLU", 4, 4),
    "reglu": Tree("ReGLU", 4, 4),
    "dropout": Tree("Dropout", 4, 4, options=(("p", 0.25),)),
    "residual": Tree("Residual", 4, 4, (Tree("RMSNorm", 4, 4),)),
    "sum": Tree("Parallel", 4, 3, (_FIRST, Tree("Linear", 4, 3)), (("join", "sum"), ("split", False))),
    "concatenation": Tree("Parallel", (4, 6), 9, (_FIRST, Tree("LayerNorm", 6, 6))),
    "a layer thrice": Tree("Residual", 4, 4, (Tree("Chain", 4, 4, (_SQUARE,) * 3),)),
    "tied weights": Tree("Chain", 4, 4, (_FIRST, Tree("Linear", 3, 4, shares=(_FIRST, True)))),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_every_block_in_every_type(name: str, dtype: str) -> None:
    _check(CASES[name], dtype, np.random.default_rng(7))


def test_all_blocks_of_the_package_are_among_the_cases() -> None:
    public = {name: getattr(lt, name) for name in lt.__all__}
    blocks = {name for name, each in public.items() if isinstance(each, type) and issubclass(each, lt.Block)}
    assert blocks - {"Block"} == {each.kind for case in CASES.values() for each in _parts(case)}


def _parts(tree: Tree) -> Iterator[Tree]:
    yield tree
    for part in tree.parts:
        yield from _parts(part)


@settings(COMPILING, max_examples=50)
@given(tree=trees())
def test_random_trees(tree: Tree, examples: Counter[str]) -> None:
    generator = np.random.default_rng(tree.seed)
    accumulate, reads_dx = (bool(each) for each in generator.integers(0, 2, 2))
    _check(tree, "float32", generator, accumulate=accumulate, reads_dx=reads_dx, frozen=float(generator.uniform(-1, 1)))
    examples["trees of blocks on the host"] += 1


def _check(
    tree: Tree,
    dtype: str,
    generator: np.random.Generator,
    *,
    accumulate: bool = False,
    reads_dx: bool = True,
    frozen: float = 0.0,
) -> None:
    """Runs a model forward and back on random values.

    Args:
        accumulate: whether gradients are added to their buffers.
        reads_dx: whether the gradients of the inputs are computed.
        frozen: probability that a parameter is frozen.
    """
    kind, tolerance = DTYPES[dtype], TOLERANCE[dtype]
    model = build(lt, tree, device="cpu", dtype=dtype)
    parameters = model.parameters()
    model.load_state_dict(random_state(model, generator))
    before = [generator.standard_normal(each.grad.shape).astype(kind) for each in parameters]
    for parameter, values in zip(parameters, before, strict=True):
        parameter.grad[...] = values
    fixed = [each for each in parameters if generator.random() < frozen]
    axes, widths = ((2, 2), (4,))[generator.integers(2)], np.atleast_1d(tree.inputs)
    xs = [generator.standard_normal((*axes, width)).astype(kind) for width in widths]
    x = xs[0] if len(xs) == 1 else tuple(xs)
    references = [sys.getrefcount(each) for each in xs]

    run = lt.Pass(3, frozen=fixed, accumulate=accumulate, inputs=() if reads_dx else (x, *xs))
    outputs = model.forward(x, run)
    dy = generator.standard_normal(outputs.shape).astype(kind)
    dx = model.backward(dy, run)
    run.finish()

    exact, rows, exact_dy = ExactModel(tree, model, 3), [_rows(each) for each in xs], _rows(dy)
    _assert_close(outputs, exact.outputs(rows), tolerance)
    _assert_close(model(x), exact.outputs(rows, trains=False), tolerance)
    if reads_dx:
        for found, expected in zip(dx if len(xs) > 1 else [dx], exact.input_gradients(rows, exact_dy), strict=True):
            _assert_close(found, expected, tolerance)
    for parameter, old in zip(parameters, before, strict=True):
        if any(parameter is each for each in fixed):
            assert np.array_equal(parameter.grad, old), parameter.name
        else:
            expected = exact.gradient(parameter, rows, exact_dy)
            _assert_close(parameter.grad, expected + old.astype(np.float64) * accumulate, tolerance, parameter.name)
    assert not run._kept
    del run
    assert [sys.getrefcount(each) for each in xs] == references


def _rows(array: Any) -> Any:
    """An array as a float64 matrix, whose rows are all axes but the last."""
    return array.reshape(-1, array.shape[-1]).astype(np.float64)


def _assert_close(found: Any, expected: Any, tolerance: float, name: str = "") -> None:
    limit = tolerance * (np.abs(expected).max() + 0.1)
    values = found.astype(np.float64).reshape(expected.shape)
    np.testing.assert_allclose(values, expected, rtol=0, atol=limit, err_msg=name)
