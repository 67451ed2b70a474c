"""AdamW over several tensors against float64, one update at a time."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.gpu.kernels import THREADS
from lt_runtime.gpu.params import AdamWChunk, AdamWParams, AdamWTensor
from lt_runtime.problem import DType
from lt_runtime.reference import AdamWHyper, adamw_update, learning_rate_factor
from lt_runtime.schedules import DECAYS, Schedule, constant, warmup, warmup_cosine, warmup_linear
from tests.host_kernels.arrays import EPS32, Guarded, assert_close, numbers, vector
from tests.host_kernels.cases import MORE, orders, seeds
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.variants import F32, TYPES

Array = NDArray[np.float64]
TYPE_CODES = {DType.FLOAT32: 0, DType.FLOAT16: 1, DType.BFLOAT16: 2}


@dataclass(frozen=True)
class TensorCase:
    size: int
    dtype: DType
    gradient_dtype: DType
    master: bool
    offset: int


sizes = st.one_of(st.integers(1, 40), st.sampled_from((255, 256, 257, 700)))
tensors = st.builds(
    TensorCase,
    size=sizes,
    dtype=st.sampled_from(TYPES),
    gradient_dtype=st.sampled_from(TYPES),
    master=st.booleans(),
    offset=st.integers(0, 3),
)
schedules = st.one_of(
    st.just(constant()),
    st.builds(warmup, st.integers(1, 6)),
    st.builds(warmup_linear, st.integers(0, 3), st.integers(4, 7), st.sampled_from((0.0, 0.1, 1.0))),
    st.builds(warmup_cosine, st.integers(0, 3), st.integers(4, 7), st.sampled_from((0.0, 0.1))),
)
hypers = st.builds(
    AdamWHyper,
    lr=st.sampled_from((1e-3, 0.1, 0.0)),
    beta1=st.sampled_from((0.9, 0.0, 0.5)),
    beta2=st.sampled_from((0.999, 0.95, 0.5, 0.0)),
    eps=st.sampled_from((1e-8, 1e-3)),
    weight_decay=st.sampled_from((0.0, 0.01, 0.5)),
    schedule=schedules,
)


@dataclass(frozen=True)
class AdamWCase:
    tensors: list[TensorCase]
    hyper: AdamWHyper
    chunk_size: int
    threads: int
    first: int  # updates done before
    updates: int
    order: int
    seed: int


cases = st.builds(
    AdamWCase,
    tensors=st.lists(tensors, min_size=1, max_size=4),
    hyper=hypers,
    chunk_size=st.sampled_from((7, 64, 300, 4096)),
    threads=st.sampled_from((32, THREADS, 7)),
    first=st.sampled_from((0, 0, 0, 3, 1000, 1_000_000)),
    updates=st.integers(1, 4),
    order=orders,
    seed=seeds,
)


class Tensor:
    """One parameter's arrays."""

    def __init__(self, case: TensorCase, generator: np.random.Generator) -> None:
        def draw(dtype: DType = F32) -> Guarded:
            return vector(numbers(generator, (case.size,), dtype), dtype, case.offset)

        self.case = case
        self.parameter = draw(case.dtype)
        # lower precision always has a master copy; the kernel lets FP32 have one too
        self.master = draw() if case.master or case.dtype is not F32 else None
        self.m, self.v = draw(), draw()
        self.v.array[...] = np.abs(self.v.array)
        self.new_gradient(generator)

    def new_gradient(self, generator: np.random.Generator) -> None:
        values = numbers(generator, (self.case.size,), self.case.gradient_dtype)
        self.gradient = vector(values, self.case.gradient_dtype, self.case.offset)

    @property
    def value(self) -> Guarded:
        """The FP32 array that is updated."""
        return self.master or self.parameter

    def row(self) -> AdamWTensor:
        """The tensor's row in the kernel's table."""
        return AdamWTensor(
            parameter=self.parameter.address,
            master=self.master.address if self.master else 0,
            gradient=self.gradient.address,
            m=self.m.address,
            v=self.v.address,
            size=self.case.size,
            parameter_type=TYPE_CODES[self.case.dtype],
            gradient_type=TYPE_CODES[self.case.gradient_dtype],
        )


class Optimizer:
    """The kernel with its step and ticket."""

    def __init__(self, host: HostKernels, case: AdamWCase) -> None:
        self._kernel = host.get("adamw")
        self._case = case
        self.step = Guarded(np.array([[case.first]], np.uint32).view(np.float32))
        self.ticket = Guarded(np.zeros((1, 1), np.float32))

    def update(self, parameters: list[Tensor]) -> None:
        size = self._case.chunk_size
        rows = (AdamWTensor * len(parameters))(*(parameter.row() for parameter in parameters))
        chunks = [AdamWChunk(start, i, 0) for i, t in enumerate(parameters) for start in range(0, t.case.size, size)]
        table = (AdamWChunk * len(chunks))(*chunks)
        self._launch(rows, table, len(chunks))

    def counters(self) -> tuple[int, int]:
        """Updates done, and blocks counted in this launch."""
        self.step.values()
        self.ticket.values()
        return int(self.step.array.view(np.uint32)[0, 0]), int(self.ticket.array.view(np.uint32)[0, 0])

    def _launch(self, rows: ctypes.Array[AdamWTensor], table: ctypes.Array[AdamWChunk], count: int) -> None:
        hyper, schedule = self._case.hyper, self._case.hyper.schedule
        params = AdamWParams(
            tensors=ctypes.addressof(rows),
            chunks=ctypes.addressof(table),
            step=self.step.address,
            ticket=self.ticket.address,
            chunk_size=self._case.chunk_size,
            lr=hyper.lr,
            log_beta1=log_of(hyper.beta1),
            log_beta2=log_of(hyper.beta2),
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            one_minus_beta1=1.0 - hyper.beta1,
            one_minus_beta2=1.0 - hyper.beta2,
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            decay=DECAYS.index(schedule.decay),
            warmup_steps=schedule.warmup_steps,
            total_steps=schedule.total_steps,
            final_factor=schedule.final_factor,
        )
        self._kernel.launch((count, 1), (self._case.threads, 1), params, order=self._case.order)


def log_of(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def limits(tensor: Tensor, hyper: AdamWHyper, step: int) -> tuple[Array, Array, Array]:
    """How far off FP32 may be in the parameter, m and v, in units of its rounding error."""
    g, value, m, v = (x.array.astype(np.float64) for x in (tensor.gradient, tensor.value, tensor.m, tensor.v))
    m_size = hyper.beta1 * np.abs(m) + (1.0 - hyper.beta1) * np.abs(g)
    v_size = hyper.beta2 * v + (1.0 - hyper.beta2) * g**2
    denominator = np.sqrt(v_size / (1.0 - hyper.beta2**step)) + hyper.eps
    move = hyper.lr * m_size / (1.0 - hyper.beta1**step) / denominator
    return EPS32 * (4 * np.abs(value) + 24 * move), 4 * EPS32 * m_size, 6 * EPS32 * v_size + 1e-44


def check_update(tensor: Tensor, expected: tuple[NDArray[np.float32], ...], bounds: tuple[Array, ...]) -> None:
    found = (tensor.value, tensor.m, tensor.v)
    for name, operand, wanted, bound in zip(("parameter", "m", "v"), found, expected, bounds, strict=True):
        assert_close(name, operand.values(), wanted.astype(np.float64), bound + EPS32 * np.abs(wanted) + 1e-44)
    with np.errstate(over="ignore"):
        rounded = tensor.value.array.astype(tensor.case.dtype.numpy)
    assert rounded.tobytes() == tensor.parameter.array.tobytes()
    tensor.parameter.values()
    tensor.gradient.assert_unchanged()


@MORE
@example(
    case=AdamWCase(
        [TensorCase(300, F32, F32, False, 0), TensorCase(7, DType.BFLOAT16, DType.BFLOAT16, True, 1)],
        AdamWHyper(1e-3, 0.9, 0.999, 1e-8, 0.01, warmup_cosine(2, 10)),
        chunk_size=256,
        threads=64,
        first=0,
        updates=2,
        order=0,
        seed=0,
    )
)
@given(case=cases)
def test_updates(host: HostKernels, case: AdamWCase) -> None:
    generator = np.random.default_rng(case.seed)
    parameters = [Tensor(tensor, generator) for tensor in case.tensors]
    optimizer = Optimizer(host, case)
    for step in range(case.first + 1, case.first + case.updates + 1):
        expected = [
            adamw_update(t.value.array, t.gradient.array, t.m.array, t.v.array, case.hyper, step) for t in parameters
        ]
        bounds = [limits(tensor, case.hyper, step) for tensor in parameters]
        optimizer.update(parameters)
        assert optimizer.counters() == (step, 0)
        for tensor, wanted, bound in zip(parameters, expected, bounds, strict=True):
            check_update(tensor, wanted, bound)
            tensor.new_gradient(generator)


@MORE
@given(schedule=schedules, step=st.one_of(st.integers(1, 12), st.integers(1, 2**31)))
def test_schedules(host: HostKernels, schedule: Schedule, step: int) -> None:
    # with β = 0 and a gradient of 1 the parameter moves by the learning rate alone
    hyper = AdamWHyper(lr=1.0, beta1=0.0, beta2=0.0, eps=1e-30, weight_decay=0.0, schedule=schedule)
    case = AdamWCase([TensorCase(1, F32, F32, False, 0)], hyper, 8, 1, step - 1, 1, 0, 0)
    tensor = Tensor(case.tensors[0], np.random.default_rng(0))
    tensor.parameter.array[...] = 0.0
    tensor.gradient.array[...] = 1.0
    Optimizer(host, case).update([tensor])
    moved = -float(tensor.parameter.array[0, 0])
    assert math.isclose(moved, learning_rate_factor(schedule, step), rel_tol=4 * EPS32, abs_tol=8 * EPS32)
