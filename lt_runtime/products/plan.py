"""Base classes of plans. A plan runs calls on streams, and binds a call to its buffers as a graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from lt_runtime.cublaslt import Algorithm
from lt_runtime.gpu.memory import BoundPlan, StreamMemory, stream_memory
from lt_runtime.kernels.call import Call


class Plan(ABC):
    """A problem on one device, ready to launch. Plans are immutable, and threads may share them.

    Attributes:
        problem: the problem that the plan solves; `problem.operands` names the addresses of a call in their order.
        device: ordinal of the GPU, which is current whenever the plan is used.
        strategy: how the problem is split; None for a product, which has nothing to split.
        products: maps the name of an operand to the plan of the layer's matrix product that computes it; empty for a
            product.
    """

    problem: Any
    device: int
    strategy: Any = None
    products: Mapping[str, AlgorithmPlan] = MappingProxyType({})

    @property
    def moved(self) -> int:
        """Bytes that the plan's elementwise kernels and its copies of operands read and write in one run.

        The result is the sum of `moved` over all attributes of the plan that have it, including plans of products. A
        `MatmulPass` has no `moved`, and is left out.
        """
        return sum(getattr(part, "moved", 0) for part in vars(self).values())

    @abstractmethod
    def put(self, call: Call, memory: StreamMemory) -> None:
        """Launches the work on `memory.stream`; `call.stream` is not read.

        The caller must hold `memory.lock`, so that no other thread's launches come between launches that share a
        workspace.
        """

    def reserve(self, memory: StreamMemory) -> None:
        """Allocates the memory of a stream that `put` needs, so that the stream may be captured afterwards."""
        del memory

    def run(self, call: Call) -> None:
        """Launches the work on `call.stream`."""
        memory = stream_memory(self.device, call.stream)
        with memory.lock:
            self.put(call, memory)

    def bind(self, call: Call) -> BoundPlan:
        """Captures a call into a graph; returns a callable that launches the graph."""
        return BoundPlan(lambda memory: self.put(call, memory), self.device, call.stream, self.reserve)


class Pass(Protocol):
    """One or several of our own kernels, which compute the results of a call without cuBLASLt.

    Attributes:
        scratch_bytes: bytes of scratch memory that a launch takes.
    """

    scratch_bytes: int

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`."""


class PassPlan(Plan):
    """The plan of a call that is a single `Pass`; if the pass is None, as for empty arrays, it does nothing."""

    def __init__(self, launched: Pass | None, device: int) -> None:
        self.device, self._pass = device, launched

    def reserve(self, memory: StreamMemory) -> None:
        """See `Plan`."""
        if self._pass is not None:
            memory.scratch(self._pass.scratch_bytes)

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        if self._pass is not None:
            self._pass.launch(call, memory)


class AlgorithmPlan(Plan):
    """A matrix product by one algorithm: cuBLASLt's, on the operands or on padded copies, or one of our own kernels.

    Attributes:
        algorithm: cuBLASLt's algorithm, or the bytes that name our kernel; None for an empty product.
    """

    algorithm: Algorithm | None

    @property
    def blob(self) -> bytes:
        """The algorithm as bytes for the plan cache, from which `plan_from_blob` makes an equal plan."""
        assert self.algorithm is not None, f"nothing is multiplied in {self.problem}"
        return self.algorithm.blob

    @property
    def adds_memsets(self) -> bool:
        """Whether a run launches memsets besides its kernels. Our own kernels need none."""
        return False

    @property
    def launches_at_most_two_kernels(self) -> bool:
        """Whether a launch succeeds with at most two kernels besides memsets.

        For cuBLASLt the limit may be one kernel, see `MatmulPlan.launches_at_most_two_kernels_by`.

        On Hopper the fastest algorithms for large products have a memset before the kernel, which clears the counter by
        which blocks claim tiles. Measured times include the memset. Our own kernels take one launch.
        """
        return True
