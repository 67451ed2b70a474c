"""The cache of plans, prepared calls and launches of repeated calls in memory."""

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
"""Hook that runs before a plan is made for a problem and a device; it may measure the problem."""

calls: Final[dict[Hashable, Any]] = {}
"""Prepared calls by operation, options and signature without addresses; see `generation`."""
repeats: Final[dict[Hashable, Any]] = {}
"""The launches of repeated calls by prepared call, stream and addresses; False for a call that was made once."""
generation = object()
"""An object that is replaced whenever plans are forgotten; prepared calls of an earlier generation are not used."""

_plans: dict[tuple[Problem, int], Plan] = {}
_lock = threading.RLock()


def plan_of(problem: Problem, device: int, stream: int, on_miss: OnMiss, *, anew: bool = False) -> Plan:
    """The plan for a problem, made at its first use.

    Args:
        stream: the stream that the plan will run on.
        on_miss: see `OnMiss`.
        anew: whether `on_miss` also runs for a problem that already has a plan.

    Raises:
        CaptureError: the problem has no plan yet, and none can be made while `stream` is being captured.
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
    """Forgets the plans of problems whose entries in the plan cache have changed; their next use makes new plans.

    Backward problems that differ only in the tensor that forward saves are forgotten together, because the strategy of
    the forward pass decides that tensor.
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
