"""Plans and calls in memory: what has been made once is found again by problem and device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any, Final, TypeAlias

from lt_runtime.errors import CaptureError
from lt_runtime.gpu.direct import is_capturing
from lt_runtime.plans.decisions import decide
from lt_runtime.problem import BackwardProblem, Derivative, Saved
from lt_runtime.products.plan import Plan
from lt_runtime.store.keys import Problem
from lt_runtime.store.recording import record

OnMiss: TypeAlias = Callable[[Problem, int], None]
"""Is told of a problem and a device before a plan is made, and may measure the problem first."""

calls: Final[dict[Hashable, Any]] = {}
"""What operations have made of calls, plans included, by all but their addresses."""
repeats: Final[dict[Hashable, Any]] = {}
"""The same by their addresses as well. `remember` adds to the two, `forget` empties them."""

_MOST: Final = 1024
_plans: dict[tuple[Problem, int], Plan] = {}
_lock = threading.RLock()
_age = 0


def plan_of(problem: Problem, device: int, stream: int, on_miss: OnMiss, *, anew: bool = False) -> Plan:
    """The plan for a problem, made at its first use.

    Args:
        stream: that the plan is to run on.
        on_miss: see `OnMiss`.
        anew: whether `on_miss` is to be told of a problem that has a plan already.

    Raises:
        CaptureError: the plan has to be made while `stream` is being captured.
        PlanError: cuBLASLt has no algorithm for the problem.
    """
    plan = _plans.get((problem, device))
    if plan is not None and not anew:
        return plan
    if not is_capturing(stream):
        record(problem)
        on_miss(problem, device)
        with _lock:
            if (problem, device) not in _plans:
                _plans[problem, device] = decide(problem, device)
            return _plans[problem, device]
    if plan is None:
        raise CaptureError(
            f"no plan yet for {problem}, and stream {stream:#x} is being captured; "
            "run the operation once with these shapes, types and layouts before the capture, or tune it with lt.tune"
        )
    return plan


def forget(problems: Iterable[Problem], device: int) -> None:
    """Lets go of the plans for problems, because something better is known: their next use plans anew.

    Backward problems that differ only in what forward has saved are forgotten together: that was decided with them.
    """
    global _age
    wanted = {_without_saved(problem) for problem in problems}
    with _lock:
        for problem, of in list(_plans):
            if of == device and _without_saved(problem) in wanted:
                del _plans[problem, of]
        calls.clear()
        repeats.clear()
        _age += 1


def age() -> int:
    """A number that changes whenever plans are let go."""
    return _age


def remember(table: dict[Hashable, Any], key: Hashable, call: Any, since: int) -> None:
    """Keeps what an operation has made of a call, its plan included, until a plan is let go.

    Args:
        table: `calls` or `repeats`.
        since: what `age` was before the plan was asked for.
    """
    with _lock:
        if since != _age:
            return
        if len(table) >= _MOST:
            del table[next(iter(table))]  # the one that was remembered first
        table[key] = call


def _without_saved(problem: Problem) -> Problem:
    if not isinstance(problem, BackwardProblem):
        return problem
    through = problem.through and _saving_nothing(problem.through)
    return replace(problem, own=_saving_nothing(problem.own), through=through)


def _saving_nothing(derivative: Derivative) -> Derivative:
    return replace(derivative, saved=Saved.NOTHING, saved_spec=None)
