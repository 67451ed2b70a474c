"""Plans of products by a kernel of ours, where one dimension is tiny: the library is at its worst there.

To the tuner and the plan cache the kernel is one more algorithm, whose blob no version of the library gives.
"""

from __future__ import annotations

from typing import Final

from lt_runtime.cublaslt import Algorithm
from lt_runtime.errors import PlanError
from lt_runtime.gpu.memory import MAX_TICKETS, StreamMemory, workspace_size
from lt_runtime.kernels.call import ProductCall
from lt_runtime.kernels.narrow import NarrowPass, takes
from lt_runtime.problem import MatmulProblem
from lt_runtime.products.matmul import MatmulPlan

NARROW: Final = Algorithm(b"lt_runtime: narrow_matmul".ljust(64, b"\0"))
"""Stands for our kernel among the library's algorithms."""


class NarrowPlan(MatmulPlan):
    """A product by our kernel on one device.

    Raises:
        PlanError: it is not for products like this.
    """

    def __init__(self, problem: MatmulProblem, device: int) -> None:
        if not takes(problem):
            raise PlanError(f"the kernel for narrow products does not take {problem}")
        self.problem, self.algorithm = problem, NARROW
        self.candidates = ()
        self._device = device
        self._pass = NarrowPass(problem, device)
        if self._pass.scratch_bytes > workspace_size(device) or self._pass.tickets > MAX_TICKETS:
            raise PlanError(f"the kernel for narrow products has no room for the partial sums of {problem}")

    @property
    def adds_memsets(self) -> bool:
        """See `MatmulPlan`."""
        return False

    def is_lean(self, algorithm: Algorithm) -> bool:
        """See `MatmulPlan`: one kernel."""
        return True

    def run(self, call: ProductCall, memory: StreamMemory) -> None:
        """See `MatmulPlan`."""
        self._pass.run(call, memory)
