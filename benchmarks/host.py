"""Host time of one call: `python3 -m benchmarks.host [FILE]`.

The product is small, so that the GPU keeps up and only the host's own work counts. Contenders take turns in short
rounds within one run; each figure is a median over the rounds, its spread their interquartile range.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np

import lt_runtime as lt
from lt_runtime import cublaslt
from lt_runtime.gpu.devices import device_info
from lt_runtime.layout import packed
from lt_runtime.planning import ProductCall, product_plan
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec

M, N, K = 64, 64, 64
CALLS = 500
ROUNDS = 41
RESULT = Path(__file__).parent / "results" / "h200" / "matmul_host.json"


def contenders() -> dict[str, Callable[[], object]]:
    """The same FP32 product, by everyone who is installed; outputs given where the interface takes them."""
    generator = np.random.default_rng(0)
    a, b = (cp.asarray(generator.standard_normal(s).astype(np.float32)) for s in ((M, K), (K, N)))
    d = cp.empty((M, N), cp.float32)
    specs = [Spec(packed(*shape)) for shape in ((M, K), (K, N), (M, N))]
    problem = MatmulProblem(DType.FLOAT32, DType.FLOAT32, Compute.FLOAT32, *specs)
    plan = product_plan(problem, 0, 0)
    launch = ProductCall(a.data.ptr, b.data.ptr, d.data.ptr, stream=0)
    return {
        "lt_matmul_out": lambda: lt.matmul(a, b, out=d),
        "lt_plan_run": lambda: plan.run(launch),
        "cupy_matmul_out": lambda: cp.matmul(a, b, out=d),
        **_torch(a, b, d),
        **_nvmath(a, b),
    }


def _torch(a: Any, b: Any, d: Any) -> dict[str, Callable[[], object]]:
    import torch

    x, w, out = torch.from_dlpack(a), torch.from_dlpack(b.T), torch.from_dlpack(d)
    y = torch.from_dlpack(b)
    return {
        "torch_f_linear": lambda: torch.nn.functional.linear(x, w),
        "torch_matmul_out": lambda: torch.matmul(x, y, out=out),
    }


def _nvmath(a: Any, b: Any) -> dict[str, Callable[[], object]]:
    from nvmath.linalg.advanced import Matmul

    product = Matmul(a, b)
    product.plan()
    return {"nvmath_execute": product.execute}


def measure(calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Microseconds a call, by contender, one figure a round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(-2, ROUNDS):  # two rounds to warm up
        for name, call in calls.items():
            cp.cuda.Device().synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            elapsed = time.perf_counter() - start
            if round_ >= 0:
                times[name].append(elapsed / CALLS * 1e6)
    return times


def main(file: Path) -> None:
    """Measures, prints a table, and writes the result."""
    times = measure(contenders())
    medians = {name: statistics.median(values) for name, values in times.items()}
    quartiles = {name: statistics.quantiles(values, n=4) for name, values in times.items()}
    row = {
        "case": f"matmul {M}x{N}x{K} float32, host time of a call",
        "us": medians,
        "spread": {name: high - low for name, (low, _, high) in quartiles.items()},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": _machine(), "commit": _commit(), "rows": [row]}, indent=2) + "\n")
    for name, median in sorted(medians.items(), key=lambda item: item[1]):
        ratio = median / medians["lt_matmul_out"]
        print(f"{name:18} {median:7.2f} µs ± {row['spread'][name]:.2f}   {ratio:5.2f} x lt_matmul_out")


def _machine() -> dict[str, Any]:
    import nvmath
    import torch

    info = device_info(0)
    return {
        "gpu": info.name,
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "cublaslt": cublaslt.get_version(),
        "cupy": cp.__version__,
        "torch": torch.__version__,
        "nvmath": nvmath.__version__,
    }


def _commit() -> str:
    """$GIT_COMMIT, for a copy without its history, or what git says."""
    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULT)
