"""The least time that a problem can take, given its operations and bytes and the GPU's peak rates (roofline)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final, NamedTuple

from lt_runtime.fp8 import Fp8ChainProblem
from lt_runtime.gpu.peaks import Hardware, hardware
from lt_runtime.plans.cache import LayerProblem
from lt_runtime.problem import BackwardProblem, Compute, DType, MatmulProblem, MLPProblem, Spec
from lt_runtime.store.keys import Remembered
from lt_runtime.tuner.chain import LayerChain
from lt_runtime.tuner.chain_operands import tensors_of
from lt_runtime.tuner.operands import operands_of

_BITS: Final = 8
# Lower bound of a kernel's time in a graph, in microseconds: half of what an H200 needs.
_LAUNCH_US: Final = 0.75
_CACHED: Final = 4.0


class Work(NamedTuple):
    """Work of a problem: floating-point operations of its products, and bytes of its operands, each moved once."""

    flops: int
    bytes: int


def floor_us(problems: Iterable[Remembered], device: int) -> float:
    """Lower bound in microseconds of the time of problems that run one after the other; a shorter measurement is wrong.

    Each problem launches at least one kernel. Operands may be in the L2 cache, from which an H200 reads about twice as
    fast as from memory; a quarter of the time at peak rates is a safe bound on other GPUs too.
    """
    peaks = hardware(device)
    return sum(max(_LAUNCH_US, (least_us(each, peaks) or 0.0) / _CACHED) for each in problems)


def least_us(problem: Remembered, hardware: Hardware) -> float | None:
    """Microseconds of a problem at the GPU's peak rates: the longer of compute time and time to move the data.

    The result is None if the GPU's peak rates are not known.
    """
    is_fp8 = isinstance(problem, Fp8ChainProblem)
    types = (DType.FLOAT8_E4M3FN, Compute.FLOAT32) if is_fp8 else (problem.dtype, problem.compute)
    peak = hardware.flops_per_s(*types)
    if not peak or not hardware.bytes_per_s:
        return None
    work = work_of(problem)
    return 1e6 * max(work.flops / peak, work.bytes / hardware.bytes_per_s)


def work_of(problem: Remembered) -> Work:
    """The work of a problem; it does not depend on the strategy."""
    if isinstance(problem, Fp8ChainProblem):
        runs = [work_of(each) for _, each in LayerChain.of_fp8(problem).runs]
        return Work(*map(sum, zip(*runs, strict=True)))
    if isinstance(problem, MLPProblem):
        return _work_of_mlp(problem)
    if isinstance(problem, MatmulProblem):
        flops, batch, moved = 2 * problem.batch * problem.m * problem.n * problem.k, problem.batch, operands_of(problem)
    else:
        batch, moved = 1, _moved(problem)
        products = (problem.dx, problem.dw) if isinstance(problem, BackwardProblem) else (problem.y,)
        flops = 2 * problem.x.layout.size * problem.w.layout.rows * sum(each is not None for each in products)
    sizes = [(spec.layout.size * (batch if spec.batch_stride else 1), dtype) for spec, dtype in moved.values()]
    return Work(flops, sum(size * (_BITS * dtype.itemsize if dtype else 1) for size, dtype in sizes) // _BITS)


def _work_of_mlp(problem: MLPProblem) -> Work:
    """The work of a narrow MLP: its products, and the bytes of inputs, outputs and parameters.

    With `backward` the gradients of outputs and parameters are counted as well; inputs have no gradient. With a loss
    the targets are read in place of the outputs' gradient, and no outputs are written.
    """
    products = [above * below for above, below in itertools.pairwise(problem.dims)]
    weights, biases = sum(products), sum(itertools.compress(problem.dims[1:], problem.biases))
    inputs, outputs = problem.dims[0], problem.dims[-1]
    passes = 3 * weights - products[0] if problem.backward else weights
    each = 1 + problem.backward  # a backward pass moves a gradient besides each output and each parameter
    moved = problem.rows * (inputs + (each - problem.loss) * outputs) + each * (weights + biases)
    return Work(2 * problem.rows * passes, problem.dtype.itemsize * moved)


def _moved(problem: LayerProblem) -> dict[str, tuple[Spec, DType | None]]:
    """Spec and type of each operand that a layer's problem reads or writes, by name; see `operands_of`."""
    tensors = tensors_of(0, problem)
    moved = {name: (each.spec, None if each.is_mask else problem.dtype) for name, each in tensors.items()}
    if isinstance(problem, BackwardProblem):
        unread = {"x": problem.dw, "w": problem.dx}
        moved = {name: each for name, each in moved.items() if unread.get(name, each) is not None}
        for name, accumulates in (("dw", problem.accumulate), ("dx", problem.accumulate_dx)):
            if accumulates and name in moved:
                moved[f"{name} before"] = moved[name]
    return moved
