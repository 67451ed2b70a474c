"""Repeats the kernel launches of operators without running their Python code.

The first calls of an operator record a recipe: which prepared calls of the package it makes, and which tensors each of
them takes. A later call with tensors of the same forms (shape, strides, type, device and alignment) allocates the
results and launches these prepared calls. Without a recipe, the Python code of the operator takes longer than a small
kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lt_runtime import ranges
from lt_runtime.arrays.libraries import signature_of
from lt_runtime.gpu.driver import is_current
from lt_runtime.kernels.call import DropoutState
from lt_runtime.ops.call import MadeCall, New, recorded_by, repeat
from lt_runtime.ops.first_use import asked_for
from lt_runtime.plans import cache
from lt_runtime.torch.tensors import Tensor, Tensors, compute_of

Made: TypeAlias = tuple[list[Tensor], Any]
"""An operator's results, None for absent ones; and an object that is equal in all calls with the same forms."""
_MOST: Final = 4096  # the number of recipes at which all are dropped
_empty: Final[Callable[..., Tensor]] = torch._C._dynamo.guards._empty_strided_cuda
"""Makes an uninitialised tensor on the current GPU from shape, strides and type, as the code of torch.compile does. It
takes half as long as `Tensor.new_empty_strided`."""

_Form: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], Any]
"""Shape, strides and type of a tensor without gaps."""


class _Step(NamedTuple):
    """A prepared call of a recipe.

    Attributes:
        scalars: the call's scalars; None if it reads none. With dropout, a `DropoutState` for each mask, whose
            `step_address` is instead the place of the step among the operands.
        places: for each array of the call its place: the index in a list of the operands, followed by the tensors that
            the calls make; -1 for an absent array.
        first: the indices, in the recipe's `forms`, of the tensors that are allocated before this call.
        last: the indices of the tensors that are freed after this call.
    """

    prepared: Any
    scalars: Any
    places: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]


class _Recipe(NamedTuple):
    """The calls that an operator makes for tensors of some forms.

    Attributes:
        generation: `cache.generation` at the time of the recording; the recipe is void once that object is replaced.
        forms: the forms of the tensors that the calls make.
        results: for each result the index of its form; None for an absent result.
        constant: the second item of `Made`.
        steps: the calls; none if the operator cannot be repeated by its calls alone.
    """

    generation: object
    forms: tuple[_Form, ...] = ()
    results: tuple[int | None, ...] = ()
    constant: Any = None
    steps: tuple[_Step, ...] = ()


_UNKNOWN: Final = _Recipe(None)
_recipes: Final[dict[Any, _Recipe]] = {}
"""Recipes by operator, options, forms of the operands, and which of them have the same address."""


def repeated(key: Any, operands: Tensors, compute: Callable[[], Made]) -> Made:
    """The results of an operator: by its recipe if there is one, otherwise by calling `compute`.

    Args:
        key: identifies the computation: the operator or its layers, its options, and the gradients that are needed.
        operands: all tensors that `compute` reads; the first is on a GPU.
        compute: computes the results.
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
        if recipe is not _UNKNOWN or len(_recipes) >= _MOST:
            _recipes.clear()
        return _recorded(whole, operands, addresses, compute)
    made = _launched(recipe, forms[0][0], addresses) if recipe.steps else None
    return compute() if made is None else (made, recipe.constant)


def _launched(recipe: _Recipe, device: int, addresses: tuple[int, ...]) -> list[Tensor] | None:
    """Runs a recipe; returns None if another device is current in this thread, or if a call's arrays overlap.

    Earlier calls of the recipe have then been launched, which wrote into new tensors only.
    """
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
    return [None if i is None else made[i] for i in recipe.results]


def _recorded(key: Any, operands: Tensors, addresses: tuple[int, ...], compute: Callable[[], Made]) -> Made:
    """Runs an operator, and keeps its recipe unless a call had to be planned, or used a plan that was dropped since."""
    recorder = _Recorder(operands, addresses)
    with recorded_by(recorder):
        made, constant = compute()
    if not recorder.met_new_plan:
        _recipes[key] = recorder.recipe(made)._replace(constant=constant)
    return made, constant


class _Recorder:
    """Makes an operator's recipe while the operator runs: `perform` tells the recorder of each call.

    An address identifies a tensor only as long as the tensor exists, because freed memory may be allocated anew.

    Attributes:
        met_new_plan: whether a call had to be planned, or used a plan that was dropped after the recording had begun.
    """

    def __init__(self, operands: Tensors, addresses: tuple[int, ...]) -> None:
        self.met_new_plan, self._is_determined = False, True
        self._generation, self._count = cache.generation, len(addresses)
        self._operands = [StorageWeakRef(each.untyped_storage()) for each in operands if each is not None]
        self._place_of = {address: place for place, address in enumerate(addresses) if address}
        self._forms, self._made = list[_Form](), list[StorageWeakRef]()  # of the tensors that the calls have made
        self._calls = list[tuple[Any, Any, tuple[int, ...]]]()  # prepared call, scalars and places, as in a `_Step`

    def __call__(self, call: MadeCall | None) -> None:
        """Adds a call."""
        if call is None or call[0].generation is not self._generation:
            self.met_new_plan = True
        elif self._is_determined:
            self._is_determined = self._adds(*call)

    def recipe(self, made: list[Tensor]) -> _Recipe:
        """The recipe for these results. It has no steps if the recorded calls alone cannot make them."""
        results = [each if each is None else self._number_of(each) for each in made]
        present = [each for each in results if each is not None]
        if not self._is_determined or -1 in present or len({*present}) < len(present):
            return _Recipe(self._generation)
        for each, i in zip(made, results, strict=True):
            if i is not None:
                self._forms[i] = _form_of(each)
        return _Recipe(self._generation, tuple(self._forms), tuple(results), None, tuple(self._steps({*results})))

    def _number_of(self, result: Tensor) -> int:
        """The index of a result among the tensors that the calls have made; -1 if it is none, or a part of one."""
        i = self._place_of.get(result.data_ptr(), 0) - self._count
        is_made = i >= 0 and not self._made[i].expired()
        return i if is_made and _is_plain(result) and result.nbytes == _bytes_of(self._forms[i]) else -1

    def _adds(self, prepared: Any, used: tuple[int, ...], scalars: Any, arrays: Sequence[Any]) -> bool:
        """Adds a call; returns False if no recipe can repeat it.

        A recipe cannot repeat a call that reads memory other than the operands' and earlier results', that writes to a
        part of such memory, or that reads the step of a dropout mask from memory that is no operand's.
        """
        request = prepared.request
        writes = {*request.written, *request.new}
        if not all(i in writes or not address or self._exists(address) for i, address in enumerate(used)):
            return False
        for i in writes:
            is_new = i in request.new or (used[i] and not self._exists(used[i]))
            if is_new and not self._adds_memory(used[i], arrays[i], request.new.get(i)):
                return False
        if request.dropouts is not None:
            states = prepared.operation.call(prepared, used, scalars, 0).dropouts
            places = [each and self._place_of.get(each.step_address, self._count) for each in states]
            if not all(each is None or each < self._count for each in places):
                return False
            scalars = [each and replace(each, step_address=place) for each, place in zip(states, places, strict=True)]
        elif not prepared.operation.is_scaled:
            scalars = None  # Without dropout they may still be `Philox` objects, which would keep tensors alive.
        self._calls.append((prepared, scalars, tuple([self._place_of.get(address, -1) for address in used])))
        return True

    def _exists(self, address: int) -> bool:
        """Whether an operand begins at an address, or a tensor that a call has made and that still exists."""
        place = self._place_of.get(address)
        return place is not None and (place < self._count or not self._made[place - self._count].expired())

    def _adds_memory(self, address: int, array: Tensor, new: New | None) -> bool:
        """Adds a tensor that a call makes; returns False if it is empty, has gaps, or shares memory with another."""
        owner = StorageWeakRef(array.untyped_storage())
        is_whole = new is not None or (_is_plain(array) and array.nbytes == array.untyped_storage().nbytes())
        if not (address and is_whole) or owner in self._operands or owner in self._made:
            return False
        self._place_of[address] = self._count + len(self._forms)
        self._made.append(owner)
        self._forms.append(_form_of(array) if new is None else _form_of_new(new))
        return True

    def _steps(self, results: set[int | None]) -> Iterator[_Step]:
        """The calls, each with the tensors to be allocated before it and to be freed after it."""
        places = range(self._count, self._count + len(self._forms))
        takers = [[at for at, call in enumerate(self._calls) if place in call[2]] for place in places]
        for at, call in enumerate(self._calls):
            first, last = ([i for i, each in enumerate(takers) if each[end] == at] for end in (0, -1))
            yield _Step(*call, tuple(first), tuple([i for i in last if i not in results]))


def _form_of(tensor: Tensor) -> _Form:
    return (*tensor.shape,), tensor.stride(), tensor.dtype


def _form_of_new(new: New) -> _Form:
    """The form of the memory that a call allocates for a result."""
    strides = tuple([math.prod(new.shape[axis:]) for axis in range(1, len(new.shape) + 1)])
    return new.shape, strides, getattr(torch, new.dtype.name)


def _bytes_of(form: _Form) -> int:
    shape, _, dtype = form
    return math.prod(shape) * int(dtype.itemsize)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has elements and no gaps: it is contiguous, or a transposed matrix that is."""
    is_transposed = tensor.dim() == 2 and tensor.t().is_contiguous()
    return bool(tensor.nbytes and (is_transposed or tensor.is_contiguous()))
