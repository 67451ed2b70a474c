"""The check of a product's results, in host memory: right results pass, and every planted fault is found."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lt_runtime.epilogue import Epilogue
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import SCALES, Compute, DType, MatmulProblem, Spec
from lt_runtime.tuner.operands import EDGES, LATTICE, NORMAL, ONES, Data, Memory
from lt_runtime.tuner.verification import (
    KINDS,
    ProductOperands,
    accumulation_error,
    disagreement,
    expected_outputs,
    verify,
)
from tests.support.fake_clock import STREAM
from tests.support.host_memory import bits, flat, read
from tests.support.right_products import compute, encode, operands, right

pytestmark = pytest.mark.usefixtures("host_memory")

M, N, K = 24, 40, 72
FLOAT_TYPES = [
    (DType.FLOAT32, DType.FLOAT32),
    (DType.BFLOAT16, DType.BFLOAT16),
    (DType.BFLOAT16, DType.FLOAT32),
    (DType.FLOAT16, DType.FLOAT16),
]


def a_problem(
    epilogue: Epilogue = Epilogue.NONE,
    types: tuple[DType, DType] = FLOAT_TYPES[0],
    *,
    order: Order = Order.ROW,
    gap: int = 0,
    batch: int = 1,
    with_c: bool = False,
    compute: Compute = Compute.FLOAT32,
    k: int = K,
    size: tuple[int, int] = (M, N),
) -> MatmulProblem:
    m, n = size
    leading = (n if order is Order.ROW else m) + gap
    stride = leading * (m if order is Order.ROW else n) + gap if batch > 1 else 0
    d = Spec(Layout(m, n, order, leading), alignment=16 if gap else 256, batch_stride=stride)
    aux = None
    if epilogue.has_aux_output or epilogue.is_derivative:
        width = 128 if epilogue.activation == "relu" else -(-leading // 8) * 8
        aux = Spec(Layout(m, n, order, width))
    a, b = Spec(packed(m, k), batch_stride=m * k), Spec(packed(k, n))
    return MatmulProblem(*types, compute, a, b, d, epilogue, c=d if with_c else None, batch=batch, aux=aux)


def judge(problem: MatmulProblem, launch: Callable[[ProductOperands], None]) -> str | None:
    trial = ProductOperands(Memory(0, STREAM), problem)
    return verify({"it": lambda: launch(trial)}, trial).get("it")


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("types", FLOAT_TYPES)
@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("epilogue", Epilogue)
def test_right_results_pass(epilogue: Epilogue, order: Order, types: tuple[DType, DType]) -> None:
    assert judge(a_problem(epilogue, types, order=order, gap=8), right) is None


def test_batches_and_c_and_float64() -> None:
    assert judge(a_problem(batch=3, gap=8, with_c=True), right) is None
    double = a_problem(types=(DType.FLOAT64, DType.FLOAT64), compute=Compute.FLOAT64)
    assert judge(double, right) is None
    in_single = judge(double, lambda trial: compute(trial, *(each.astype(np.float32) for each in operands(trial))))
    assert in_single is not None


@pytest.mark.parametrize("output", ["d", "vector"])
def test_results_of_several_blocks(output: str) -> None:
    problem = a_problem(Epilogue.DGELU_BGRAD, size=(130, 70))
    assert judge(problem, right) is None

    def off_in_the_last_tile(trial: ProductOperands) -> None:
        right(trial)
        bits(trial.buffers[output])[0, -1, 69] ^= 1 << 28

    fault = judge(problem, off_in_the_last_tile)
    assert fault is not None
    assert fault.startswith(f"wrong: {output}[0, {129 if output == 'd' else 0}, 69] is ")


@pytest.mark.parametrize("types", FLOAT_TYPES)
@pytest.mark.parametrize("output", ["d", "aux", "vector"])
def test_one_element_that_is_off(output: str, types: tuple[DType, DType]) -> None:
    """The planted fault is three units in the last place, because one or two are tolerated for an exact sum, depending
    on its size.
    """
    epilogue = {"d": Epilogue.BIAS, "aux": Epilogue.GELU_AUX_BIAS, "vector": Epilogue.DRELU_BGRAD}[output]

    def launch(trial: ProductOperands) -> None:
        right(trial)
        found = bits(trial.buffers[output])
        found[0, -1, 3] += 3 if output != "vector" else 1 << (8 * found.itemsize - 6)

    fault = judge(a_problem(epilogue, types), launch)
    assert fault is not None
    assert f"{output}[0, " in fault


def test_one_bit_of_a_mask() -> None:
    def launch(trial: ProductOperands) -> None:
        right(trial)
        bits(trial.buffers["aux"])[0, 5, 2] ^= 1 << 3

    fault = judge(a_problem(Epilogue.RELU_AUX), launch)
    assert fault is not None
    assert fault.startswith("wrong: aux[0, 5, 19] is ")


def test_an_element_that_is_not_written() -> None:
    def launch(trial: ProductOperands) -> None:
        before = bits(trial.buffers["d"])[0, 4, 9].copy()
        right(trial)
        bits(trial.buffers["d"])[0, 4, 9] = before

    fault = judge(a_problem(), launch)
    assert fault is not None
    assert fault.startswith("wrong: d[0, 4, 9] is nan and not ")
    assert "1 of 960 elements there are off" in fault


@pytest.mark.parametrize("at", [7, 8 + N, -1], ids=["before", "between the rows", "behind"])
def test_memory_that_is_not_the_results(at: int) -> None:
    def launch(trial: ProductOperands) -> None:
        right(trial)
        flat(trial.buffers["d"])[at] = 0

    fault = judge(a_problem(gap=8, types=FLOAT_TYPES[1]), launch)
    assert fault == f"wrong: it writes outside of D, with {LATTICE.name}"


def test_two_runs_that_differ() -> None:
    runs: list[int] = []

    def launch(trial: ProductOperands) -> None:
        right(trial)
        runs.append(0)
        # The second check's operands have inexact sums, so that it allows errors that are larger than this changed bit.
        if len(runs) == 4:
            bits(trial.buffers["d"])[0, 0, 0] ^= 1

    assert judge(a_problem(), launch) == f"two runs differ, with {EDGES.name}"


def test_a_wrong_one_does_not_take_the_others_along() -> None:
    trial = ProductOperands(Memory(0, STREAM), a_problem())

    def wrong() -> None:
        right(trial)
        bits(trial.buffers["d"])[0, 0, 0] = 0x7FC00000

    faults = verify({"wrong": wrong, "right": lambda: right(trial), "idle": lambda: None}, trial)
    assert list(faults) == ["wrong", "idle"]


def truncated(values: NDArray[Any]) -> NDArray[Any]:
    """Truncates to TF32, which keeps 10 mantissa bits."""
    bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32).astype(np.float64)


def test_tf32_passes_only_where_it_is_asked_for() -> None:
    def launch(trial: ProductOperands) -> None:
        a, b = operands(trial)
        compute(trial, truncated(a), truncated(b))

    assert judge(a_problem(compute=Compute.TF32), launch) is None
    fault = judge(a_problem(), launch)
    assert fault is not None
    assert fault.endswith(EDGES.name)


@pytest.mark.parametrize("k", [72, 4096])
def test_sums_in_fp32_pass_in_any_order(k: int) -> None:
    def launch(trial: ProductOperands) -> None:
        a, b = (each.astype(np.float32) for each in operands(trial))
        order = np.random.default_rng(0).permutation(k)
        total = np.zeros((1, M, N), np.float32)
        for part in np.array_split(order, 9):  # as with split K, each of nine parts is summed by itself
            partial = np.zeros_like(total)
            for index in part:
                partial += a[..., index, None] * b[..., None, index, :]
            total += partial
        bits(trial.buffers["d"])[...] = total.view(np.uint32)

    assert judge(a_problem(k=k), launch) is None


def tail_dropped(trial: ProductOperands) -> NDArray[Any]:
    a, b = operands(trial)
    return a[..., : K - 1] @ b[..., : K - 1, :]


def partial_sums_rounded(trial: ProductOperands) -> NDArray[Any]:
    a, b = operands(trial)
    halves = (a[..., : K // 2] @ b[..., : K // 2, :], a[..., K // 2 :] @ b[..., K // 2 :, :])
    return sum(half.astype(trial.problem.d_dtype.numpy).astype(np.float64) for half in halves)


@pytest.mark.parametrize(
    ("product", "types"), [*((tail_dropped, types) for types in FLOAT_TYPES), (partial_sums_rounded, FLOAT_TYPES[1])]
)
def test_products_that_are_wrong(
    product: Callable[[ProductOperands], NDArray[Any]], types: tuple[DType, DType]
) -> None:
    def launch(trial: ProductOperands) -> None:
        bits(trial.buffers["d"])[...] = encode(product(trial), trial.problem.d_dtype)

    assert judge(a_problem(types=types), launch) is not None


def test_sums_are_exact_up_to_the_integers_that_fp32_holds() -> None:
    assert [accumulation_error(a_problem(k=2**24 - less), ONES) == 0.0 for less in (2, 1)] == [True, False]


def test_what_lies_beyond_the_range_is_not_judged() -> None:
    k = 70000
    problem = a_problem(types=(DType.FLOAT16, DType.FLOAT16), k=k)
    trial = ProductOperands(Memory(0, STREAM), problem)
    trial.fill(ONES, 0)
    expected = expected_outputs(trial, ONES)
    trial.poison()
    bits(trial.buffers["d"])[...] = 0x7C00  # infinity
    assert disagreement(trial, expected) is None


def test_data_is_what_it_says() -> None:
    trial = ProductOperands(Memory(0, STREAM), a_problem(types=FLOAT_TYPES[1]))
    for data in (*KINDS, NORMAL):
        trial.fill(data, 1)
        values = read(trial, "a")
        assert np.isfinite(values).all()
        if data is LATTICE:
            assert set(np.unique(values * 8)) <= set(range(-16, 17))
        if data is ONES:
            assert (values == 1).all()
        if data is EDGES:
            magnitudes = np.abs(values)
            assert (magnitudes == 0).any()
            assert (magnitudes > 32).any()
            tiny = magnitudes[(magnitudes > 0) & (magnitudes < 1e-20)]
            assert tiny.size
            assert tiny.min() > 1e-36  # no subnormal numbers, which the reference would treat as 0


def address_of(trial: ProductOperands, name: str) -> int:
    return dict(zip(trial.problem.operands, trial.call(7).addresses, strict=True))[name]


def test_addresses_have_no_more_alignment_than_the_problem_says() -> None:
    problem = a_problem(gap=8)
    trial = ProductOperands(Memory(0, STREAM), problem)
    start = trial.buffers["d"].start
    assert address_of(trial, "d") - start == 16
    assert address_of(trial, "a") == trial.buffers["a"].start
    assert trial.call(7).stream == 7
    assert trial.size > 4 * (M * N + M * K + K * N)


def test_a_second_run_that_writes_nothing() -> None:
    runs = itertools.count()
    fault = judge(a_problem(), lambda trial: right(trial) if next(runs) % 2 == 0 else None)
    assert fault is not None
    assert fault.startswith("two runs differ")


@pytest.mark.parametrize("data", [LATTICE, EDGES, NORMAL])
def test_operands_of_one_shape_have_values_of_their_own(data: Data) -> None:
    square = Spec(packed(M, M))
    trial = ProductOperands(
        Memory(0, STREAM), MatmulProblem(*FLOAT_TYPES[0], Compute.FLOAT32, square, square, square, c=square)
    )
    trial.fill(data, 0)
    a, b, c = (read(trial, name) for name in "abc")
    assert not any((one == other).all() for one, other in ((a, b), (a, c), (b, c)))


E4M3, E5M2 = DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2


def float8_problem(d: DType, b: DType = E4M3, epilogue: Epilogue = Epilogue.NONE) -> MatmulProblem:
    """A product of 32×64 by 64×48 with all the scales that D's type has."""
    problem = a_problem(epilogue, (E4M3, d), size=(32, 48), k=64)
    scales = SCALES if d.is_float8 else SCALES[:2]
    lying = Spec(packed(64, 48, order=Order.COLUMN))
    return replace(problem, b=lying, b_dtype=None if b is E4M3 else b, scales=scales, fast_accumulation=True)


def write_amax(trial: ProductOperands, factor: float = 1.0) -> None:
    """Writes the largest magnitude of D, times a factor, to the product's `amax_d`."""
    if trial.problem.d_dtype.is_float8:
        amax = np.nanmax(np.abs(read(trial, "d"))) * factor
        trial.memory.write(trial.call(STREAM).addresses[-1], np.array([amax], np.float32))


@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.RELU_AUX_BIAS, Epilogue.GELU_AUX_BIAS])
@pytest.mark.parametrize("types", [(DType.BFLOAT16, E5M2), (DType.FLOAT32, E4M3), (E4M3, E4M3), (E5M2, E5M2)])
def test_right_float8_results_pass(types: tuple[DType, DType], epilogue: Epilogue) -> None:
    def launch(trial: ProductOperands) -> None:
        right(trial)
        write_amax(trial)

    assert judge(float8_problem(*types, epilogue), launch) is None


def test_scales_of_float8_are_applied_once() -> None:
    trial = ProductOperands(Memory(0, STREAM), float8_problem(E4M3))
    call = trial.call(STREAM)
    scale_a, scale_b, scale_d = (trial.memory.read(at, 1, np.float32)[0] for at in call.addresses[6:9])
    assert call.scalars[0] * scale_a * scale_b * scale_d == 1.0
    assert 1.0 not in (scale_a, scale_b, scale_a * scale_b)


@pytest.mark.parametrize("broken", [None, "scale_a", "scale_b"])
def test_scale_vectors_are_applied_by_row_and_by_column(broken: str | None) -> None:
    """The verification finds a kernel that multiplies the last row or column by the scale of the one before."""
    problem = replace(float8_problem(DType.BFLOAT16), scale_vectors=True)

    def launch(trial: ProductOperands) -> None:
        scale_a, scale_b = (read(trial, name)[0, 0].astype(np.float64) for name in ("scale_a", "scale_b"))
        for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
            scale[-1] = scale[-2] if name == broken else scale[-1]
        a, b = operands(trial)
        bits(trial.buffers["d"])[...] = encode(scale_a[:, None] * (a @ b) * scale_b, DType.BFLOAT16)

    assert (judge(problem, launch) is None) == (broken is None)


@pytest.mark.parametrize("d", [DType.BFLOAT16, DType.FLOAT32, E4M3])
def test_float8_products_without_their_last_terms(d: DType) -> None:
    def launch(trial: ProductOperands) -> None:
        a, b = operands(trial)
        compute(trial, a[..., :-1], b[..., :-1, :])
        write_amax(trial)

    fault = judge(float8_problem(d), launch)
    assert fault is not None
    assert fault.startswith("wrong: d[0, ")


def test_a_largest_magnitude_that_is_off() -> None:
    def launch(trial: ProductOperands) -> None:
        right(trial)
        write_amax(trial, 0.5)

    fault = judge(float8_problem(E4M3), launch)
    assert fault is not None
    assert fault.startswith("wrong: amax_d is ")
