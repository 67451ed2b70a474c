"""Whether algorithms compute what they are asked for: every element of every output, against float64, and twice.

The reference is a product in FP64, which other kernels compute than any that is judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lt_runtime.epilogue import Epilogue
from lt_runtime.problem import Activation, Compute, DType, MatmulProblem
from lt_runtime.reference import activate, derivative
from lt_runtime.tuner.trial import EDGES, LATTICE, ONES, Data, Trial

KINDS: Final = (LATTICE, EDGES, ONES)
"""Random data whose sums are exact in any order, so that one term too few or too many shows; data of which no sum is
exact, which an operand or a partial sum kept in too narrow a type shows; and all ones, which must give K."""
_SLAB: Final = 1 << 22

# In the last place, relative. Half of it is what rounding to the nearest takes, which the library does not promise.
_UNIT: Final = {DType.FLOAT32: 2.0**-23, DType.FLOAT16: 2.0**-10, DType.BFLOAT16: 2.0**-7, DType.FLOAT64: 2.0**-52}
_LEAST_NORMAL: Final = {DType.FLOAT16: 2.0**-14, DType.FLOAT64: 2.0**-1022}
_LARGEST: Final = {DType.FLOAT16: 65504.0, DType.FLOAT64: math.inf}
# The library's GELU is good to five digits, and its derivative, where 1 - tanh² cancels, to less.
_GELU_ERROR: Final = 1e-4
_GELU_DERIVATIVE_ERROR: Final = 1e-3
_STEEPEST: Final = 1.13
"""The largest derivative of the activations."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Some rows of an output: what they must be, and how far off each element may be; (batch, rows, cols)."""

    output: str
    rows: slice
    values: Any
    limits: Any


def verify(launches: Mapping[str, Callable[[], object]], trial: Trial) -> dict[str, str]:
    """Why algorithms are not to be used, by name; those that agree with the reference are left out.

    Args:
        launches: by name; each launches the trial's product once, on the stream that is current for the trial's arrays.
        trial: its operands are overwritten.
    """
    reasons: dict[str, str] = {}
    for seed, data in enumerate(KINDS):
        trial.fill(data, seed)
        expected = list(expected_outputs(trial, data))
        for name, launch in launches.items():
            fault = _judge(launch, trial, expected) if name not in reasons else None
            if fault is not None:
                reasons[name] = f"{fault}, with {data.name}"
    return reasons


def _judge(launch: Callable[[], object], trial: Trial, expected: list[Expected]) -> str | None:
    trial.poison()
    launch()
    fault = disagreement(trial, expected)
    if fault is not None:
        return f"wrong: {fault}"
    before = trial.snapshot()
    trial.poison()
    launch()
    return None if trial.same_as(before) else "two runs differ"


def disagreement(trial: Trial, expected: list[Expected]) -> str | None:
    """The first element that is too far off, in words; None if there is none."""
    for part in expected:
        actual = trial.read(part.output, part.rows)
        bad = ~(abs(actual - part.values) <= part.limits)  # NaN is bad
        if bad.any():
            return _describe(part, actual, bad)
    return "it writes outside of D" if trial.wrote_outside() else None


def _describe(part: Expected, actual: Any, bad: Any) -> str:
    at = tuple(int(where[0]) for where in bad.nonzero())
    batch, row, column = at[0], at[1] + (part.rows.start or 0), at[2]
    found, wanted, limit = (float(array[at]) for array in (actual, part.values, part.limits))
    return (
        f"{part.output}[{batch}, {row}, {column}] is {found:.9g} and not {wanted:.9g} ± {limit:.3g}; "
        f"{int(bad.sum())} of {bad.size} elements there are off"
    )


def expected_outputs(trial: Trial, data: Data) -> Iterator[Expected]:
    """What the product makes of the trial's operands, some rows at a time: float64 arrays take room."""
    problem = trial.problem
    b = trial.read("b")
    b_norms = ((b * b).sum(axis=-2) ** 0.5)[:, None, :]
    sums = _ColumnSums()
    step = max(1, _SLAB // (problem.batch * problem.n))
    for start in range(0, problem.m, step):
        rows = slice(start, min(start + step, problem.m))
        product, error = _product(trial, rows, b, b_norms, accumulation_error(problem, data))
        values, rounding, approximation = _through_epilogue(trial, rows, product, error)
        yield _expect(problem, "d", rows, values, rounding + approximation)
        if "aux" in trial.outputs:
            yield _expect_aux(trial, rows, product, error)
        if "vector" in trial.outputs:
            sums.add(values, rounding + _UNIT[problem.d_dtype] * abs(values), approximation)
    if "vector" in trial.outputs:
        yield _expect(problem, "vector", slice(0, 1), *_operand_sums(trial, b) or sums.results())


def _product(trial: Trial, rows: slice, b: Any, b_norms: Any, relative: float) -> tuple[Any, Any]:
    """A·B + C + bias in float64, and how far off it may be in the problem's precision.

    The norms' product is, by Cauchy and Schwarz, no less than the sum of the products' magnitudes, and much cheaper.
    """
    problem, a = trial.problem, trial.read("a", rows)
    product = a @ b
    error = relative * ((a * a).sum(axis=-1, keepdims=True) ** 0.5) * b_norms
    if problem.c is not None:
        product = product + trial.read("c", rows)
    if problem.epilogue.has_bias:
        product = product + trial.read("vector")
    if relative:  # C and the bias are rounded in as well
        error = error + 2 * _UNIT[_accumulator(problem)] * abs(product)
    return product, error


def accumulation_error(problem: MatmulProblem, data: Data) -> float:
    """How far off a sum of products may be, relative to the sum of their magnitudes.

    Nothing, where every partial sum is exact. Otherwise, the order of the sum being free: errors of K roundings that
    mostly cancel grow as their root, and tensor cores, which truncate, get a few times that. TF32 keeps 10 bits of
    each operand, truncated as well.
    """
    if problem.k <= data.exact_to:
        return 0.0
    operands = 2.0**-9 if problem.compute is Compute.TF32 else 0.0
    return operands + 2 * _UNIT[_accumulator(problem)] * (8 + math.sqrt(problem.k))


def _accumulator(problem: MatmulProblem) -> DType:
    return DType.FLOAT64 if problem.compute is Compute.FLOAT64 else DType.FLOAT32


def _through_epilogue(trial: Trial, rows: slice, product: Any, error: Any) -> tuple[Any, Any, Any]:
    """D before it is rounded to its type, what the product's error makes of it, and what the activation's adds."""
    epilogue = trial.problem.epilogue
    activation, approximate = Activation(epilogue.activation), epilogue.activation == "gelu"
    if epilogue.is_derivative:
        aux = trial.read("aux", rows)
        slope = aux if trial.has_mask else derivative(aux, activation)
        inexact = _GELU_DERIVATIVE_ERROR if approximate else 0.0
        return product * slope, error * abs(slope), inexact * abs(product)
    inexact = _GELU_ERROR if approximate else 0.0
    return activate(product, activation), _STEEPEST * error, inexact * abs(product)


def _expect(problem: MatmulProblem, output: str, rows: slice, values: Any, error: Any) -> Expected:
    """With the rounding to D's type; what lies beyond its range is not judged, nor what is subnormal below."""
    dtype = problem.d_dtype
    largest, least = _LARGEST.get(dtype, 2.0**127), _LEAST_NORMAL.get(dtype, 2.0**-126)
    limits = error + _UNIT[dtype] * abs(values) + least
    limits[abs(values) + limits > largest] = math.inf
    return Expected(output, rows, values, limits)


def _expect_aux(trial: Trial, rows: slice, product: Any, error: Any) -> Expected:
    """The pre-activation, or where it is positive; so close to 0 that either may be right, either is."""
    if not trial.has_mask:
        return _expect(trial.problem, "aux", rows, product, error)
    limits = (abs(product) <= error).astype("float64")
    return Expected("aux", rows, (product > 0).astype("float64"), limits)


def _operand_sums(trial: Trial, b: Any) -> tuple[Any, Any] | None:
    """The sum of A or of B over K, and how far off it may be; None for an epilogue without."""
    match trial.problem.epilogue:
        case Epilogue.BGRADA:
            operand = trial.read("a").swapaxes(-1, -2)
        case Epilogue.BGRADB:
            operand = b
        case _:
            return None
    sums = _ColumnSums()
    sums.add(operand, 0.0 * operand, 0.0 * operand)
    return sums.results()


class _ColumnSums:
    """Sums over rows that come in parts, and how far off they may be.

    Roundings mostly cancel: of as many as there are rows, eight times the root of the sum of their squares is never
    exceeded. An approximation's error has one sign, and so has that of a sum that truncates.
    """

    def __init__(self) -> None:
        self._total: Any = 0.0
        self._squares: Any = 0.0
        self._bias: Any = 0.0

    def add(self, values: Any, rounding: Any, approximation: Any) -> None:
        """Adds rows, (batch, rows, cols), with the error of each element."""
        self._total = self._total + values.sum(axis=1, keepdims=True)
        self._squares = self._squares + (rounding * rounding).sum(axis=1, keepdims=True)
        self._bias = self._bias + (approximation + 2.0**-20 * abs(values)).sum(axis=1, keepdims=True)

    def results(self) -> tuple[Any, Any]:
        """The sums, (batch, 1, cols), and their errors."""
        return self._total, 8.0 * self._squares**0.5 + self._bias
