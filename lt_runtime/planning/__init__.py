"""Plans: a problem with its strategy, algorithms and kernels, ready to launch."""

from lt_runtime.planning.cache import backward_plan, forward_plan, product_plan
from lt_runtime.planning.call import ProductCall
from lt_runtime.planning.launches import DropoutState
from lt_runtime.planning.linear import BackwardPlan, ForwardPlan
from lt_runtime.planning.strategies import saved_for

__all__ = [
    "BackwardPlan",
    "DropoutState",
    "ForwardPlan",
    "ProductCall",
    "backward_plan",
    "forward_plan",
    "product_plan",
    "saved_for",
]
