"""Plan choices: the plan cache's entries for a model's training steps, which a checkpoint carries to other caches."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from lt_runtime.errors import LtError, printable
from lt_runtime.fp8 import Fp8ChainProblem
from lt_runtime.gpu.devices import activated
from lt_runtime.nn.block import Block
from lt_runtime.plans.cache import make_plan
from lt_runtime.problem import MatmulProblem
from lt_runtime.products.product import plain_product
from lt_runtime.store.document import Document, UnusableError
from lt_runtime.store.entries import LayerEntry
from lt_runtime.store.keys import Problem, Remembered, problem_key
from lt_runtime.store.plan_store import PlanStore, plan_store
from lt_runtime.tuner.chain import as_decided

_LARGEST: Final = 1 << 20
"""Limit of the characters of plan choices; a layer takes some thousands for each batch size."""
_logger: Final = logging.getLogger("lt_runtime")


def choices_of(model: Block) -> str | None:
    """The plan cache's entries for a model's training steps, as the text of a plan file.

    The entries are for the batch sizes that steps of this process have captured or tuned last. Algorithms are left out:
    the reader rebuilds them from their configurations. None on the host and if there are no entries; None and a warning
    if the text is too long.
    """
    device = model.device.ordinal
    if device is None:
        return None
    store = plan_store(device)
    made = Document(store.fingerprint)
    for problem in _problems(model, device, store):
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


def take_choices(path: object, text: object, model: Block) -> None:
    """Adds a checkpoint's plan choices to the plan cache of the model's GPU, as `cache merge` does.

    If the plan cache has an entry for a problem, the entry stays. Damaged choices, and choices from another kind of
    machine, are not used; a line is logged instead.

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
        known = store.keys
        store.merge(Document(theirs.fingerprint, {key: raw for key, raw in theirs.raw.items() if key not in known}))
    except UnusableError as error:
        _logger.info("%s: its plan choices are not used: what they hold %s", printable(str(path)), error)


def _problems(model: Block, device: int, store: PlanStore) -> Iterator[Remembered]:
    """The problems that a model's training steps have met and that have plans: layers, narrow MLPs, FP8, products."""
    for given in dict.fromkeys(each for met in model.met for each in met.to_tune()):
        if isinstance(given, MatmulProblem):
            yield from (given, plain_product(given))
            continue
        if isinstance(given, Fp8ChainProblem):
            yield given
            continue
        yield from given.narrow(device)
        for problem in as_decided(given, store).problems:
            yield problem
            if store.choice(problem_key(problem)) is not None:
                yield from _products(problem, device)


def _products(problem: Problem, device: int) -> list[MatmulProblem]:
    """The products of a problem's plan; none if the plan cannot be made."""
    with activated(device), contextlib.suppress(LtError, MemoryError):
        return [product.problem for product in make_plan(problem, device).products.values()]
    return []
