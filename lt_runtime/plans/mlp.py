"""Plans that run a pass of a narrow MLP in fused kernels, and the choice between them and running layer by layer."""

from __future__ import annotations

from dataclasses import replace

from lt_runtime.kernels.losses import ElementwiseLoss
from lt_runtime.kernels.mlp import MlpBackward, MlpForward, supports
from lt_runtime.layout import Layout, packed
from lt_runtime.plans.cache import FUSED_MLP, known_layer
from lt_runtime.problem import MLPProblem
from lt_runtime.products.plan import PassPlan
from lt_runtime.store.plan_store import plan_store


def is_fused(problem: MLPProblem, device: int) -> bool:
    """Whether the passes of an MLP run in fused kernels: the measured choice, or, if unmeasured, whenever possible."""
    entry = known_layer(problem, plan_store(device))
    return supports(problem, device) and (entry is None or entry.strategy[FUSED_MLP] is True)


def mlp_plans(problem: MLPProblem, device: int) -> tuple[MlpPlan, ...]:
    """The fused plans of an MLP's passes, forward or forward and backward, for contiguous inputs and outputs."""
    x, y = packed(problem.rows, problem.dims[0]), packed(problem.rows, problem.dims[-1])
    passes = (replace(problem, backward=False), problem) if problem.backward else (problem,)
    return tuple(MlpPlan(each, device, x, y, False, None) for each in passes)


class MlpPlan(PassPlan):
    """A pass of an MLP: the gradients of its parameters if `problem.backward` is set, otherwise its outputs.

    A forward pass is one kernel for all layers. A backward pass is one to three kernels, of which each computes the
    gradients of some layers, and a kernel that adds up the partial sums of their blocks.

    A call's addresses are those of x, of the outputs y or of their gradient dy, of each layer's weight and bias, and of
    the gradients of weights and biases. With a loss, the targets' address replaces dy's, and the loss's address
    comes last.

    Args:
        x, y: layouts of the inputs, and of the outputs (with `backward`: of their gradient or of the targets).
        accumulate: whether the gradients are added to the values in their buffers.
        loss: the loss that gives the gradient of the outputs from targets; None if `y` is that gradient, or the
            outputs.
    """

    def __init__(
        self, problem: MLPProblem, device: int, x: Layout, y: Layout, accumulate: bool, loss: ElementwiseLoss | None
    ) -> None:
        self.problem = problem
        if problem.backward:
            super().__init__(MlpBackward(problem, x, y, accumulate, loss, device), device)
        else:
            super().__init__(MlpForward(problem, x, y, device), device)
