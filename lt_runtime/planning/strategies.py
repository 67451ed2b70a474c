"""How a layer is split between cuBLASLt's epilogues and our kernels, as data.

The rule here is fixed: fuse what cuBLASLt can when nothing has to be kept for backward, and take derivative and
bias gradient in one pass of our own, which on Hopper beats the library's derivative epilogues by up to four times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lt_runtime.epilogue import Epilogue
from lt_runtime.layout import Order
from lt_runtime.problem import Activation, BackwardProblem, ForwardProblem, Saved


@dataclass(frozen=True, slots=True)
class ForwardStrategy:
    """How forward is split.

    Attributes:
        epilogue: what cuBLASLt applies to the product.
        own_pass: whether our kernel follows, for what is left of bias, activation and dropout.
        own_bias: whether that pass adds the bias.
        keep_preactivation: whether the product goes to a matrix of its own, kept for backward, and not to the output.
    """

    epilogue: Epilogue
    own_pass: bool
    own_bias: bool
    keep_preactivation: bool


def saved_for(activation: Activation, dropout: bool) -> Saved:
    """What backward takes the activation's derivative from: whatever costs forward the least.

    The output where the derivative follows from it. ReLU's does so under dropout as well: where an element was
    dropped the gradient is zero whatever the derivative, and where it was kept the scale leaves the sign.
    """
    if activation.name == "none":
        return Saved.NOTHING
    if activation.name == "relu" or (activation.name in ("sigmoid", "tanh") and not dropout):
        return Saved.OUTPUT
    return Saved.PREACTIVATION


def forward_strategies(problem: ForwardProblem) -> Iterator[ForwardStrategy]:
    """Strategies for a problem, the preferred first; the last one works wherever a plain product does."""
    keep = problem.preactivation is not None
    name = problem.activation.name
    has_bias = problem.bias is not None
    if _can_fuse_bias(problem):
        suffix = "_bias" if has_bias else ""
        fusable = name == "gelu" or (name == "relu" and not problem.propagate_nan)
        if fusable and not keep and not problem.dropout:
            yield ForwardStrategy(Epilogue(name + suffix), own_pass=False, own_bias=False, keep_preactivation=False)
        own_pass = name != "none" or problem.dropout or keep
        plain = Epilogue.BIAS if has_bias else Epilogue.NONE
        yield ForwardStrategy(plain, own_pass, own_bias=False, keep_preactivation=keep)
    yield ForwardStrategy(Epilogue.NONE, own_pass=True, own_bias=has_bias, keep_preactivation=keep)


def _can_fuse_bias(problem: ForwardProblem) -> bool:
    """cuBLASLt's bias runs along the contiguous axis of the output; without inputs there is no product at all.

    A bias that the library is known to get wrong, as one of too little alignment, the plan of the product refuses.
    """
    target = problem.preactivation or problem.y
    if problem.x.layout.cols == 0:
        return False
    return problem.bias is None or target.layout.order is Order.ROW


@dataclass(frozen=True, slots=True)
class BackwardStrategy:
    """How backward is split.

    Attributes:
        own_pass: whether our kernel makes dz, the bias gradient, or both, from dy.
        needs_dz: whether that pass writes dz; without it, dy is dz.
    """

    own_pass: bool
    needs_dz: bool


def backward_strategy(problem: BackwardProblem) -> BackwardStrategy:
    """The strategy for a problem."""
    differs = problem.saved is not Saved.NOTHING or problem.dropout
    wants_product = problem.dx is not None or problem.dw is not None
    needs_dz = problem.dz is not None or (differs and wants_product)
    return BackwardStrategy(own_pass=needs_dz or problem.db, needs_dz=needs_dz)
