"""Attributes of descriptors and algorithms: number in the header, C type, accepted values, first version.

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
from typing import Any, Final

from lt_runtime.cublaslt import enums
from lt_runtime.errors import AlignmentError, ArgumentError, LtError

MAX_ADDRESS: Final = 2**64 - 1
# "=" rather than native: a native float turns a number that is too large into infinity.
_PACKERS: Final = {code: struct.Struct(f"={code}") for code in "bHiIqQf"}


@dataclass(frozen=True, slots=True)
class Accepted:
    """A set of values.

    Attributes:
        allows: whether a number is in the set.
        described: the set in words, for error messages.
        kind: the enum that the values belong to, if any.
        alignment: an address must be a multiple of this number; 0 where the values are not addresses.
    """

    allows: Callable[[Any], bool]
    described: str
    kind: type[enum.IntEnum | enum.IntFlag] | None = None
    alignment: int = 0


class Attribute(enum.IntEnum):
    """The number of an attribute in the header, together with its storage.

    A member's definition lists its number, its C type as a code of `struct`, the accepted values (or a function that
    returns them), and the version of cuBLASLt that introduced it, major·10000 + minor·100 + patch. The version is left
    out where CUDA 12.0 has the attribute.

    Attributes:
        code: the C type.
        size: bytes of the C type.
        since: the first version of cuBLASLt that has the attribute; 0 for CUDA 12.0.
    """

    code: str
    size: int
    since: int
    packer: struct.Struct
    values: Accepted | Callable[[], Accepted]

    def __new__(cls, number: int, code: str, values: Accepted | Callable[[], Accepted], since: int = 0) -> Attribute:
        """Makes a member."""
        attribute = int.__new__(cls, number)
        attribute._value_ = number
        attribute.code, attribute.values, attribute.since = code, values, since
        attribute.packer, attribute.size = _PACKERS[code], _PACKERS[code].size
        return attribute

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    @functools.cached_property
    def accepted(self) -> Accepted:
        """The values that the attribute may be set to."""
        return self.values if isinstance(self.values, Accepted) else self.values()

    def pack(self, value: float) -> bytes:
        """The bytes to hand to the library.

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
        raise self._refusal(value)

    def unpack(self, data: bytes) -> Any:
        """The value that the library returned, as a member of its enum where it has one."""
        (number,) = self.packer.unpack(data)
        try:
            return self.accepted.kind(number) if self.accepted.kind else number
        except ValueError:  # -1, which means "unset", or a value that a later version added
            return number

    def _refusal(self, value: float) -> LtError:
        c_type = "float" if self.code == "f" else f"{'u' * self.code.isupper()}int{8 * self.size}_t"
        accepted = f"accepted: {self.accepted.described} ({c_type})"
        if not self.accepted.alignment or not isinstance(value, int):
            return ArgumentError(f"{self} is {value!r}; {accepted}")
        kind = AlignmentError if 0 <= value <= MAX_ADDRESS else ArgumentError
        return kind(f"{self} is {value:#x}; {accepted}")


def alike(numbers: range, *storage: Any) -> tuple[tuple[Any, ...], ...]:
    """Definitions of several members of an `Attribute` with consecutive numbers and the same storage."""
    return tuple((number, *storage) for number in numbers)


def member(kind: type[enum.IntEnum], *others: int) -> Accepted:
    """All members of an enum, and a few other numbers."""
    values = frozenset((*map(int, kind), *others))
    names = [f"{name} ({int(value)})" for name, value in kind.__members__.items()]
    listed = ", ".join((*names, *map(str, others))) if len(names) <= 40 else f"{names[0]} to {names[-1]}"
    return Accepted(values.__contains__, f"one of {kind.__name__}: {listed}", kind)


def mask(kind: type[enum.IntFlag]) -> Accepted:
    """Any combination of the members of a flag enum."""
    bits = functools.reduce(operator.or_, map(int, kind.__members__.values()))
    names = ", ".join(f"{name} ({int(value)})" for name, value in kind.__members__.items())
    return Accepted(lambda value: not value & ~bits, f"a combination of {kind.__name__}: {names}", kind)


def at_least(least: int) -> Accepted:
    """The numbers from `least` on."""
    return Accepted(lambda value: bool(value >= least), f"{least} or more")


def between(least: int, most: int) -> Accepted:
    """The numbers from `least` to `most`, both included."""
    return Accepted(lambda value: least <= value <= most, f"{least} to {most}")


def one_of(*values: enum.IntEnum | enum.IntFlag) -> Accepted:
    """Only these members of one enum."""
    listed = ", ".join(f"{value.name} ({int(value)})" for value in values)
    return Accepted(frozenset(values).__contains__, listed, type(values[0]))


def nothing(reason: str) -> Accepted:
    """No value: the attribute can only be read."""
    return Accepted(lambda _: False, f"nothing, {reason}")


def address(alignment: int) -> Accepted:
    """The null pointer, and the addresses that are multiples of `alignment`."""
    return Accepted(
        lambda value: 0 <= value <= MAX_ADDRESS and not value % alignment,
        f"0, or an address that is a multiple of {alignment}",
        alignment=alignment,
    )


POWER_OF_TWO: Final = Accepted(lambda value: value > 0 and not value & (value - 1), "a power of two")
FRACTION: Final = Accepted(lambda value: value >= 0 and math.isfinite(value), "a finite number, 0 or more")
ANYTHING: Final = Accepted(lambda _: True, "any number")
"""Every value that the C type holds."""


_R = enums.ReductionScheme
_TYPE: Final = member(enums.DataType)
_TYPE_OR_UNSET: Final = member(enums.DataType, -1)
_OPERATION: Final = member(enums.Operation)
_POINTER_MODE: Final = member(enums.PointerMode)
_SCALE_MODE: Final = member(enums.MatmulMatrixScale)
_STAGES: Final = member(enums.MatmulStages)
_WIDTH: Final = member(enums.IntegerWidth)
_COUNT: Final = at_least(0)
# The heuristic does not know the alignment of bias and aux pointers from any preference: it reads the pointers. Below
# 16 bytes of alignment it chooses kernels that fault.
_VECTOR: Final = address(16)
_WORD: Final = address(4)  # address of one FP32 or int32 number, or of a block of scales
_READ_ONLY: Final = nothing("it is read only")


def _tile() -> Accepted:
    from lt_runtime.cublaslt.tiles import MatmulTile  # imported late: making the enum takes milliseconds

    return member(MatmulTile)


class MatmulDescAttribute(Attribute):
    """`cublasLtMatmulDescAttributes_t`, prefix CUBLASLT_MATMUL_DESC_."""

    COMPUTE_TYPE = 0, "i", member(enums.ComputeType)
    SCALE_TYPE = 1, "i", _TYPE
    POINTER_MODE = 2, "i", _POINTER_MODE
    TRANSA, TRANSB = alike(range(3, 5), "i", _OPERATION)
    TRANSC = 5, "i", one_of(enums.Operation.N)
    FILL_MODE = 6, "i", member(enums.FillMode)
    EPILOGUE = 7, "I", member(enums.Epilogue)
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
    FAST_ACCUM = 25, "b", between(0, 1)
    BIAS_DATA_TYPE = 26, "i", _TYPE_OR_UNSET
    A_SCALE_MODE, B_SCALE_MODE, C_SCALE_MODE, D_SCALE_MODE = alike(range(31, 35), "i", _SCALE_MODE, 120800)
    EPILOGUE_AUX_SCALE_MODE = 35, "i", _SCALE_MODE, 120800
    D_OUT_SCALE_POINTER = 36, "Q", _WORD, 120800
    D_OUT_SCALE_MODE = 37, "i", _SCALE_MODE, 120800
    EMULATION_DESCRIPTOR = 38, "Q", address(8), 130100  # 12.9 and 13.0 use this number for another attribute
    ALPHA_BATCH_STRIDE, BETA_BATCH_STRIDE = alike(range(39, 41), "q", _COUNT, 130200)
    BATCH_INVARIANCE_FLAGS = 41, "I", member(enums.BatchInvariance), 130800


class MatrixLayoutAttribute(Attribute):
    """`cublasLtMatrixLayoutAttribute_t`, prefix CUBLASLT_MATRIX_LAYOUT_, or CUBLASLT_GROUPED_MATRIX_LAYOUT_."""

    TYPE = 0, "I", _TYPE
    ORDER = 1, "i", member(enums.Order)
    ROWS, COLS = alike(range(2, 4), "Q", _COUNT)
    LD = 4, "q", _COUNT
    BATCH_COUNT = 5, "i", at_least(1)
    STRIDED_BATCH_OFFSET = 6, "q", _COUNT
    PLANE_OFFSET = 7, "q", ANYTHING
    BATCH_MODE = 8, "I", member(enums.BatchMode)
    GROUPED_ROWS_ARRAY, GROUPED_COLS_ARRAY, GROUPED_LD_ARRAY = alike(range(9, 12), "Q", _WORD, 130200)
    GROUPED_ROWS_COLS_ARRAY_INTEGER_WIDTH = 12, "i", _WIDTH, 130200
    GROUPED_LD_ARRAY_INTEGER_WIDTH = 13, "i", _WIDTH, 130200


class MatrixTransformDescAttribute(Attribute):
    """`cublasLtMatrixTransformDescAttributes_t`, prefix CUBLASLT_MATRIX_TRANSFORM_DESC_."""

    SCALE_TYPE = 0, "i", _TYPE
    POINTER_MODE = 1, "i", _POINTER_MODE
    TRANSA, TRANSB = alike(range(2, 4), "i", _OPERATION)


class EmulationDescAttribute(Attribute):
    """`cublasLtEmulationDescAttributes_t`, prefix CUBLASLT_EMULATION_DESC_."""

    STRATEGY = 0, "i", member(enums.EmulationStrategy)
    SPECIAL_VALUES_SUPPORT = 1, "i", mask(enums.EmulationSpecialValues)
    FIXEDPOINT_MANTISSA_CONTROL = 2, "i", member(enums.EmulationMantissaControl)
    FIXEDPOINT_MAX_MANTISSA_BIT_COUNT = 3, "i", _COUNT
    FIXEDPOINT_MANTISSA_BIT_OFFSET = 4, "i", ANYTHING
    FIXEDPOINT_MANTISSA_BIT_COUNT_POINTER = 5, "Q", _WORD


class PreferenceAttribute(Attribute):
    """`cublasLtMatmulPreferenceAttributes_t`, prefix CUBLASLT_MATMUL_PREF_."""

    SEARCH_MODE = 0, "I", member(enums.MatmulSearch)
    MAX_WORKSPACE_BYTES = 1, "Q", _COUNT
    REDUCTION_SCHEME_MASK = 3, "I", mask(enums.ReductionScheme)
    MIN_ALIGNMENT_A_BYTES, MIN_ALIGNMENT_B_BYTES = alike(range(5, 7), "I", POWER_OF_TWO)
    MIN_ALIGNMENT_C_BYTES, MIN_ALIGNMENT_D_BYTES = alike(range(7, 9), "I", POWER_OF_TWO)
    MAX_WAVES_COUNT = 9, "f", FRACTION
    IMPL_MASK = 12, "Q", _COUNT
    GROUPED_AVERAGE_REDUCTION_DIM, GROUPED_DESC_D_AVERAGE_ROWS = alike(range(13, 15), "Q", _COUNT, 130200)
    GROUPED_DESC_D_AVERAGE_COLS = 15, "Q", _COUNT, 130200


class AlgoConfigAttribute(Attribute):
    """`cublasLtMatmulAlgoConfigAttributes_t`, prefix CUBLASLT_ALGO_CONFIG_."""

    ID = 0, "i", nothing("it is fixed by algo_init")
    TILE_ID = 1, "I", _tile
    SPLITK_NUM = 2, "i", _COUNT
    REDUCTION_SCHEME = 3, "I", one_of(_R.NONE, _R.INPLACE, _R.COMPUTE_TYPE, _R.OUTPUT_TYPE)
    CTA_SWIZZLING = 4, "I", between(0, 1)
    CUSTOM_OPTION = 5, "I", _COUNT
    STAGES_ID = 6, "I", _STAGES
    INNER_SHAPE_ID = 7, "H", member(enums.MatmulInnerShape)
    CLUSTER_SHAPE_ID = 8, "H", member(enums.ClusterShape)


class AlgoCapAttribute(Attribute):
    """`cublasLtMatmulAlgoCapAttributes_t`, prefix CUBLASLT_ALGO_CAP_."""

    SPLITK_SUPPORT = 0, "i", _READ_ONLY
    REDUCTION_SCHEME_MASK = 1, "I", mask(enums.ReductionScheme)
    CTA_SWIZZLING_SUPPORT = 2, "I", _READ_ONLY
    STRIDED_BATCH_SUPPORT, OUT_OF_PLACE_RESULT_SUPPORT, UPLO_SUPPORT = alike(range(3, 6), "i", _READ_ONLY)
    TILE_IDS = 6, "I", _tile
    CUSTOM_OPTION_MAX = 7, "i", _READ_ONLY
    CUSTOM_MEMORY_ORDER = 10, "i", _READ_ONLY
    POINTER_MODE_MASK = 11, "I", mask(enums.PointerModeMask)
    EPILOGUE_MASK = 12, "I", _READ_ONLY
    STAGES_IDS = 13, "I", _STAGES
    LD_NEGATIVE = 14, "i", _READ_ONLY
    NUMERICAL_IMPL_FLAGS = 15, "Q", mask(enums.NumericalImplFlags)
    MIN_ALIGNMENT_A_BYTES, MIN_ALIGNMENT_B_BYTES = alike(range(16, 18), "I", _READ_ONLY)
    MIN_ALIGNMENT_C_BYTES, MIN_ALIGNMENT_D_BYTES = alike(range(18, 20), "I", _READ_ONLY)
    POINTER_ARRAY_BATCH_SUPPORT, FLOATING_POINT_EMULATION_SUPPORT = alike(range(21, 23), "i", _READ_ONLY)
    POINTER_ARRAY_GROUPED_SUPPORT = 23, "i", _READ_ONLY, 130200


ARRAYS: Final = frozenset((AlgoCapAttribute.TILE_IDS, AlgoCapAttribute.STAGES_IDS))
"""The capabilities that have several """
