"""Whether an algorithm computes what it is asked for: every element of every output, against float64, and twice.

The reference is a product in FP64. None of the algorithms that are judged computes that product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from lt_runtime.epilogue import Epilogue
from lt_runtime.problem import Activation, Compute, DType, MatmulProblem
from lt_runtime.reference import activate, derivative
from lt_runtime.tuner.operands import EDGES, LATTICE, ONES, Data, ProductOperands

KINDS: Final = (LATTICE, EDGES, ONES)
"""Random data whose sums are exact in any order, which shows a term too few or too many; data of which no sum is exact,
which shows an operand or a partial sum in too narrow a type; and ones, whose sums must be K."""
_SLAB: Final = 1 << 22  # elements of D that the reference is computed for at a time

# One unit in the last place, relative. Rounding to the nearest costs half of it, but the library does not promise that.
_UNIT: Final = {DType.FLOAT32: 2.0**-23, DType.FLOAT16: 2.0**-10, DType.BFLOAT16: 2.0**-7, DType.FLOAT64: 2.0**-52}
_LEAST_NORMAL: Final = {DType.FLOAT16: 2.0**-14, DType.FLOAT64: 2.0**-1022}
_LARGEST: Final = {DType.FLOAT16: 65504.0, DType.FLOAT64: math.inf}
# The library's GELU is accurate to about 1e-5. Its derivative is less accurate where 1 - tanh² cancels.
_GELU_ERROR: Final = 1e-4
_GELU_DERIVATIVE_ERROR: Final = 1e-3
_STEEPEST: Final = 1.13
"""The largest derivative of the activations."""

_Sums: TypeAlias = tuple[Any, Any, Any]
_NO_SUMS: Final[_Sums] = (0.0, 0.0, 0.0)


class Expected(NamedTuple):
    """Some rows of an output: what they must be, and how far off each element may be; (batch, rows, cols)."""

    output: str
    rows: slice
    values: Any
    limits: Any


def verify(launches: Mapping[str, Callable[[], object]], operands: ProductOperands) -> dict[str, str]:
    """Why algorithms are not to be used, by name; those that agree with the reference are left out.

    Args:
        launches: by name; each runs the product once, on the stream that is current for the operands' arrays.
        operands: of the product; they are overwritten.
    """
    reasons: dict[str, str] = {}
    for seed, data in enumerate(KINDS):
        operands.fill(data, seed)
        expected = list(expected_outputs(operands, data))
        for name, launch in launches.items():
            fault = _judge(launch, operands, expected) if name not in reasons else None
            if fault is not None:
                reasons[name] = f"{fault}, with {data.name}"
    return reasons


def _judge(launch: Callable[[], object], operands: ProductOperands, expected: list[Expected]) -> str | None:
    operands.poison()
    launch()
    fault = disagreement(operands, expected)
    if fault is not None:
        return f"wrong: {fault}"
    before = operands.snapshot()
    operands.poison()
    launch()
    return None if operands.same_as(before) else "two runs differ"


def disagreement(operands: ProductOperands, expected: list[Expected]) -> str | None:
    """The first element that is too far off, in words; None if there is none."""
    for part in expected:
        actual = operands.read(part.output, part.rows)
        bad = ~(abs(actual - part.values) <= part.limits)  # NaN is bad
        if bad.any():
            return _describe(part, actual, bad)
    return "it writes outside of D" if operands.wrote_outside() else None


def _describe(part: Expected, actual: Any, bad: Any) -> str:
    at = tuple(int(where[0]) for where in bad.nonzero())
    batch, row, column = at[0], at[1] + (part.rows.start or 0), at[2]
    found, wanted, limit = (float(array[at]) for array in (actual, part.values, part.limits))
    return (
        f"{part.output}[{batch}, {row}, {column}] is {found:.9g} and not {wanted:.9g} ± {limit:.3g}; "
        f"{int(bad.sum())} of {bad.size} elements there are off"
    )


def expected_outputs(operands: ProductOperands, data: Data) -> Iterator[Expected]:
    """What the product must make of the operands, some rows at a time, because float64 arrays take much memory."""
    problem = operands.problem
    b = operands.read("b")
    b_norms = ((b * b).sum(axis=-2) ** 0.5)[:, None, :]
    sums = _NO_SUMS
    step = max(1, _SLAB // (problem.batch * problem.n))
    for start in range(0, problem.m, step):
        rows = slice(start, min(start + step, problem.m))
        product, error = _product(operands, rows, b, b_norms, accumulation_error(problem, data))
        values, rounding, approximation = _through_epilogue(operands, rows, product, error)
        yield _expect(problem, "d", rows, values, rounding + approximation)
        if "aux" in operands.outputs:
            yield _expect_aux(operands, rows, product, error)
        if "vector" in operands.outputs:
            sums = _add_rows(sums, values, rounding + _UNIT[problem.d_dtype] * abs(values), approximation)
    if problem.epilogue.sums_operand:
        operand = operands.read("a").swapaxes(-1, -2) if problem.epilogue is Epilogue.BGRADA else b
        sums = _add_rows(_NO_SUMS, operand, 0.0 * operand, 0.0 * operand)
    if "vector" in operands.outputs:
        total, squares, bias = sums
        yield _expect(problem, "vector", slice(0, 1), total, 8.0 * squares**0.5 + bias)


def _product(operands: ProductOperands, rows: slice, b: Any, b_norms: Any, relative: float) -> tuple[Any, Any]:
    """A·B + C + bias in float64, and how far off it may be in the problem's precision.

    By Cauchy and Schwarz the product of the norms is no less than the sum of the products' magnitudes. It costs much
    less to compute.
    """
    problem, a = operands.problem, operands.read("a", rows)
    product = a @ b
    error = relative * ((a * a).sum(axis=-1, keepdims=True) ** 0.5) * b_norms
    if problem.c is not None:
        product = product + operands.read("c", rows)
    if problem.epilogue.has_bias:
        product = product + operands.read("vector")
    if relative:  # Adding C and the bias rounds as well.
        error = error + 2 * _UNIT[_accumulator(problem)] * abs(product)
    return product, error


def accumulation_error(problem: MatmulProblem, data: Data) -> float:
    """How far off a sum of products may be, relative to the sum of their magnitudes.

    Where every partial sum is exact, it may not be off at all. Otherwise the errors of K roundings mostly cancel and
    grow as the root of K, in whatever order the sum is taken. Tensor cores truncate and get a few times that. TF32
    truncates each operand to 10 bits as well.
    """
    if problem.k <= data.exact_to:
        return 0.0
    truncation = 2.0**-9 if problem.compute is Compute.TF32 else 0.0
    return truncation + 2 * _UNIT[_accumulator(problem)] * (8 + math.sqrt(problem.k))


def _accumulator(problem: MatmulProblem) -> DType:
    return DType.FLOAT64 if problem.compute is Compute.FLOAT64 else DType.FLOAT32


def _through_epilogue(operands: ProductOperands, rows: slice, product: Any, error: Any) -> tuple[Any, Any, Any]:
    """D before it is rounded to its type, its error by the product's error, and its error by the activation's."""
    epilogue = operands.problem.epilogue
    activation, approximate = Activation(epilogue.activation), epilogue.activation == "gelu"
    if epilogue.is_derivative:
        aux = operands.read("aux", rows)
        slope = aux if operands.has_mask else derivative(aux, activation)
        inexact = _GELU_DERIVATIVE_ERROR if approximate else 0.0
        return product * slope, error * abs(slope), inexact * abs(product)
    inexact = _GELU_ERROR if approximate else 0.0
    return activate(product, activation), _STEEPEST * error, inexact * abs(product)


def _expect(problem: MatmulProblem, output: str, rows: slice, values: Any, error: Any) -> Expected:
    """Adds the rounding to D's type to the error. Results beyond the type's range, or subnormal, are not judged."""
    dtype = problem.d_dtype
    largest, least = _LARGEST.get(dtype, 2.0**127), _LEAST_NORMAL.get(dtype, 2.0**-126)
    limits = error + _UNIT[dtype] * abs(values) + least
    limits[abs(values) + limits > largest] = math.inf
    return Expected(output, rows, values, limits)


def _expect_aux(operands: ProductOperands, rows: slice, product: Any, error: Any) -> Expected:
    """The pre-activation, or ReLU's mask of it. Close to 0, where its sign may be off, either bit is right."""
    if not operands.has_mask:
        return _expect(operands.problem, "aux", rows, product, error)
    limits = (abs(product) <= error).astype("float64")
    return Expected("aux", rows, (product > 0).astype("float64"), limits)


def _add_rows(sums: _Sums, values: Any, rounding: Any, approximation: Any) -> _Sums:
    """Sums of columns with some more rows, (batch, rows, cols), and the error of each element of those.

    Rounding errors mostly cancel: their sum does not exceed eight times the root of the sum of their squares. The
    errors of an approximation all have the same sign, as have those of a sum that truncates, and add up.

    Returns:
        The sums, the sums of the squares of the rounding errors, and the sums of the others; (batch, 1, cols).
    """
    terms = values, rounding * rounding, approximation + 2.0**-20 * abs(values)
    total, squares, others = (old + each.sum(axis=1, keepdims=True) for old, each in zip(sums, terms, strict=True))
    return total, squares, others
