"""The attributes of descriptors and algorithms: their numbers, C types, accepted values and first versions.

cuBLASLt checks only the size of a value. These bindings refuse every value that the header does not define.

The C types are the header's, with one exception. The header's comments give the three GROUPED preferences as uint32_t,
but every version that has them (13.2 to 13.10) stores them in 8 bytes.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from lt_runtime.cublaslt import enums
from lt_runtime.errors import AlignmentError, ArgumentError

Enum: TypeAlias = type[enum.IntEnum | enum.IntFlag]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The values that an attribute may be set to.

    Attributes:
        allows: whether a number is in the set.
        described: the set in words, for error messages.
        kind: converts a number to a member of the enum that the values belong to, if any.
        alignment: an address must be a multiple of this number; 0 where the values are not addresses.
    """

    allows: Callable[[Any], bool]
    described: str
    kind: Callable[[int], Any] | None = None
    alignment: int = 0


class Attribute(enum.IntEnum):
    """The number of an attribute in the header, together with the C type and the accepted values of the attribute.

    A member's definition lists its number, its C type as a code of `struct`, the accepted values or the enum that they
    belong to, and the version of cuBLASLt that introduced it, major·10000 + minor·100 + patch. The version is left out
    where CUDA 12.0 has the attribute.

    Attributes:
        code: the C type.
        accepted: the values that the attribute may be set to.
        since: the first version of cuBLASLt that has the attribute; 0 for CUDA 12.0.
        size: bytes of the C type.
    """

    code: str
    accepted: Accepted
    since: int
    packer: struct.Struct
    size: int

    def __new__(cls, number: int, code: str, accepted: Accepted | Enum, since: int = 0) -> Attribute:
        """Makes a member of the enum from its definition."""
        attribute = int.__new__(cls, number)
        attribute._value_ = number
        attribute.code, attribute.since = code, since
        attribute.accepted = accepted if isinstance(accepted, Accepted) else member(accepted)
        # "=" selects standard sizes: with native packing, a float that is too large would silently become infinity.
        attribute.packer = struct.Struct(f"={code}")
        attribute.size = attribute.packer.size
        return attribute

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def pack(self, value: float) -> bytes:
        """Packs a value into the bytes that the library takes.

        Raises:
            ArgumentError: the value is not accepted, or does not fit the C type.
            AlignmentError: an address is not a multiple of the required alignment.
        """
        try:
            number = value if self.code == "f" else operator.index(value)  # type: ignore[arg-type]
            if self.accepted.allows(number):
                return self.packer.pack(number)
        except (TypeError, struct.error, OverflowError):
            pass
        c_type = "float" if self.code == "f" else f"{'u' * self.code.isupper()}int{8 * self.size}_t"
        is_misaligned = self.accepted.alignment and isinstance(value, int) and 0 <= value < 2**64
        kind, given = (AlignmentError, f"{value:#x}") if is_misaligned else (ArgumentError, repr(value))
        raise kind(f"{self} is {given}; accepted: {self.accepted.described} ({c_type})")

    def unpack(self, data: bytes) -> Any:
        """Unpacks the bytes that the library returned, into a member of the attribute's enum if it has one."""
        (number,) = self.packer.unpack(data)
        try:
            return self.accepted.kind(number) if self.accepted.kind else number
        # A number outside of the enum is -1, which means "unset", or a value that a later version added.
        except ValueError:
            return number


def alike(numbers: range, *storage: Any) -> tuple[tuple[Any, ...], ...]:
    """Definitions of several members of an `Attribute` with consecutive numbers and the same storage."""
    return tuple((number, *storage) for number in numbers)


@functools.cache
def member(kind: Enum, *others: int) -> Accepted:
    """Accepts all members of an enum and a few other numbers; of a flag enum, all combinations of its members."""
    values = frozenset((*map(int, kind.__members__.values()), *others))
    names = [f"{name} ({int(value)})" for name, value in kind.__members__.items()] + [*map(str, others)]
    listed = ", ".join(names) if len(names) <= 40 else f"{names[0]} to {names[-1]}"
    if issubclass(kind, enum.IntFlag):
        bits = functools.reduce(operator.or_, values)
        return Accepted(lambda value: not value & ~bits, f"a combination of {kind.__name__}: {listed}", kind)
    return Accepted(values.__contains__, f"one of {kind.__name__}: {listed}", kind)


def one_of(*values: enum.IntEnum | enum.IntFlag) -> Accepted:
    """Accepts only the given members of one enum."""
    listed = ", ".join(f"{value.name} ({int(value)})" for value in values)
    return Accepted(frozenset(values).__contains__, listed, type(values[0]))


def address(alignment: int) -> Accepted:
    """Accepts the null pointer, and the addresses that are multiples of `alignment`."""
    described = f"0, or an address that is a multiple of {alignment}"
    return Accepted(range(0, 2**64, alignment).__contains__, described, alignment=alignment)


def _tile(number: int) -> Any:
    from lt_runtime.cublaslt.tiles import MatmulTile  # imported late: creating the enum `MatmulTile` takes milliseconds

    return MatmulTile(number)


_R = enums.ReductionScheme
_TYPE_OR_UNSET: Final = member(enums.DataType, -1)
_TILE: Final = Accepted(lambda value: not value or enums.tile_shape(value) is not None, "one of MatmulTile", _tile)
_COUNT: Final = Accepted(lambda value: value >= 0, "0 or more")
_FLAG: Final = Accepted((0, 1).__contains__, "0 to 1")
_ANYTHING: Final = Accepted(lambda _: True, "any number")
# No preference tells the heuristic the alignment of bias and aux pointers: it reads the pointers themselves. Below 16
# bytes of alignment it chooses kernels that fault.
_VECTOR: Final = address(16)
_WORD: Final = address(4)  # address of one FP32 or int32 number, or of a block of scales
_POWER_OF_TWO: Final = Accepted(lambda value: value > 0 and not value & (value - 1), "a power of two")
_FRACTION: Final = Accepted(lambda value: value >= 0 and math.isfinite(value), "a finite number, 0 or more")
_READ_ONLY: Final = Accepted(lambda _: False, "nothing, it is read only")


class MatmulDescAttribute(Attribute):
    """`cublasLtMatmulDescAttributes_t`, prefix CUBLASLT_MATMUL_DESC_."""

    COMPUTE_TYPE = 0, "i", enums.ComputeType
    SCALE_TYPE = 1, "i", enums.DataType
    POINTER_MODE = 2, "i", enums.PointerMode
    TRANSA, TRANSB = alike(range(3, 5), "i", enums.Operation)
    TRANSC = 5, "i", one_of(enums.Operation.N)
    FILL_MODE = 6, "i", enums.FillMode
    EPILOGUE = 7, "I", enums.Epilogue
    BIAS_POINTER = 8, "Q", _VECTOR
    BIAS_BATCH_STRIDE = 10, "q", _COUNT
    EPILOGUE_AUX_POINTER = 11, "Q", _VECTOR
    EPILOGUE_AUX_LD = 12, "q", _COUNT
    EPILOGUE_AUX_BATCH_STRIDE, ALPHA_VECTOR_BATCH_STRIDE = alike(range(13, 15), "q", _COUNT)
    SM_COUNT_TARGET = 15, "i", _COUNT
    A_SCALE_POINTER, B_SCALE_POINTER, C_SCALE_POINTER, D_SCALE_POINTER = alike(range(17, 21), "Q", _WORD)
    AMAX_D_POINTER = 21, "Q", _WORD
    EPILOGUE_AUX_DATA_TYPE = 22, "i", _TYPE_OR_UNSET
    EPILOGUE_AUX_SCALE_POINTER, EPILOGUE_AUX_AMAX_POINTER = alike(range(23, 25), "Q", _WORD)
    FAST_ACCUM = 25, "b", _FLAG
    BIAS_DATA_TYPE = 26, "i", _TYPE_OR_UNSET
    A_SCALE_MODE, B_SCALE_MODE, C_SCALE_MODE, D_SCALE_MODE = alike(range(31, 35), "i", enums.MatmulMatrixScale, 120800)
    EPILOGUE_AUX_SCALE_MODE = 35, "i", enums.MatmulMatrixScale, 120800
    D_OUT_SCALE_POINTER = 36, "Q", _WORD, 120800
    D_OUT_SCALE_MODE = 37, "i", enums.MatmulMatrixScale, 120800
    EMULATION_DESCRIPTOR = 38, "Q", address(8), 130100  # cuBLASLt 12.9 and 13.0 have another attribute of this number
    ALPHA_BATCH_STRIDE, BETA_BATCH_STRIDE = alike(range(39, 41), "q", _COUNT, 130200)
    BATCH_INVARIANCE_FLAGS = 41, "I", enums.BatchInvariance, 130800


class MatrixLayoutAttribute(Attribute):
    """`cublasLtMatrixLayoutAttribute_t`, prefix CUBLASLT_MATRIX_LAYOUT_, or CUBLASLT_GROUPED_MATRIX_LAYOUT_."""

    TYPE = 0, "I", enums.DataType
    ORDER = 1, "i", enums.Order
    ROWS, COLS = alike(range(2, 4), "Q", _COUNT)
    LD = 4, "q", _COUNT
    BATCH_COUNT = 5, "i", Accepted(lambda value: value >= 1, "1 or more")
    STRIDED_BATCH_OFFSET = 6, "q", _COUNT
    PLANE_OFFSET = 7, "q", _ANYTHING
    BATCH_MODE = 8, "I", enums.BatchMode
    GROUPED_ROWS_ARRAY, GROUPED_COLS_ARRAY, GROUPED_LD_ARRAY = alike(range(9, 12), "Q", _WORD, 130200)
    GROUPED_ROWS_COLS_ARRAY_INTEGER_WIDTH = 12, "i", enums.IntegerWidth, 130200
    GROUPED_LD_ARRAY_INTEGER_WIDTH = 13, "i", enums.IntegerWidth, 130200


class MatrixTransformDescAttribute(Attribute):
    """`cublasLtMatrixTransformDescAttributes_t`, prefix CUBLASLT_MATRIX_TRANSFORM_DESC_."""

    SCALE_TYPE = 0, "i", enums.DataType
    POINTER_MODE = 1, "i", enums.PointerMode
    TRANSA, TRANSB = alike(range(2, 4), "i", enums.Operation)


class EmulationDescAttribute(Attribute):
    """`cublasLtEmulationDescAttributes_t`, prefix CUBLASLT_EMULATION_DESC_."""

    STRATEGY = 0, "i", enums.EmulationStrategy
    SPECIAL_VALUES_SUPPORT = 1, "i", enums.EmulationSpecialValues
    FIXEDPOINT_MANTISSA_CONTROL = 2, "i", enums.EmulationMantissaControl
    FIXEDPOINT_MAX_MANTISSA_BIT_COUNT = 3, "i", _COUNT
    FIXEDPOINT_MANTISSA_BIT_OFFSET = 4, "i", _ANYTHING
    FIXEDPOINT_MANTISSA_BIT_COUNT_POINTER = 5, "Q", _WORD


class PreferenceAttribute(Attribute):
    """`cublasLtMatmulPreferenceAttributes_t`, prefix CUBLASLT_MATMUL_PREF_."""

    SEARCH_MODE = 0, "I", enums.MatmulSearch
    MAX_WORKSPACE_BYTES = 1, "Q", _COUNT
    REDUCTION_SCHEME_MASK = 3, "I", enums.ReductionScheme
    MIN_ALIGNMENT_A_BYTES, MIN_ALIGNMENT_B_BYTES = alike(range(5, 7), "I", _POWER_OF_TWO)
    MIN_ALIGNMENT_C_BYTES, MIN_ALIGNMENT_D_BYTES = alike(range(7, 9), "I", _POWER_OF_TWO)
    MAX_WAVES_COUNT = 9, "f", _FRACTION
    IMPL_MASK = 12, "Q", _COUNT
    GROUPED_AVERAGE_REDUCTION_DIM, GROUPED_DESC_D_AVERAGE_ROWS = alike(range(13, 15), "Q", _COUNT, 130200)
    GROUPED_DESC_D_AVERAGE_COLS = 15, "Q", _COUNT, 130200


class AlgoConfigAttribute(Attribute):
    """`cublasLtMatmulAlgoConfigAttributes_t`, prefix CUBLASLT_ALGO_CONFIG_."""

    ID = 0, "i", Accepted(lambda _: False, "nothing, it is fixed by algo_init")
    TILE_ID = 1, "I", _TILE
    SPLITK_NUM = 2, "i", _COUNT
    REDUCTION_SCHEME = 3, "I", one_of(_R.NONE, _R.INPLACE, _R.COMPUTE_TYPE, _R.OUTPUT_TYPE)
    CTA_SWIZZLING = 4, "I", _FLAG
    CUSTOM_OPTION = 5, "I", _COUNT
    STAGES_ID = 6, "I", enums.MatmulStages
    INNER_SHAPE_ID = 7, "H", enums.MatmulInnerShape
    CLUSTER_SHAPE_ID = 8, "H", enums.ClusterShape


class AlgoCapAttribute(Attribute):
    """`cublasLtMatmulAlgoCapAttributes_t`, prefix CUBLASLT_ALGO_CAP_."""

    SPLITK_SUPPORT = 0, "i", _READ_ONLY
    REDUCTION_SCHEME_MASK = 1, "I", enums.ReductionScheme
    CTA_SWIZZLING_SUPPORT = 2, "I", _READ_ONLY
    STRIDED_BATCH_SUPPORT, OUT_OF_PLACE_RESULT_SUPPORT, UPLO_SUPPORT = alike(range(3, 6), "i", _READ_ONLY)
    TILE_IDS = 6, "I", _TILE
    CUSTOM_OPTION_MAX = 7, "i", _READ_ONLY
    CUSTOM_MEMORY_ORDER = 10, "i", _READ_ONLY
    POINTER_MODE_MASK = 11, "I", enums.PointerModeMask
    EPILOGUE_MASK = 12, "I", _READ_ONLY
    STAGES_IDS = 13, "I", enums.MatmulStages
    LD_NEGATIVE = 14, "i", _READ_ONLY
    NUMERICAL_IMPL_FLAGS = 15, "Q", enums.NumericalImplFlags
    MIN_ALIGNMENT_A_BYTES, MIN_ALIGNMENT_B_BYTES = alike(range(16, 18), "I", _READ_ONLY)
    MIN_ALIGNMENT_C_BYTES, MIN_ALIGNMENT_D_BYTES = alike(range(18, 20), "I", _READ_ONLY)
    POINTER_ARRAY_BATCH_SUPPORT, FLOATING_POINT_EMULATION_SUPPORT = alike(range(21, 23), "i", _READ_ONLY)
    POINTER_ARRAY_GROUPED_SUPPORT = 23, "i", _READ_ONLY, 130200


ARRAYS: Final = frozenset((AlgoCapAttribute.TILE_IDS, AlgoCapAttribute.STAGES_IDS))
"""The capabilities whose value is an array."""
