"""The processes that the suites `cold` and `tuning` start: `python -m benchmarks.processes TASK`.

The tasks are import, linear, step, trained MODEL, and plans BLOCK... Each prints a line of JSON. The modules imported
at the top are imported before the clock starts, so they are few.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_M, _N, _K = 256, 512, 784
MODELS: Final[Mapping[str, tuple[int, tuple[int, ...]]]] = {
    "mnist MLP BF16, batch 256": (_M, (784, 512, 512, 10)),
    "gpt2-mlp-x2 BF16": (8192, (768, 3072, 768, 3072, 768)),
}
"""The models of the tasks by name: rows of a batch, and sizes of the layers. All are BF16 with ReLU."""
_STEPS: Final = 500


class Stages:
    """A stopwatch: maps the name of each stage to the microseconds between the marks at its ends."""

    def __init__(self) -> None:
        self.us: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, name: str) -> None:
        """Ends a stage: stores the time since the previous mark."""
        now = time.perf_counter()
        self.us[name], self._last = 1e6 * (now - self._last), now


def import_(stages: Stages) -> None:
    """Imports the package, and then looks up every public name, which imports its module."""
    import lt_runtime as lt

    stages.mark("import")
    for name in lt.__all__:
        getattr(lt, name)
    stages.mark("names")


def linear(stages: Stages) -> None:
    """Task `linear`: runs a layer forward twice."""
    cp, lt, to_gpu = _libraries(stages)
    x, w, bias, y = (to_gpu(shape) for shape in ((_M, _K), (_N, _K), (_N,), (_M, _N)))
    _done(cp, stages, "operands")
    for name in ("first", "second"):
        lt.linear_fwd(x, w, bias, activation="gelu", out=y)
        _done(cp, stages, name)


def step(stages: Stages) -> None:
    """Task `step`: makes two training steps; the first makes the plans, compiles the kernels and captures the graph."""
    _first_steps(stages, next(iter(MODELS)))


def trained(stages: Stages, model: str) -> None:
    """Makes two training steps of the named model, then `_STEPS` more, whose mean time is the stage `step`."""
    cp, train = _first_steps(stages, model)
    for _ in range(_STEPS):
        train()
    _done(cp, stages, "step")
    stages.us["step"] /= _STEPS


def _first_steps(stages: Stages, name: str) -> tuple[Any, Callable[[], object]]:
    """Trains two steps; returns CuPy and a function that makes one more step on the same batch."""
    cp, lt, to_gpu = _libraries(stages)
    rows, dims = MODELS[name]
    model = lt.MLP(dims, activation="relu", dtype="bfloat16", device="cuda")
    optimizer = lt.AdamW(model.parameters(), lr=1e-3)
    train = lt.TrainStep(model, optimizer, loss="cross_entropy", batch_size=rows)
    x, labels = to_gpu((rows, dims[0])), cp.zeros(rows, cp.int64)
    _done(cp, stages, "operands")
    for stage in ("first", "second"):
        train(x, labels)
        _done(cp, stages, stage)
    return cp, lambda: train(x, labels)


def _libraries(stages: Stages) -> tuple[Any, Any, Callable[[tuple[int, ...]], Any]]:
    """Returns CuPy, the package, and a function that makes a random BF16 array on the GPU (without a kernel)."""
    import cupy as cp
    import ml_dtypes
    import numpy as np

    import lt_runtime as lt

    generator = np.random.default_rng(0)
    stages.mark("import")
    return cp, lt, lambda shape: cp.asarray(generator.standard_normal(shape).astype(ml_dtypes.bfloat16))


def _done(cp: Any, stages: Stages, name: str) -> None:
    cp.cuda.Device().synchronize()
    stages.mark(name)


def loads_driver() -> bool:
    """Whether this process has loaded the CUDA driver's library."""
    return "libcuda.so" in Path("/proc/self/maps").read_text()


def plans(names: Sequence[str]) -> dict[str, Any]:
    """Builds the plans of the named blocks, whose problems have been measured; see `internals.SecondProcess`."""
    from benchmarks.internals import SecondProcess
    from benchmarks.layers import blocks

    process = SecondProcess()
    for block in blocks():
        if block.name in names:
            process.build(block)
    return {"measurements": process.measurements, "known": process.known, "us": process.us}


TASKS: Final[dict[str, Any]] = {"import": import_, "linear": linear, "step": step, "trained": trained}


def main(task: str, names: Sequence[str]) -> None:
    """Runs the task that the command line names, and prints its times."""
    if task == "plans":
        found = plans(names)
    else:
        stages = Stages()
        TASKS[task](stages, *names)
        found = {"us": stages.us, "loads_driver": loads_driver()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
