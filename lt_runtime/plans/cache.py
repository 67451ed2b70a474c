"""Plans already made, by problem and device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any, Final, TypeVar

from lt_runtime.errors import CaptureError
from lt_runtime.gpu.direct import is_capturing
from lt_runtime.plans.backward import BackwardPlan
from lt_runtime.plans.decisions import decide_backward, decide_forward
from lt_runtime.plans.first_use import is_asked_for, tune_at_first_use
from lt_runtime.plans.forward import ForwardPlan
from lt_runtime.problem import BackwardProblem, Derivative, ForwardProblem, MatmulProblem, Saved
from lt_runtime.products.product import ProductPlan
from lt_runtime.store.keys import Problem
from lt_runtime.store.recording import record

_Problem = TypeVar("_Problem", ForwardProblem, BackwardProblem, MatmulProblem)
_Plan = TypeVar("_Plan", ForwardPlan, BackwardPlan, ProductPlan)

_forward: dict[tuple[ForwardProblem, int], ForwardPlan] = {}
_backward: dict[tuple[BackwardProblem, int], BackwardPlan] = {}
_products: dict[tuple[MatmulProblem, int], ProductPlan] = {}
_lock = threading.RLock()

_MOST_CALLS: Final = 1024
_calls: dict[Hashable, Any] = {}
_age = 0


def forward_plan(problem: ForwardProblem, device: int, stream: int) -> ForwardPlan:
    """The plan for a problem, made at its first use.

    Raises:
        CaptureError: it has to be made while `stream` is being captured.
        PlanError: cuBLASLt has no algorithm for it.
    """
    return _look_up(_forward, decide_forward, problem, device, stream)


def backward_plan(problem: BackwardProblem, device: int, stream: int) -> BackwardPlan:
    """As `forward_plan`, for backward."""
    return _look_up(_backward, decide_backward, problem, device, stream)


def product_plan(problem: MatmulProblem, device: int, stream: int) -> ProductPlan:
    """As `forward_plan`, for a single product."""
    return _look_up(_products, ProductPlan, problem, device, stream)


def forget(problems: Iterable[Problem], device: int) -> None:
    """Lets go of the plans for problems, because something better is known: their next use plans anew.

    Of a backward problem also those that differ in what forward has saved, which was decided with it.
    """
    global _age
    wanted = {_whatever_is_saved(problem) for problem in problems}
    tables: tuple[dict[Any, Any], ...] = (_forward, _backward, _products)
    with _lock:
        for plans in tables:
            for problem, of in list(plans):
                if of == device and _whatever_is_saved(problem) in wanted:
                    del plans[problem, of]
        _calls.clear()
        _age += 1


def age() -> int:
    """A number that changes whenever plans are let go."""
    return _age


def remember(key: Hashable, call: Any, since: int) -> None:
    """Keeps what an operation has made of a call, its plan included, for `recall`, until a plan is let go.

    Args:
        since: what `age` was before the plan was asked for.
    """
    with _lock:
        if since != _age:
            return
        if len(_calls) >= _MOST_CALLS:
            del _calls[next(iter(_calls))]  # the one that was remembered first
        _calls[key] = call


def recall(key: Hashable) -> Any:
    """What `remember` was given with an equal key; None if it has been let go, or the thread is to measure anew."""
    return None if is_asked_for() else _calls.get(key)


def _whatever_is_saved(problem: Problem) -> Problem:
    if not isinstance(problem, BackwardProblem):
        return problem
    through = problem.through and _saving_nothing(problem.through)
    return replace(problem, own=_saving_nothing(problem.own), through=through)


def _saving_nothing(derivative: Derivative) -> Derivative:
    return replace(derivative, saved=Saved.NOTHING, saved_spec=None)


def _look_up(
    plans: dict[tuple[_Problem, int], _Plan],
    make: Callable[[_Problem, int], _Plan],
    problem: _Problem,
    device: int,
    stream: int,
) -> _Plan:
    plan = plans.get((problem, device))
    if plan is not None and not is_asked_for():
        return plan
    if not is_capturing(stream):
        record(problem)
        tune_at_first_use(problem, device)
        return _planned(plans, make, problem, device)
    if plan is None:
        raise CaptureError(
            f"no plan yet for {problem}, and stream {stream:#x} is being captured; "
            "run the operation once with these shapes, types and layouts before the capture, or tune it with lt.tune"
        )
    return plan


def _planned(
    plans: dict[tuple[_Problem, int], _Plan], make: Callable[[_Problem, int], _Plan], problem: _Problem, device: int
) -> _Plan:
    with _lock:
        if (problem, device) not in plans:
            plans[problem, device] = make(problem, device)
        return plans[problem, device]
