"""Plans that run a pass of a narrow MLP in one kernel, and the choice between one kernel and layer by layer."""

from __future__ import annotations

from typing import Final

from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.kernel import Matrix
from lt_runtime.kernels.losses import ElementwiseLoss
from lt_runtime.kernels.mlp import MlpBackward, MlpForward, supports
from lt_runtime.layout import Layout, packed
from lt_runtime.problem import MLPProblem
from lt_runtime.products.plan import Plan
from lt_runtime.store.entries import LayerEntry
from lt_runtime.store.keys import problem_key
from lt_runtime.store.plan_store import plan_store

FUSED_MLP: Final = "fused_mlp"
"""Key of an MLP's strategy in the plan cache: True if each pass is one kernel, False if each layer runs by itself."""


def is_fused(problem: MLPProblem, device: int) -> bool:
    """Whether each pass of an MLP runs in one kernel: the measured choice, or, if unmeasured, whenever possible."""
    entry = known_mlp(problem, device)
    if not supports(problem, device):
        return False
    return entry is None or entry.strategy[FUSED_MLP] is True


def known_mlp(problem: MLPProblem, device: int) -> LayerEntry | None:
    """The entry of an MLP in the plan cache; None if the MLP was not measured, or if the entry is damaged."""
    entry = plan_store(device).layer(problem_key(problem))
    return entry if entry is not None and entry.strategy in ({FUSED_MLP: True}, {FUSED_MLP: False}) else None


def mlp_plans(problem: MLPProblem, device: int) -> tuple[MlpForwardPlan | MlpBackwardPlan, ...]:
    """The plans of an MLP's passes, for packed inputs and outputs."""
    x, y = packed(problem.rows, problem.dims[0]), packed(problem.rows, problem.dims[-1])
    forward = MlpForwardPlan(problem, x, y, device)
    return (forward, MlpBackwardPlan(problem, x, y, False, device)) if problem.backward else (forward,)


class MlpForwardPlan(Plan):
    """The forward pass of an MLP. A call's addresses are those of x, y, and each layer's weight and bias."""

    def __init__(self, problem: MLPProblem, x: Layout, y: Layout, device: int) -> None:
        self.problem, self.device = problem, device
        self._pass = MlpForward(problem, Matrix.of(x), Matrix.of(y), device)

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        self._pass.run(call, memory)


class MlpBackwardPlan(Plan):
    """The gradients of an MLP's parameters.

    A call's addresses are those of x, of the gradient dy of the outputs, of each layer's weight and bias, and of their
    gradients. With a loss, the targets' address replaces that of dy, and the loss's address comes last.
    """

    def __init__(
        self,
        problem: MLPProblem,
        x: Layout,
        y: Layout,
        accumulate: bool,
        device: int,
        loss: ElementwiseLoss | None = None,
    ) -> None:
        self.problem, self.device = problem, device
        self._pass = MlpBackward(problem, Matrix.of(x), Matrix.of(y), accumulate, device, loss)

    def reserve(self, memory: StreamMemory) -> None:
        """See `Plan`."""
        memory.scratch(self._pass.scratch_bytes)

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        self._pass.run(call, memory)
