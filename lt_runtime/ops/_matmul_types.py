"""What passes between `matmul` and the two ways of running it."""

from __future__ import annotations

from typing import Any, NamedTuple

from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import ArgumentError, DTypeError, ShapeError
from lt_runtime.problem import DType


class MatmulOperands(NamedTuple):
    """Arrays; None where there is none."""

    a: Any
    b: Any
    c: Any
    bias: Any
    aux: Any
    bias_gradient: Any
    out: Any


class MatmulOptions(NamedTuple):
    """Everything about a call but its arrays."""

    epilogue: Epilogue
    alpha: Any
    beta: Any
    dtype: Any
    compute: str


class MatmulShape(NamedTuple):
    """Sizes of a product; `batch` is None where neither operand is a batch."""

    m: int
    n: int
    k: int
    batch: int | None

    def of(self, *axes: int) -> tuple[int, ...]:
        """`axes`, with the batch in front if there is one."""
        return axes if self.batch is None else (self.batch, *axes)


def product_shape(a: tuple[int, ...], b: tuple[int, ...]) -> MatmulShape:
    """Sizes of A·B.

    Raises:
        ShapeError: the shapes do not fit.
    """
    for name, shape in (("a", a), ("b", b)):
        if len(shape) not in (2, 3):
            raise ShapeError(f"{name} has shape {shape}; accepted are a matrix (2 axes) or a batch of them (3)")
    if a[-1] != b[-2]:
        raise ShapeError(f"b has shape {b}; its last axis but one must be {a[-1]}, as the last of a of shape {a}")
    counts = {shape[0] for shape in (a, b) if len(shape) == 3}
    if len(counts - {1}) > 1:
        raise ShapeError(f"b has shape {b}, a batch of {b[0]}, and a has shape {a}; equal batches or 1 are accepted")
    return MatmulShape(a[-2], b[-1], a[-1], next(iter(counts - {1} or counts), None))


def result_type(operand: DType, requested: Any, epilogue: Epilogue) -> DType:
    """D's type.

    Raises:
        DTypeError: the type asked for does not go with the operands'.
        ArgumentError: an epilogue with float64.
    """
    if operand is DType.FLOAT64 and epilogue is not Epilogue.NONE:
        raise ArgumentError(f"epilogue is {epilogue.value!r}; float64 has none")
    if requested is None:
        return operand
    wanted = DType.parse("dtype", requested, fp64=True)
    if wanted is operand or (wanted is DType.FLOAT32 and operand in (DType.FLOAT16, DType.BFLOAT16)):
        return wanted
    raise DTypeError(f"dtype is {wanted.value}; with {operand.value} operands, that or float32 for 16-bit ones")
