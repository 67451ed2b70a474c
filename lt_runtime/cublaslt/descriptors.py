"""Descriptors as context managers: made by the library, freed exactly once."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from lt_runtime.cublaslt import attributes
from lt_runtime.cublaslt.enums import (
    ComputeType,
    DataType,
    MatmulDescAttribute,
    MatrixLayoutAttribute,
    PreferenceAttribute,
)
from lt_runtime.cublaslt.library import call
from lt_runtime.errors import ArgumentError


class _Descriptor:
    """What the three share: `handle` for the library's calls, attributes by table, `close`."""

    _prefix: ClassVar[str]
    _types: ClassVar[Mapping[Any, Any]]

    def __init__(self, *arguments: int) -> None:
        created = ctypes.c_void_p()
        call(f"{self._prefix}Create", ctypes.byref(created), *arguments)
        self.handle: int | None = created.value

    def _set(self, attribute: int, value: int) -> None:
        cell = self._types[attribute](value)
        if cell.value != value:
            raise ArgumentError(f"{attribute!r} is {value}, which does not fit its C type")
        call(f"{self._prefix}SetAttribute", self.handle, attribute, ctypes.byref(cell), ctypes.sizeof(cell))

    def _get(self, attribute: int) -> int:
        cell, written = self._types[attribute](), ctypes.c_size_t()
        size = ctypes.sizeof(cell)
        call(f"{self._prefix}GetAttribute", self.handle, attribute, ctypes.byref(cell), size, ctypes.byref(written))
        return int(cell.value)

    def close(self) -> None:
        """Frees the descriptor; a second call does nothing."""
        handle, self.handle = self.handle, None
        if handle is not None:
            call(f"{self._prefix}Destroy", handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MatmulDesc(_Descriptor):
    """`cublasLtMatmulDesc_t`: what a matrix product computes.

    Args:
        compute_type: precision of the accumulation.
        scale_type: type of α and β.
    """

    _prefix = "cublasLtMatmulDesc"
    _types = attributes.MATMUL_DESC

    def __init__(self, compute_type: ComputeType, scale_type: DataType) -> None:
        super().__init__(compute_type, scale_type)

    def set(self, attribute: MatmulDescAttribute, value: int) -> None:
        """Sets one attribute."""
        self._set(attribute, value)

    def get(self, attribute: MatmulDescAttribute) -> int:
        """Reads one attribute."""
        return self._get(attribute)


class MatrixLayout(_Descriptor):
    """`cublasLtMatrixLayout_t`: a column-major matrix in memory.

    Args:
        data_type: type of an element.
        rows, cols: its shape.
        leading_dimension: elements from one column to the next, at least `rows`.
    """

    _prefix = "cublasLtMatrixLayout"
    _types = attributes.MATRIX_LAYOUT

    def __init__(self, data_type: DataType, rows: int, cols: int, leading_dimension: int) -> None:
        if rows < 0 or cols < 0:
            raise ArgumentError(f"the shape is ({rows}, {cols}); neither may be negative")
        if leading_dimension < rows:
            raise ArgumentError(f"leading_dimension is {leading_dimension}; it must be at least rows ({rows})")
        super().__init__(data_type, rows, cols, leading_dimension)

    def set(self, attribute: MatrixLayoutAttribute, value: int) -> None:
        """Sets one attribute."""
        self._set(attribute, value)

    def get(self, attribute: MatrixLayoutAttribute) -> int:
        """Reads one attribute."""
        return self._get(attribute)


class MatmulPreference(_Descriptor):
    """`cublasLtMatmulPreference_t`: what the heuristic may choose from."""

    _prefix = "cublasLtMatmulPreference"
    _types = attributes.PREFERENCE

    def set(self, attribute: PreferenceAttribute, value: int) -> None:
        """Sets one attribute."""
        self._set(attribute, value)

    def get(self, attribute: PreferenceAttribute) -> int:
        """Reads one attribute."""
        return self._get(attribute)
