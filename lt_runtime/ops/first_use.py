"""Steps before the first use of a problem: algorithms from other machines are verified, and the problem is tuned.

This module only decides whether to measure. The tuner is imported only when a problem has to be measured.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from lt_runtime.environment import TUNE_VARIABLE, VARIABLES, setting
from lt_runtime.errors import LtError
from lt_runtime.fp8 import Fp8ChainProblem
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import is_captured, relaxed_captures
from lt_runtime.plans.cache import known_entry, make_plan
from lt_runtime.problem import MatmulProblem
from lt_runtime.products.methods import known_algorithm
from lt_runtime.products.plan import AlgorithmPlan
from lt_runtime.store.keys import Problem, Remembered, problem_key
from lt_runtime.store.plan_store import plan_store

if TYPE_CHECKING:
    from lt_runtime.tuner.chain import Tunable
    from lt_runtime.tuner.report import Progress


asked_for: Final[ContextVar[bool]] = ContextVar("lt_runtime_tuning", default=False)
"""Whether the calling thread is within `tuning()`; it then also measures problems that have already run untuned."""
_is_switched_off: Final[ContextVar[bool]] = ContextVar("lt_runtime_is_not_tuning", default=False)
_is_busy: Final[ContextVar[bool]] = ContextVar("lt_runtime_is_tuning", default=False)
_seen: Final[set[tuple[Remembered | Tunable, int]]] = set()
"""Pairs (problem or chain, device) that have been measured, or could not be, and are not measured again."""
_one_at_a_time = threading.Lock()
_logger: Final = logging.getLogger("lt_runtime")

# Reads every environment variable at import, so that an invalid value gives a warning even if no GPU is used.
for _name in VARIABLES:
    setting(_name)


@contextlib.contextmanager
def within(variable: ContextVar[bool]) -> Iterator[None]:
    """Sets a context variable to True within a `with` block."""
    token = variable.set(True)
    try:
        yield
    finally:
        variable.reset(token)


def tuning() -> AbstractContextManager[None]:
    """Within a `with` block, the calling thread measures problems that are not in the plan cache before it runs them.

    A layer's forward pass is decided together with the backward pass that goes with it. In PyTorch a backward pass
    measures if its forward pass was within the block, whichever thread runs it. The results go to the plan cache; from
    then on other threads and processes use them as well. Nothing is measured while the thread's stream is
    being captured. `LT_RUNTIME_TUNE=first-use` does the same for a whole process, for problems that it runs for the
    first time. A `TrainStep` needs neither.

    While it measures, other threads must not synchronise with the whole device, as `torch.cuda.synchronize()` does:
    `lt.tune` says what else is forbidden.
    """
    return within(asked_for)


def not_tuning() -> AbstractContextManager[None]:
    """Within a `with` block, the calling thread measures no problem; this overrides `tuning` and `LT_RUNTIME_TUNE`."""
    return within(_is_switched_off)


def is_tuning() -> bool:
    """Whether the calling thread is within `tuning()`, and not within `not_tuning()`."""
    return asked_for.get() and not _is_switched_off.get()


def before_first_use(problem: Remembered, device: int, stream: Callable[[], int] = lambda: 0) -> bool:
    """Verifies another machine's algorithms for a problem. If tuning is on and the problem is new, also measures it.

    After a failure a warning is given, and the problem runs untuned.

    Args:
        stream: function that returns a stream's handle; nothing is done while this stream is being captured.

    Returns:
        Whether the plan cache may have changed.
    """
    if _is_busy.get():
        return False
    is_wanted = asked_for.get() or setting(TUNE_VARIABLE) == "first-use"
    is_new = is_wanted and not _is_switched_off.get() and (problem, device) not in _seen
    # The other problems, a fused MLP and a choice of the precision, have no algorithms of their own to verify.
    has_unproven = isinstance(problem, Problem) and plan_store(device).has_unproven
    if not (is_new or has_unproven) or is_captured(stream()):
        return False
    with _one_at_a_time:
        if isinstance(problem, Problem) and has_unproven:
            _prove(problem, device)
        if is_new and not is_measured(problem, device):
            from lt_runtime.tuner.chain import LayerChain

            given: Tunable = (
                problem if isinstance(problem, MatmulProblem | Fp8ChainProblem) else LayerChain.of_problem(problem)
            )
            _measure([given], device, str(problem))
        if is_new:
            _seen.add((problem, device))
    return True


def before_first_step(given: Sequence[Tunable], device: int, stream: int) -> bool:
    """Measures the problems of a training step that are not in the plan cache.

    A terminal shows a progress bar; without one, a line is logged. The stream is waited for, so that none of the
    caller's work runs during a measurement. A failure costs a warning, and the step runs untuned.

    Args:
        given: the choices of a precision, the groups of layers and the products that the step has run.
        stream: the step's stream, which is not being captured.

    Returns:
        Whether there was a problem to measure.
    """
    with _one_at_a_time:
        new = [each for each in given if (each, device) not in _seen]
        unknown = [each for each in new if not _is_known(each, device)]
        if unknown:
            with relaxed_captures():
                call("cuStreamSynchronize", stream)
            _tune_step(unknown, device)
        _seen.update((each, device) for each in new)
        return bool(unknown)


def is_step_tuned(tune: bool | None) -> bool:
    """Whether a training step measures its problems that are not in the plan cache.

    Args:
        tune: the `tune` option of the step. It overrides `tuning()`, which overrides the environment variable.
    """
    return asked_for.get() or setting(TUNE_VARIABLE) != "off" if tune is None else tune


def is_measured(problem: Remembered, device: int) -> bool:
    """Whether the plan cache has a usable entry for a problem."""
    return known_entry(problem, plan_store(device)) is not None


def _is_known(chain: Tunable, device: int) -> bool:
    """Whether all problems of a chain have been measured; for a narrow MLP also the choice whether to fuse it."""
    from lt_runtime.tuner.chain import LayerChain, as_decided

    if isinstance(chain, Fp8ChainProblem) and not chain.is_open:
        return True
    if not isinstance(chain, LayerChain):
        return is_measured(chain, device)
    problems = *as_decided(chain, plan_store(device)).problems, *chain.narrow(device)
    return all(is_measured(each, device) for each in problems)


def _prove(problem: Problem, device: int) -> None:
    """Verifies other machines' algorithms for the products of a problem's plan."""

    def choose(product: MatmulProblem, on: int) -> AlgorithmPlan:
        store, key = plan_store(on), problem_key(product)
        entry = None if product.is_empty else store.unproven(key)
        if entry is not None:
            from lt_runtime.tuner.product_search import proven

            store.put({key: proven(product, on, entry)})
        return known_algorithm(product, on)

    try:
        with activated(device):
            make_plan(problem, device, choose)
    except (LtError, MemoryError) as error:
        warnings.warn(f"merged algorithms could not be verified and are not used ({error})", stacklevel=2)


def _tune_step(given: Sequence[Tunable], device: int) -> None:
    from lt_runtime.tuner.chain import LayerChain
    from lt_runtime.tuner.report import progress_bar

    forwards = [each for chain in given if isinstance(chain, LayerChain) for each in chain.forwards.values()]
    what = f"a training step on {forwards[0].x.layout.rows} rows" if forwards else "the products of a training step"
    with progress_bar() as progress:
        if progress is None:
            _logger.info("measuring what is fastest for %s; tune=False or %s=off leaves that out", what, TUNE_VARIABLE)
        _measure(given, device, what, progress)


def _measure(given: Sequence[Tunable], device: int, what: str, progress: Progress | None = None) -> None:
    from lt_runtime.tuner import search

    try:
        with within(_is_busy):
            list(search.tune_chains(given, device, progress=progress))
    except (LtError, MemoryError) as error:
        warnings.warn(f"{what} could not be tuned and runs untuned ({error})", stacklevel=2)
