"""Plans: a problem with its strategy, algorithms and kernels, ready to launch."""

from lt_runtime.planning.backward import BackwardCall, BackwardPlan
from lt_runtime.planning.bound import BoundPlan
from lt_runtime.planning.cache import age, backward_plan, forward_plan, product_plan, recall, remember
from lt_runtime.planning.call import ProductCall
from lt_runtime.planning.forward import ForwardPlan
from lt_runtime.planning.launches import DropoutState
from lt_runtime.planning.product import ProductPlan

__all__ = [
    "BackwardCall",
    "BackwardPlan",
    "BoundPlan",
    "DropoutState",
    "ForwardPlan",
    "ProductCall",
    "ProductPlan",
    "age",
    "backward_plan",
    "forward_plan",
    "product_plan",
    "recall",
    "remember",
]
