"""Parts of argument blocks that several kernels share: the structs of `cuda_src`'s headers as ctypes sees them.

A kernel takes one struct by value, so that a launch passes one pointer. Each family's module has the structs of its own
kernels.
"""

from __future__ import annotations

import ctypes
from typing import Final

from lt_runtime.layout import Layout
from lt_runtime.problem import DType

SCALAR: Final = {
    DType.FLOAT32: "float",
    DType.FLOAT16: "__half",
    DType.BFLOAT16: "__nv_bfloat16",
}
"""The CUDA C++ name of each type."""
ROUNDS: Final = 10
"""Rounds of Philox4x32."""


class Matrix(ctypes.Structure):
    """`lt::Matrix`; strides are in elements."""

    _fields_ = (("data", ctypes.c_void_p), ("row_stride", ctypes.c_int64), ("col_stride", ctypes.c_int64))

    @classmethod
    def of(cls, layout: Layout | None) -> Matrix:
        """A matrix of a layout, its address to be filled in; an absent matrix if there is no layout."""
        return cls() if layout is None else cls(0, *layout.strides)


class Dropout(ctypes.Structure):
    """`lt::Dropout`."""

    _fields_ = (
        ("keys", (ctypes.c_uint32 * 2) * ROUNDS),
        ("step_pointer", ctypes.c_void_p),
        ("step", ctypes.c_uint32),
        ("layer", ctypes.c_uint32),
        ("limit", ctypes.c_uint32),
        ("scale", ctypes.c_float),
    )


class ColumnSum(ctypes.Structure):
    """`lt::ColumnSum<SCALAR>`."""

    _fields_ = (
        ("sum", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("tickets", ctypes.c_void_p),
        ("accumulate", ctypes.c_int),
    )
