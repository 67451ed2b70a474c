"""FLOPs and bytes of an operation, and the ceilings of a GPU: the highest rates that kernels reach on it.

An operation's work follows from its plan: each kernel reads and writes each of its operands once. The ceilings are
measured once, and stored beside the plan cache in a file for each kind of machine.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from lt_runtime import paths
from lt_runtime.files import parse_json, read_private, replace_private
from lt_runtime.gpu.driver import call
from lt_runtime.layout import packed
from lt_runtime.ops.call import PreparedCall
from lt_runtime.ops.optimizers.optimizer import Optimizer
from lt_runtime.plans.cache import FUSED_MLP, make_plan
from lt_runtime.problem import Compute, DType, MatmulProblem, MLPProblem, Spec
from lt_runtime.products.padded import PaddedPlan
from lt_runtime.products.plan import Plan
from lt_runtime.products.product import ProductPlan
from lt_runtime.store.document import fingerprint
from lt_runtime.store.keys import Remembered, to_json
from lt_runtime.tuner import roofline
from lt_runtime.tuner.operands import NORMAL
from lt_runtime.tuner.report import strategy_in_words
from lt_runtime.tuner.timing import Bench, workbench
from lt_runtime.tuner.verification import ProductOperands

COPY: Final = "copy"
_COPIED: Final = 1 << 29  # bytes
_EXTENT: Final = 8192
_ROUNDS: Final = 6
_LIMIT: Final = 1 << 16  # largest number of bytes of the file of measured ceilings (highest rates)


class Work(NamedTuple):
    """The work of one run of an operation.

    Attributes:
        flops: operations of its matrix products; a multiply-add counts two.
        bytes: bytes that all its kernels read and write, including copies of operands.
        kind: the type of its products, or "tf32"; "" without products.
        strategy: the plan's strategy, in words; "" for an operation without strategies.
        copies: whether the plan copies operands to padded buffers.
    """

    flops: int = 0
    bytes: int = 0
    kind: str = ""
    strategy: str = ""
    copies: bool = False


@functools.lru_cache(maxsize=4096)
def work_of(ran: PreparedCall | Optimizer) -> Work:
    """The work of a prepared call, or of an update by an optimizer; `ranges.tell` passes either."""
    if isinstance(ran, Optimizer):
        return Work(bytes=_bytes_of_update(ran))
    problem = ran.request.problem
    # The counted work includes the forward pass, which the fused backward kernel repeats.
    if isinstance(problem, MLPProblem):
        return Work(*roofline.work_of(problem), problem.dtype.value, strategy_in_words({FUSED_MLP: True}))
    if not isinstance(problem, Remembered):
        # Losses, dropout and gates read or write each array once; an input that is overwritten is read and written.
        overwritten = [ran.sizes[place] for place in ran.request.written if place < ran.operation.required]
        return Work(bytes=sum(ran.sizes) + sum(overwritten))
    kind = "tf32" if problem.compute is Compute.TF32 else problem.dtype.value
    least = roofline.work_of(problem)
    if ran.plan is None:
        return Work(least.flops, least.bytes, kind)
    plan: Plan = ran.plan
    copied = [name for name, product in _products(plan).items() if isinstance(product, PaddedPlan)]
    words = "" if plan.strategy is None else strategy_in_words(to_json(plan.strategy))
    if copied:
        words = ", ".join([*filter(None, [words]), f"copies for {' and '.join(copied)}"])
    return Work(least.flops, _moved(plan), kind, words, bool(copied))


def _products(plan: Plan) -> dict[str, Plan]:
    return {"d": plan.product} if isinstance(plan, ProductPlan) else dict(plan.products)


def _moved(plan: Plan) -> int:
    """Bytes that all kernels of a plan read and write."""
    moved = plan.moved
    for each in _products(plan).values():
        moved += roofline.work_of(each.inner.problem if isinstance(each, PaddedPlan) else each.problem).bytes
    if isinstance(plan, ProductPlan) and plan.product.problem is not plan.problem:
        # The package's kernel after the plain product reads that product and the operands of the epilogue, and writes
        # D.
        plain, whole = plan.product.problem, plan.problem
        moved += roofline.work_of(whole).bytes - roofline.work_of(plain).bytes
        moved += sum(each.batch * each.d.layout.size * each.d_dtype.itemsize for each in (plain, whole))
    return moved


def _bytes_of_update(optimizer: Optimizer) -> int:
    """Bytes of an optimizer's update, which reads gradients, values and moments, and writes values and moments.

    The gradients are read once more if their norm or finiteness is checked.
    """
    options, moved = optimizer.options, 0
    for parameter, moments in zip(optimizer.parameters, optimizer.moments, strict=True):
        size, own = math.prod(parameter.data.shape), parameter.data.dtype.itemsize
        gradients = parameter.grad.dtype.itemsize * (1 + options.judges_gradients)
        values = own + (own if parameter.master is None else 2 * parameter.master.dtype.itemsize)
        moved += size * (gradients + values + 2 * len(moments) * options.moments.itemsize)
    return moved


def ceilings(device: int, kinds: Iterable[str]) -> dict[str, float]:
    """FLOP/s of each kind of matrix product, and bytes/s of a copy under the name `COPY`, counting reads and writes.

    A ceiling that the file lacks is measured, which takes some tenths of a second.

    Args:
        kinds: names of types, or "tf32".

    Raises:
        GpuError: GPU memory is exhausted, or the driver, compiler or cuBLASLt failed.
        CaptureError: a stream is being captured.
    """
    path = paths.cache_directory() / "ceilings" / fingerprint(device).file_name
    known = dict[str, float]()
    # a missing or damaged file of ceilings counts as empty
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        known = {str(name): float(value) for name, value in parse_json(read_private(path, _LIMIT)).items() if value > 0}
    missing = {COPY, *kinds} - known.keys()
    if missing:
        with workbench(device) as bench:
            known |= {kind: measure(bench, kind) for kind in sorted(missing)}
        with contextlib.suppress(OSError):  # if the file cannot be written, the next process measures again
            replace_private(path, json.dumps(known, indent=2).encode())
    return known


def measure(bench: Bench, kind: str) -> float:
    """Measures one ceiling: bytes/s for `COPY`, otherwise FLOP/s."""
    run: Callable[[int], object]
    if kind == COPY:
        source, target = (bench.memory.allocate(_COPIED) for _ in range(2))
        copy = target.data.ptr, source.data.ptr, _COPIED
        amount, run = 2 * _COPIED, lambda stream: call("cuMemcpyDtoDAsync", *copy, stream)
    else:
        dtype = DType.FLOAT32 if kind == "tf32" else DType(kind)
        compute = {"tf32": Compute.TF32, "float64": Compute.FLOAT64}.get(kind, Compute.FLOAT32)
        spec = Spec(packed(_EXTENT, _EXTENT))
        problem = MatmulProblem(dtype, dtype, compute, spec, spec, spec)
        plan, operands = make_plan(problem, bench.device), ProductOperands(bench.memory, problem)
        operands.fill(NORMAL, 0)
        amount, run = 2 * _EXTENT**3, lambda stream: plan.run(operands.call(stream))
    # the fastest of several rounds counts, because the first round also loads the kernel
    return 1e6 * amount / min(bench.clock.once(run) for _ in range(_ROUNDS))
