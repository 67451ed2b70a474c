"""What is done of problems when they are first met: other machines' algorithms are verified, and problems are tuned.

This module only decides whether to measure. What measures is imported when the first problem is to be measured.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final, cast

from lt_runtime.arguments import one_of
from lt_runtime.errors import ArgumentError, LtError
from lt_runtime.gpu.devices import activated
from lt_runtime.plans.decisions import decide, known_layer
from lt_runtime.plans.mlp import known_mlp
from lt_runtime.problem import MatmulProblem, MLPProblem
from lt_runtime.products.choose import known_algorithm
from lt_runtime.products.plan import AlgorithmPlan
from lt_runtime.store.entries import EFFORTS, Effort, is_as_deep
from lt_runtime.store.keys import Remembered, problem_key
from lt_runtime.store.plan_store import plan_store

TUNE_VARIABLE: Final = "LT_RUNTIME_TUNE"
_MODES: Final = ("off", "first-use")

asked_for: Final[ContextVar[Effort | None]] = ContextVar("lt_runtime_tuning", default=None)
"""The effort at which the calling thread is to measure even what it has run before; None if it is not to."""
_is_busy: Final[ContextVar[bool]] = ContextVar("lt_runtime_is_tuning", default=False)
_seen: Final[set[tuple[Remembered, int, Effort]]] = set()
"""Problems that have been measured, or cannot be, with device and effort."""
_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def tuning(effort: Effort = "default") -> Iterator[None]:
    """Within a `with` block, the calling thread measures problems that nobody has measured before it runs them.

    A layer's forward pass is decided together with the backward pass that goes with it. What is decided goes to the
    plan cache and is used from then on, by other threads and processes as well. While its stream is being captured
    nothing is measured. `LT_RUNTIME_TUNE=first-use` does the same for a whole process, at default effort, to problems
    that it runs for the first time.

    Args:
        effort: "default" takes about a second a problem at most on an H200, "deep" tries many more algorithms. What
            was measured with less effort is measured again.

    Raises:
        ArgumentError: the effort is neither.
    """
    token = asked_for.set(checked_effort(effort))
    try:
        yield
    finally:
        asked_for.reset(token)


def checked_effort(effort: str) -> Effort:
    """The effort of that name.

    Raises:
        ArgumentError: there is none.
    """
    return cast(Effort, one_of("effort", effort, EFFORTS))


def before_first_use(problem: Remembered, device: int) -> None:
    """Verifies what another machine has measured of a problem, and measures what is not known, if that is asked for.

    What cannot be done costs a warning, and the problem runs as it would without.

    Raises:
        ArgumentError: the environment asks for something unknown.
    """
    effort = asked_for.get() or _effort_of_process()
    if _is_busy.get():
        return
    if plan_store(device).has_unproven:
        with _one_at_a_time:
            _prove(problem, device)
    if effort is None or (problem, device, effort) in _seen:
        return
    with _one_at_a_time:
        _seen.add((problem, device, effort))
        if not is_measured(problem, device, effort):
            _tune(problem, device, effort)


def _effort_of_process() -> Effort | None:
    mode = os.environ.get(TUNE_VARIABLE) or "off"
    if mode not in _MODES:
        raise ArgumentError(f"{TUNE_VARIABLE} is {mode!r}; accepted are {' and '.join(map(repr, _MODES))}")
    return "default" if mode == "first-use" else None


def is_measured(problem: Remembered, device: int, effort: Effort = "default") -> bool:
    """Whether the plan cache knows a problem, measured with no less than an effort."""
    if isinstance(problem, MLPProblem):
        return is_as_deep(known_mlp(problem, device), effort)
    store = plan_store(device)
    entry = store.product(problem_key(problem)) if isinstance(problem, MatmulProblem) else known_layer(problem, store)
    return is_as_deep(entry, effort)


def _prove(problem: Remembered, device: int) -> None:
    """Verifies other machines' algorithms of those products that the problem's plan will be made of."""
    if isinstance(problem, MLPProblem):  # which is made of no products
        return

    def choose(product: MatmulProblem, on: int) -> AlgorithmPlan:
        store, key = plan_store(on), problem_key(product)
        entry = None if product.is_empty else store.unproven(key)
        if entry is not None:
            from lt_runtime.tuner.proof import proven

            store.put({key: proven(product, on, entry)})
        return known_algorithm(product, on)

    try:
        with activated(device):
            decide(problem, device, choose)
    except (LtError, MemoryError) as error:
        warnings.warn(f"merged algorithms could not be verified and are not used ({error})", stacklevel=2)


def _tune(problem: Remembered, device: int, effort: Effort) -> None:
    from lt_runtime.tuner import search
    from lt_runtime.tuner.chain import Chain

    token = _is_busy.set(True)
    try:
        given: Chain | MatmulProblem
        if isinstance(problem, MLPProblem):
            given = Chain.of_narrow(problem)
        else:
            given = problem if isinstance(problem, MatmulProblem) else Chain.of_problem(problem)
        for _ in search.tune_chains([given], device, effort=effort):
            pass
    except (LtError, MemoryError) as error:
        warnings.warn(f"{problem} could not be tuned and runs untuned ({error})", stacklevel=2)
    finally:
        _is_busy.reset(token)
