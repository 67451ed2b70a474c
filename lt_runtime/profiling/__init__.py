"""Profiles of a step: the latency and the kernels of each layer. The profilers listen to `lt_runtime.ranges`."""

from lt_runtime.profiling.layers import Kernel, Layer, Totals
from lt_runtime.profiling.session import Profile, profile

__all__ = ["Kernel", "Layer", "Profile", "Totals", "profile"]
