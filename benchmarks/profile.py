"""Profiles against PyTorch's profiler: `python -m benchmarks.profile [--json FILE]`.

Kernel times of the same matrix products, taken by `lt.profile` and by PyTorch's profiler in processes that alternate,
because one process can have one user of CUPTI; what events cost a training step, and whether the times of its layers
add up to the time without events; and what a range costs, alone and with NVTX attached.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

_SHAPES: Final = ((8192, 3072, 768), (8192, 768, 3072), (4096, 4096, 4096))  # M, N, K
_LAUNCHES: Final = 60
_TURNS: Final = 3
_DIMS, _ROWS = (768, 3072, 768, 3072, 768), 8192
_STEPS: Final = 40
_EVENT_TURNS: Final = 11
_WARM_UP: Final = 5
_PAUSE_S: Final = 0.2
_RANGES: Final = 10**6


def by_lt(products: Sequence[Callable[[], object]]) -> dict[str, float]:
    """Medians of every kernel's times in microseconds, by `lt.profile`."""
    import lt_runtime as lt

    found: dict[str, float] = {}
    for number, product in enumerate(products):
        prof = lt.profile(product, steps=_LAUNCHES)
        found |= {f"{number} {each.name}": each.median_us for each in prof.kernels() if "memcpy" not in each.name}
    return found


def by_torch(products: Sequence[Callable[[], object]]) -> dict[str, float]:
    """The same by PyTorch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    found: dict[str, float] = {}
    for number, product in enumerate(products):
        product()
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            for _ in range(_LAUNCHES):
                product()
            torch.cuda.synchronize()
        times: dict[str, list[float]] = {}
        for event in prof.events():
            if event.device_type == torch.autograd.DeviceType.CUDA and "Memcpy" not in event.name:
                times.setdefault(event.name, []).append(event.time_range.elapsed_us())
        found |= {f"{number} {name}": statistics.median(each) for name, each in times.items()}
    return found


def kernel_times(who: str) -> dict[str, float]:
    """Kernel times of PyTorch's products as one of the two profilers takes them; in a process of its own."""
    import torch

    def product(m: int, n: int, k: int) -> Callable[[], object]:
        a, b = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in ((m, k), (k, n)))
        return lambda: a @ b

    return {"lt": by_lt, "torch": by_torch}[who]([product(*shape) for shape in _SHAPES])


def compared() -> dict[str, Any]:
    """Both profilers' medians of each kernel, over processes that alternate, and how far apart they are."""
    turns: dict[str, list[dict[str, float]]] = {"lt": [], "torch": []}
    for turn in range(_TURNS):
        for who in ("lt", "torch") if turn % 2 else ("torch", "lt"):
            command = [sys.executable, "-m", "benchmarks.profile", "--only", who]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            turns[who].append(json.loads(done.stdout.splitlines()[-1]))
    medians = {
        who: {name: statistics.median(each[name] for each in found if name in each) for name in found[0]}
        for who, found in turns.items()
    }
    both = medians["lt"].keys() & medians["torch"].keys()
    return {
        "us": {name: [medians["lt"][name], medians["torch"][name]] for name in sorted(both)},
        "only_one": sorted(medians["lt"].keys() ^ medians["torch"].keys()),
        "most_apart": max(
            (abs(medians["lt"][name] / medians["torch"][name] - 1) for name in both if medians["torch"][name] > 20),
            default=None,
        ),
    }


def cost_of_events() -> dict[str, float]:
    """Microseconds of a gpt2-mlp-x2 step, back to back, without a profile and while it is timed."""
    import cupy as cp

    import lt_runtime as lt

    model = lt.MLP(_DIMS, activation="gelu", dtype="bfloat16", dropout=0.1, device="cuda")
    step = lt.TrainStep(model, lt.AdamW(model.parameters()), loss="mse", batch_size=_ROWS, tune=False)
    x, target = (cp.random.standard_normal((_ROWS, n)).astype(model.dtype.numpy) for n in (_DIMS[0], _DIMS[-1]))

    def run() -> float:
        """A step's time over steps back to back, from the same state of the GPU's clocks each time."""
        cp.cuda.Device().synchronize()
        time.sleep(_PAUSE_S)
        start, end = cp.cuda.Event(), cp.cuda.Event()
        for number in range(_WARM_UP + _STEPS):
            if number == _WARM_UP:
                start.record()
            step(x, target)
        end.record()
        end.synchronize()
        return float(cp.cuda.get_elapsed_time(start, end)) * 1e3 / _STEPS

    def profiled() -> float:
        with lt.profile(timed=_WARM_UP + _STEPS + 2, traced=0) as prof:
            step(x, target)  # the copies of the graph are made, and the one with all events is launched
            took = run()
        by_layers.append(prof.totals().step_us)
        return took

    by_layers: list[float] = []
    found: dict[str, list[float]] = {"plain_us": [], "timed_us": [], "by_layers_us": by_layers}
    run()
    for turn in range(_EVENT_TURNS):
        for name, measure in (("plain_us", run), ("timed_us", profiled))[:: -1 if turn % 2 else 1]:
            found[name].append(measure())
    medians = {name: statistics.median(each) for name, each in found.items()}
    return {
        **medians,
        "cost": medians["timed_us"] / medians["plain_us"] - 1,
        "by_layers": medians["by_layers_us"] / medians["plain_us"] - 1,
    }


def cost_of_a_range() -> dict[str, float]:
    """Nanoseconds of a range without those of the loop, and of a context of Python's that does nothing.

    Each is the least of several loops of a million.
    """
    import lt_runtime as lt

    made, nothing, none = lt.range("benchmark"), contextlib.nullcontext(), [None] * _RANGES

    def loop() -> None:
        for _ in none:
            pass

    def silent() -> None:
        for _ in none:
            with made:
                pass

    def by_name() -> None:
        for _ in none:
            with lt.range("benchmark"):
                pass

    def least(run: Callable[[], None]) -> float:
        times = []
        for _ in range(7):
            start = time.perf_counter_ns()
            run()
            times.append(time.perf_counter_ns() - start)
        return min(times) / _RANGES

    def null() -> None:
        for _ in none:
            with nothing:
                pass

    empty = least(loop)
    calls = {"range_ns": silent, "range_by_name_ns": by_name, "nullcontext_ns": null}
    return {name: least(call) - empty for name, call in calls.items()}


def cost_with_nvtx_attached() -> dict[str, float]:
    """The same in a process with CUPTI as NVTX's tool."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    tool = {"NVTX_INJECTION64_PATH": str(load_nvidia_dynamic_lib("cupti").abs_path)}
    command = [sys.executable, "-m", "benchmarks.profile", "--only", "range"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | tool)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Prints all figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("lt", "torch", "range", "events"))
    options = parser.parse_args()
    alone: dict[str, Callable[[], dict[str, Any]]] = {
        "lt": lambda: kernel_times("lt"),
        "torch": lambda: kernel_times("torch"),
        "range": cost_of_a_range,
        "events": cost_of_events,
    }
    if options.only:
        print(json.dumps(alone[options.only]()))
        return
    result = {
        "range": cost_of_a_range(),
        "range_with_nvtx": cost_with_nvtx_attached(),
        "events": cost_of_events(),
        "kernels": compared(),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
