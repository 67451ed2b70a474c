"""Matrix products with every epilogue on the GPU, against the float64 reference."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from typing import Any

import cupy as cp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import PlanError
from lt_runtime.gpu.graphs import captured_nodes
from lt_runtime.kernels.call import Call
from lt_runtime.layout import Layout, Order, batch_of, packed
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec
from lt_runtime.products.choose import configuration
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.tuner.candidates import heuristic_candidates
from tests.host_kernels.arrays import assert_close
from tests.support.gpu_arrays import EPSILON, Guarded, to_host
from tests.support.strategies import MatmulCase, Placement, lattice, matmul_cases

Array = NDArray[Any]
FLAT = Placement(column_major=False, gap=0, offset=0)
_TINY = 1e-6


@functools.cache
def _capture_stream() -> Any:
    return cp.cuda.Stream(non_blocking=True)


class Product:
    """Operands of a case on the host and on the GPU, and the reference's results."""

    def __init__(self, case: MatmulCase) -> None:
        self.case = case
        generator = np.random.default_rng(case.data_seed)
        counts = {count for count in case.batches[:2] if count is not None}
        self.batch = max(counts) if counts else None
        self.a = self._draw(generator, case.batches[0], (case.m, case.k), case.dtype)
        self.b = self._draw(generator, case.batches[1], (case.k, case.n), case.dtype)
        self.c = self._draw(generator, self.batch, (case.m, case.n), case.d_dtype) if case.with_c else None
        self.bias = lattice(generator, (case.n,), case.d_dtype) if case.epilogue.has_bias else None
        self.z = self._draw(generator, self.batch, (case.m, case.n), case.d_dtype)  # what a derivative is taken at
        self.expected = reference.matmul(
            self.a, self.b, self.c, alpha=case.alpha, beta=case.beta, epilogue=case.epilogue, bias=self.bias,
            aux=self.z if case.epilogue.is_derivative else None,
        )  # fmt: skip
        plain = Epilogue.BIAS if self.bias is not None else Epilogue.NONE
        self.product = reference.matmul(
            self.a, self.b, self.c, alpha=case.alpha, beta=case.beta, epilogue=plain, bias=self.bias
        ).d

    @staticmethod
    def _draw(generator: np.random.Generator, batch: int | None, shape: tuple[int, ...], dtype: DType) -> Array:
        return lattice(generator, shape if batch is None else (batch, *shape), dtype)

    def place(self) -> None:
        case = self.case
        full = self.z.shape
        start = np.zeros(full, case.d_dtype.numpy) if self.c is None or not case.in_place else self.c
        self.out = Guarded(start, case.d)
        self.gpu: dict[str, Any] = {
            "a": Guarded(self.a, case.a).array,
            "b": Guarded(self.b, case.b).array,
            "epilogue": case.epilogue,
            "compute": case.compute,
            "dtype": case.d_dtype.value,
            "out": self.out.array,
            "alpha": self._scalar(case.alpha),
            "beta": self._scalar(case.beta),
        }
        if self.c is not None:
            self.gpu["c"] = self.out.array if case.in_place else Guarded(self.c, case.c).array
        if self.bias is not None:
            self.gpu["bias"] = self._vector(self.bias)
        if case.epilogue.has_bias_gradient:
            rows = case.m if case.epilogue is Epilogue.BGRADA else case.n
            shape = (rows,) if self.batch is None else (self.batch, rows)
            self.gpu["bias_gradient"] = self._vector(np.full(shape, np.nan, case.d_dtype.numpy))
        self._place_aux()

    def _scalar(self, value: float) -> Any:
        kind = np.float64 if self.case.dtype is DType.FLOAT64 else np.float32
        return cp.asarray([value], dtype=kind) if self.case.device_scalars else value

    def _vector(self, values: Array) -> Any:
        offset = self.case.bias_offset
        buffer = cp.empty(offset + values.size, values.dtype)
        view = buffer[offset:].reshape(values.shape)
        view[...] = cp.asarray(values)
        return view

    @property
    def _flipped(self) -> bool:
        """Whether the package takes D for column-major: one that is both is row-major to it."""
        array = self.out.array
        strides = [stride // array.itemsize for stride in array.strides]
        return batch_of("out", array.shape, strides)[0].order is Order.COLUMN

    def _place_aux(self) -> None:
        epilogue = self.case.epilogue
        if not (epilogue.has_aux_output or epilogue.is_derivative):
            return
        if epilogue.activation == "gelu":
            values = self.z if epilogue.is_derivative else np.zeros_like(self.z)
            self.aux = Guarded(values, Placement(self._flipped, self.case.d.gap, 0), multiple=8)
            self.gpu["aux"] = self.aux.array
            return
        positive = self.z.astype(np.float64) > 0
        mask = reference.pack_mask(np.swapaxes(positive, -1, -2) if self._flipped else positive)
        self.gpu["aux"] = cp.asarray(mask if epilogue.is_derivative else np.zeros_like(mask))


def _tolerance(product: Product) -> Array:
    """Rounding of D, and of the plain product where a pass of our own follows it."""
    case = product.case
    epsilon = 2 * EPSILON[case.d_dtype]
    if case.dtype is DType.FLOAT64:
        return epsilon * np.abs(product.expected.d)
    # β·C may be added after the product was rounded, and cuBLASLt's GELU is good to five digits, not seven.
    across = case.with_c and not case.in_place and case.c != case.d
    if case.epilogue is Epilogue.NONE and not across:
        return epsilon * np.abs(product.expected.d) + _TINY
    rounded = (1.2 * np.abs(product.product) + abs(case.beta)) * (1 + np.abs(product.z.astype(np.float64)))
    gelu = 2e-5 * np.abs(product.product) if case.epilogue.activation == "gelu" else 0.0
    return epsilon * (np.abs(product.expected.d) + rounded) + gelu + _TINY


def _check(product: Product) -> None:
    case, epilogue = product.case, product.case.epilogue
    product.place()
    assert lt.matmul(**product.gpu) is product.gpu["out"]
    tolerance = _tolerance(product)
    assert_close("d", product.out.values(), product.expected.d, tolerance)
    if epilogue.has_aux_output:
        _check_aux(product)
    if epilogue.has_bias_gradient:
        assert product.expected.bias_gradient is not None
        expected = product.expected.bias_gradient
        summed = 0.0 if epilogue.sums_operand else tolerance.sum(axis=-2)
        limit = summed + 2 * EPSILON[case.d_dtype] * np.abs(expected) + _TINY
        assert_close("bias_gradient", to_host(product.gpu["bias_gradient"]), expected, limit)


def _check_aux(product: Product) -> None:
    case = product.case
    if case.epilogue.activation == "gelu":
        # A pass of our own adds bias and β·C to a product that has been rounded, which they may have made smaller.
        addends = [] if product.bias is None else [np.abs(product.bias.astype(np.float64))]
        addends += [] if product.c is None else [abs(case.beta) * np.abs(product.c.astype(np.float64))]
        rounded = 2 * np.abs(product.product) + sum(addends)
        limit = 2 * EPSILON[case.d_dtype] * rounded
        assert_close("aux", product.aux.values(), product.product, limit)
        return
    flipped = product._flipped
    bits = reference.unpack_mask(cp.asnumpy(product.gpu["aux"]), case.m if flipped else case.n)
    positive = np.swapaxes(bits, -1, -2) if flipped else bits
    # At zero ReLU has no derivative, and either bit will do.
    np.testing.assert_array_equal(positive | (product.product == 0), (product.product > 0) | (product.product == 0))


@settings(
    max_examples=3200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=matmul_cases())
def test_matmul_agrees_with_reference_and_launches_kernels_only(case: MatmulCase, examples: Counter[str]) -> None:
    product = Product(case)
    try:
        _check(product)
    except (
        cp.cuda.runtime.CUDARuntimeError
    ) as error:  # nothing runs in this process any more: no example can be repeated
        raise AssertionError(f"{case} is the end of the context") from error
    lt.matmul(**product.gpu, stream=_capture_stream())  # that stream's own memory is made outside the capture
    _capture_stream().synchronize()  # before the operands' memory is given to the next example
    nodes = captured_nodes(lambda stream: lt.matmul(**product.gpu, stream=stream), _capture_stream().ptr)
    assert set(nodes) == {"KERNEL"}, nodes
    assert len(nodes) <= 3, nodes  # copies of operands, the product, and a pass of ours
    examples["matmul"] += 1


def _case(**changes: Any) -> MatmulCase:
    standard: dict[str, Any] = {
        "m": 64, "n": 48, "k": 40, "batches": (None, None, None), "dtype": DType.FLOAT32, "compute": "float32",
        "d_dtype": DType.FLOAT32, "epilogue": Epilogue.NONE, "alpha": 1.0, "beta": 0.0, "with_c": False,
        "in_place": False, "device_scalars": False, "a": FLAT, "b": FLAT, "c": FLAT, "d": FLAT, "bias_offset": 0,
        "data_seed": 1,
    }  # fmt: skip
    return MatmulCase(**{**standard, **changes})


# (n, m, k) that have been wrong in one library or another
_AWKWARD = [(1, 1, 1), (1, 2, 3), (3, 2, 1), (2, 1, 3), (65, 43, 21), (40, 50, 60), (9, 2, 1), (4, 1, 2)]


@pytest.mark.parametrize(("n", "m", "k"), _AWKWARD)
@pytest.mark.parametrize("epilogue", Epilogue)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_awkward_sizes(n: int, m: int, k: int, epilogue: Epilogue, dtype: DType) -> None:
    _check(Product(_case(m=m, n=n, k=k, epilogue=epilogue, dtype=dtype, d_dtype=dtype)))


@pytest.mark.parametrize("k", [129, 257, 1000, 4097])
@pytest.mark.parametrize(
    ("dtype", "compute"), [("float32", "float32"), ("float32", "tf32"), ("bfloat16", "float32"), ("float16", "float32")]
)
@pytest.mark.parametrize(("m", "n"), [(256, 256), (16, 64)])
def test_all_ones_give_exactly_k_with_every_candidate(k: int, dtype: str, compute: str, m: int, n: int) -> None:
    kind = DType(dtype)
    a, b, d = cp.ones((m, k), kind.numpy), cp.ones((k, n), kind.numpy), cp.empty((m, n), cp.float32)
    problem = MatmulProblem(
        kind, DType.FLOAT32, Compute(compute), Spec(packed(m, k)), Spec(packed(k, n)), Spec(packed(m, n))
    )
    count = len(MatmulPlan(problem, 0).candidates)
    assert count > 0
    for rank in range(count):
        d.fill(cp.nan)
        plan = MatmulPlan(problem, 0, rank)
        plan.run(Call((a.data.ptr, b.data.ptr, 0, 0, 0, d.data.ptr), 0))
        assert (d == k).all(), f"candidate {rank}"


@pytest.mark.parametrize("epilogue", Epilogue)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_rows_of_d_less_aligned_than_those_of_c(epilogue: Epilogue, dtype: DType) -> None:
    pitched = Placement(column_major=False, gap=1, offset=0)
    scalars = {"alpha": 2.0, "beta": -0.5, "device_scalars": True}
    case = _case(dtype=dtype, d_dtype=DType.FLOAT32, epilogue=epilogue, with_c=True, d=pitched, **scalars)
    if epilogue.sums_operand:
        case = dataclasses.replace(case, c=pitched)  # which the reference's sums ask for
    _check(Product(case))


@pytest.mark.parametrize("gap", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "compute", "d_dtype"),
    [("float32", "tf32", "float32"), ("bfloat16", "float32", "float32"), ("float16", "float32", "float16")],
)
def test_rows_of_d_less_aligned_than_those_of_c_with_every_candidate(
    dtype: str, compute: str, d_dtype: str, gap: int
) -> None:
    # An algorithm that stores vectors to D because C's rows would allow it ends the context: a misaligned address.
    m, n, k, kind, result = 64, 128, 96, DType(dtype), DType(d_dtype)
    a, b, c = cp.ones((m, k), kind.numpy), cp.ones((k, n), kind.numpy), cp.ones((m, n), result.numpy)
    d = cp.empty((m, n + gap), result.numpy)[:, :n]
    pitched = Spec(Layout(m, n, Order.ROW, n + gap))
    flat = [Spec(packed(*array.shape)) for array in (a, b, c)]
    problem = MatmulProblem(kind, result, Compute(compute), flat[0], flat[1], pitched, c=flat[2])
    first, count = MatmulPlan(problem, 0), 0
    for algorithm in heuristic_candidates(first, first.workspace_size):
        with contextlib.suppress(PlanError):
            plan = MatmulPlan(problem, 0, algorithm=algorithm.blob)
            if plan.launches_at_most_two_kernels:
                d.fill(cp.nan)
                plan.run(Call((a.data.ptr, b.data.ptr, c.data.ptr, 0, 0, d.data.ptr), 0, (1.0, 2.0)))
                assert (d == k + 2).all(), configuration(algorithm.blob)
                count += 1
    assert count >= 4


@pytest.mark.parametrize("empty", ["m", "n", "k"])
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.GELU_BIAS, Epilogue.DRELU_BGRAD, Epilogue.BGRADB])
@pytest.mark.parametrize("beta", [None, 0.0, 1.0, -0.5])
def test_empty_axes(empty: str, epilogue: Epilogue, beta: float | None) -> None:
    sizes = {"m": 5, "n": 6, "k": 7, empty: 0}
    case = _case(**sizes, epilogue=epilogue, with_c=beta is not None, beta=beta or 0.0)
    _check(Product(case))


def test_empty_batch() -> None:
    d = lt.matmul(cp.ones((0, 3, 4), cp.float32), cp.ones((4, 5), cp.float32))
    assert d.shape == (0, 3, 5)


def test_device_scalars_are_read_at_replay() -> None:
    a, b = cp.ones((32, 16), cp.float32), cp.ones((16, 24), cp.float32)
    c, d = cp.ones((32, 24), cp.float32), cp.empty((32, 24), cp.float32)
    alpha, beta = cp.ones(1, cp.float32), cp.ones(1, cp.float32)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()

    def run() -> None:
        lt.matmul(a, b, c, alpha=alpha, beta=beta, out=d, stream=stream)

    run()
    stream.begin_capture()
    run()
    graph = stream.end_capture()
    for x, y in ((1, 1), (2, -3), (0, 5)):
        alpha.fill(x)
        beta.fill(y)
        cp.cuda.get_current_stream().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert (d == 16 * x + y).all()


def test_broadcast_batch_is_not_copied() -> None:
    a, b = cp.ones((4, 8, 16), cp.float32), cp.arange(16 * 8, dtype=cp.float32).reshape(16, 8)
    everywhere = cp.broadcast_to(b, (4, 16, 8))
    np.testing.assert_array_equal(cp.asnumpy(lt.matmul(a, everywhere)), cp.asnumpy(lt.matmul(a, b)))
