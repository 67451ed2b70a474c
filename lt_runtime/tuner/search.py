"""Tunes any number of chains and products, and remembers what was found."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from lt_runtime.errors import PlanError
from lt_runtime.kernels.mlp import supports
from lt_runtime.plans.cache import forget
from lt_runtime.plans.decisions import LayerProblem, known_layer
from lt_runtime.plans.mlp import known_mlp
from lt_runtime.problem import MatmulProblem, MLPProblem
from lt_runtime.products.product import library_may_fuse, plain_product
from lt_runtime.store.entries import Effort, LayerEntry, ProductEntry, is_as_deep
from lt_runtime.store.keys import Remembered, problem_key
from lt_runtime.store.plan_store import plan_store
from lt_runtime.tuner.chain import Chain, Part, as_decided, saved_as
from lt_runtime.tuner.chain_search import decide_chain, decide_mlp
from lt_runtime.tuner.layer_search import decide_part
from lt_runtime.tuner.product_search import BUDGET_S, find_algorithm
from lt_runtime.tuner.report import Decided, Progress, Tuned, choice_in_words, describe
from lt_runtime.tuner.timing import Bench, clear_bench, workbench


def tune_chains(
    chains: Iterable[Chain | MatmulProblem],
    device: int,
    *,
    effort: Effort = "default",
    progress: Progress | None = None,
) -> Iterator[Tuned]:
    """Decides chains of layers, and single products, by measurement; each group of problems is saved when it is done.

    A layer's forward problem is decided together with the backward problem that reads what it keeps. Then each chain is
    measured as a whole: what is nearly as fast for a problem by itself takes the place of what was decided, if the
    chain is faster with it.

    What was decided at that effort, or at a greater one, is not measured again. Empty problems are left out. What the
    GPU has not enough memory for costs a warning and stays as it is. Plans made from now on follow what was decided.
    All memory that measuring took is given back at the end.

    Args:
        device: ordinal of the GPU.

    Yields:
        What was decided for each group, and for each chain as a whole.

    Raises:
        MissingLibraryError: CuPy is not installed.
        CaptureError: a stream is being captured that this would disturb.
    """
    given = list(dict.fromkeys(chains))
    session, tell = _Session(device, effort), progress or (lambda *_: None)
    groups = [group for each in given for group in session.groups(each)]
    try:
        for done, (problems, decide) in enumerate(groups):
            names = " and ".join([*map(describe, problems[:2]), *([f"{len(problems) - 2} more"] * (len(problems) > 2))])
            tell(done, len(groups), names)
            try:
                tuned = decide()
            except MemoryError as error:
                warnings.warn(f"not tuned, for want of memory on the GPU: {names} ({error})", stacklevel=2)
                continue
            if tuned is not None:
                yield tuned
        tell(len(groups), len(groups), "")
    finally:
        clear_bench(device)


_Group: TypeAlias = tuple[Sequence[Remembered], Callable[[], Tuned | None]]
"""Problems that are decided together, and the function that decides them; None if there is nothing to decide."""


class _Session:
    def __init__(self, device: int, effort: Effort) -> None:
        self._device, self._effort = device, effort
        self._store = plan_store(device)
        self._met: set[LayerProblem] = set()

    def groups(self, given: Chain | MatmulProblem) -> list[_Group]:
        """What is decided together, each with the function that decides it."""
        if isinstance(given, MatmulProblem):
            return [([given], partial(self._tune_product, given))]
        parts: list[_Group] = [
            (given.cut(part).problems, partial(self._tune_part, given, part)) for part in given.parts
        ]
        whole: list[_Group] = [(given.problems, partial(self._tune_chain, given))] if len(parts) > 1 else []
        narrow = given.narrow
        if narrow is not None and supports(narrow, self._device):
            whole.append(([narrow], partial(self._tune_mlp, given, narrow)))
        return [*parts, *whole]

    def _tune_part(self, chain: Chain, part: Part) -> Tuned | None:
        """Decides a part; None if it is empty, or equal layers have brought it up before."""
        kept = {
            index: saved_as(each, self._store, self._effort)
            for index, each in chain.forwards.items()
            if each in self._met
        }
        chain = chain.keeping(kept)
        if part.forward is not None and kept.get(part.forward) is not None:
            part = part._replace(forward=None)
        cut = chain.cut(part)
        is_empty = any(0 in (each.x.layout.size, each.w.layout.size) for each in cut.problems)
        if is_empty or self._met.issuperset(cut.problems):
            return None
        self._met.update(cut.problems)
        return self._known(cut) or self._measure(
            cut.problems, lambda bench: decide_part(bench, self._store, cut, self._effort)
        )

    def _known(self, part: Chain) -> Tuned | None:
        """What is known of a part's forward problem, and of the backward problem that reads what that keeps."""
        problems = as_decided(part, self._store, self._effort).problems
        found = [entry for problem in problems if (entry := self._entry(problem)) is not None]
        if len(found) < len(part.problems):
            return None
        words, us = " | ".join(map(choice_in_words, found)), sum(each.us for each in found)
        return Tuned((*part.problems,), us, us, words)

    def _entry(self, problem: LayerProblem) -> LayerEntry | None:
        """What was decided with no less effort, and is a strategy of the problem; None if nothing was."""
        entry = known_layer(problem, self._store)
        return entry if is_as_deep(entry, self._effort) else None

    def _measure(self, problems: Sequence[Remembered], decide: Callable[[Bench], Decided]) -> Tuned:
        """Decides problems on a bench, and remembers what was decided."""
        started = time.monotonic()
        try:
            with workbench(self._device) as bench:
                tuned, entries = decide(bench)
        except PlanError as error:
            return Tuned((*problems,), 0.0, 0.0, "none", 0, (str(error),), time.monotonic() - started)
        self._store.put({problem_key(problem): entry for problem, entry in entries.items()})
        forget({*problems, *(each for each in entries if not isinstance(each, MatmulProblem))}, self._device)
        return replace(tuned, problems=(*problems,), seconds=time.monotonic() - started)

    def _tune_chain(self, chain: Chain) -> Tuned | None:
        """Decides a chain as a whole, as far as its layers are decided by themselves; None if nothing is to be done."""
        chain = as_decided(chain.condensed, self._store, self._effort)
        known = {each: entry for each in chain.problems if (entry := known_layer(each, self._store)) is not None}
        chain = chain.only(known)
        if len(chain.parts) < 2 or all(entry.in_chain for entry in known.values()):
            return None
        return self._measure(chain.problems, lambda bench: decide_chain(bench, self._store, chain, known))

    def _tune_mlp(self, chain: Chain, problem: MLPProblem) -> Tuned:
        """Decides whether an MLP's passes are one kernel each, once its layers are decided."""
        entry = known_mlp(problem, self._device)
        if entry is not None and is_as_deep(entry, self._effort):
            return Tuned((problem,), entry.us, entry.us, choice_in_words(entry))
        return self._measure([problem], lambda bench: decide_mlp(bench, chain, problem, self._effort))

    def _tune_product(self, problem: MatmulProblem) -> Tuned | None:
        """Decides a product, or what of it is left to the library (see `ProductPlan`); None if it is empty."""
        if problem.is_empty:
            return None
        refused: list[str] = []
        for each in dict.fromkeys([problem] * library_may_fuse(problem) + [plain_product(problem)]):
            entry = self._store.product(problem_key(each))
            if entry is not None and is_as_deep(entry, self._effort):
                return replace(_tuned(each, entry), problems=(problem,), measured=0, rejected=tuple(refused))
            tuned = self._measure([problem], partial(self._decide_product, each))
            if tuned.measured:
                return replace(tuned, rejected=(*refused, *tuned.rejected))
            refused += (f"{each.epilogue.value}: refused: {reason}" for reason in tuned.rejected)
        return replace(tuned, rejected=tuple(refused))

    def _decide_product(self, problem: MatmulProblem, bench: Bench) -> Decided:
        entry = find_algorithm(bench, problem, self._effort, BUDGET_S[self._effort])
        return _tuned(problem, entry), {problem: entry}


def _tuned(problem: MatmulProblem, entry: ProductEntry) -> Tuned:
    """A product's entry as the report shows it."""
    words, reasons = choice_in_words(entry), tuple(each.reason for each in entry.rejected)
    times = entry.first_us, entry.us
    return Tuned((problem,), *times, f"{problem.epilogue.value} by {words}", entry.candidates, reasons)
