"""Plans already made, by problem and device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from lt_runtime.errors import CaptureError
from lt_runtime.gpu.streams import is_capturing
from lt_runtime.planning.backward import BackwardPlan
from lt_runtime.planning.decisions import decide_backward, decide_forward
from lt_runtime.planning.forward import ForwardPlan
from lt_runtime.planning.product import ProductPlan
from lt_runtime.problem import BackwardProblem, ForwardProblem, MatmulProblem

_Problem = TypeVar("_Problem", ForwardProblem, BackwardProblem, MatmulProblem)
_Plan = TypeVar("_Plan", ForwardPlan, BackwardPlan, ProductPlan)

_forward: dict[tuple[ForwardProblem, int], ForwardPlan] = {}
_backward: dict[tuple[BackwardProblem, int], BackwardPlan] = {}
_products: dict[tuple[MatmulProblem, int], ProductPlan] = {}
_lock = threading.RLock()


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


def _look_up(
    plans: dict[tuple[_Problem, int], _Plan],
    make: Callable[[_Problem, int], _Plan],
    problem: _Problem,
    device: int,
    stream: int,
) -> _Plan:
    plan = plans.get((problem, device))
    if plan is not None:
        return plan
    if is_capturing(stream):
        raise CaptureError(
            f"no plan yet for {problem}, and stream {stream:#x} is being captured; "
            "run the operation once with these shapes, types and layouts before the capture"
        )
    with _lock:
        if (problem, device) not in plans:
            plans[problem, device] = make(problem, device)
        return plans[problem, device]
