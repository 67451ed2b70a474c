"""What the kernels of a step take, by PyTorch's profiler: it sees whatever runs on the GPU, whoever launched it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

_STEPS: Final = 20
_DIGITS: Final = 2


def kernel_times(replays: Callable[[int], object]) -> dict[str, float]:
    """Microseconds of a step, profiled: the sum of its kernels' times, the time in which any runs, and from end to end.

    The last two differ by the gaps between kernels, the first two by what runs side by side. Being profiled costs time
    in gaps.

    Args:
        replays: puts so many steps on the GPU.
    """
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        replays(_STEPS)
        torch.cuda.synchronize()
    events: Any = profiler.events()
    spans = sorted(
        (each.time_range.start, each.time_range.end) for each in events if each.device_type == DeviceType.CUDA
    )
    if not spans:
        raise RuntimeError("the profiler saw no kernels")
    times = {
        "sum": sum(end - start for start, end in spans),
        "busy": covered(spans),
        "step": max(end for _, end in spans) - spans[0][0],
    }
    return {name: round(us / _STEPS, _DIGITS) for name, us in times.items()}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals, given by ascending start."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
