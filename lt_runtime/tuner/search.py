"""Tunes any number of chains and products, and remembers the results."""

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
from lt_runtime.store.entries import ProductEntry
from lt_runtime.store.keys import Remembered, problem_key
from lt_runtime.store.plan_store import plan_store
from lt_runtime.tuner.chain import LayerChain, Part, as_decided, saved_as
from lt_runtime.tuner.layer_search import decide_part
from lt_runtime.tuner.mlp_search import decide_mlp
from lt_runtime.tuner.product_search import find_algorithm
from lt_runtime.tuner.report import Decided, Progress, Tuned, choice_in_words, describe
from lt_runtime.tuner.timing import Bench, clear_bench, workbench


def tune_chains(
    chains: Iterable[LayerChain | MatmulProblem],
    device: int,
    *,
    progress: Progress | None = None,
) -> Iterator[Tuned]:
    """Decides chains of layers, and single products, by measurement, and saves each group of problems when it is done.

    A layer's forward problem is decided together with the backward problem that reads the tensor it saves. A narrow
    MLP whose passes may be one kernel each is decided after its layers.

    Problems in the plan cache are not measured again. Empty problems are left out. Problems for which the GPU has not
    enough memory cost a warning and stay as they are. Plans made from now on follow the results. All memory that
    measuring took is freed at the end, whatever ends it.

    Args:
        device: ordinal of the GPU.

    Yields:
        The result for each group.

    Raises:
        MissingLibraryError: CuPy is not installed.
        CaptureError: a stream is being captured that this would disturb.
    """
    session, tell = _Session(device), progress or (lambda *_: None)
    groups = [group for each in dict.fromkeys(chains) for group in session.groups(each)]
    try:
        for done, (problems, decide) in enumerate(groups):
            names = " and ".join(map(describe, problems))
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
"""Problems that are decided together, and the function that decides them; it returns None if none of them is new."""


class _Session:
    def __init__(self, device: int) -> None:
        self._device = device
        self._store = plan_store(device)
        self._met: set[LayerProblem] = set()

    def groups(self, given: LayerChain | MatmulProblem) -> list[_Group]:
        """The groups of a chain's problems, or of a product."""
        if isinstance(given, MatmulProblem):
            return [([given], partial(self._tune_product, given))]
        found: list[_Group] = [
            (given.cut(part).problems, partial(self._tune_part, given, part)) for part in given.parts
        ]
        narrow = given.narrow
        if narrow is not None and supports(narrow, self._device):
            found.append(([narrow], partial(self._tune_mlp, given, narrow)))
        return found

    def _tune_part(self, chain: LayerChain, part: Part) -> Tuned | None:
        """Decides a part; returns None if it is empty, or equal to a part before."""
        kept = {index: saved_as(each, self._store) for index, each in chain.forwards.items() if each in self._met}
        chain = chain.keeping(kept)
        if part.forward is not None and kept.get(part.forward) is not None:
            part = part._replace(forward=None)
        cut = chain.cut(part)
        is_empty = any(0 in (each.x.layout.size, each.w.layout.size) for each in cut.problems)
        if is_empty or self._met.issuperset(cut.problems):
            return None
        self._met.update(cut.problems)
        return self._known(cut) or self._measure(cut.problems, lambda bench: decide_part(bench, self._store, cut))

    def _known(self, part: LayerChain) -> Tuned | None:
        """The result for a part from the plan cache; None if one of its problems is not there."""
        problems = as_decided(part, self._store).problems
        found = [entry for problem in problems if (entry := known_layer(problem, self._store)) is not None]
        if len(found) < len(part.problems):
            return None
        words, us = " | ".join(map(choice_in_words, found)), sum(each.us for each in found)
        return Tuned((*part.problems,), us, us, words)

    def _measure(self, problems: Sequence[Remembered], decide: Callable[[Bench], Decided]) -> Tuned:
        """Decides problems on a bench, and remembers the entries."""
        started = time.monotonic()
        try:
            with workbench(self._device) as bench:
                tuned, entries = decide(bench)
        except PlanError as error:
            return Tuned((*problems,), 0.0, 0.0, "none", 0, (str(error),), time.monotonic() - started)
        self._store.put({problem_key(problem): entry for problem, entry in entries.items()})
        forget({*problems, *(each for each in entries if not isinstance(each, MatmulProblem))}, self._device)
        return replace(tuned, problems=(*problems,), seconds=time.monotonic() - started)

    def _tune_mlp(self, chain: LayerChain, problem: MLPProblem) -> Tuned:
        """Decides whether an MLP's passes are one kernel each."""
        entry = known_mlp(problem, self._device)
        if entry is not None:
            return Tuned((problem,), entry.us, entry.us, choice_in_words(entry))
        return self._measure([problem], lambda bench: decide_mlp(bench, chain, problem))

    def _tune_product(self, problem: MatmulProblem) -> Tuned | None:
        """Decides a product, or the plain product if the library may not do the rest; returns None if it is empty."""
        if problem.is_empty:
            return None
        refused: list[str] = []
        for each in dict.fromkeys([problem] * library_may_fuse(problem) + [plain_product(problem)]):
            entry = self._store.product(problem_key(each))
            if entry is not None:
                return replace(_tuned(each, entry), problems=(problem,), measured=0, rejected=tuple(refused))
            tuned = self._measure([problem], partial(self._decide_product, each))
            if tuned.measured:
                return replace(tuned, rejected=(*refused, *tuned.rejected))
            refused += (f"{each.epilogue.value}: refused: {reason}" for reason in tuned.rejected)
        return replace(tuned, rejected=tuple(refused))

    def _decide_product(self, problem: MatmulProblem, bench: Bench) -> Decided:
        entry = find_algorithm(bench, problem)
        return _tuned(problem, entry), {problem: entry}


def _tuned(problem: MatmulProblem, entry: ProductEntry) -> Tuned:
    """A product's entry as the report shows it."""
    words, reasons = choice_in_words(entry), tuple(each.reason for each in entry.rejected)
    times = entry.first_us, entry.us
    return Tuned((problem,), *times, f"{problem.epilogue.value} by {words}", entry.candidates, reasons)
