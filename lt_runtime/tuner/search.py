"""Tunes chains of layers and matrix products, and stores the results in the plan cache."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from lt_runtime.errors import GpuError, PlanError
from lt_runtime.fp8 import Fp8ChainProblem
from lt_runtime.gpu.devices import activated
from lt_runtime.plans.cache import LayerProblem, forget, known_layer
from lt_runtime.problem import MatmulProblem, MLPProblem
from lt_runtime.products.product import library_may_fuse, plain_product
from lt_runtime.store.entries import ProductEntry
from lt_runtime.store.keys import Remembered, problem_key
from lt_runtime.store.plan_store import plan_store
from lt_runtime.tuner.chain import LayerChain, Part, Tunable, as_decided, saved_as
from lt_runtime.tuner.fp8_search import decide_fp8, fp8_plans
from lt_runtime.tuner.layer_search import decide_part
from lt_runtime.tuner.product_search import find_algorithm
from lt_runtime.tuner.report import Decided, Progress, Tuned, choice_in_words, describe
from lt_runtime.tuner.timing import Bench, clear_bench, workbench
from lt_runtime.tuner.two_ways import decide_mlp


def tune_chains(chains: Iterable[Tunable], device: int, *, progress: Progress | None = None) -> Iterator[Tuned]:
    """Decides chains of layers, and single products, by measurement; saves the result of each group when it is decided.

    A group is a layer's forward problem with the backward problem that reads its saved tensor, one of these alone, or a
    product. For a narrow MLP, the choice between fused kernels and layers follows after its layers were decided. The
    choice of the precision of layers follows after the layers in their own type and the products in FP8.

    Problems in the plan cache are not measured again, and empty problems are left out. If the GPU has not enough memory
    for a problem, a warning is given and the problem stays untuned. Later plans use the results. The memory of the
    measurements is freed at the end, also after an exception.

    Args:
        device: ordinal of the GPU.

    Yields:
        The result for each group.

    Raises:
        MissingLibraryError: CuPy is not installed.
        CaptureError: a stream is being captured that the measurements would disturb.
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
"""A group of problems that are decided together, and the function that decides them.

The function returns None if a matrix is empty, or if this session has already decided equal problems.
"""


class _Session:
    def __init__(self, device: int) -> None:
        self._device = device
        self._store = plan_store(device)
        self._met: set[LayerProblem] = set()

    def groups(self, given: Tunable) -> list[_Group]:
        """The groups of problems that are decided together, for a chain, a choice of the precision, or one product."""
        if isinstance(given, MatmulProblem):
            return [([given], partial(self._tune_product, given))]
        if isinstance(given, Fp8ChainProblem) and not given.is_open:
            return []
        if isinstance(given, Fp8ChainProblem):
            parts: list[Tunable] = [LayerChain.of_fp8(given), *self._products_in_fp8(given)]
            before = [group for part in parts for group in self.groups(part)]
            return [*before, ([given], partial(self._tune_ways, given, partial(decide_fp8, problem=given)))]
        groups = [(given.cut(part).problems, partial(self._tune_part, given, part)) for part in given.parts]
        ways = [(each, partial(decide_mlp, chain=given, problem=each)) for each in given.narrow(self._device)]
        return [*groups, *(([each], partial(self._tune_ways, each, decide)) for each, decide in ways)]

    def _tune_part(self, chain: LayerChain, part: Part) -> Tuned | None:
        """Decides one part of a chain: a forward problem, the backward problem that reads its saved tensor, or both.

        Returns None if a matrix is empty, or if this session has already decided equal problems.
        """
        kept = {index: saved_as(each, self._store) for index, each in chain.forwards.items() if each in self._met}
        chain = chain.keeping(kept)
        if part.forward is not None and kept.get(part.forward) is not None:
            part = part._replace(forward=None)
        cut = chain.cut(part)
        is_empty = any(0 in (each.x.layout.size, each.w.layout.size) for each in cut.problems)
        if is_empty or self._met.issuperset(cut.problems):
            return None
        self._met.update(cut.problems)
        known = self._known(cut.problems, as_decided(cut, self._store).problems)
        return known or self._measure(cut.problems, lambda bench: decide_part(bench, self._store, cut))

    def _known(
        self, shown: Sequence[Remembered], decided: Sequence[LayerProblem | MLPProblem | Fp8ChainProblem]
    ) -> Tuned | None:
        """The result for problems from the plan cache; None if the cache lacks one of them.

        Args:
            shown: the problems as the report names them.
            decided: the same problems with the saved tensors that the plan cache has chosen.
        """
        found = [entry for each in decided if (entry := known_layer(each, self._store)) is not None]
        if len(found) < len(shown):
            return None
        words, us = " | ".join(map(choice_in_words, found)), sum(each.us for each in found)
        return Tuned((*shown,), us, us, words)

    def _measure(self, problems: Sequence[Remembered], decide: Callable[[Bench], Decided]) -> Tuned:
        """Decides a group by measuring, and writes the entries to the plan cache."""
        started = time.monotonic()
        try:
            with workbench(self._device) as bench:
                tuned, entries = decide(bench)
        except PlanError as error:
            return Tuned((*problems,), 0.0, 0.0, "none", 0, (str(error),), time.monotonic() - started)
        self._store.put({problem_key(problem): entry for problem, entry in entries.items()})
        forget({*problems, *(each for each in entries if not isinstance(each, MatmulProblem))}, self._device)
        return replace(tuned, problems=(*problems,), seconds=time.monotonic() - started)

    def _tune_ways(self, problem: MLPProblem | Fp8ChainProblem, decide: Callable[[Bench], Decided]) -> Tuned:
        """Decides between two ways to run layers; see `two_ways.py`."""
        return self._known([problem], [problem]) or self._measure([problem], decide)

    def _products_in_fp8(self, problem: Fp8ChainProblem) -> list[MatmulProblem]:
        """The products of layers in FP8; none if the GPU or cuBLASLt refuses one of them."""
        with activated(self._device), contextlib.suppress(GpuError):
            plans = fp8_plans(problem, self._device)
            return [product.problem for _, plan in plans for product in plan.products.values()]
        return []

    def _tune_product(self, problem: MatmulProblem) -> Tuned | None:
        """Decides a product, without its epilogue if cuBLASLt may not fuse it; returns None for an empty product."""
        if problem.is_empty:
            return None
        refused: list[str] = []
        for each in dict.fromkeys([problem] * library_may_fuse(problem) + [plain_product(problem)]):
            entry = self._store.product(problem_key(each))
            if entry is not None:
                return replace(_tuned(each, entry), problems=(problem,), measured=0, rejected=tuple(refused))
            tuned = self._measure([problem], partial(_decide_product, each))
            if tuned.measured:
                return replace(tuned, rejected=(*refused, *tuned.rejected))
            refused += (f"{each.epilogue.value}: refused: {reason}" for reason in tuned.rejected)
        return replace(tuned, rejected=tuple(refused))


def _decide_product(problem: MatmulProblem, bench: Bench) -> Decided:
    entry = find_algorithm(bench, problem)
    return _tuned(problem, entry), {problem: entry}


def _tuned(problem: MatmulProblem, entry: ProductEntry) -> Tuned:
    """The `Tuned` row of the report for a product's entry."""
    words = f"{problem.epilogue.value} by {choice_in_words(entry)}"
    reasons = tuple(each.reason for each in entry.rejected)
    return Tuned((problem,), entry.first_us, entry.us, words, entry.candidates, reasons)
