"""Plans and calls in memory: what has been made once is found again by problem and device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any, Final, TypeAlias

from lt_runtime.errors import CaptureError
from lt_runtime.gpu.driver import is_capturing
from lt_runtime.plans.decisions import make_plan
from lt_runtime.problem import BackwardProblem, Derivative, Saved
from lt_runtime.products.plan import Plan
from lt_runtime.store.keys import Problem, Remembered
from lt_runtime.store.recording import record

OnMiss: TypeAlias = Callable[[Problem, int], None]
"""Is told of a problem and a device before a plan is made, and may measure the problem first."""

calls: Final[dict[Hashable, Any]] = {}
"""What operations have made of calls, plans included, by all but their addresses; see `generation`."""
repeats: Final[dict[Hashable, Any]] = {}
"""The launches of calls that repeat, by their addresses as well; what is false stands for a call made once."""
generation = object()
"""Another object whenever plans are let go. What operations have made of calls holds in one generation alone."""

_plans: dict[tuple[Problem, int], Plan] = {}
_lock = threading.RLock()


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
                _plans[problem, device] = make_plan(problem, device)
            return _plans[problem, device]
    if plan is None:
        raise CaptureError(
            f"no plan yet for {problem}, and stream {stream:#x} is being captured; "
            "run the operation once with these shapes, types and layouts before the capture, or tune it with lt.tune"
        )
    return plan


def forget(problems: Iterable[Remembered], device: int) -> None:
    """Lets go of the plans for problems, because something better is known: their next use plans anew.

    Backward problems that differ only in what forward has saved are forgotten together: that was decided with them.
    """
    global generation
    wanted = {_without_saved(problem) for problem in problems}
    with _lock:
        for problem, of in list(_plans):
            if of == device and _without_saved(problem) in wanted:
                del _plans[problem, of]
        generation = object()
        calls.clear()
        repeats.clear()


def _without_saved(problem: Remembered) -> Remembered:
    if not isinstance(problem, BackwardProblem):
        return problem
    through = problem.input_derivative and _saving_nothing(problem.input_derivative)
    return replace(problem, output_derivative=_saving_nothing(problem.output_derivative), input_derivative=through)


def _saving_nothing(derivative: Derivative) -> Derivative:
    return replace(derivative, saved=Saved.NOTHING, saved_spec=None)
