"""Descriptors as context managers: each frees exactly once the object that the library made for it.

A descriptor that is never closed is freed when it is garbage-collected. That is safe at any time, even during a
capture, because the library frees a descriptor on the host alone.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from typing import Any, ClassVar, Final, Generic, Self, TypeVar, get_args

from lt_runtime.cublaslt import attributes
from lt_runtime.cublaslt.enums import BatchMode, ComputeType, DataType, Order, PointerMode
from lt_runtime.cublaslt.library import Owner, call, read_bytes
from lt_runtime.errors import ArgumentError

A = TypeVar("A", bound=attributes.Attribute)
V = TypeVar("V", int, float)
_revisions = itertools.count()
_TILE_COLS: Final = 32
_TILE_ROWS: Final = {Order.COL32: 1, Order.COL4_4R2_8C: 8, Order.COL32_2R_4R4: 32}


class Descriptor(Owner, Generic[A, V]):
    """The base of all descriptors: `Descriptor[A, V]` has attributes of the enum A, with values of type V.

    A subclass is named like its C functions, without "cublasLt": `MatmulDesc` for cublasLtMatmulDescCreate.

    Attributes:
        revision: a number that no other descriptor has. The number changes whenever `validate` might come to another
            result for the descriptor.
    """

    _prefix: ClassVar[str]
    _setter: ClassVar[str]
    _attributes: ClassVar[type[attributes.Attribute]]

    def __init_subclass__(cls) -> None:
        cls._prefix = f"cublasLt{cls.__name__}"
        cls._setter = f"{cls._prefix}SetAttribute"
        cls._attributes, _ = get_args(vars(cls)["__orig_bases__"][0])

    def __init__(self) -> None:
        self._create(f"{self._prefix}Create", {})

    def _create(self, name: str, arguments: dict[A, V]) -> None:
        """Creates the C object by the function `name`, which takes the values of `arguments` in their order."""
        for attribute, value in arguments.items():
            attribute.pack(value)
        created = ctypes.c_void_p()
        call(name, ctypes.byref(created), *arguments.values())
        self._handle = created.value
        self._values: dict[A, V] = arguments
        self.revision = next(_revisions)
        self._free: weakref.finalize[..., Any] = weakref.finalize(self, call, f"{self._prefix}Destroy", created.value)
        # Nothing is freed at exit: the library may be unloaded by then, and the system frees the memory.
        self._free.atexit = False

    def set(self, attribute: A, value: V) -> None:
        """Sets one attribute.

        Raises:
            ArgumentError: the value is not accepted; the library itself checks only its size.
            AlignmentError: an address is not a multiple of the required alignment.
            MissingLibraryError: the attribute is newer than the library.
            CublasLtError: the library refused.
        """
        self._check_kind(attribute)
        call(self._setter, self.handle, attribute, attribute.pack(value), attribute.size, attribute=attribute)
        before = self._values.get(attribute)
        self._values[attribute] = value
        # Replacing one address by another keeps the revision, because `validate` only checks whether an address is 0.
        if not (attribute.accepted.alignment and before and value):
            self.revision = next(_revisions)

    def get(self, attribute: A) -> V:
        """Reads one attribute, as a member of its enum where it has one.

        Raises:
            MissingLibraryError: the attribute is newer than the library.
            CublasLtError: the library refused.
        """
        self._check_kind(attribute)
        value: V = attribute.unpack(read_bytes(f"{self._prefix}GetAttribute", self.handle, attribute))
        return value

    def recall(self, attribute: A) -> V:
        """As `get`, but the value is cached, so that the library is asked only the first time."""
        if attribute not in self._values:
            self._values[attribute] = self.get(attribute)
        return self._values[attribute]

    def _check_kind(self, attribute: A) -> None:
        if not isinstance(attribute, self._attributes):
            raise ArgumentError(f"{type(self).__name__} has no attribute {attribute!r}")

    def close(self) -> None:
        """See `Owner`."""
        self._handle = None
        self.revision = next(_revisions)
        self._free()


class MatmulDesc(Descriptor[attributes.MatmulDescAttribute, int]):
    """`cublasLtMatmulDesc_t`: the computation of a matrix product.

    Args:
        compute_type: the precision of the accumulation.
        scale_type: the type of α and β.

    Attributes:
        validated: the revisions of this descriptor and of four layouts that passed `validate` together.
    """

    def __init__(self, compute_type: ComputeType, scale_type: DataType) -> None:
        ids = attributes.MatmulDescAttribute
        self._create("cublasLtMatmulDescCreate", {ids.COMPUTE_TYPE: compute_type, ids.SCALE_TYPE: scale_type})
        self._values[ids.POINTER_MODE] = PointerMode.HOST
        self._emulation: EmulationDesc | None = None
        self.validated: tuple[int, ...] = ()

    def set_emulation(self, emulation: EmulationDesc | None) -> None:
        """Sets EMULATION_DESCRIPTOR, and keeps the descriptor that it points to alive.

        Raises:
            MissingLibraryError: the library is older than 13.1.
        """
        self.set(attributes.MatmulDescAttribute.EMULATION_DESCRIPTOR, emulation.handle if emulation else 0)
        self._emulation = emulation


class MatrixLayout(Descriptor[attributes.MatrixLayoutAttribute, int]):
    """`cublasLtMatrixLayout_t`: a matrix in memory, or a batch of them.

    Args:
        data_type: the type of an element.
        rows, cols: the shape of each matrix.
        leading_dimension: elements from one column to the next, at least `rows`; in a row-major matrix, from one row
            to the next, at least `cols`. For the tiled orders see `cublasLtOrder_t`.
        order: the order of the elements in memory.
        batch_count: the number of matrices.
        batch_stride: elements from one matrix to the next.

    Raises:
        ArgumentError: a number is negative, or the leading dimension is too small.
    """

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
        ids = attributes.MatrixLayoutAttribute
        created = {ids.TYPE: data_type, ids.ROWS: rows, ids.COLS: cols, ids.LD: leading_dimension}
        self._create("cublasLtMatrixLayoutCreate", created)
        defaults = {ids.ORDER: Order.COL, ids.BATCH_COUNT: 1, ids.STRIDED_BATCH_OFFSET: 0}
        self._values |= {**defaults, ids.BATCH_MODE: BatchMode.STRIDED}
        more = {ids.ORDER: order, ids.BATCH_COUNT: batch_count, ids.STRIDED_BATCH_OFFSET: batch_stride}
        for attribute, value in more.items() - defaults.items():
            self.set(attribute, value)
        self.check_leading_dimension()

    def check_leading_dimension(self, owner: str = "") -> None:
        """Raises `ArgumentError`, whose message begins with `owner`, if columns (or rows, or tiles) overlap."""
        ids = attributes.MatrixLayoutAttribute
        order, rows, cols, leading = map(self.recall, (ids.ORDER, ids.ROWS, ids.COLS, ids.LD))
        if order == Order.COL:
            least, described = rows, f"rows ({rows})"
        elif order == Order.ROW:
            least, described = cols, f"cols ({cols}), since the order is ROW"
        else:
            tile = _TILE_ROWS[Order(order)]
            least = _TILE_COLS * -(-rows // tile) * tile
            described = f"{least}, since the order is {Order(order).name} and there are {rows} rows"
        if leading < least:
            raise ArgumentError(f"{owner}leading_dimension is {leading}; it must be at least {described}")

    @classmethod
    def grouped(cls, data_type: DataType, groups: int, rows: int, cols: int, leading_dimensions: int) -> Self:
        """A batch of matrices of different shapes; the launch reads the shapes from device memory.

        Args:
            data_type: the type of an element.
            groups: the number of matrices.
            rows, cols, leading_dimensions: device addresses of arrays of int32, one number for each matrix.

        Raises:
            ArgumentError, AlignmentError: as for the attributes GROUPED_*.
            MissingLibraryError: the library is older than 13.2.
        """
        ids = attributes.MatrixLayoutAttribute
        arrays = {ids.GROUPED_ROWS_ARRAY: rows, ids.GROUPED_COLS_ARRAY: cols, ids.GROUPED_LD_ARRAY: leading_dimensions}
        made = cls.__new__(cls)
        made._create("cublasLtGroupedMatrixLayoutCreate", {ids.TYPE: data_type, ids.BATCH_COUNT: groups, **arrays})
        return made


class MatmulPreference(Descriptor[attributes.PreferenceAttribute, float]):
    """`cublasLtMatmulPreference_t`: the limits within which the heuristic chooses algorithms."""


class MatrixTransformDesc(Descriptor[attributes.MatrixTransformDescAttribute, int]):
    """`cublasLtMatrixTransformDesc_t`: the computation of a matrix transform; `scale_type` is the type of α and β."""

    def __init__(self, scale_type: DataType) -> None:
        ids = attributes.MatrixTransformDescAttribute
        self._create("cublasLtMatrixTransformDescCreate", {ids.SCALE_TYPE: scale_type})


class EmulationDesc(Descriptor[attributes.EmulationDescAttribute, int]):
    """`cublasLtEmulationDesc_t`: how FP32 or FP64 is emulated with narrower types.

    Raises:
        MissingLibraryError: the library is older than 13.1.
    """
