"""Plans of products with one tiny dimension, by a kernel of ours: the library is slowest there.

To the tuner and the plan cache the kernel is one more algorithm, whose blob no version of the library gives.
"""

from __future__ import annotations

from typing import Final

from lt_runtime.cublaslt import Algorithm
from lt_runtime.errors import PlanError
from lt_runtime.gpu.memory import MAX_TICKETS, StreamMemory, workspace_size
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.narrow import NarrowPass, takes
from lt_runtime.problem import MatmulProblem
from lt_runtime.products.plan import AlgorithmPlan

NARROW: Final = Algorithm(b"lt_runtime: narrow_matmul".ljust(64, b"\0"))
"""Stands for our kernel among the library's algorithms."""


class NarrowPlan(AlgorithmPlan):
    """A product by our kernel on one device.

    Raises:
        PlanError: the kernel does not take the problem, or has no room for its partial sums.
    """

    adds_memsets, is_lean = False, True  # it is one kernel

    def __init__(self, problem: MatmulProblem, device: int) -> None:
        if not takes(problem):
            raise PlanError(f"the kernel for narrow products does not take {problem}")
        self.problem, self.device, self.algorithm = problem, device, NARROW
        self._pass = NarrowPass(problem, device)
        if self._pass.scratch_bytes > workspace_size(device) or self._pass.tickets > MAX_TICKETS:
            raise PlanError(f"the kernel for narrow products has no room for the partial sums of {problem}")

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        self._pass.run(call, memory)
