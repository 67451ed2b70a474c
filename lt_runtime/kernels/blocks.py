"""Parts of argument blocks that several kernels share: the structs of `cuda_src`'s headers as ctypes sees them.

A kernel takes one struct by value, so that a launch passes one pointer. Each family's module has the structs of its own
kernels.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_int64, c_uint32, c_void_p
from typing import Any, Final

from lt_runtime.layout import Layout
from lt_runtime.problem import DType, Spec

SCALAR: Final = {DType.FLOAT32: "float", DType.FLOAT16: "__half", DType.BFLOAT16: "__nv_bfloat16"}
"""The CUDA C++ name of each type."""
ROUNDS: Final = 10
"""Rounds of Philox4x32."""
_BITS: Final = 8


def fields(*groups: tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
    """A structure's `_fields_`: each group has the names of consecutive fields, and their type."""
    return tuple((name, kind) for names, kind in groups for name in names.split())


class Matrix(Structure):
    """`lt::Matrix`; strides are in elements."""

    _fields_ = fields(("data", c_void_p), ("row_stride col_stride", c_int64))

    @classmethod
    def of(cls, matrix: Layout | Spec | None, *, is_mask: bool = False) -> Matrix:
        """How a matrix lies, its address to be filled in; an absent matrix for None.

        Args:
            is_mask: whether it counts bits. The kernels take a mask as bytes, each of which is eight columns.
        """
        if matrix is None:
            return cls()
        layout = matrix.layout if isinstance(matrix, Spec) else matrix
        return cls(0, layout.leading_dimension // _BITS, 1) if is_mask else cls(0, *layout.strides)


class Dropout(Structure):
    """`lt::Dropout`."""

    _fields_ = fields(
        ("keys", (c_uint32 * 2) * ROUNDS),
        ("step_pointer", c_void_p),
        ("step layer limit", c_uint32),
        ("scale", c_float),
    )


class ColumnSum(Structure):
    """`lt::ColumnSum<SCALAR>`."""

    _fields_ = fields(("sum partial tickets", c_void_p), ("accumulate", c_int))
