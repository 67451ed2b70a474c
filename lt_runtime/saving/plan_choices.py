"""The plan choices of a model's training steps, which a checkpoint takes along to plan caches that do not know them."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from lt_runtime.errors import LtError
from lt_runtime.gpu.devices import activated
from lt_runtime.plans.decisions import make_plan
from lt_runtime.problem import MatmulProblem
from lt_runtime.products.choose import known_algorithm
from lt_runtime.products.plan import AlgorithmPlan
from lt_runtime.store.document import Document, UnusableError
from lt_runtime.store.entries import Entry, LayerEntry
from lt_runtime.store.keys import Problem, Remembered, problem_key
from lt_runtime.store.plan_store import PlanStore, plan_store
from lt_runtime.training.body import chains_of
from lt_runtime.training.mlp import MLP
from lt_runtime.tuner.chain import as_decided

_LARGEST: Final = 1 << 20
"""Characters; a layer takes some thousands for each size of batch."""
_MOST_SIZES: Final = 8
"""Of batches; as many as a step keeps graphs of."""
_ANY_ROWS: Final = (1 << 48) - 1
_NUMBER: Final = "([1-9][0-9]{0,13})"
_logger: Final = logging.getLogger("lt_runtime")


def choices_of(model: MLP) -> str | None:
    """What the plan cache knows of a model's training steps, for batches of any size, as the text of a plan file.

    Algorithms are left out, as whoever reads it rebuilds them from their configurations. None if nothing is known, as
    on the host. If it is too long, that costs a warning. Of many sizes of batch those count that were measured last.
    """
    device = model.device.ordinal
    if device is None:
        return None
    store = plan_store(device)
    made = Document(store.fingerprint)
    for rows in _known_rows(model, store):
        for problem in _problems(model, rows, device, store):
            entry = store.choice(problem_key(problem))
            if entry is not None:
                made.add(problem_key(problem), _chosen(entry))
    if not made.raw:
        return None
    with contextlib.suppress(OSError):  # where they are too many for any plan file
        text = made.without_algorithms().render().decode()
        if len(text) <= _LARGEST:
            return text
    warnings.warn(f"the plan choices are {len(made.raw)}: too many for a checkpoint, which has none", stacklevel=3)
    return None


def take_choices(path: object, text: object, model: MLP) -> None:
    """Adds to the plan cache what it does not know of a checkpoint's plan choices, as `cache merge` does.

    What was measured on another kind of machine, or cannot be used, costs a line of the logger.

    Args:
        path: of the checkpoint.
        text: what the checkpoint says; nobody has checked it.
    """
    device = model.device.ordinal
    if device is None or not isinstance(text, str):
        return
    store = plan_store(device)
    try:
        theirs = Document.parse(text.encode(errors="replace"))
        known = store.keys
        store.merge(Document(theirs.fingerprint, {key: raw for key, raw in theirs.raw.items() if key not in known}))
    except UnusableError as error:
        _logger.info("%s: its plan choices are not used: what they hold %s", path, error)


def _chosen(entry: Entry) -> Entry:
    """An entry without what was not chosen."""
    if isinstance(entry, LayerEntry):
        return replace(entry, alternatives=(), rejected=())
    return replace(entry, rejected=())


def _known_rows(model: MLP, store: PlanStore) -> list[int]:
    """The rows of micro-batches for which the plan cache knows the first layer."""
    (chain,) = chains_of(model, _ANY_ROWS, accumulates=False)
    pattern = re.escape(problem_key(chain.forwards[0]))
    pattern = pattern.replace(str(_ANY_ROWS), _NUMBER, 1).replace(str(_ANY_ROWS), r"\1")
    found = [match for key in store.keys if (match := re.fullmatch(pattern, key))]
    measured = [(entry.when, int(match[1])) for match in found if (entry := store.choice(match[0])) is not None]
    return [rows for _, rows in sorted(measured)[-_MOST_SIZES:]]


def _problems(model: MLP, rows: int, device: int, store: PlanStore) -> Iterator[Remembered]:
    """What the plan cache may know of a model's steps: layers, the layers as a whole, and products."""
    for chain in chains_of(model, rows, accumulates=True):
        if chain.narrow is not None:
            yield chain.narrow
        for problem in as_decided(chain, store, "default").problems:
            yield problem
            if store.choice(problem_key(problem)) is not None:
                yield from _products(problem, device)


def _products(problem: Problem, device: int) -> list[MatmulProblem]:
    """The products of a problem's plan, as far as one can be made."""
    met: list[MatmulProblem] = []

    def choose(product: MatmulProblem, on: int) -> AlgorithmPlan:
        met.append(product)
        return known_algorithm(product, on)

    with activated(device), contextlib.suppress(LtError, MemoryError):
        make_plan(problem, device, choose)
    return met
