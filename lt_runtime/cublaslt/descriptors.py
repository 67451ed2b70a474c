"""Descriptors as context managers: made by the library, freed exactly once.

One that is never closed is freed when it is garbage-collected. That is safe at any time, in the middle of a capture
too: the library frees a descriptor on the host alone.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

from lt_runtime.cublaslt import attributes
from lt_runtime.cublaslt.attribute_ids import (
    EmulationDescAttribute,
    MatmulDescAttribute,
    MatrixLayoutAttribute,
    MatrixTransformDescAttribute,
    PreferenceAttribute,
)
from lt_runtime.cublaslt.enums import BatchMode, ComputeType, DataType, Order, PointerMode
from lt_runtime.cublaslt.library import attribute_failure, call, function
from lt_runtime.cublaslt.values import Attribute
from lt_runtime.errors import ArgumentError

A = TypeVar("A", bound=enum.IntEnum)
V = TypeVar("V", int, float)
_revisions = itertools.count()


class Descriptor(Generic[A, V]):
    """What all share: `handle` for the library's calls, attributes by table, `close`.

    Attributes:
        revision: a number that no other descriptor has, and another one whenever a check may turn out otherwise.
    """

    _prefix: ClassVar[str]
    _setter: ClassVar[str]
    _table: ClassVar[Mapping[Any, Attribute]]

    def __init_subclass__(cls) -> None:
        cls._setter = f"{cls._prefix}SetAttribute"

    def _create(self, name: str, *arguments: int) -> None:
        created = ctypes.c_void_p()
        call(name, ctypes.byref(created), *arguments)
        self._handle = created.value
        self._values: dict[A, Any] = {}
        self.revision = next(_revisions)
        self._free: weakref.finalize[..., Any] = weakref.finalize(self, call, f"{self._prefix}Destroy", created.value)
        self._free.atexit = False  # the process takes its memory along, and the library may be gone by then

    @property
    def handle(self) -> int:
        """The C pointer.

        Raises:
            ArgumentError: the descriptor is closed.
        """
        if self._handle is None:
            raise ArgumentError(f"this {type(self).__name__} is closed")
        return self._handle

    def set(self, attribute: A, value: V) -> None:
        """Sets one attribute.

        Raises:
            ArgumentError: the value is not accepted; the library itself looks at sizes only.
            AlignmentError: an address is not a multiple of what it must be.
            MissingLibraryError: the attribute is newer than the library.
            CublasLtError: the library refused.
        """
        known = self._known(attribute)
        packed = known.pack(attribute, value)
        status = function(self._setter)(self.handle, attribute, packed, known.size)
        if status:
            raise attribute_failure(self._setter, status, attribute, known.since)
        before = self._values.get(attribute)
        self._values[attribute] = value
        if not (known.accepted.alignment and before and value):  # another address in place of one changes no check
            self.revision = next(_revisions)

    def get(self, attribute: A) -> V:
        """Reads one attribute, as a member of the enum that it is of.

        Raises:
            MissingLibraryError: the attribute is newer than the library.
            CublasLtError: the library refused.
        """
        known = self._known(attribute)
        cell, written = ctypes.create_string_buffer(known.size), ctypes.c_size_t()
        name = f"{self._prefix}GetAttribute"
        status = function(name)(self.handle, attribute, cell, known.size, ctypes.byref(written))
        if status:
            raise attribute_failure(name, status, attribute, known.since)
        value: V = known.unpack(cell.raw)
        return value

    def recall(self, attribute: A) -> V:
        """The same as `get`, from memory once it is known: for checks that every launch makes."""
        if attribute not in self._values:
            self._values[attribute] = self.get(attribute)
        value: V = self._values[attribute]
        return value

    def _known(self, attribute: A) -> Attribute:
        try:
            return self._table[attribute]
        except KeyError:
            raise ArgumentError(f"{type(self).__name__} has no attribute {attribute!r}") from None

    def close(self) -> None:
        """Frees the descriptor; a second call does nothing."""
        self._handle = None
        self.revision = next(_revisions)
        self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MatmulDesc(Descriptor[MatmulDescAttribute, int]):
    """`cublasLtMatmulDesc_t`: what a matrix product computes.

    Args:
        compute_type: precision of the accumulation.
        scale_type: type of α and β.

    Attributes:
        validated: the revisions of this descriptor and of the layouts that `validate` has found nothing wrong with.
        prepared: what `matmul` keeps of its last call with it.
    """

    _prefix = "cublasLtMatmulDesc"
    _table = attributes.MATMUL_DESC

    def __init__(self, compute_type: ComputeType, scale_type: DataType) -> None:
        ids = MatmulDescAttribute
        created = {ids.COMPUTE_TYPE: compute_type, ids.SCALE_TYPE: scale_type}
        for attribute, value in created.items():
            _check(attribute, value, self._table)
        self._create("cublasLtMatmulDescCreate", *created.values())
        self._values |= {**created, ids.POINTER_MODE: PointerMode.HOST}
        self._emulation: EmulationDesc | None = None
        self.validated: tuple[int, ...] = ()
        self.prepared: Any = None

    def set_emulation(self, emulation: EmulationDesc | None) -> None:
        """Sets EMULATION_DESCRIPTOR, and keeps the descriptor that it points to alive.

        Raises:
            MissingLibraryError: the library is older than 13.1.
        """
        self.set(MatmulDescAttribute.EMULATION_DESCRIPTOR, emulation.handle if emulation else 0)
        self._emulation = emulation


class MatrixLayout(Descriptor[MatrixLayoutAttribute, int]):
    """`cublasLtMatrixLayout_t`: a matrix in memory, or a batch of them.

    Args:
        data_type: type of an element.
        rows, cols: its shape.
        leading_dimension: elements from one column to the next, at least `rows`; of a row-major matrix, from one row
            to the next. For the tiled orders see `cublasLtOrder_t`.
        order: how it lies.
        batch_count: number of matrices.
        batch_stride: elements from one matrix to the next.

    Raises:
        ArgumentError: a number is negative, or the leading dimension too small.
    """

    _prefix = "cublasLtMatrixLayout"
    _table = attributes.MATRIX_LAYOUT

    def __init__(
        self,
        data_type: DataType,
        rows: int,
        cols: int,
        leading_dimension: int,
        *,
        order: Order = Order.COL,
        batch_count: int = 1,
        batch_stride: int = 0,
    ) -> None:
        ids = MatrixLayoutAttribute
        created = {ids.TYPE: data_type, ids.ROWS: rows, ids.COLS: cols, ids.LD: leading_dimension}
        more = {ids.ORDER: order, ids.BATCH_COUNT: batch_count, ids.STRIDED_BATCH_OFFSET: batch_stride}
        for attribute, value in (created | more).items():
            _check(attribute, value, self._table)
        check_leading_dimension(order, rows, cols, leading_dimension)
        self._create("cublasLtMatrixLayoutCreate", *created.values())
        defaults = {ids.ORDER: Order.COL, ids.BATCH_COUNT: 1, ids.STRIDED_BATCH_OFFSET: 0}
        self._values |= {**created, **defaults, ids.BATCH_MODE: BatchMode.STRIDED}
        try:
            for attribute in defaults:
                if more[attribute] != defaults[attribute]:
                    self.set(attribute, more[attribute])
        except Exception:
            self.close()
            raise

    @classmethod
    def grouped(cls, data_type: DataType, groups: int, rows: int, cols: int, leading_dimensions: int) -> Self:
        """A batch of matrices of different shapes, which are read from device memory at the launch.

        Args:
            data_type: type of an element.
            groups: number of matrices.
            rows, cols, leading_dimensions: device addresses of arrays of int32.

        Raises:
            ArgumentError, AlignmentError: as for the attributes GROUPED_*.
            MissingLibraryError: the library is older than 13.2.
        """
        ids = MatrixLayoutAttribute
        arrays = {ids.GROUPED_ROWS_ARRAY: rows, ids.GROUPED_COLS_ARRAY: cols, ids.GROUPED_LD_ARRAY: leading_dimensions}
        for attribute, value in ({ids.TYPE: data_type, ids.BATCH_COUNT: groups} | arrays).items():
            _check(attribute, value, cls._table)
        made = cls.__new__(cls)
        made._create("cublasLtGroupedMatrixLayoutCreate", data_type, groups, *arrays.values())
        return made


class MatmulPreference(Descriptor[PreferenceAttribute, float]):
    """`cublasLtMatmulPreference_t`: what the heuristic may choose from."""

    _prefix = "cublasLtMatmulPreference"
    _table = attributes.PREFERENCE

    def __init__(self) -> None:
        self._create("cublasLtMatmulPreferenceCreate")


class MatrixTransformDesc(Descriptor[MatrixTransformDescAttribute, int]):
    """`cublasLtMatrixTransformDesc_t`: what a matrix transform computes; `scale_type` is the type of α and β."""

    _prefix = "cublasLtMatrixTransformDesc"
    _table = attributes.MATRIX_TRANSFORM_DESC

    def __init__(self, scale_type: DataType) -> None:
        _check(MatrixTransformDescAttribute.SCALE_TYPE, scale_type, self._table)
        self._create("cublasLtMatrixTransformDescCreate", scale_type)


class EmulationDesc(Descriptor[EmulationDescAttribute, int]):
    """`cublasLtEmulationDesc_t`: how FP32 or FP64 is emulated on narrower units.

    Raises:
        MissingLibraryError: the library is older than 13.1.
    """

    _prefix = "cublasLtEmulationDesc"
    _table = attributes.EMULATION_DESC

    def __init__(self) -> None:
        self._create("cublasLtEmulationDescCreate")


def _check(attribute: Any, value: int, table: Mapping[Any, Attribute]) -> None:
    table[attribute].pack(attribute, value)


_TILE_COLS: Final = 32
_TILE_ROWS: Final = {Order.COL32: 1, Order.COL4_4R2_8C: 8, Order.COL32_2R_4R4: 32}


def check_leading_dimension(order: int, rows: int, cols: int, leading_dimension: int) -> None:
    """Raises `ArgumentError` if a matrix's columns (rows, tiles) would overlap."""
    if order == Order.COL:
        least, described = rows, f"rows ({rows})"
    elif order == Order.ROW:
        least, described = cols, f"cols ({cols}), since the order is ROW"
    else:
        tile = _TILE_ROWS[Order(order)]
        least = _TILE_COLS * -(-rows // tile) * tile
        described = f"{least}, since the order is {Order(order).name} and there are {rows} rows"
    if leading_dimension < least:
        raise ArgumentError(f"leading_dimension is {leading_dimension}; it must be at least {described}")
