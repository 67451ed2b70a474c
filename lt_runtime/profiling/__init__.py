"""Where the time of a step goes. Whatever measures it is a listener of `lt_runtime.ranges`."""

from lt_runtime.profiling.range_timer import LayerTime, RangeTimer

__all__ = ["LayerTime", "RangeTimer"]
