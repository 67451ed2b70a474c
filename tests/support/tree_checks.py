"""Training steps of random trees of blocks: captured, launched one by one, and on the host."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.block_trees import Tree, build, random_state
from tests.support.numpy_cases import DTYPES

SMOOTH = {"activations": ("none", "gelu"), "gates": ("SwiGLU",)}
"""Arguments of `trees` for models that need few kernels, and whose gradients change little when inputs are rounded."""


def check_steps(gpu: Any, tree: Tree, dtype: str, tolerance: float, memory: Callable[[], int]) -> None:
    """Fails unless a captured step has the bits of single launches and, within a tolerance, the host's values.

    Args:
        gpu: a `FakeGpu` or a `RealGpu`.
        tolerance: the error of a value relative to the largest one of its array, where this is not below 0.1.
        memory: the number of bytes in use, which must be the same after all steps.
    """
    if not build(gpu.lt, tree, device="cpu").parameters():  # the tree has only Dropout blocks
        return
    captured, single = (_trained(gpu, tree, dtype, memory, graph=graph) for graph in (True, False))
    assert all(map(np.array_equal, captured, single))
    for found, expected in zip(captured, _trained(gpu, tree, dtype, None, graph=False), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * (np.abs(expected).max() + 0.1))


def _trained(
    gpu: Any, tree: Tree, dtype: str, memory: Callable[[], int] | None, *, graph: bool
) -> list[NDArray[np.float64]]:
    """The losses and gradients of two steps, then the parameters' values; on the host if there is no `memory`."""
    lt, generator, kind = gpu.lt, np.random.default_rng(tree.seed), DTYPES[dtype]
    model = build(lt, tree, device="cuda" if memory else "cpu", dtype=dtype)
    model.load_state_dict(random_state(model, generator))
    parameters = model.parameters()
    # With this eps, an error of a gradient gives an error of the same size in the update.
    step = lt.TrainStep(model, lt.AdamW(parameters, lr=0.1, eps=1.0), loss="mse", graph=graph)
    axes = ((8,), (4, 2))[generator.integers(2)]
    found, used = [], set[int]()
    for _ in range(2):
        batch = [
            generator.standard_normal((*axes, n)).astype(kind) for n in [*np.atleast_1d(tree.inputs), tree.outputs]
        ]
        *xs, target = map(gpu.cp.asarray, batch) if memory else batch
        loss = step(xs[0] if len(xs) == 1 else tuple(xs), target)
        found += [_values(gpu, each) for each in (loss, *(each.grad for each in parameters))]
        del xs, target, loss
        gc.collect()  # frees earlier models, which hold references to themselves
        used.add(memory() if memory else 0)
    assert len(used) == 1, "a step holds arrays"
    return [*found, *(_values(gpu, each.data) for each in parameters)]


def _values(gpu: Any, array: Any) -> NDArray[np.float64]:
    gpu.synchronize_all()
    return np.array(array if isinstance(array, np.ndarray) else gpu.host_of(array)).astype(np.float64)
