"""Plan choices: the plan cache's entries for a model's training steps, which a checkpoint carries to other caches."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from lt_runtime.errors import LtError, printable
from lt_runtime.gpu.devices import activated
from lt_runtime.nn.mlp import MLP
from lt_runtime.plans.cache import make_plan
from lt_runtime.problem import Compute, MatmulProblem
from lt_runtime.store.document import Document, UnusableError
from lt_runtime.store.entries import Entry, LayerEntry
from lt_runtime.store.keys import Problem, Remembered, problem_key
from lt_runtime.store.plan_store import PlanStore, plan_store
from lt_runtime.tuner.chain import LayerChain, as_decided

_LARGEST: Final = 1 << 20
"""Limit of the characters of plan choices; a layer takes some thousands for each batch size."""
_MOST_SIZES: Final = 8
"""Limit of the batch sizes for which a checkpoint holds plan choices; a training step keeps as many graphs."""
_ANY_ROWS: Final = (1 << 48) - 1
_NUMBER: Final = "([1-9][0-9]{0,13})"
_logger: Final = logging.getLogger("lt_runtime")


def choices_of(model: MLP) -> str | None:
    """The plan cache's entries for a model's training steps, as the text of a plan file.

    The entries are for the batch sizes that were measured last. Algorithms are left out: the reader rebuilds them from
    their configurations. None on the host and if there are no entries; None and a warning if the text is too long.
    """
    device = model.device.ordinal
    if device is None:
        return None
    store = plan_store(device)
    made = Document(store.fingerprint)
    for rows in _known_rows(model, store.keys, store.choice):
        for problem in _problems(model, rows, device, store):
            entry: Any = store.choice(problem_key(problem))
            if entry is not None:
                others = {"alternatives": ()} if isinstance(entry, LayerEntry) else {}
                made.add(problem_key(problem), replace(entry, rejected=(), **others))
    if not made.raw:
        return None
    text = made.without_algorithms().render().decode()
    if len(text) <= _LARGEST:
        return text
    warnings.warn(f"the plan choices are {len(made.raw)}: too many for a checkpoint, which has none", stacklevel=3)
    return None


def take_choices(path: object, text: object, model: MLP) -> None:
    """Adds a checkpoint's plan choices for the model to the plan cache, as `cache merge` does.

    Problems that have an entry already keep it. Damaged choices, and choices from another kind of machine, are not
    used; a line is logged instead.

    Args:
        path: path of the checkpoint.
        text: the checkpoint's plan choices, unchecked.
    """
    device = model.device.ordinal
    if device is None or not isinstance(text, str):
        return
    store = plan_store(device)
    try:
        theirs = Document.parse(text[: _LARGEST + 1].encode(errors="replace"))
        theirs.require(store.fingerprint)
        theirs.require_sound()
        known, sizes = store.keys, _known_rows(model, theirs.raw, theirs.get)
        lacking = {key: raw for key, raw in theirs.raw.items() if key not in known}
        # A forward entry decides which backward problem follows, and an entry of a layer decides which products it has.
        while lacking and (found := lacking.keys() & _keys(model, sizes, device, store)):
            store.merge(Document(theirs.fingerprint, {key: lacking.pop(key) for key in found}))
    except UnusableError as error:
        _logger.info("%s: its plan choices are not used: what they hold %s", printable(str(path)), error)


def _known_rows(model: MLP, keys: Iterable[str], choice: Callable[[str], Entry | None]) -> list[int]:
    """The micro-batch sizes for which the model's first layer is among some entries, given by their keys."""
    chain = chain_of(model, _ANY_ROWS)
    pattern = re.escape(problem_key(chain.forwards[0]))
    pattern = pattern.replace(str(_ANY_ROWS), _NUMBER, 1).replace(str(_ANY_ROWS), r"\1")
    found = [match for key in keys if (match := re.fullmatch(pattern, key))]
    measured = [(entry.when, int(match[1])) for match in found if (entry := choice(match[0])) is not None]
    return [rows for _, rows in sorted(measured)[-_MOST_SIZES:]]


def _keys(model: MLP, sizes: Iterable[int], device: int, store: PlanStore) -> set[str]:
    return {problem_key(problem) for rows in sizes for problem in _problems(model, rows, device, store)}


def _problems(model: MLP, rows: int, device: int, store: PlanStore) -> Iterator[Remembered]:
    """The problems of a model's training steps: the narrow MLP, if it is one, its layers, and the layers' products."""
    for chain in (chain_of(model, rows), chain_of(model, rows).accumulating):
        yield from chain.narrow(device)
        for problem in as_decided(chain, store).problems:
            yield problem
            if store.choice(problem_key(problem)) is not None:
                yield from _products(problem, device)


def chain_of(model: MLP, rows: int) -> LayerChain:
    """The layers of a training step on micro-batches of `rows` rows."""
    layers, types = model.layers, (model.dtype, Compute(model.compute))
    dropout, bias = [each.dropout > 0 for each in layers], [each.bias is not None for each in layers]
    activations = [each.activation for each in layers]
    return LayerChain.of_mlp(rows, model.dims, activations, *types, dropout=dropout, bias=bias)


def _products(problem: Problem, device: int) -> list[MatmulProblem]:
    """The products of a problem's plan; none if the plan cannot be made."""
    with activated(device), contextlib.suppress(LtError, MemoryError):
        return [product.problem for product in make_plan(problem, device).products.values()]
    return []
