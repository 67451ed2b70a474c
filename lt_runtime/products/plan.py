"""What every plan has in common, a product's and a layer's: it runs on a stream, or is bound to its buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lt_runtime.cublaslt import Algorithm
from lt_runtime.gpu.bound import BoundPlan
from lt_runtime.gpu.memory import StreamMemory, stream_memory
from lt_runtime.kernels.call import Call


class Plan(ABC):
    """A problem on one device, ready to launch. It is immutable, and threads may share it.

    Attributes:
        problem: what is computed; `problem.operands` names the addresses of a call in their order.
        device: ordinal of the GPU, which is current whenever the plan is used.
        strategy: how the problem is split; None for a product, which has nothing to split.
        products: plans of a layer's matrix products, by the operand that each makes; empty for a product.
    """

    problem: Any
    device: int
    strategy: Any = None
    products: Mapping[str, AlgorithmPlan] = MappingProxyType({})

    @abstractmethod
    def put(self, call: Call, memory: StreamMemory) -> None:
        """Puts the work on `memory.stream`. The caller holds `memory.lock`, and the call's own stream is not read.

        The lock keeps other threads' launches from coming between those that share a workspace.
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
        """A callable that does what `run` would with this call, at the least cost to the host."""
        return BoundPlan(lambda memory: self.put(call, memory), self.device, call.stream, self.reserve)


class AlgorithmPlan(Plan):
    """A matrix product by one algorithm: the library's, the same on padded copies, or a kernel of ours.

    Attributes:
        algorithm: what makes the product; None where there is nothing to multiply.
    """

    algorithm: Algorithm | None

    @property
    def blob(self) -> bytes:
        """The bytes that stand for the algorithm in the plan cache; `plan_from_blob` makes the same plan of them."""
        assert self.algorithm is not None, f"nothing is multiplied in {self.problem}"
        return self.algorithm.blob

    @property
    @abstractmethod
    def adds_memsets(self) -> bool:
        """Whether a run puts memsets on the stream besides its kernels."""

    @property
    @abstractmethod
    def launches_at_most_two_kernels(self) -> bool:
        """Whether a launch succeeds with at most two kernels, or one if the problem says so, and else only memsets.

        Large products have a memset before the kernel, for the counter that its blocks draw tiles from: on Hopper the
        fastest algorithms do. What that costs, a measurement sees.
        """
