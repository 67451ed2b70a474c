"""Verifies algorithms: compares every element of every output with an FP64 reference, and two runs bit for bit.

A kernel of verify.cu computes the reference, never a candidate algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.verify import ACTIVATIONS, EXPECT, EXPECT_TILE, TYPES, Elements, Results, Rounding
from lt_runtime.layout import packed
from lt_runtime.problem import SCALES, Compute, DType, MatmulProblem, Spec
from lt_runtime.tuner.operands import EDGES, LATTICE, ONES, Buffer, Data, Memory, Operands, operands_of

KINDS: Final = (LATTICE, EDGES, ONES)
"""The three kinds of test data with which each algorithm is verified. With LATTICE sums are exact in any order, which
reveals missing or extra terms. With EDGES no sum is exact, which reveals operands or partial sums in too narrow a type.
With ONES every sum must be K.
"""
# Relative tolerance for rounding a result: one unit in the last place. Rounding to nearest errs by at most half a unit,
# but cuBLASLt does not promise to round to nearest.
_E4M3, _E5M2 = DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2
_UNIT: Final = {
    DType.FLOAT32: 2.0**-23, DType.FLOAT16: 2.0**-10, DType.BFLOAT16: 2.0**-7, DType.FLOAT64: 2.0**-52,
    _E4M3: 2.0**-3, _E5M2: 2.0**-2,
}  # fmt: skip
_LEAST_NORMAL: Final = {DType.FLOAT16: 2.0**-14, DType.FLOAT64: 2.0**-1022, _E4M3: 2.0**-6, _E5M2: 2.0**-14}
_LARGEST: Final = {DType.FLOAT16: 65504.0, DType.FLOAT64: math.inf, _E4M3: 448.0, _E5M2: 57344.0}
_FLOAT8_UNIT: Final = 2.0**-13
"""Unit in the last place, relative to the largest term, of sums of 32 FP8 products, which Hopper's tensor cores add in
fewer bits than FP32 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
"""
_FLOAT8_TERMS: Final = 32
_FACTORS: Final = {"scale_a": 0.5, "scale_b": 0.25, "scale_d": 1.0, "amax_d": math.nan}
"""Values of an FP8 product's scales during verification; with α, their product is exactly 1."""
_SLOT: Final = 16  # Distance in bytes from one scale to the next.
# cuBLASLt's GELU is accurate to about 1e-5, its derivative less, because 1 - tanh² cancels. The tolerances are wider.
_GELU_ERROR: Final = 1e-4
_GELU_DERIVATIVE_ERROR: Final = 1e-3
_DOUBLE: Final = 8  # bytes
_SUM_ERROR: Final = 2.0**-20
"""Tolerance, relative to the sum of magnitudes, for FP32 sums whose additions truncate: all errors have one sign, and
add up.
"""


class ProductOperands(Operands):
    """The operands of one matrix product. Outputs are "d", and "aux" or "vector" if the epilogue writes them.

    Args:
        problem: a product that is not empty.

    Attributes:
        has_mask: whether the auxiliary matrix is ReLU's bit mask.
    """

    def __init__(self, memory: Memory, problem: MatmulProblem) -> None:
        super().__init__()
        self.memory, self.problem = memory, problem
        epilogue, placed = problem.epilogue, operands_of(problem)
        for name, (spec, dtype) in placed.items():
            self.buffers[name] = Buffer(memory, spec, dtype, 1 if name == "vector" else problem.batch)
        self.has_mask = "aux" in placed and epilogue.activation == "relu"
        one = np.ones(1, np.float64 if problem.compute is Compute.FLOAT64 else np.float32)
        numbers = [name for name in problem.scales if name not in (*self.buffers, "amax_d")]
        self._alpha = 1.0 / math.prod(_FACTORS[name] for name in numbers)
        self._scalars = memory.allocate(_SLOT * (2 + len(problem.scales)))
        for slot, value in enumerate((self._alpha, 1.0, *(_FACTORS[name] for name in problem.scales))):
            memory.write(self._scalars.data.ptr + _SLOT * slot, np.full_like(one, value))
        written = {"d": True, "vector": epilogue.has_bias_gradient, "aux": epilogue.has_aux_output}
        self.outputs = [name for name, is_output in written.items() if is_output]

    def call(self, stream: int) -> Call:
        """The call of the product on these operands. β is 1 if there is a C; α is 1 unless scales are numbers."""
        problem, first = self.problem, int(self._scalars.data.ptr)
        addresses = [self.buffers[name].address if name in self.buffers else 0 for name in problem.operands]
        slots = {name: first + _SLOT * (2 + slot) for slot, name in enumerate(problem.scales)}
        addresses += [self.buffers[name].address if name in self.buffers else at for name, at in slots.items()]
        numbers: tuple[Any, Any] = (first, first + _SLOT) if problem.device_scalars else (self._alpha, 1.0)
        return Call(tuple(addresses), stream, (numbers[0], numbers[1] if problem.c is not None else 0.0))

    def amax_fault(self) -> str | None:
        """A sentence that says how the stored maximum of |D| differs from the elements of D; None if it is right."""
        problem, d = self.problem, self.buffers["d"]
        if "amax_d" not in problem.scales:
            return None
        at = self._scalars.data.ptr + _SLOT * (2 + problem.scales.index("amax_d"))
        amax = float(self.memory.read(at, 1, np.float32)[0])
        extent = (problem.batch - 1) * problem.d.batch_stride + problem.d.layout.extent
        stored = self.memory.read(d.address, extent, problem.d_dtype.numpy).astype(np.float64)
        wanted = float(np.nanmax(np.abs(stored)))  # the gaps between the rows hold NaN
        limit = _UNIT[problem.d_dtype] * wanted
        is_right = amax >= wanted - limit if wanted == _LARGEST[problem.d_dtype] else abs(amax - wanted) <= limit
        return None if is_right else f"amax_d is {amax:.9g} and the largest element of d {wanted:.9g}"


class Expected:
    """Expected values of an output and their tolerances, in FP64, contiguous in GPU memory.

    Args:
        shape: (batch, rows, cols).
    """

    def __init__(self, memory: Memory, shape: tuple[int, int, int]) -> None:
        batch, rows, cols = shape
        spec = Spec(packed(rows, cols), batch_stride=rows * cols)
        self._values, self._limits = (Buffer(memory, spec, DType.FLOAT64, batch) for _ in range(2))
        self.results = Results(self._values.address, self._limits.address)

    def fault(self, name: str, output: Buffer) -> str | None:
        """A sentence on the first output element whose error exceeds its tolerance; None if all are right."""
        found = output.compare(self._values, limits=self._limits.address)
        if not found.bad:
            return None
        at = [int(index) for index in np.unravel_index(found.first, output.shape)]
        is_off = f"is {output.value(at):.9g} and not {self._values.value(at):.9g} ± {self._limits.value(at):.3g}"
        return f"{name}{at} {is_off}; {found.bad} of {math.prod(output.shape)} elements there are off"


def verify(launches: Mapping[str, Callable[[], object]], operands: ProductOperands) -> dict[str, str]:
    """Verifies algorithms; returns a description of the fault by name, without the algorithms that pass.

    Args:
        launches: functions by name of the algorithm; each runs the product once, on the stream of the operands' memory.
        operands: the product's operands, which are overwritten.
    """
    reasons: dict[str, str] = {}
    for seed, data in enumerate(KINDS):
        operands.fill(data, seed)
        expected = expected_outputs(operands, data)
        for name, launch in launches.items():
            fault = _judge(launch, operands, expected) if name not in reasons else None
            if fault is not None:
                reasons[name] = f"{fault}, with {data.name}"
    return reasons


def _judge(launch: Callable[[], object], operands: ProductOperands, expected: Mapping[str, Expected]) -> str | None:
    operands.poison()
    launch()
    fault = disagreement(operands, expected)
    if fault is not None:
        return f"wrong: {fault}"
    before = {name: operands.buffers[name].snapshot() for name in operands.outputs}
    operands.poison()
    launch()
    is_same = all(operands.buffers[name].equals(each) for name, each in before.items())
    return None if is_same else "two runs differ"


def disagreement(operands: ProductOperands, expected: Mapping[str, Expected]) -> str | None:
    """A sentence on the first element of any output whose error exceeds its tolerance; None if all are right.

    Memory between and after the rows of D must still hold the NaN of `poison`. No expected result may be NaN.
    """
    for name, each in expected.items():
        fault = each.fault(name, operands.buffers[name])
        if fault is not None:
            return fault
    fault, d = operands.amax_fault(), operands.buffers["d"]
    if fault is not None:
        return fault
    return None if d.count_written() == math.prod(d.shape) else "it writes outside of D"


def expected_outputs(operands: ProductOperands, data: Data) -> dict[str, Expected]:
    """The expected values of each output of a product.

    The tolerance of D is the sum of the errors of accumulation, of adding C and the bias, and of the activation. If the
    error could change the sign of a pre-activation, both values of its bit in ReLU's mask are accepted.
    """
    problem, memory = operands.problem, operands.memory
    epilogue, rounding = problem.epilogue, _rounding(problem.d_dtype)
    at = {name: buffer.elements for name, buffer in operands.buffers.items()}
    shape = problem.batch, problem.m, problem.n
    found = {name: Expected(memory, shape) for name in ("d", "aux") if name in operands.outputs}
    c, bias = at.get("c", Elements()), at["vector"] if epilogue.has_bias else Elements()
    aux = at["aux"] if epilogue.is_derivative else Elements()
    params = EXPECT.params(at["a"], at["b"], c, bias, aux=aux, d=found["d"].results, rounding=rounding)
    params.rows, params.cols, params.depth = problem.m, problem.n, problem.k
    params.row_scales, params.col_scales = (at.get(name, Elements()) for name in SCALES[:2])
    params.accumulation = accumulation_error(problem, data)
    params.addition = 2 * _UNIT[_accumulator(problem)] if params.accumulation else 0.0
    if epilogue.activation == "gelu":
        params.approximation = _GELU_DERIVATIVE_ERROR if epilogue.is_derivative else _GELU_ERROR
    params.activation, params.is_derivative = ACTIVATIONS[epilogue.activation], epilogue.is_derivative
    if "aux" in found:
        params.kept, params.keeps_mask = found["aux"].results, operands.has_mask
    tiles = -(-problem.m // EXPECT_TILE)
    if epilogue.sums_operand:
        found["vector"] = _operand_sums(operands, rounding)
    elif "vector" in operands.outputs:
        sums = memory.allocate(3 * _DOUBLE * tiles * problem.n)
        params.sums = sums.data.ptr
    memory.expect(params, problem.batch)
    if params.sums:
        parts = memory.read(params.sums, 3 * tiles * problem.n, np.float64).reshape(tiles, 3, problem.n)
        total, squares, others = parts.sum(axis=0)
        # Rounding errors mostly cancel, so that the tolerance is eight times the root of the sum of their squares.
        found["vector"] = Expected(memory, (1, 1, problem.n))
        memory.write(found["vector"].results.values, total)
        memory.write(found["vector"].results.limits, _limits(total, 8.0 * squares**0.5 + others, rounding))
    return found


def _operand_sums(operands: ProductOperands, rounding: Rounding) -> Expected:
    """The expected bias gradient: op(A) summed over K for BGRADA (length M), op(B) summed over K for BGRADB (length N).

    The sums are computed as the product of a row of ones with B, or with the transpose of A.
    """
    problem, memory = operands.problem, operands.memory
    transposed = problem.epilogue is Epilogue.BGRADA
    summed = operands.buffers["a" if transposed else "b"].elements
    if transposed:
        summed.row_stride, summed.col_stride = summed.col_stride, summed.row_stride
    length = problem.m if transposed else problem.n
    one = memory.allocate(_DOUBLE)
    memory.write(one.data.ptr, np.ones(1))
    found = Expected(memory, (1, 1, length))
    ones = Elements(one.data.ptr, type=TYPES["float64"])
    params = EXPECT.params(ones, summed, d=found.results, rounding=rounding, rows=1, cols=length, depth=problem.k)
    params.accumulation = _SUM_ERROR
    memory.expect(params, 1)
    return found


def _rounding(dtype: DType) -> Rounding:
    """The rounding of results to their type.

    Results beyond the type's range, and subnormal results, are not compared.
    """
    return Rounding(_UNIT[dtype], _LEAST_NORMAL.get(dtype, 2.0**-126), _LARGEST.get(dtype, 2.0**127))


def _limits(values: NDArray[Any], errors: NDArray[Any], rounding: Rounding) -> NDArray[np.float64]:
    """Tolerances of results: computation errors plus rounding to their type, as `store` in verify.cu computes them."""
    limits: NDArray[np.float64] = errors + rounding.unit * abs(values) + rounding.least
    limits[abs(values) + limits > rounding.largest] = math.inf
    return limits


def accumulation_error(problem: MatmulProblem, data: Data) -> float:
    """Tolerance of a sum of products, relative to the sum of their magnitudes.

    The tolerance is 0 if all partial sums are exact. Otherwise the errors of K roundings mostly cancel, and grow as the
    square root of K in any order of summation. Tensor cores truncate, which makes the error a few times larger. TF32
    also truncates each operand to 10 bits. Sums of FP8 products have fewer bits, and are never exact.
    """
    if problem.dtype.is_float8:
        return _FLOAT8_UNIT * (8 + math.sqrt(problem.k / _FLOAT8_TERMS))
    if problem.k <= data.exact_to:
        return 0.0
    truncation = 2.0**-9 if problem.compute is Compute.TF32 else 0.0
    return truncation + 2 * _UNIT[_accumulator(problem)] * (8 + math.sqrt(problem.k))


def _accumulator(problem: MatmulProblem) -> DType:
    return DType.FLOAT64 if problem.compute is Compute.FLOAT64 else DType.FLOAT32
