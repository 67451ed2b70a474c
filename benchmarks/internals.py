"""Gives the suites access to private parts of lt_runtime: single kernels, a step's graph, plans of a second process.

Only this module, `splits` and the modules that fit untuned choices import private parts. Suites import them
inside functions, so that with `--ours` a suite runs on other versions of the package.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import cupy as cp

import lt_runtime as lt
from benchmarks.splits import DEVICE, chain_of
from benchmarks.timing import timed
from lt_runtime.fp8 import Prologue
from lt_runtime.gpu.clock import Clock
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.graphs import Graph
from lt_runtime.gpu.memory import release, stream_memory
from lt_runtime.gpu.streams import private_stream
from lt_runtime.kernels.call import Call as KernelCall
from lt_runtime.kernels.call import DropoutState
from lt_runtime.kernels.epilogue import BackwardPass, ForwardPass
from lt_runtime.kernels.fp8 import CastGatedPass, CastPass
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.nn import narrow
from lt_runtime.ops.fp8.state import arrays_of
from lt_runtime.plans.cache import forget, make_layer_plan
from lt_runtime.problem import (
    Activation,
    Compute,
    Derivative,
    DType,
    ForwardProblem,
    MatmulProblem,
    Philox,
    Saved,
    Spec,
    keep_threshold,
)
from lt_runtime.store.keys import Problem, problem_key
from lt_runtime.store.plan_store import plan_store
from lt_runtime.training import captured
from lt_runtime.training.fp8_weights import Fp8Weights

Call = Callable[[], object]

# Private parts of lt_runtime that the suite `narrow` uses.


@contextlib.contextmanager
def one_kernel_a_pass(fused: bool) -> Iterator[None]:
    """Within a `with` block, narrow MLPs run as one kernel for each pass or layer by layer, whatever was measured."""
    kept = narrow.is_fused
    narrow.is_fused = lambda *_: fused
    forget((), DEVICE)  # `forget` drops decisions that models have already taken from the plan cache
    try:
        yield
    finally:
        narrow.is_fused = kept
        forget((), DEVICE)


# The suite `kernels`: the epilogue kernels alone, in BF16.


def backward_pass(
    shape: tuple[int, int], dropout: float, rng: Mapping[str, int], *, db: bool, transposed: bool
) -> Callable[..., None]:
    """Returns a function that launches the backward pass; it takes the addresses of dy, z and dz, and a stream."""
    rows, cols = shape
    spec = Spec(packed(rows, cols))
    dz_spec = Spec(packed(cols, rows)).transposed if transposed else spec
    derivative = Derivative(Activation("gelu"), Saved.PREACTIVATION, spec, 256 if db else None, dropout > 0)
    backward = BackwardPass(DType.BFLOAT16, derivative, spec, dz_spec, 0)
    state = _state(dropout, rng)
    partial, sums = cp.empty(backward.partial_bytes, cp.uint8), cp.empty(cols, DType.BFLOAT16.numpy)

    def run(dy: int, z: int, dz: int, stream: int) -> None:
        backward.launch(dy, z, dz, sums.data.ptr, partial.data.ptr, state, stream_memory(DEVICE, stream))

    return run


def forward_pass(shape: tuple[int, int], dropout: float, rng: Mapping[str, int]) -> Callable[..., None]:
    """Returns a function that launches the forward pass; it takes the addresses of z and y, and a stream."""
    spec = Spec(packed(*shape))
    problem = ForwardProblem(DType.BFLOAT16, Compute.FLOAT32, Activation("gelu"), x=spec, w=spec, y=spec, dropout=True)
    product = MatmulProblem(problem.dtype, problem.dtype, problem.compute, spec, spec, spec)
    forward = ForwardPass(problem, product, None, 0)
    state = _state(dropout, rng)
    return lambda z, y, stream: forward.launch(z, 0, y, 0, 0, state, stream)


def fp8_pass(shape: tuple[int, int], *, backward: bool) -> Callable[..., None]:
    """Returns a function that launches GELU and the cast to E4M3, or GELU's derivative and the cast to E5M2.

    Forward writes the cast row-major and transposed. Backward writes the bias gradient, and the cast only transposed.
    The function takes the addresses of z, of the result (backward: of dy) and of the transposed result, and a stream.
    """
    rows, cols = shape
    bf16, activation = DType.BFLOAT16, Activation("gelu")
    spec, turned = Spec(packed(rows, cols)), Spec(packed(cols, rows))
    scale, amax, sums = cp.ones(1, cp.float32), cp.zeros(1, cp.float32), cp.empty(cols, bf16.numpy)
    if not backward:
        cast = CastPass(bf16, "float8_e4m3fn", spec, spec, turned, DEVICE, Prologue(activation))
        return _launching(cast, lambda z, out, transposed: (z, scale.data.ptr, out, transposed, amax.data.ptr))
    derivative = Derivative(activation, Saved.PREACTIVATION, spec, 256)
    cast_gradient = CastPass(bf16, "float8_e5m2", spec, None, turned, DEVICE, derivative)
    partial = cp.empty(cast_gradient.partial_bytes, cp.uint8)

    def addresses(z: int, dy: int, transposed: int) -> tuple[int, ...]:
        return dy, scale.data.ptr, 0, transposed, amax.data.ptr, z, sums.data.ptr, partial.data.ptr

    return _launching(cast_gradient, addresses)


def _launching(made: Any, addresses: Callable[..., tuple[int, ...]]) -> Callable[..., None]:
    """A function that launches a pass; `addresses` puts the caller's addresses in the order of the pass."""

    def run(*given: int) -> None:
        *some, stream = given
        made.launch(KernelCall(addresses(*some), stream), stream_memory(DEVICE, stream))

    return run


def gated_fp8_pass(shape: tuple[int, int], *, backward: bool) -> Callable[..., None]:
    """Returns a function that launches SwiGLU and the cast to E4M3, or the gradients of gate and value in E5M2.

    Both results are written row-major and transposed. The function takes the addresses of h = (gate, value), of the
    output's gradient (only backward), of the result and of its transpose, and a stream.

    Args:
        shape: rows and columns of the output.
    """
    rows, cols = shape
    spec, silu = Spec(packed(rows, cols)), Activation("silu")
    scale, amax = cp.ones(1, cp.float32), cp.zeros(1, cp.float32)
    words = scale.data.ptr, amax.data.ptr
    if backward:
        made = CastGatedPass("float8_e5m2", silu, False, spec, DEVICE)
        return _launching(made, lambda h, dy, *out, _held=(scale, amax): (dy, h, *out, *words, *words))
    gate, turned = Spec(Layout(rows, cols, Order.ROW, 2 * cols)), Spec(packed(cols, rows))
    cast = CastPass(DType.BFLOAT16, "float8_e4m3fn", gate, spec, turned, DEVICE, Prologue(silu, gated=True))
    return _launching(cast, lambda h, *out, _held=(scale, amax): (h, words[0], *out, words[1]))


def fp8_update(weight: Any, grad: Any, *, masters: bool, casts: bool) -> Callable[[int], None]:
    """AdamW's step of one weight that also writes the weight in E4M3, row-major and transposed, on a stream.

    Args:
        masters: whether weight and moments are kept in FP32; otherwise all are BF16.
        casts: whether a cast after the step writes the weight in E4M3; if False, the step itself writes it.
    """
    kept: Any = {} if masters else {"moments": "bfloat16", "stochastic_rounding": True}
    parameter, state = lt.Parameter(weight, grad), lt.FP8State()
    optimizer, device = lt.AdamW([parameter], lr=1e-5, **kept), weight.device.id
    arrays_of(state, weight)
    with activated(device):
        copies = Fp8Weights(optimizer, [(state, parameter)], device, 0)

    def step_and_cast(stream: int) -> None:
        optimizer.step(stream=stream)
        copies.remake(stream)

    return step_and_cast if casts else lambda stream: copies.step(lambda: None, stream=stream)


def _state(dropout: float, rng: Mapping[str, int]) -> DropoutState | None:
    return DropoutState(keep_threshold(dropout), Philox(**rng)) if dropout else None


# The suite `steps`: the graph of a TrainStep, and the plans that it follows.


def forget_plans(case: Any) -> None:
    """Drops the plans in memory for the problems of a case, because they were made with another plan cache."""
    forget(chain_of(case).problems, DEVICE)


def launch_of(step: lt.TrainStep) -> Callable[[int], None]:
    """Returns a function that launches a step's operations on a stream, as a graph; the step must have run once.

    Neither this graph nor those of the compared libraries copy the batch. The step's own graph copies the batch, or
    reads it in place: then this graph reads the last batch in place too, and the caller must keep that batch. The
    update of both graphs writes the copies of weights in FP8 that the next forward reads.
    """
    gpu: Any = step._gpu
    buffers = gpu._latest
    options = {"weights": buffers.weights, "table": buffers.table if buffers.in_place else 0}
    stream = private_stream(gpu._device, "training")
    with activated(gpu._device), captured.memory_from(buffers.arena.again(), gpu._device, stream, gpu._pool.malloc):
        graph = Graph(lambda handle: gpu._body.run(buffers.parts, gpu.tally, handle, **options), stream)

    def launch(stream: int, _held: object = step) -> None:
        graph.launch(stream)

    return launch


def sums_of(step: lt.TrainStep, stream: Any) -> Callable[[], float]:
    """Returns a turn that sums the gradients of a group's step in its buckets, without a step, by a graph."""
    gpu: Any = step._gpu
    buckets = gpu._body._buckets

    def run(handle: int) -> None:
        buckets.begin(handle)
        buckets.finish()

    with activated(gpu._device):
        graph = Graph(run, private_stream(gpu._device, "training"))
    return timed(partial(graph.launch, stream.ptr), 1, stream)


_measured = itertools.count()


@contextlib.contextmanager
def own_training_stream() -> Iterator[Callable[[lt.TrainStep], int]]:
    """Within a `with` block steps are captured from a stream of their own, so that they share no memory with others.

    Its memory is freed at the end of the block: no step of the block may exist then.

    Yields:
        A function that returns the bytes that a step with one graph holds: the graph's arena, what else the graph has
        allocated, and the scratch memory of its branch.
    """
    stream, original = private_stream(DEVICE, f"measured step {next(_measured)}"), captured.private_stream

    def held(step: lt.TrainStep) -> int:
        memory, gpu = stream_memory(DEVICE, stream), step._gpu
        streams = [memory] if memory._branch is None else [memory, memory._branch]
        assert gpu is not None
        assert gpu._latest is not None
        assert gpu._latest.arena is not None
        scratch = sum(size for each in streams for _, size in each._buffers.values())
        return gpu._latest.arena.size + int(gpu._pool.total_bytes()) + scratch

    captured.private_stream = lambda device, name: stream
    try:
        yield held
    finally:
        captured.private_stream = original
        gc.collect()
        release(DEVICE, stream)


# The suite `tuning`: plans in a process that finds every problem measured.


class SecondProcess:
    """Builds plans in a second process; counts the process's measurements, which are uses of the tuner's clock.

    Attributes:
        us: microseconds of building each plan; the first also loads the libraries.
        known: the number of problems that had been measured before.
        measurements: the number of measurements in this process.
    """

    def __init__(self) -> None:
        self.measurements, self.known = 0, 0
        self.us: list[float] = []
        for name in ("once", "replay"):
            self._watch(name)

    def _watch(self, name: str) -> None:
        method = getattr(Clock, name)

        def counted(clock: Clock, *arguments: Any, **options: Any) -> Any:
            self.measurements += 1
            return method(clock, *arguments, **options)

        setattr(Clock, name, counted)

    def _build(self, make_plan: Callable[[Any, int], Any], problem: Problem) -> Any:
        start = time.perf_counter()
        plan = make_plan(problem, DEVICE)
        self.us.append(1e6 * (time.perf_counter() - start))
        self.known += plan_store(DEVICE).layer(problem_key(problem)) is not None
        return plan

    def build(self, block: Any) -> None:
        """Builds the plans of all passes of a block."""
        chain = chain_of(block)
        with activated(DEVICE):
            forwards = [self._build(make_layer_plan, layer.forward) for layer in chain.layers]
            for layer in chain.keeping({i: plan.strategy.saved for i, plan in enumerate(forwards)}).layers[::-1]:
                self._build(make_layer_plan, layer.backward)
