"""The highest rates of a GPU, measured once: bytes/s of a copy, FLOP/s of a large matrix product of each type.

The measured rates, called ceilings, are stored beside the plan cache, in a file for each kind of machine.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from lt_runtime import paths
from lt_runtime.files import read_private, replace_private
from lt_runtime.gpu.driver import call
from lt_runtime.layout import packed
from lt_runtime.plans.cache import make_plan
from lt_runtime.problem import ALIGNMENT, Compute, DType, MatmulProblem, Spec
from lt_runtime.store.document import fingerprint
from lt_runtime.tuner.operands import NORMAL
from lt_runtime.tuner.timing import Bench, workbench
from lt_runtime.tuner.verification import ProductOperands

COPY: Final = "copy"
_COPIED: Final = 1 << 29  # bytes
_EXTENT: Final = 8192
_ROUNDS: Final = 5
_LIMIT: Final = 1 << 16  # bytes that are read of the file


def ceilings(device: int, kinds: Iterable[str]) -> dict[str, float]:
    """FLOP/s of each kind of matrix product, and bytes/s of a copy under the name `COPY`, counting reads and writes.

    A ceiling that the file lacks is measured, which takes some tenths of a second.

    Args:
        kinds: names of types, or "tf32".

    Raises:
        GpuError: no memory, or another failure.
        CaptureError: a stream is being captured.
    """
    path, known = _path(device), dict[str, float]()
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):  # the file is missing or damaged
        known = {str(name): float(value) for name, value in json.loads(read_private(path, _LIMIT)).items() if value > 0}
    missing = {COPY, *kinds} - known.keys()
    if missing:
        with workbench(device) as bench:
            known |= {kind: measure(bench, kind) for kind in sorted(missing)}
        with contextlib.suppress(OSError):  # without the file they are measured again next time
            replace_private(path, json.dumps(known, indent=2).encode())
    return known


def measure(bench: Bench, kind: str) -> float:
    """Measures one ceiling: bytes/s for `COPY`, otherwise FLOP/s."""
    if kind == COPY:
        source, target = (bench.memory.allocate(_COPIED) for _ in range(2))
        copy = target.data.ptr, source.data.ptr, _COPIED
        return 2e6 * _COPIED / _least_us(bench, lambda stream: call("cuMemcpyDtoDAsync", *copy, stream))
    dtype = DType.FLOAT32 if kind == "tf32" else DType(kind)
    compute = {"tf32": Compute.TF32, "float64": Compute.FLOAT64}.get(kind, Compute.FLOAT32)
    spec = Spec(packed(_EXTENT, _EXTENT), ALIGNMENT)
    problem = MatmulProblem(dtype, dtype, compute, spec, spec, spec)
    plan, operands = make_plan(problem, bench.device), ProductOperands(bench.memory, problem)
    operands.fill(NORMAL, 0)
    return 2e6 * _EXTENT**3 / _least_us(bench, lambda stream: plan.run(operands.call(stream)))


def _least_us(bench: Bench, run: Callable[[int], object]) -> float:
    bench.clock.once(run)
    return min(bench.clock.once(run) for _ in range(_ROUNDS))


def _path(device: int) -> Path:
    return paths.cache_directory() / "ceilings" / fingerprint(device).file_name
