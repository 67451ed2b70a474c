"""What is done of problems before they first run: other machines' algorithms are verified, and problems are tuned.

This module only decides whether to measure. What measures is imported when the first problem is to be measured.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, cast

from lt_runtime.arguments import one_of
from lt_runtime.environment import TUNE_VARIABLE, VARIABLES, setting
from lt_runtime.errors import LtError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import relaxed_captures
from lt_runtime.kernels.mlp import supports
from lt_runtime.plans.decisions import known_layer, make_plan
from lt_runtime.plans.mlp import known_mlp
from lt_runtime.problem import MatmulProblem, MLPProblem
from lt_runtime.products.choose import known_algorithm
from lt_runtime.products.plan import AlgorithmPlan
from lt_runtime.store.entries import EFFORTS, Effort, is_as_deep
from lt_runtime.store.keys import Remembered, problem_key
from lt_runtime.store.plan_store import plan_store

if TYPE_CHECKING:
    from lt_runtime.tuner.chain import Chain
    from lt_runtime.tuner.report import Progress


asked_for: Final[ContextVar[Effort | None]] = ContextVar("lt_runtime_tuning", default=None)
"""The effort at which the calling thread is to measure even what it has run before; None if it is not to."""
_is_switched_off: Final[ContextVar[bool]] = ContextVar("lt_runtime_is_not_tuning", default=False)
_is_busy: Final[ContextVar[bool]] = ContextVar("lt_runtime_is_tuning", default=False)
_seen: Final[set[tuple[Remembered | Chain, int, Effort]]] = set()
"""Problems and chains that have been measured, or cannot be, with device and effort."""
_one_at_a_time = threading.Lock()
_logger: Final = logging.getLogger("lt_runtime")

for _name in VARIABLES:  # warns of meaningless values on the host too, where nothing else reads the variables
    setting(_name)


@contextlib.contextmanager
def tuning(effort: Effort = "default") -> Iterator[None]:
    """Within a `with` block, the calling thread measures problems that nobody has measured before it runs them.

    A layer's forward pass is decided together with the backward pass that goes with it. What is decided goes to the
    plan cache and is used from then on, by other threads and processes as well. While its stream is being captured
    nothing is measured. `LT_RUNTIME_TUNE=first-use` does the same for a whole process, at default effort, to problems
    that it runs for the first time. A `TrainStep` needs neither. What other threads must not do while something is
    measured stands at `lt.tune`.

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


@contextlib.contextmanager
def not_tuning() -> Iterator[None]:
    """Within a `with` block, the calling thread measures nothing that it meets, whoever else asks for it."""
    token = _is_switched_off.set(True)
    try:
        yield
    finally:
        _is_switched_off.reset(token)


def checked_effort(effort: str) -> Effort:
    """The effort of that name.

    Raises:
        ArgumentError: there is none.
    """
    return cast(Effort, one_of("effort", effort, EFFORTS))


def before_first_use(problem: Remembered, device: int) -> None:
    """Verifies what another machine has measured of a problem, and measures what is not known, if that is asked for.

    What cannot be done costs a warning, and the problem runs as it would without.
    """
    asked = asked_for.get() or ("default" if setting(TUNE_VARIABLE) == "first-use" else None)
    effort = None if _is_switched_off.get() else asked
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


def before_first_step(chains: Sequence[Chain], device: int, stream: int, effort: Effort) -> None:
    """Measures what a training step is about to meet and nobody has measured, and the step's layers as a whole.

    A terminal shows a bar meanwhile; where there is none, a line is logged. The stream is waited for, so that nothing
    of the caller's runs beside what is measured. What cannot be done costs a warning, and the step runs as it would
    without.

    Args:
        chains: the layers of the step, more than once if it runs them in several ways.
        stream: that the step is on; nobody captures it.
    """
    with _one_at_a_time:
        new = [each for each in chains if (each, device, effort) not in _seen]
        unknown = [each for each in new if not _is_known(each, device, effort)]
        if unknown:
            with relaxed_captures():
                call("cuStreamSynchronize", stream)
            _tune_step(unknown, device, effort)
        _seen.update((each, device, effort) for each in new)


def effort_of_step(tune: bool | None) -> Effort | None:
    """The effort at which a training step measures what is not known; None if it is not to measure.

    Args:
        tune: what the step was made with, which decides before `tuning()`, and that before the environment.
    """
    if tune is False:
        return None
    asked = asked_for.get()
    return None if not tune and asked is None and setting(TUNE_VARIABLE) == "off" else asked or "default"


def is_measured(problem: Remembered, device: int, effort: Effort = "default") -> bool:
    """Whether the plan cache knows a problem, measured with no less than an effort."""
    if isinstance(problem, MLPProblem):
        return is_as_deep(known_mlp(problem, device), effort)
    store = plan_store(device)
    entry = store.product(problem_key(problem)) if isinstance(problem, MatmulProblem) else known_layer(problem, store)
    return is_as_deep(entry, effort)


def _is_known(chain: Chain, device: int, effort: Effort) -> bool:
    """Whether all problems of a chain are measured, and whether its layers run as a whole if kernels take them."""
    from lt_runtime.tuner.chain import as_decided

    problems: list[Remembered] = [*as_decided(chain, plan_store(device), effort).problems]
    if chain.narrow is not None and supports(chain.narrow, device):
        problems.append(chain.narrow)
    return all(is_measured(each, device, effort) for each in problems)


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
            make_plan(problem, device, choose)
    except (LtError, MemoryError) as error:
        warnings.warn(f"merged algorithms could not be verified and are not used ({error})", stacklevel=2)


def _tune(problem: Remembered, device: int, effort: Effort) -> None:
    from lt_runtime.tuner.chain import Chain

    given: Chain | MatmulProblem
    if isinstance(problem, MLPProblem):
        given = Chain.of_narrow(problem)
    else:
        given = problem if isinstance(problem, MatmulProblem) else Chain.of_problem(problem)
    _measure([given], device, effort, str(problem))


def _tune_step(chains: Sequence[Chain], device: int, effort: Effort) -> None:
    from lt_runtime.tuner.report import progress_bar

    layers = chains[0].forwards
    what = f"a training step of {len(layers)} layer{'s' * (len(layers) > 1)} on {layers[0].x.layout.rows} rows"
    with progress_bar() as progress:
        if progress is None:
            _logger.info("measuring what is fastest for %s; tune=False or %s=off leaves that out", what, TUNE_VARIABLE)
        _measure(chains, device, effort, what, progress)


def _measure(
    given: Sequence[Chain | MatmulProblem], device: int, effort: Effort, what: str, progress: Progress | None = None
) -> None:
    from lt_runtime.tuner import search

    token = _is_busy.set(True)
    try:
        for _ in search.tune_chains(given, device, effort=effort, progress=progress):
            pass
    except (LtError, MemoryError) as error:
        warnings.warn(f"{what} could not be tuned and runs untuned ({error})", stacklevel=2)
    finally:
        _is_busy.reset(token)
