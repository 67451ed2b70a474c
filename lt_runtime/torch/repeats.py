"""Operators that are called again with tensors of the same forms.

The first calls of an operator record which prepared calls of the package it makes, and which tensors each of them
takes. Later calls allocate the results and launch these prepared calls: the Python code between PyTorch's dispatcher
and the launches takes longer than a small kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
_empty: Final[Callable[..., Tensor]] = torch._C._dynamo.guards._empty_strided_cuda
"""Makes an uninitialised tensor on the current GPU from shape, strides and type, as the code of torch.compile does. It
takes half as long as `Tensor.new_empty_strided`."""

_Form: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], Any]
"""Shape, strides and type of a tensor without gaps."""


class _Step(NamedTuple):
    """A prepared call of a recipe.

    Attributes:
        scalars: the call's scalars. Those of a call with dropout are states, whose `step_address` is a place.
        places: for each array of the call its place: an index into the addresses of the operands, then of the results,
            then of the recipe's other tensors; -1 for an absent array.
        first, last: the other tensors, by their numbers, that no earlier and no later call takes.
    """

    prepared: Any
    scalars: Any
    places: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]


class _Recipe(NamedTuple):
    """The calls that an operator makes for tensors of some forms.

    Attributes:
        generation: the plan cache's; see `cache.generation`.
        results: the forms of the results; None for an absent one.
        others: the forms of tensors that one call writes and a later one reads.
        constant: the second item of `Made`.
        steps: the calls; none if the operator cannot be repeated by its calls alone.
    """

    generation: object
    results: tuple[_Form | None, ...] = ()
    others: tuple[_Form, ...] = ()
    constant: Any = None
    steps: tuple[_Step, ...] = ()


_UNKNOWN: Final = _Recipe(None)
_recipes: Final[dict[Any, _Recipe]] = {}
"""Recipes by operator, options and forms of the operands."""


def repeated(key: Any, operands: Tensors, compute: Callable[[], Made]) -> Made:
    """What `compute`, an operator's computation, returns: by the operator's recipe if there is one.

    Args:
        key: the operator, its options, and whether it runs forward or backward.
        operands: all tensors that `compute` reads; the first is on a GPU.
    """
    if asked_for.get() or ranges.is_heard:
        return compute()
    try:
        signature = signature_of((*operands,))
        if signature is None:
            return compute()
        forms, addresses = signature
        whole = *key, forms, compute_of(operands[0].dtype)
        recipe = _recipes.get(whole, _UNKNOWN)
    except (TypeError, RuntimeError):
        # An option is not hashable, or an operand is sparse. `compute` raises an LtError that says so.
        return compute()
    if recipe.generation is not cache.generation:
        if recipe is not _UNKNOWN or len(_recipes) >= _MOST:
            _recipes.clear()
        return _recorded(whole, addresses, compute)
    made = _launched(recipe, forms[0][0], addresses) if recipe.steps else None
    return compute() if made is None else (made, recipe.constant)


def _launched(recipe: _Recipe, device: int, addresses: tuple[int, ...]) -> list[Tensor] | None:
    """Runs a recipe; returns None if operands overlap, or if another device is current in this thread."""
    if not is_current(device):
        return None
    made = [each and _empty(*each) for each in recipe.results]
    others: list[Any] = [None] * len(recipe.others)
    known = [*addresses, *[0 if each is None else each.data_ptr() for each in made], *[0] * len(others), 0]
    stream, start = torch._C._cuda_getCurrentRawStream(device), len(known) - 1 - len(others)
    for prepared, scalars, places, first, last in recipe.steps:
        for i in first:
            others[i] = _empty(*recipe.others[i])
            known[start + i] = others[i].data_ptr()
        if prepared.request.dropouts is not None:
            scalars = [each and DropoutState(each.threshold, each.philox, known[each.step_address]) for each in scalars]
        if not repeat(prepared, tuple([known[place] for place in places]), scalars, stream):
            return None
        for i in last:
            others[i] = None
    return made


def _recorded(key: Any, addresses: tuple[int, ...], compute: Callable[[], Made]) -> Made:
    """Runs an operator, and keeps its recipe unless one of its calls had to be planned first."""
    generation = cache.generation
    with made_calls() as calls:
        made, constant = compute()
    if None not in calls and all(call[0].generation is generation for call in calls if call):
        found = _recipe_of(calls, addresses, made)
        _recipes[key] = (
            _Recipe(generation) if found is None else found._replace(generation=generation, constant=constant)
        )
    return made, constant


def _recipe_of(calls: Sequence[Any], addresses: tuple[int, ...], made: list[Tensor]) -> _Recipe | None:
    """The recipe of an operator that has made these calls and no others; None if they do not determine the results.

    That is so if a call reads memory that is none of the operator's tensors or is not written yet, or if two tensors
    have one address, so that it does not tell which of them a call takes. The arrays of all calls still exist, so that
    no address is that of two of them.
    """
    known = [*addresses, *[0 if each is None else each.data_ptr() for each in made]]
    place_of = {address: place for place, address in enumerate(known) if address}
    is_plain = all(each is None or (each.nbytes and _is_dense(each)) for each in made)
    if not is_plain or len(place_of) != len(known) - known.count(0):
        return None
    sizes = {each.data_ptr(): each.nbytes for each in made if each is not None}
    written, others, steps = {*addresses, 0}, list[_Form](), list[tuple[Any, Any, tuple[int, ...]]]()
    for prepared, used, scalars, _ in calls:
        request = prepared.request
        for i, new in request.new.items():
            size = math.prod(new.shape) * new.dtype.itemsize
            if used[i] not in place_of:
                place_of[used[i]] = len(known) + len(others)
                others.append((new.shape, _packed_strides(new.shape), getattr(torch, new.dtype.name)))
            elif sizes.get(used[i]) != size:  # the result is a part of the memory that the call allocates
                return None
        if request.dropouts is not None:
            states = prepared.operation.call(prepared, used, scalars, 0).dropouts
            if not all(each is None or each.step_address in addresses for each in states):
                return None
            scalars = [each and replace(each, step_address=place_of[each.step_address]) for each in states]
        writes = {used[i] for i in (*request.written, *request.new)}
        if not written >= {*used} - writes:
            return None
        written |= writes
        steps.append((prepared, scalars, tuple([place_of.get(address, -1) for address in used])))
    if not written >= {*known} or not place_of.keys() >= written - {0}:
        return None
    results = tuple([None if each is None else ((*each.shape,), each.stride(), each.dtype) for each in made])
    return _Recipe(None, results, tuple(others), None, tuple(_with_lives(steps, len(known), len(others))))


def _with_lives(steps: Sequence[tuple[Any, Any, tuple[int, ...]]], start: int, count: int) -> Iterator[_Step]:
    """Adds to each call which of the `count` other tensors, whose places begin at `start`, it takes first and last."""
    takers = [[at for at, (_, _, places) in enumerate(steps) if start + i in places] for i in range(count)]
    for at, step in enumerate(steps):
        first, last = (tuple(i for i, each in enumerate(takers) if each[end] == at) for end in (0, -1))
        yield _Step(*step, first, last)


def _packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis:]) for axis in range(1, len(shape) + 1))


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has no gaps: it is contiguous, or a transposed matrix that is."""
    return bool(tensor.is_contiguous() or (tensor.dim() == 2 and tensor.t().is_contiguous()))
