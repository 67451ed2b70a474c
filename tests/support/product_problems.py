"""Helpers that make the problems of a layer's matrix products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from lt_runtime.epilogue import Epilogue
from lt_runtime.layout import Order, packed
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec

TF32: Final[dict[str, Any]] = {"dtype": DType.FLOAT32, "compute": Compute.TF32}
FP32: Final[dict[str, Any]] = {"dtype": DType.FLOAT32}


def across(rows: int, cols: int) -> Spec:
    """Makes the description of a packed column-major matrix."""
    return Spec(packed(rows, cols, order=Order.COLUMN))


def problem_of(
    a: Spec, b: Spec, /, epilogue: Epilogue = Epilogue.NONE, *, dtype: DType = DType.BFLOAT16, **changes: Any
) -> MatmulProblem:
    """Makes the problem of a product into a packed matrix of the operands' type.

    An epilogue's auxiliary matrix has the layout of D.
    """
    d = Spec(packed(a.layout.rows, b.layout.cols))
    aux = d if epilogue.has_aux_output or epilogue.is_derivative else None
    return replace(MatmulProblem(dtype, dtype, Compute.FLOAT32, a, b, d, epilogue, aux=aux), **changes)


def forward(m: int, n: int, k: int, *epilogue: Epilogue, **changes: Any) -> MatmulProblem:
    return problem_of(Spec(packed(m, k)), across(k, n), *epilogue, **changes)


def input_gradient(m: int, n: int, k: int, *epilogue: Epilogue, **changes: Any) -> MatmulProblem:
    return problem_of(Spec(packed(m, k)), Spec(packed(k, n)), *epilogue, **changes)


def weight_gradient(m: int, n: int, k: int, *epilogue: Epilogue, **changes: Any) -> MatmulProblem:
    return problem_of(across(m, k), Spec(packed(k, n)), *epilogue, **changes)
