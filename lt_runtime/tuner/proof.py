"""An algorithm that another machine has measured: rebuilt from its configuration, and verified before its first use."""

from __future__ import annotations

from dataclasses import replace

from lt_runtime.errors import PlanError
from lt_runtime.problem import MatmulProblem
from lt_runtime.products.choose import configuration, plan_from_config
from lt_runtime.products.plan import AlgorithmPlan
from lt_runtime.store.entries import ProductEntry
from lt_runtime.tuner.operands import ProductOperands
from lt_runtime.tuner.product_search import afresh, launcher
from lt_runtime.tuner.timing import workbench
from lt_runtime.tuner.verification import verify


def proven(problem: MatmulProblem, device: int, entry: ProductEntry) -> ProductEntry:
    """An entry for a product, not empty, with the algorithm that its configuration stands for.

    It is barred if there is no such algorithm, or if that does not compute what it should.

    Raises:
        CublasLtError: the library failed, which says nothing of the algorithm.
        MissingLibraryError: CuPy is not installed.
        CaptureError: a stream is being captured that this would disturb.
        MemoryError: the GPU has not enough memory for the operands and for the reference in FP64.
    """
    try:
        plan = plan_from_config(problem, device, entry.config)
        fault = _fault(plan, device)
    except PlanError as error:
        fault = str(error)
    if fault is not None:
        return replace(entry, barred=fault)
    return replace(entry, algorithm=plan.blob, config=configuration(plan.blob))


def _fault(plan: AlgorithmPlan, device: int) -> str | None:
    """Why an algorithm must not be used; None if it may."""
    if not plan.launches_at_most_two_kernels:
        return "cannot be launched as at most two kernels and nothing else"
    with workbench(device) as bench:
        operands = ProductOperands(bench.xp, plan.problem)
        launch = launcher(plan, [operands.call(bench.clock.stream)])
        return verify({"it": afresh(launch, bench)}, operands).get("it")
