"""AdamW's kernels over several tensors, compared with float64 after each update."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.grad_scaler import LARGEST_SCALE, GradScaler
from lt_runtime.reference import RoundedTensor
from lt_runtime.reference.optimizer import learning_rate_factor
from lt_runtime.schedules import Schedule, constant, warmup, warmup_cosine, warmup_linear
from tests.host_kernels.arrays import EPS32
from tests.host_kernels.cases import FEW, orders, seeds
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.optimizer import (
    HYPER,
    OPTIONS,
    HostOptimizer,
    HostTensor,
    TensorCase,
    bits,
    rounded,
    tensors,
    with_hyper,
)
from tests.host_kernels.variants import ADAMW, BF16, F16, F32, FULL_ADAMW, PLAIN_ADAMW, AdamWVariant
from tests.support.adamw_reference import AdamWHyper, AdamWTensor, adamw_update

Array = NDArray[np.float64]
NAMES = ("value", "m", "v", "v_max")
PARTS = (RoundedTensor.PARAMETER, RoundedTensor.M, RoundedTensor.V, RoundedTensor.V)

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
    weight_decay=st.just(0.01),
    schedule=schedules,
)


@dataclass(frozen=True)
class AdamWCase:
    tensors: list[TensorCase]
    hyper: AdamWHyper
    first: int  # number of updates that were made before this one
    updates: int
    order: int
    seed: int


def adamw_cases(in_place: bool) -> st.SearchStrategy[AdamWCase]:
    return st.builds(
        AdamWCase,
        tensors=st.lists(tensors(in_place), min_size=1, max_size=4),
        hyper=hypers,
        first=st.sampled_from((0, 0, 0, 3, 1000, 1_000_000)),
        updates=st.integers(1, 3),
        order=orders,
        seed=seeds,
    )


SOME_OF_EACH = AdamWCase(
    [
        TensorCase(9300, F32, F32),
        TensorCase(7, BF16, BF16, offsets=(1, 0, 3), lr_scale=0.5, weight_decay=0.0),
        TensorCase(0, F16, F32),
        TensorCase(8100, F16, BF16),  # so many elements that every block of the tensor's last chunk updates some
    ],
    AdamWHyper(1e-3, 0.9, 0.999, 1e-8, 0.01, warmup_cosine(2, 10)),
    first=0,
    updates=2,
    order=0,
    seed=0,
)


def limits(old: AdamWTensor, gradient: Array, hyper: AdamWHyper, step: int) -> tuple[Array, ...]:
    """Bounds the error of FP32 arithmetic in each array, before the result is rounded to the array's type."""
    g, (value, m, v) = np.abs(gradient), (x.astype(np.float64) for x in (old.value, old.m, old.v))
    m_size = hyper.beta1 * np.abs(m) + (1.0 - hyper.beta1) * g
    v_size = hyper.beta2 * v + (1.0 - hyper.beta2) * g**2
    largest = v_size if old.v_max is None else np.maximum(old.v_max.astype(np.float64), v_size)
    denominator = np.sqrt(largest / (1.0 - hyper.beta2**step)) + hyper.eps
    move = hyper.lr * m_size / (1.0 - hyper.beta1**step) / denominator
    tiny = 1e-44
    bounds = (EPS32 * (4 * np.abs(value) + 28 * move), 5 * EPS32 * m_size, 8 * EPS32 * v_size, 8 * EPS32 * largest)
    return tuple(bound + tiny for bound in bounds)


def check_update(
    tensor: HostTensor, index: int, old: AdamWTensor, seed: int, hyper: AdamWHyper, step: int, factor: float = 1.0
) -> None:
    """Compares a tensor after an update of `old` with the reference, including the rounding to low precision."""
    hyper, gradient = tensor.hyper(hyper), tensor.gradient.array.astype(np.float64) * factor
    new = adamw_update(old, tensor.gradient.array, hyper, step, factor)
    bounds = limits(old, gradient, hyper, step)
    for name, part, found, exact, bound in zip(NAMES, PARTS, tensor.updated, new, bounds, strict=False):
        lanes = reference.rounding_lanes(tensor.case.size, seed, index, step, part)
        slack = bound + EPS32 * np.abs(exact.astype(np.float64))
        # rounding is monotonic, so that the result must lie between the roundings of the two bounds
        low, high = (rounded((exact + side * slack).astype(np.float32), found.dtype, lanes) for side in (-1, 1))
        stored = found.values()
        wrong = ~((low <= stored) & (stored <= high) | (np.isnan(stored) & np.isnan(exact)))
        assert not wrong.any(), f"{name} of tensor {index}: {stored[wrong][:3]}, expected {exact[wrong][:3]}"
    if tensor.master is not None:
        with np.errstate(over="ignore"):
            copy = tensor.master.array.astype(tensor.case.dtype.numpy)
        np.testing.assert_array_equal(tensor.parameter.values(), copy.astype(np.float64))
    tensor.gradient.assert_unchanged()


@pytest.mark.parametrize("variant", ADAMW, ids=str)
@FEW
@example(data=None)
@given(data=st.data())
def test_updates(host: HostKernels, variant: AdamWVariant, data: st.DataObject | None) -> None:
    case = SOME_OF_EACH if data is None else data.draw(adamw_cases(variant.stochastic))
    generator = np.random.default_rng(case.seed)
    parameters = [HostTensor(tensor, variant, generator) for tensor in case.tensors]
    optimizer = HostOptimizer(host, variant, replace(with_hyper(case.hyper), seed=case.seed), case.first)
    for step in range(case.first + 1, case.first + case.updates + 1):
        before = [tensor.state for tensor in parameters]
        optimizer.update(parameters, case.order)
        assert optimizer.state["steps"] == step
        for i, (tensor, old) in enumerate(zip(parameters, before, strict=True)):
            check_update(tensor, i, old, case.seed, case.hyper, step)
            tensor.set_gradient(-tensor.gradient.array)


@FEW
@given(schedule=schedules, step=st.one_of(st.integers(1, 12), st.integers(1, 2**31)))
def test_schedules(host: HostKernels, schedule: Schedule, step: int) -> None:
    # with β₁ = β₂ = 0 and a gradient of 1, each update moves the parameter by exactly the learning rate
    hyper = AdamWHyper(lr=1.0, beta1=0.0, beta2=0.0, eps=1e-30, weight_decay=0.0, schedule=schedule)
    tensor = HostTensor(TensorCase(1, weight_decay=0.0), PLAIN_ADAMW, 0, [1.0])
    tensor.parameter.array[...] = 0.0
    HostOptimizer(host, PLAIN_ADAMW, with_hyper(hyper), step - 1).update([tensor])
    moved, expected = -float(tensor.parameter.array[0, 0]), learning_rate_factor(schedule, step)
    assert math.isclose(moved, expected, rel_tol=4 * EPS32, abs_tol=8 * EPS32)
    assert moved == expected or expected != 0.0


@pytest.mark.parametrize("octet", [1 << 28, (1 << 32) - 32, 1 << 40])
def test_random_numbers_of_tensors_over_two_thousand_million_elements(host: HostKernels, octet: int) -> None:
    case = TensorCase(2500, BF16, BF16, in_place=True)
    tensor = HostTensor(case, FULL_ADAMW, 1)
    optimizer = HostOptimizer(host, FULL_ADAMW, replace(OPTIONS, seed=7 << 40))
    old, hyper = tensor.state, tensor.hyper(HYPER)
    optimizer.update([tensor], octet=octet)
    new = adamw_update(old, tensor.gradient.array, hyper, 1)
    lanes = reference.rounding_lanes(case.size, 7 << 40, 0, 1, RoundedTensor.M, first=8 * octet)
    expected = rounded(new.m, BF16, lanes)
    agree = (tensor.m.values() == expected).mean()
    assert agree > 0.99  # the kernel computes in FP32, so that a few numbers are rounded to another neighbour
    elsewhere = rounded(new.m, BF16, reference.rounding_lanes(case.size, 7 << 40, 0, 1, RoundedTensor.M))
    assert (tensor.m.values() == elsewhere).mean() < 0.9


@pytest.mark.parametrize("variant", ADAMW, ids=str)
def test_empty_tensors_only(host: HostKernels, variant: AdamWVariant) -> None:
    optimizer = HostOptimizer(host, variant, OPTIONS)
    nothing = [HostTensor(TensorCase(0), variant, 0) for _ in range(2)]
    optimizer.step(nothing)
    assert optimizer.state["steps"] == 1
    assert optimizer.state["norm"] == 0


@pytest.mark.parametrize("variant", ADAMW, ids=str)
def test_thread_order_changes_no_bit(host: HostKernels, variant: AdamWVariant) -> None:
    def run(order: int) -> list[bytes]:
        generator = np.random.default_rng(5)
        cases = [TensorCase(2300, BF16, F16, in_place=variant.stochastic), TensorCase(37, F32, BF16, offsets=(1, 1, 1))]
        parameters = [HostTensor(case, variant, generator) for case in cases]
        optimizer = HostOptimizer(host, variant, replace(OPTIONS, max_norm=0.5))
        for _ in range(2):
            optimizer.step(parameters, order)
        return [*bits(parameters), optimizer.state.tobytes()]

    assert run(0) == run(1) == run(2) == run(3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("max_norm", [None, 1.0, math.inf])
def test_without_skipping_arithmetic_takes_its_course(host: HostKernels, bad: float, max_norm: float | None) -> None:
    tensor = HostTensor(TensorCase(300), PLAIN_ADAMW, 2)
    gradient = tensor.gradient.array.copy()
    gradient[0, 17] = bad
    tensor.set_gradient(gradient)
    optimizer = HostOptimizer(host, PLAIN_ADAMW, replace(OPTIONS, max_norm=max_norm))
    old = tensor.state
    if max_norm is not None:
        optimizer.measure([tensor])
    optimizer.update([tensor])
    factor = 1.0 if max_norm is None else reference.clip_factor(abs(bad), max_norm)
    with np.errstate(invalid="ignore"):
        new = adamw_update(old, gradient, tensor.hyper(HYPER), 1, factor)
    for found, expected in zip(tensor.updated, new, strict=False):
        np.testing.assert_array_equal(np.isnan(found.values()), np.isnan(expected))
    assert optimizer.state["steps"] == 1


def test_nan_as_a_gpu_makes_it_survives_rounding(host: HostKernels) -> None:
    nan = np.full(300, 0x7FFFFFFF, np.uint32).view(np.float32)
    tensor = HostTensor(TensorCase(300, BF16, F32, in_place=True), FULL_ADAMW, 3, nan)
    HostOptimizer(host, FULL_ADAMW, OPTIONS).update([tensor])
    for found in tensor.updated:
        assert np.isnan(found.values()).all()


@pytest.mark.parametrize(("scale", "bad"), [(2.0**127, 0.0), (2.0**-126, math.nan), (1.5 * 2.0**-126, math.inf)])
def test_a_scale_stays_a_normal_number(host: HostKernels, scale: float, bad: float) -> None:
    scaler = GradScaler(scale, growth_interval=1)
    tensor = HostTensor(TensorCase(5), PLAIN_ADAMW, 4, [bad] * 5)
    optimizer = HostOptimizer(host, PLAIN_ADAMW, replace(OPTIONS, scaler=scaler, skip_nonfinite=True))
    for _ in range(2):
        optimizer.step([tensor])
    assert float(optimizer.scale[0]) == (2.0**-126 if bad else 2.0**127)
    assert optimizer.growth_tracker[0] == 0


@dataclass(frozen=True)
class Judged:
    """An optimizer whose steps have gradients that are scaled, clipped and checked for NaN.

    Attributes:
        bad: for each step, the value (NaN or infinity) that replaces one element of a gradient; None for none.
    """

    tensors: list[TensorCase]
    scaler: GradScaler | None
    max_norm: float | None
    skip: bool
    bad: tuple[float | None, ...]
    order: int
    seed: int


judged_cases = st.builds(
    Judged,
    tensors=st.lists(tensors(in_place=False), min_size=1, max_size=3),
    scaler=st.one_of(
        st.none(),
        st.builds(
            GradScaler,
            init_scale=st.sampled_from((65536.0, 1.0, 3.0, 2.0**127, 2.0**-126)),
            growth_factor=st.sampled_from((2.0, 1.5)),
            backoff_factor=st.sampled_from((0.5, 0.25)),
            growth_interval=st.integers(1, 3),
        ),
    ),
    max_norm=st.sampled_from((None, 1.0, 1e-3, 1e9, math.inf)),
    skip=st.booleans(),
    bad=st.lists(st.sampled_from((None, None, math.nan, math.inf, -math.inf)), min_size=1, max_size=4).map(tuple),
    order=orders,
    seed=seeds,
)


@FEW
@example(Judged([TensorCase(300, BF16, F32), TensorCase(70)], GradScaler(8.0), 1.0, True, (None, math.inf, None), 0, 0))
@example(Judged([TensorCase(70)], GradScaler(8.0, growth_interval=2), None, True, (None, None, None), 0, 0))
@example(Judged([TensorCase(70)], GradScaler(LARGEST_SCALE / 2, growth_interval=1), None, True, (None, None), 0, 0))
@given(case=judged_cases)
def test_scaling_clipping_and_skipping(host: HostKernels, case: Judged) -> None:
    generator = np.random.default_rng(case.seed)
    skips = case.skip or case.scaler is not None
    options = replace(OPTIONS, scaler=case.scaler, max_norm=case.max_norm, skip_nonfinite=skips)
    parameters = [HostTensor(tensor, PLAIN_ADAMW, generator) for tensor in case.tensors]
    optimizer = HostOptimizer(host, PLAIN_ADAMW, options)
    steps = skipped = tracker = 0
    scale = case.scaler.init_scale if case.scaler else 1.0
    for bad in case.bad:
        put_bad = set_gradients(parameters, scale, bad, generator)
        before, bytes_before = [each.state for each in parameters], bits(parameters)
        gradients = [tensor.gradient.array for tensor in parameters]
        optimizer.step(parameters, case.order)
        with np.errstate(invalid="ignore"):
            norm, finite = reference.gradient_norm(gradients, scale)
        assert finite != put_bad
        assert optimizer.state["norm"][0] == pytest.approx(norm, rel=8 * EPS32, abs=1e-22, nan_ok=True)
        if skips and not finite:
            skipped += 1
            assert bits(parameters) == bytes_before
        else:
            steps += 1
            clipping = 1.0 if case.max_norm is None else reference.clip_factor(norm, case.max_norm)
            for i, (tensor, old) in enumerate(zip(parameters, before, strict=True)):
                if finite:
                    check_update(tensor, i, old, 0, HYPER, steps, clipping / scale)
        if case.scaler:
            scale, tracker = reference.next_scale(case.scaler, scale, tracker, finite)
            scale = float(np.float32(scale))
            assert (optimizer.scale[0], optimizer.growth_tracker[0]) == (scale, tracker)
        assert (optimizer.state["steps"], optimizer.state["skipped"]) == (steps, skipped)
        if not finite and not skips:
            return  # the parameters are NaN from this step on, so that the test ends


def set_gradients(
    parameters: list[HostTensor], scale: float, bad: float | None, generator: np.random.Generator
) -> bool:
    """Draws gradients that stay finite when multiplied by the scale; returns whether `bad`
    replaced an element.
    """
    for tensor in parameters:
        kind = tensor.case.gradient_dtype
        drawn = generator.standard_normal(tensor.case.size) * min(scale, 256.0)
        tensor.set_gradient(drawn.astype(kind.numpy))
    filled = [tensor for tensor in parameters if tensor.case.size]
    if bad is None or not filled:
        return False
    tensor = filled[int(generator.integers(len(filled)))]
    gradient = tensor.gradient.array.copy()
    gradient[0, int(generator.integers(tensor.case.size))] = bad
    tensor.set_gradient(gradient)
    return True


def test_clipping_adds_to_the_norm_what_pytorch_adds(host: HostKernels) -> None:
    tensor = HostTensor(TensorCase(1), PLAIN_ADAMW, 6, [1e-6])
    tensor.m.array[...] = 0.0
    optimizer = HostOptimizer(host, PLAIN_ADAMW, replace(OPTIONS, max_norm=1e-6))
    optimizer.step([tensor])
    # PyTorch's clip_grad_norm_ adds 1e-6 to the norm, which makes the factor 1e-6 / (1e-6 + 1e-6) here
    assert tensor.m.values()[0, 0] == pytest.approx((1.0 - HYPER.beta1) * 0.5e-6, rel=1e-5)


@pytest.mark.parametrize("variant", ADAMW, ids=str)
def test_alignment_changes_no_bit(host: HostKernels, variant: AdamWVariant) -> None:
    def run(offsets: tuple[int, int, int]) -> list[bytes]:
        generator = np.random.default_rng(8)
        cases = [TensorCase(2347, dtype, F16, variant.stochastic, offsets) for dtype in (F32, F16, BF16)]
        parameters = [HostTensor(case, variant, generator) for case in cases]
        HostOptimizer(host, variant, OPTIONS).update(parameters)
        return bits(parameters)

    assert run((0, 0, 0)) == run((1, 0, 0)) == run((0, 3, 0)) == run((0, 0, 5)) == run((7, 2, 1))
