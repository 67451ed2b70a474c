"""The rules of FP8 matrix products: cuBLAS's documentation of cublasLtMatmul, table of FP8 types and requirements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lt_runtime.arrays.checks import check_one_float32, check_weights
from lt_runtime.arrays.operand import HOST, Operand
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import AlignmentError, ArgumentError, DTypeError, LayoutError, ShapeError
from lt_runtime.fp8 import UNIT
from lt_runtime.layout import Order
from lt_runtime.problem import SCALES, DType, MatmulProblem, Spec

_E5M2: Final = DType.FLOAT8_E5M2


def has_vectors(given: Mapping[str, Operand], shape: tuple[int, ...]) -> bool:
    """Whether scale_a and scale_b are vectors: a number for each row and for each column of a product of this shape.

    Raises:
        ShapeError: one scale has more than one number, and they are not two vectors of M and of N numbers.
        DTypeError: a vector is not FP32.
        LayoutError: a vector has gaps.
    """
    a, b = (given.get(name) for name in SCALES[:2])
    if all(each is None or each.shape in ((), (1,)) for each in (a, b)):
        return False
    *batch, m, n = shape
    if batch or a is None or b is None or (a.shape, b.shape) != ((m,), (n,)):
        shapes = ["is None" if each is None else f"has shape {each.shape}" for each in (a, b)]
        vectors = f"vectors ({m},) and ({n},) for the rows of a and the columns of b, without a batch"
        raise ShapeError(f"scale_a {shapes[0]} and scale_b {shapes[1]}; both must be one number, or {vectors}")
    for each in (a, b):
        check_weights(each, each.shape, "a number for each row of a or column of b")
    return True


def check_options(
    given: Mapping[str, Operand], types: tuple[DType, DType, DType], epilogue: Epilogue, *, fast: bool, vectors: bool
) -> None:
    """Checks scales and options of a product against the types of A, B and D.

    Raises:
        ArgumentError: scales or fast accumulation without FP8 matrices; or a scale, C or epilogue that D's type
            excludes: if D is FP8, vectors of scales are.
        DTypeError: cuBLASLt does not have this combination of types; or a scale is no FP32 number.
        AlignmentError: a scale's address is not a multiple of 16 bytes.
    """
    a, b, d = types
    for name in [each for each in SCALES if each in given]:
        if name.endswith("_d") or not vectors:
            check_one_float32(given[name])
        if not a.is_float8:
            raise ArgumentError(f"{name} is given, and a is {a.value}; only float8 matrices have scales")
        if name.endswith("_d") and not d.is_float8:
            raise ArgumentError(f"{name} is given, and dtype is {d.value}; only a float8 result has it")
        check_address(given[name])
    if not a.is_float8:
        if fast:
            raise ArgumentError(f"fast_accumulation is True, and a is {a.value}; only float8 products have it")
        return
    if a is b is _E5M2:
        raise DTypeError(f"a and b are {_E5M2.value}; one of them must be {DType.FLOAT8_E4M3FN.value}")
    if d is _E5M2 and _E5M2 not in (a, b):
        raise DTypeError(f"dtype is {d.value}, and a and b are {a.value}; one of them must be {d.value} too")
    if d.is_float8 and vectors:
        raise ArgumentError(f"scale_a is a vector, and dtype is {d.value}; with vectors D is not float8")
    if epilogue.sums_operand:
        raise ArgumentError(f"epilogue is {epilogue.value!r}; float8 matrices are not summed")
    if d.is_float8 and "c" in given:
        raise ArgumentError(f"c is given, and dtype is {d.value}; nothing is added to a float8 product: drop c")


def check_layouts(given: Mapping[str, Operand], problem: MatmulProblem) -> None:
    """Checks that the tensor cores of compute capability 8.9 and 9.0 can read an FP8 product's matrices.

    Raises:
        LayoutError: a matrix is not contiguous along K, or a leading dimension is no multiple of 16 elements.
        ShapeError: an extent is no positive multiple of 16.
        AlignmentError: an address is not a multiple of 16 bytes.
    """
    for name, extent in (("M", problem.m), ("N", problem.n), ("K", problem.k)):
        if extent % UNIT or not extent:
            sizes = f"a has shape {given['a'].shape} and b {given['b'].shape}"
            raise ShapeError(f"{sizes}: {name} is {extent}; with float8 it must be a positive multiple of {UNIT}")
    for name, spec, order, shape in (("a", problem.a, Order.ROW, "(M, K)"), ("b", problem.b, Order.COLUMN, "(K, N)")):
        if spec.layout.order is not order:
            found = f"{name} {shape} has strides {given[name].strides}, and is not contiguous along K"
            remedy = f"{name} = lt.contiguous({name}.T).T copies it, lt.cast_fp8(..., out_transposed=) writes it so"
            raise LayoutError(f"{found}; float8 products need a row-major a and a column-major b: {remedy}")
    specs = {"a": problem.a, "b": problem.b, "c": problem.c, "out": problem.d}
    for name, each in specs.items():
        if each is not None and name in given:
            check_strides(given[name], each)
    for name in ("a", "b", "c", "bias", "aux", "out"):
        if name in given:
            check_address(given[name])


def check_strides(operand: Operand, spec: Spec, what: str = "float8") -> None:
    """Raises `LayoutError` unless rows or columns, and matrices of a batch, are a multiple of 16 elements apart."""
    if spec.layout.leading_dimension % UNIT or spec.batch_stride % UNIT:
        found = f"{operand.name} has strides {operand.strides}"
        raise LayoutError(f"{found}; with {what} those above 1 must be multiples of {UNIT}")


def check_address(operand: Operand, what: str = "float8") -> None:
    """Raises `AlignmentError` unless an operand on a GPU lies at a multiple of 16 bytes."""
    if operand.device != HOST and operand.alignment < UNIT:
        found = f"{operand.name} is at {operand.address:#x}"
        raise AlignmentError(f"{found}; with {what} it must be a multiple of {UNIT} bytes")
