"""Where the time of a step goes."""

from lt_runtime.profiling.range_timer import LayerTime, RangeTimer

__all__ = ["LayerTime", "RangeTimer"]
