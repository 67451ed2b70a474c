"""Where the time of a step goes. Whatever measures it is a listener of `lt_runtime.ranges`."""

from lt_runtime.profiling.layers import Kernel, Layer, Totals
from lt_runtime.profiling.session import Profile, profile

__all__ = ["Kernel", "Layer", "Profile", "Totals", "profile"]
