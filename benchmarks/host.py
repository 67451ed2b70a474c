"""Host time of one call: `python3 -m benchmarks.host [FILE]`.

The product is small, so that the GPU keeps up and only the host's own work counts. Contenders take turns in short
rounds within one run; each figure is a median over the rounds, its spread their interquartile range.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import cupy as cp
import numpy as np

import lt_runtime as lt
from benchmarks import report
from benchmarks.report import Row
from benchmarks.timing import take_turns
from lt_runtime.layout import packed
from lt_runtime.planning import ProductCall, product_plan
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec

M, N, K = 64, 64, 64
CALLS: Final = 500
ROUNDS: Final = 41
RESULT: Final = report.RESULTS / "matmul_host.json"

Calls = dict[str, Callable[[], object]]


def contenders() -> tuple[Calls, dict[str, str]]:
    """The same FP32 product by everyone who is installed, outputs given where they can be; and why others are not."""
    generator = np.random.default_rng(0)
    a, b = (cp.asarray(generator.standard_normal(s).astype(np.float32)) for s in ((M, K), (K, N)))
    d = cp.empty((M, N), cp.float32)
    specs = [Spec(packed(*shape)) for shape in ((M, K), (K, N), (M, N))]
    problem = MatmulProblem(DType.FLOAT32, DType.FLOAT32, Compute.FLOAT32, *specs)
    plan = product_plan(problem, 0, 0)
    launch = ProductCall(a.data.ptr, b.data.ptr, d.data.ptr, stream=0)
    calls: Calls = {
        "lt_matmul_out": lambda: lt.matmul(a, b, out=d),
        "lt_plan_run": lambda: plan.run(launch),
        "cupy_matmul_out": lambda: cp.matmul(a, b, out=d),
    }
    left_out = {}
    for library, add in {"torch": _torch, "nvmath": _nvmath}.items():
        try:
            calls |= add(a, b, d)
        except ImportError as error:
            left_out[library] = str(error)
    return calls, left_out


def _torch(a: Any, b: Any, d: Any) -> Calls:
    import torch

    x, w, out = torch.from_dlpack(a), torch.from_dlpack(b.T), torch.from_dlpack(d)
    y = torch.from_dlpack(b)
    return {
        "torch_f_linear": lambda: torch.nn.functional.linear(x, w),
        "torch_matmul_out": lambda: torch.matmul(x, y, out=out),
    }


def _nvmath(a: Any, b: Any, _: Any) -> Calls:
    from nvmath.linalg.advanced import Matmul

    product = Matmul(a, b)
    product.plan()
    return {"nvmath_execute": product.execute}


def microseconds(call: Callable[[], object]) -> float:
    """Host time of one of `CALLS` calls in a row."""
    cp.cuda.Device().synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def main(file: Path) -> None:
    """Measures, prints a table, and writes the result."""
    calls, left_out = contenders()
    timings = take_turns({name: partial(microseconds, call) for name, call in calls.items()}, ROUNDS)
    case = f"matmul {M}x{N}x{K} float32, host time of a call"
    row = Row(case, timings, "lt_matmul_out", setting={"rounds": ROUNDS}, left_out=left_out)
    report.write(file, [row])
    report.console().print(report.table([row]))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULT)
