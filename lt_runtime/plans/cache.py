"""Makes plans, and keeps plans, prepared calls and launches of repeated calls in memory.

A plan uses the measured strategy of its problem. Without a measurement it uses the first strategy, in the order of
`priors`, that cuBLASLt accepts.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any, Final, TypeAlias

from lt_runtime.errors import CaptureError, PlanError
from lt_runtime.fp8 import Fp8ChainProblem
from lt_runtime.gpu.driver import is_capturing
from lt_runtime.plans.layers import BackwardPlan, ForwardPlan
from lt_runtime.plans.priors import backward_priors, forward_priors
from lt_runtime.plans.strategies import BackwardStrategy, ForwardStrategy, backward_strategies, forward_strategies
from lt_runtime.problem import BackwardProblem, ForwardProblem, MatmulProblem, MLPProblem, Saved
from lt_runtime.products.methods import Choose, known_algorithm
from lt_runtime.products.plan import Plan
from lt_runtime.products.product import ProductPlan
from lt_runtime.store.entries import Entry, LayerEntry
from lt_runtime.store.entries import Strategy as StoredStrategy
from lt_runtime.store.keys import Problem, Remembered, problem_key, to_json
from lt_runtime.store.plan_store import PlanStore, plan_store
from lt_runtime.store.recording import record

LayerProblem: TypeAlias = ForwardProblem | BackwardProblem
LayerPlan: TypeAlias = ForwardPlan | BackwardPlan
Strategy: TypeAlias = ForwardStrategy | BackwardStrategy

FUSED_MLP: Final = "fused_mlp"
"""Key of an MLP's strategy in the plan cache: True for fused kernels (see `MlpPlan`), False to run layer by layer."""
IN_FP8: Final = "fp8"
"""Key of an `Fp8ChainProblem`'s strategy in the plan cache: True for products in FP8, False for the own type."""
_YES_OR_NO: Final = {MLPProblem: FUSED_MLP, Fp8ChainProblem: IN_FP8}

OnMiss: TypeAlias = Callable[[Problem, int], object]
"""Hook that runs before a plan is made for a problem and a device; it may measure the problem."""

calls: Final[dict[Hashable, Any]] = {}
"""Prepared calls, by operation, options and the part of the arrays' signature without addresses; see `generation`."""
repeats: Final[dict[Hashable, Any]] = {}
"""Functions that launch the graphs of repeated calls, by prepared call, stream and addresses; False before capture."""
generation = object()
"""An object that is replaced whenever plans are forgotten. A prepared call keeps the object that was current when it
was made, and is invalid once the object has been replaced.
"""

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
        mend = "run the operation once with these shapes, types and layouts before the capture, or tune it with lt.tune"
        raise CaptureError(f"no plan yet for {problem}, and stream {stream:#x} is being captured; {mend}")
    return plan


def forget(problems: Iterable[Remembered], device: int) -> None:
    """Drops plans of problems whose entries in the plan cache have changed; their next use makes new ones.

    Backward problems that differ only in the saved tensor are dropped together, because the strategy of the forward
    pass decides which tensor is saved.
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


def exchange_entries(content: bytes, device: int) -> None:
    """Replaces all entries of a device's plan cache, see `PlanStore.take_over`, and drops all plans of the device."""
    plan_store(device).take_over(content)
    forget([problem for problem, of in [*_plans] if of == device], device)


def _without_saved(problem: Remembered) -> Remembered:
    if not isinstance(problem, BackwardProblem):
        return problem
    derivatives = {name: getattr(problem, name) for name in ("output_derivative", "input_derivative")}
    bare = {name: each and replace(each, saved=Saved.NOTHING, saved_spec=None) for name, each in derivatives.items()}
    return replace(problem, **bare)


def make_plan(problem: Problem, device: int, choose: Choose = known_algorithm) -> Plan:
    """The plan for a problem.

    Raises:
        PlanError: cuBLASLt has no algorithm even for the plain products.
    """
    if isinstance(problem, MatmulProblem):
        return ProductPlan(problem, device, choose)
    return make_layer_plan(problem, device, choose)


def make_layer_plan(problem: LayerProblem, device: int, choose: Choose = known_algorithm) -> LayerPlan:
    """The plan for a layer's problem, with its measured strategy if it has one, else with a prior strategy."""
    store = plan_store(device)
    entry = known_layer(problem, store)
    if entry is not None:
        try:
            return plan_for(problem, device, stored_strategy(problem, entry.strategy), choose)
        except PlanError as error:
            store.bar(problem_key(problem), entry, str(error))
    return prior_plan(problem, device, choose)


def plan_for(problem: LayerProblem, device: int, strategy: Strategy, choose: Choose = known_algorithm) -> LayerPlan:
    """The plan of a layer's problem with the given strategy.

    Raises:
        PlanError: cuBLASLt refuses one of the strategy's products.
    """
    kind: Any = ForwardPlan if isinstance(problem, ForwardProblem) else BackwardPlan
    plan: LayerPlan = kind(problem, device, strategy, choose)
    return plan


def strategies_of(problem: LayerProblem) -> Iterable[Strategy]:
    """All strategies of a problem."""
    return forward_strategies(problem) if isinstance(problem, ForwardProblem) else backward_strategies(problem)


def priors_of(problem: LayerProblem, device: int) -> Iterable[Strategy]:
    """All strategies of a problem, sorted by the priors."""
    return forward_priors(problem, device) if isinstance(problem, ForwardProblem) else backward_priors(problem, device)


def stored_strategy(problem: LayerProblem, values: StoredStrategy) -> Strategy:
    """Reads a problem's strategy from an entry of the plan cache.

    Raises:
        ValueError: the values are not one of the problem's strategies.
    """
    for strategy in strategies_of(problem):
        if to_json(strategy) == values:
            return strategy
    raise ValueError(f"{dict(values)} is not one of the strategies of {problem}")


def known_entry(problem: Remembered, store: PlanStore) -> Entry | None:
    """The entry of a problem in the plan cache; None if the problem was not measured, or if the entry is damaged."""
    return store.product(problem_key(problem)) if isinstance(problem, MatmulProblem) else known_layer(problem, store)


def known_layer(problem: LayerProblem | MLPProblem | Fp8ChainProblem, store: PlanStore) -> LayerEntry | None:
    """The entry of a layer or of an MLP in the plan cache; None if it was not measured, or if the entry is damaged.

    An entry is damaged if the problem does not allow its strategy. For a layer a warning is then given once, and the
    entry is ignored from then on.
    """
    key = problem_key(problem)
    entry = store.layer(key)
    if isinstance(problem, MLPProblem | Fp8ChainProblem):
        name = _YES_OR_NO[type(problem)]
        return entry if entry is not None and entry.strategy in ({name: True}, {name: False}) else None
    if entry is not None:
        try:
            stored_strategy(problem, entry.strategy)
        except ValueError as error:
            warnings.warn(f"{store.path} has a damaged entry, which is not used ({error})", stacklevel=2)
            store.bar(key, entry, str(error))
            return None
    return entry


def prior_plan(problem: LayerProblem, device: int, choose: Choose = known_algorithm) -> LayerPlan:
    """The plan with the first prior strategy that cuBLASLt accepts, even if another was measured.

    Raises as `make_plan`.
    """
    refused: PlanError | None = None
    for strategy in priors_of(problem, device):
        try:
            return plan_for(problem, device, strategy, choose)
        except PlanError as error:
            refused = error
    raise refused or PlanError("there is no strategy for the problem")
