"""Compares kernel times with PyTorch's profiler: `python -m benchmarks.profiles [--rounds N] [--launches N]`.

Both profilers look at the same work, in processes of their own that take turns. A kernel's time is the median over its
launches in a process, and then the median over the processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

_SHORT_US: Final = 20.0
"""Kernels that take less are shown, but not counted."""
_ROWS: Final = 4096


def work() -> Callable[[], None]:
    """A layer of ours and the same of PyTorch's, and two elementwise kernels."""
    import cupy as cp
    import torch

    import lt_runtime as lt

    x, weight = (torch.randn(_ROWS, _ROWS, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bias = torch.randn(_ROWS, device="cuda", dtype=torch.bfloat16)
    large = cp.ones(1 << 26, cp.float32)

    def run() -> None:
        lt.linear_fwd(x, weight, bias, activation="gelu")
        torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))
        cp.multiply(large, 1, out=large)

    for _ in range(5):
        run()
    torch.cuda.synchronize()
    return run


def by_lt(run: Callable[[], None], launches: int) -> Mapping[str, Sequence[float]]:
    """Durations in microseconds by kernel, as our collector has them."""
    from lt_runtime.profiling.collector import Collector

    with Collector() as collector:
        for _ in range(launches):
            run()
    found = defaultdict(list)
    for each in collector.activities:
        if each.kind == "kernel":
            found[each.name].append((each.end_ns - each.start_ns) / 1e3)
    return found


def by_torch(run: Callable[[], None], launches: int) -> Mapping[str, Sequence[float]]:
    """The same, as PyTorch's profiler has them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(launches):
            run()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.time_range.elapsed_us())
    return found


PROFILERS: Final[Mapping[str, Callable[[Callable[[], None], int], Mapping[str, Sequence[float]]]]] = {
    "lt": by_lt,
    "torch": by_torch,
}


def measured(rounds: int, launches: int) -> dict[str, dict[str, float]]:
    """By kernel and profiler, the median of the processes' medians in microseconds."""
    medians: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for index in range(rounds):
        for name in [*PROFILERS][:: -1 if index % 2 else 1]:
            command = [sys.executable, "-m", "benchmarks.profiles", "--process", name, "--launches", str(launches)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            for kernel, durations in json.loads(done.stdout.splitlines()[-1]).items():
                if len(durations) >= launches:
                    medians[kernel][name].append(statistics.median(durations))
    return {kernel: {name: statistics.median(of) for name, of in both.items()} for kernel, both in medians.items()}


def table(kernels: Mapping[str, Mapping[str, float]]) -> str:
    """A line a kernel, the longest first, and what the worst of those is that count."""
    lines, worst = [f"{'lt us':>10} {'torch us':>10} {'difference':>10}  kernel"], 0.0
    for kernel, both in sorted(kernels.items(), key=lambda each: -max(each[1].values())):
        if set(both) != set(PROFILERS):
            lines.append(f"{'seen by ' + ', '.join(both) + ' alone':>32}  {kernel[:90]}")
            continue
        difference = both["lt"] / both["torch"] - 1
        counts = both["torch"] >= _SHORT_US
        worst = max(worst, abs(difference)) if counts else worst
        lines.append(f"{both['lt']:10.2f} {both['torch']:10.2f} {difference:10.2%}  {kernel[:90]}")
    return "\n".join([*lines, f"the most of kernels over {_SHORT_US:g} us: {worst:.2%}; the target is 3 %"])


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser: Any = argparse.ArgumentParser(prog="python -m benchmarks.profiles", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="processes of each profiler; default: 4")
    parser.add_argument("--launches", type=int, default=60, metavar="N", help="of each kernel in one; default: 60")
    parser.add_argument("--process", choices=PROFILERS, help="do one process's part")
    options = parser.parse_args(argv)
    if options.process:
        print(json.dumps(PROFILERS[options.process](work(), options.launches)))
    else:
        print(table(measured(options.rounds, options.launches)))


if __name__ == "__main__":
    main()
