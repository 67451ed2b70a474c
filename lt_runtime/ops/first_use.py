"""Tuning of problems when they are first met, where that is asked for.

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

from lt_runtime.errors import ArgumentError, LtError
from lt_runtime.problem import MatmulProblem
from lt_runtime.store.entries import EFFORTS, Effort, is_as_deep
from lt_runtime.store.keys import Problem, problem_key
from lt_runtime.store.plan_store import plan_store

TUNE_VARIABLE: Final = "LT_RUNTIME_TUNE"
_MODES: Final = ("off", "first-use")

asked_for: Final[ContextVar[Effort | None]] = ContextVar("lt_runtime_tuning", default=None)
"""The effort at which the calling thread is to measure even what it has run before; None if it is not to."""
_is_busy: Final[ContextVar[bool]] = ContextVar("lt_runtime_is_tuning", default=False)
_seen: Final[set[tuple[Problem, int, Effort]]] = set()
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
    if effort not in EFFORTS:
        raise ArgumentError(f"effort is {effort!r}; accepted are {', '.join(map(repr, EFFORTS))}")
    return cast(Effort, effort)


def tune_at_first_use(problem: Problem, device: int) -> None:
    """Measures a problem of which the plan cache knows nothing, if that is asked for; otherwise does nothing.

    A problem that cannot be tuned costs a warning, and runs as it would without.

    Raises:
        ArgumentError: the environment asks for something unknown.
    """
    effort = asked_for.get() or _effort_of_process()
    if effort is None or _is_busy.get() or (problem, device, effort) in _seen:
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


def is_measured(problem: Problem, device: int, effort: Effort = "default") -> bool:
    """Whether the plan cache knows a problem, measured with no less than an effort."""
    store, key = plan_store(device), problem_key(problem)
    return is_as_deep(store.product(key) if isinstance(problem, MatmulProblem) else store.layer(key), effort)


def _tune(problem: Problem, device: int, effort: Effort) -> None:
    from lt_runtime.tuner import search
    from lt_runtime.tuner.chain import Chain

    token = _is_busy.set(True)
    try:
        given = problem if isinstance(problem, MatmulProblem) else Chain.of_problem(problem)
        for _ in search.tune_chains([given], device, effort=effort):
            pass
    except (LtError, MemoryError) as error:
        warnings.warn(f"{problem} could not be tuned and runs untuned ({error})", stacklevel=2)
    finally:
        _is_busy.reset(token)
