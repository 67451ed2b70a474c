"""The base classes of all plans: a plan runs on a stream, or is bound to its buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from lt_runtime.cublaslt import Algorithm
from lt_runtime.gpu.memory import BoundPlan, StreamMemory, stream_memory
from lt_runtime.kernels.call import Call


class Plan(ABC):
    """A problem on one device, ready to launch. It is immutable, and threads may share it.

    Attributes:
        problem: the problem that the plan solves; `problem.operands` names the addresses of a call in their order.
        device: ordinal of the GPU, which is current whenever the plan is used.
        strategy: how the problem is split; None for a product, which has nothing to split.
        products: plans of a layer's matrix products, by the operand that each makes; empty for a product.
    """

    problem: Any
    device: int
    strategy: Any = None
    products: Mapping[str, AlgorithmPlan] = MappingProxyType({})

    @property
    def moved(self) -> int:
        """Bytes that copies of operands and a layer's passes read and write in a run.

        It is the sum of `moved` over the plan's attributes, plans of products among them. A `MatmulPass` has no
        attribute `moved`, and is left out.
        """
        return sum(getattr(part, "moved", 0) for part in vars(self).values())

    @abstractmethod
    def put(self, call: Call, memory: StreamMemory) -> None:
        """Puts the work on `memory.stream`; the call's own stream is not read.

        The caller holds `memory.lock`, so that no other thread's launches come between launches that share a workspace.
        """

    def reserve(self, memory: StreamMemory) -> None:
        """Allocates what `put` needs of a stream's memory, so that the stream may be captured afterwards."""
        del memory

    def run(self, call: Call) -> None:
        """Puts the work on the call's stream."""
        memory = stream_memory(self.device, call.stream)
        with memory.lock:
            self.put(call, memory)

    def bind(self, call: Call) -> BoundPlan:
        """Captures the call into a graph; returns a callable that launches the graph."""
        return BoundPlan(lambda memory: self.put(call, memory), self.device, call.stream, self.reserve)


class Pass(Protocol):
    """One or several kernels of ours that compute the results of a call without a matrix product of cuBLASLt's.

    Attributes:
        scratch_bytes: bytes of scratch memory that a launch takes.
    """

    scratch_bytes: int

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`."""


class PassPlan(Plan):
    """The plan of a call that is one pass; without a pass it does nothing, as for arrays without elements."""

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
    """A matrix product by one algorithm: cuBLASLt's on the operands or on padded copies, or a kernel of ours.

    Attributes:
        algorithm: the algorithm of cuBLASLt, or the bytes that name our kernel; None if there is nothing to multiply.
    """

    algorithm: Algorithm | None

    @property
    def blob(self) -> bytes:
        """The bytes by which the plan cache names the algorithm; `plan_from_blob` makes an equal plan from them."""
        assert self.algorithm is not None, f"nothing is multiplied in {self.problem}"
        return self.algorithm.blob

    @property
    def adds_memsets(self) -> bool:
        """Whether a run puts memsets on the stream besides its kernels; a kernel of ours needs none."""
        return False

    @property
    def launches_at_most_two_kernels(self) -> bool:
        """Whether a launch succeeds, and consists of at most two kernels (one with `no_split_k`) and of memsets.

        The fastest algorithms on Hopper have a memset before the kernel of a large product: it clears the counter from
        which the kernel's blocks draw tiles. Measured times include the memset. A product of ours is one kernel.
        """
        return True
