"""Plans of products by kernels of ours: products with one tiny dimension, and 16-bit products with ragged rows.

cuBLASLt is slowest for these products. The tuner and the plan cache take each kernel for one more algorithm.
"""

from __future__ import annotations

from typing import Final, Protocol

from lt_runtime.cublaslt import Algorithm
from lt_runtime.errors import PlanError
from lt_runtime.gpu.devices import device_info
from lt_runtime.gpu.memory import MAX_TICKETS, StreamMemory, workspace_size
from lt_runtime.kernels import narrow, tile_matmul
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.narrow import NarrowPass
from lt_runtime.kernels.tile_matmul import TileMatmulPass
from lt_runtime.problem import MatmulProblem
from lt_runtime.products.plan import AlgorithmPlan

NARROW_MATMUL: Final = Algorithm(b"lt_runtime: narrow_matmul".ljust(64, b"\0"))
TILE_MATMUL: Final = Algorithm(b"lt_runtime: tile_matmul".ljust(64, b"\0"))
"""The bytes by which the plan cache names our kernel; no version of cuBLASLt gives these bytes to an algorithm."""


class _Pass(Protocol):
    """A product in one kernel."""

    @property
    def scratch_bytes(self) -> int: ...

    @property
    def tickets(self) -> int: ...

    def run(self, call: Call, memory: StreamMemory) -> None: ...


class OwnPlan(AlgorithmPlan):
    """A product by a kernel of ours on one device.

    Raises:
        PlanError: the kernel does not support the problem or the GPU, or its partial sums exceed the workspace.
    """

    adds_memsets, launches_at_most_two_kernels = False, True  # it is one kernel

    def __init__(self, problem: MatmulProblem, device: int, algorithm: Algorithm, made: _Pass) -> None:
        self.problem, self.device, self.algorithm = problem, device, algorithm
        self._pass = made
        if made.scratch_bytes > workspace_size(device) or made.tickets > MAX_TICKETS:
            raise PlanError(f"our kernel has no room for the partial sums of {problem}")

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        self._pass.run(call, memory)


class NarrowPlan(OwnPlan):
    """A product with one tiny dimension."""

    def __init__(self, problem: MatmulProblem, device: int) -> None:
        if not narrow.supports(problem):
            raise PlanError(f"the kernel for narrow products does not take {problem}")
        super().__init__(problem, device, NARROW_MATMUL, NarrowPass(problem, device))


class TilePlan(OwnPlan):
    """A product of 16-bit matrices with ragged rows."""

    def __init__(self, problem: MatmulProblem, device: int) -> None:
        if not tile_matmul.supports(problem):
            raise PlanError(f"the kernel for ragged rows does not take {problem}")
        capability, least = device_info(device).capability, tile_matmul.CAPABILITY
        if capability < least:
            has = f"GPU {device} has compute capability {capability}"
            raise PlanError(f"{has}; our kernel's products on tensor cores need {least} or more")
        super().__init__(problem, device, TILE_MATMUL, TileMatmulPass(problem, device))
