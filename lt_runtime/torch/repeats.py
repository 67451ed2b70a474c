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
        scalars: the call's scalars; None if it reads none. Those of a call with dropout are states, whose
            `step_address` is a place.
        places: for each array of the call its place: an index into the addresses of the operands, then of the tensors
            that the recipe makes; -1 for an absent array.
        first: numbers of the tensors that no earlier call takes, which are allocated before this call.
        last: numbers of the tensors that no later call takes and that are no results, which are freed after this call.
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
        forms: a `_Form` for each tensor that the recipe makes: the results, None for an absent one, then the tensors
            that one call writes and a later one reads.
        results: the number of results.
        constant: the second item of `Made`.
        steps: the calls; none if the operator cannot be repeated by its calls alone.
    """

    generation: object
    forms: tuple[Any, ...] = ()
    results: int = 0
    constant: Any = None
    steps: tuple[_Step, ...] = ()


_UNKNOWN: Final = _Recipe(None)
_recipes: Final[dict[Any, _Recipe]] = {}
"""Recipes by operator, options, forms of the operands, and which of them have the same address."""


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
        if signature is not None:
            forms, addresses = signature
            same = tuple(map(addresses.index, addresses)) if len({*addresses}) < len(addresses) else None
            whole = *key, forms, compute_of(operands[0].dtype), same
            recipe = _recipes.get(whole, _UNKNOWN)
    except (TypeError, RuntimeError):
        signature = None  # An option is not hashable, or an operand is sparse: `compute` raises an LtError.
    if signature is None:
        return compute()
    if recipe.generation is not cache.generation:
        if torch.cuda.is_current_stream_capturing():
            return compute()  # The tensors that recording keeps would enlarge the memory of the graph.
        if recipe is not _UNKNOWN or len(_recipes) >= _MOST:
            _recipes.clear()
        return _recorded(whole, addresses, compute)
    made = _launched(recipe, forms[0][0], addresses) if recipe.steps else None
    return compute() if made is None else (made, recipe.constant)


def _launched(recipe: _Recipe, device: int, addresses: tuple[int, ...]) -> list[Tensor] | None:
    """Runs a recipe; returns None if operands overlap, or if another device is current in this thread."""
    if not is_current(device):
        return None
    made: list[Any] = [None] * len(recipe.forms)
    known, start = [*addresses, *[0] * len(made), 0], len(addresses)
    stream = torch._C._cuda_getCurrentRawStream(device)
    for prepared, scalars, places, first, last in recipe.steps:
        for i in first:
            made[i] = _empty(*recipe.forms[i])
            known[start + i] = made[i].data_ptr()
        if prepared.request.dropouts is not None:
            scalars = [each and DropoutState(each.threshold, each.philox, known[each.step_address]) for each in scalars]
        if not repeat(prepared, tuple([known[place] for place in places]), scalars, stream):
            return None
        for i in last:
            made[i] = None
    return made[: recipe.results]


def _recorded(key: Any, addresses: tuple[int, ...], compute: Callable[[], Made]) -> Made:
    """Runs an operator, and keeps its recipe unless one of its calls had to be planned first.

    Recording keeps all tensors that the calls make. If memory does not suffice for that, the operator runs once more
    without it.
    """
    generation = cache.generation
    try:
        with made_calls() as calls:
            made, constant = compute()
    except torch.OutOfMemoryError:
        calls.clear()
    else:
        if None not in calls and all(call[0].generation is generation for call in calls if call):
            found = _recipe_of(calls, addresses, made) or _UNKNOWN
            _recipes[key] = found._replace(generation=generation, constant=constant)
        return made, constant
    return compute()


def _recipe_of(calls: Sequence[Any], addresses: tuple[int, ...], made: list[Tensor]) -> _Recipe | None:
    """The recipe of an operator that has made these calls and no others; None if they do not determine the results.

    That is so if a call reads memory that is none of the operator's tensors or is not written yet, or if a result has
    the address of another tensor, so that the address does not tell which of them a call takes. The arrays of all calls
    still exist, so that no address is that of two of them.
    """
    known = [*addresses, *[0 if each is None else each.data_ptr() for each in made]]
    place_of = {address: place for place, address in enumerate(known) if address}
    forms: list[_Form | None] = [each if each is None else ((*each.shape,), each.stride(), each.dtype) for each in made]
    results = [each for each in made if each is not None]
    if not all(map(_is_plain, results)) or len(place_of) != len({*addresses} - {0}) + len(results):
        return None
    sizes = {each.data_ptr(): each.nbytes for each in results}
    written, steps = {*addresses, 0}, list[tuple[Any, Any, tuple[int, ...]]]()
    for prepared, used, scalars, _ in calls:
        request = prepared.request
        for i, new in request.new.items():
            size = math.prod(new.shape) * new.dtype.itemsize
            if used[i] not in place_of:
                place_of[used[i]] = len(addresses) + len(forms)
                forms.append((new.shape, _packed_strides(new.shape), getattr(torch, new.dtype.name)))
            elif sizes.get(used[i]) != size:  # the result is a part of the memory that the call allocates
                return None
        if request.dropouts is not None:
            states = prepared.operation.call(prepared, used, scalars, 0).dropouts
            if not all(each is None or (each.step_address or -1) in addresses for each in states):
                return None
            scalars = [each and replace(each, step_address=place_of[each.step_address]) for each in states]
        elif not prepared.operation.is_scaled:
            scalars = None  # may hold sources of masks that the call does not draw, which would keep their steps alive
        writes = {used[i] for i in (*request.written, *request.new)}
        if not written >= {*used} - writes:
            return None
        written |= writes
        steps.append((prepared, scalars, tuple([place_of.get(address, -1) for address in used])))
    if not written >= {*known} or not place_of.keys() >= written - {0}:
        return None
    places = range(len(addresses), len(addresses) + len(forms))
    return _Recipe(None, tuple(forms), len(made), None, tuple(_with_lives(steps, places, len(made))))


def _with_lives(steps: Sequence[tuple[Any, Any, tuple[int, ...]]], places: range, results: int) -> Iterator[_Step]:
    """Adds to each call which tensors it takes first and last; the first of the tensors at `places` are the results."""
    takers = [[at for at, step in enumerate(steps) if place in step[2]] for place in places]
    for at, step in enumerate(steps):
        first, last = (tuple(i for i, each in enumerate(takers) if each and each[end] == at) for end in (0, -1))
        yield _Step(*step, first, tuple(i for i in last if i >= results))


def _packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis:]) for axis in range(1, len(shape) + 1))


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has elements and no gaps: it is contiguous, or a transposed matrix that is."""
    is_transposed = tensor.dim() == 2 and tensor.t().is_contiguous()
    return bool(tensor.nbytes and (is_transposed or tensor.is_contiguous()))
