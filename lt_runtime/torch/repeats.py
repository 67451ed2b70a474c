"""Operators that are called again with tensors of the same forms.

The first calls of an operator record which prepared calls of the package it makes, and which tensors each of them
takes. Later calls allocate the results and launch these prepared calls: the Python code between PyTorch's dispatcher
and the launches takes longer than a small kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from lt_runtime import ranges
from lt_runtime.arrays.libraries import signature_of
from lt_runtime.gpu.driver import is_current
from lt_runtime.kernels.call import DropoutState
from lt_runtime.ops.call import made_calls, repeat
from lt_runtime.ops.first_use import asked_for
from lt_runtime.plans import cache
from lt_runtime.torch.tensors import Tensor, Tensors, compute_of

Made: TypeAlias = tuple[list[Tensor], Any]
"""The tensors that an operator makes, None for absent ones; and an object, equal for all operands of the same forms."""
_MOST: Final = 4096

_Form: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], Any]
"""Shape, strides and type of a tensor without gaps."""


class _Recipe(NamedTuple):
    """The calls that an operator makes for tensors of some forms.

    Attributes:
        generation: the plan cache's; see `cache.generation`.
        results: the forms of the results; None for an absent one.
        others: the forms of tensors that one call writes and a later one reads.
        constant: the second item of `Made`.
        calls: the prepared calls, each with its scalars and, for each of its arrays, an index into the addresses of the
            operands, the results and the others; -1 for an absent array. The scalars of calls with dropout are states,
            whose `step_address` is such an index too.
    """

    generation: object
    results: tuple[_Form | None, ...]
    others: tuple[_Form, ...]
    constant: Any
    calls: tuple[tuple[Any, Any, tuple[int, ...]], ...]


_UNKNOWN: Final = _Recipe(None, (), (), None, ())
_recipes: Final[dict[Any, _Recipe | None]] = {}
"""Recipes by operator, options and forms of the operands; None for an operator that has none."""


def repeated(key: Any, operands: Tensors, compute: Callable[[], Made]) -> Made:
    """What `compute`, an operator's computation, returns: by the operator's recipe if there is one.

    Args:
        key: the operator, its options, and whether it runs forward or backward.
        operands: all tensors that `compute` reads; the first is on a GPU.
    """
    signature = None if asked_for.get() or ranges.is_heard else signature_of((*operands,))
    if signature is None:
        return compute()
    forms, addresses = signature
    whole = *key, forms, compute_of(operands[0].dtype)
    recipe = _recipes.get(whole, _UNKNOWN)
    if recipe is None:
        return compute()
    if recipe.generation is not cache.generation:
        return _recorded(whole, addresses, compute)
    return _launched(recipe, operands[0], forms[0][0], addresses) or compute()


def _launched(recipe: _Recipe, like: Tensor, device: int, addresses: tuple[int, ...]) -> Made | None:
    """Runs a recipe; returns None if operands overlap, or if another device is current in this thread."""
    if not is_current(device):
        return None
    made = [each and like.new_empty_strided(each[0], each[1], dtype=each[2]) for each in recipe.results]
    others = [like.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in recipe.others]
    known = *addresses, *[0 if each is None else each.data_ptr() for each in (*made, *others)], 0
    stream = torch._C._cuda_getCurrentRawStream(device)
    for prepared, scalars, places in recipe.calls:
        if prepared.request.dropouts is not None:
            scalars = [each and DropoutState(each.threshold, each.philox, known[each.step_address]) for each in scalars]
        if not repeat(prepared, tuple([known[place] for place in places]), scalars, stream):
            return None
    return made, recipe.constant


def _recorded(key: Any, addresses: tuple[int, ...], compute: Callable[[], Made]) -> Made:
    """Runs an operator, and keeps its recipe unless one of its calls had to be planned first."""
    with made_calls() as calls:
        made, constant = compute()
    if None not in calls:
        if len(_recipes) >= _MOST:
            _recipes.clear()
        _recipes[key] = _recipe_of(calls, addresses, made, constant)
    return made, constant


def _recipe_of(calls: list[Any], addresses: tuple[int, ...], made: list[Tensor], constant: Any) -> _Recipe | None:
    """The recipe of an operator that has made these calls and no others.

    Returns None if a call reads memory that is none of the operator's tensors, or if two tensors have one address, so
    that it does not tell which of them a call takes.
    """
    known = [*addresses, *[0 if each is None else each.data_ptr() for each in made]]
    place_of = {address: place for place, address in enumerate(known) if address}
    sizes = {each.data_ptr(): each.nbytes for each in made if each is not None}
    is_plain = all(each is None or (each.nbytes and _is_dense(each)) for each in made)
    if not is_plain or len(place_of) != len(known) - known.count(0):
        return None
    others, steps = list[_Form](), []
    for prepared, used, scalars in calls:
        if prepared.request.dropouts is not None:
            states = prepared.operation.call(prepared, used, scalars, 0).dropouts
            if not all(each is None or each.step_address in place_of for each in states):
                return None
            scalars = [each and replace(each, step_address=place_of[each.step_address]) for each in states]
        for i, new in prepared.request.new.items():
            size = math.prod(new.shape) * new.dtype.itemsize
            if used[i] not in place_of:
                place_of[used[i]], sizes[used[i]] = len(known) + len(others), size
                strides = [math.prod(new.shape[axis:]) for axis in range(1, len(new.shape) + 1)]
                others.append((new.shape, (*strides,), getattr(torch, new.dtype.name)))
            elif sizes.get(used[i]) != size:  # memory that was freed, and allocated again for a tensor of another size
                return None
        if not place_of.keys() >= {*used} - {0}:
            return None
        steps.append((prepared, scalars, tuple([place_of.get(address, -1) for address in used])))
    results = tuple([None if each is None else ((*each.shape,), each.stride(), each.dtype) for each in made])
    return _Recipe(cache.generation, results, tuple(others), constant, tuple(steps)) if steps else None


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has no gaps: it is contiguous, or a transposed matrix that is."""
    return bool(tensor.is_contiguous() or (tensor.dim() == 2 and tensor.t().is_contiguous()))
