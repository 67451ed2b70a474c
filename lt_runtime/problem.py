"""What is asked of a linear layer: types, activations, layouts, dropout. Pure data, no GPU, no library."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import ml_dtypes
import numpy as np

from lt_runtime.errors import ArgumentError, DTypeError
from lt_runtime.layout import Layout


class DType(enum.Enum):
    """Element types of operands. Products are accumulated in FP32 whatever the type."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return 4 if self is DType.FLOAT32 else 2

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy type of the same name (`ml_dtypes.bfloat16` for BF16)."""
        return _NUMPY_TYPES[self]

    @classmethod
    def parse(cls, operand: str, dtype: object) -> DType:
        """The member for a type's name or NumPy type; `DTypeError` naming `operand` if there is none."""
        name = getattr(dtype, "name", None) or str(dtype)
        try:
            return cls(name)
        except ValueError:
            accepted = ", ".join(member.value for member in cls)
            raise DTypeError(f"{operand} has type {name}; accepted are {accepted}") from None


_NUMPY_TYPES: Final[Mapping[DType, np.dtype[Any]]] = {
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}


class Compute(enum.Enum):
    """How FP32 products are formed: in full FP32, or on tensor cores with operands rounded to TF32."""

    FLOAT32 = "float32"
    TF32 = "tf32"

    @classmethod
    def parse(cls, compute: str, dtype: DType) -> Compute:
        """The member named `compute`; `ArgumentError` if unknown, or TF32 with operands that are not FP32."""
        try:
            member = cls(compute)
        except ValueError:
            raise ArgumentError(f"compute is {compute!r}; accepted are 'float32' and 'tf32'") from None
        if member is Compute.TF32 and dtype is not DType.FLOAT32:
            raise ArgumentError(f"compute='tf32' needs float32 operands, not {dtype.value}")
        return member


class Saved(enum.Enum):
    """What forward keeps for backward to take the activation's derivative from."""

    NOTHING = "nothing"
    PREACTIVATION = "preactivation"
    OUTPUT = "output"


ACTIVATIONS: Final = ("none", "relu", "leaky_relu", "sigmoid", "tanh", "gelu", "gelu_erf", "silu")
"""Names of the activations: `gelu` is the tanh form (as in cuBLASLt and GPT-2), `gelu_erf` the exact one."""


@dataclass(frozen=True, slots=True)
class Activation:
    """An elementwise function between a layer's matrix product and its output.

    Attributes:
        name: one of `ACTIVATIONS`.
        negative_slope: slope of `leaky_relu` below zero; 0.01 for every other activation, where it has no meaning.

    Raises:
        ArgumentError: unknown name, or a slope that is not finite.
    """

    name: str = "none"
    negative_slope: float = 0.01

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise ArgumentError(f"activation is {self.name!r}; accepted are {', '.join(ACTIVATIONS)}")
        if not math.isfinite(self.negative_slope):
            raise ArgumentError(f"negative_slope is {self.negative_slope}; it must be finite")
        if self.name != "leaky_relu":
            object.__setattr__(self, "negative_slope", 0.01)


@dataclass(frozen=True, slots=True)
class Philox:
    """Where a dropout mask's random numbers come from: Philox4x32-10, counter-based and stateless.

    The mask of an M×N array depends on these three and on the element's row-major index alone: not on type,
    layout, tiling or GPU. Nothing is stored; backward computes the mask again.

    Attributes:
        seed: 64-bit key.
        layer: 32-bit id that separates the layers of a model.
        step: 32-bit training step: an int, or an array of one uint32 that lives where the operands live, so that
            a captured graph advances it between replays.

    Raises:
        ArgumentError: no integer, or one out of its range.
    """

    seed: int = 0
    layer: int = 0
    step: Any = field(default=0, compare=False)

    def __post_init__(self) -> None:
        _check_range("seed", self.seed, 64)
        _check_range("layer", self.layer, 32)
        if isinstance(self.step, int):
            _check_range("step", self.step, 32)


def _check_range(name: str, value: int, bits: int) -> None:
    if not (hasattr(value, "__index__") and 0 <= value < 1 << bits):
        raise ArgumentError(f"{name} is {value}; it must be an integer in [0, 2**{bits})")


def keep_threshold(p: float) -> int:
    """The 16-bit lane value below which dropout with probability `p` keeps an element: round((1 - p)·65536).

    At least 1, so that the scale stays finite.

    Raises:
        ArgumentError: `p` is outside [0, 1).
    """
    if not 0.0 <= p < 1.0:
        raise ArgumentError(f"dropout probability is {p}; it must be in [0, 1)")
    return max(1, round((1.0 - p) * 65536))


def keep_scale(threshold: int) -> float:
    """What a kept element is multiplied by: 65536 / threshold, so that the expectation is exact; rounded to FP32."""
    return float(np.float32(65536 / threshold))


@dataclass(frozen=True, slots=True)
class Spec:
    """How a matrix lies in memory: its layout, and the largest power of two (at most 256) dividing its address."""

    layout: Layout
    alignment: int = 256


@dataclass(frozen=True, slots=True)
class MatmulProblem:
    """One matrix product D[M,N] = α·A[M,K]·B[K,N] + β·D, with FP32 accumulation.

    Attributes:
        epilogue: what is applied to the product before it is stored: "none", "bias", "relu_bias" or "gelu_bias"
            ("relu" and "gelu" without a bias); a bias has N elements.
        accumulate: β is 1 rather than 0.
    """

    dtype: DType
    compute: Compute
    a: Spec
    b: Spec
    d: Spec
    epilogue: str = "none"
    accumulate: bool = False

    @property
    def m(self) -> int:
        """Rows of D."""
        return self.d.layout.rows

    @property
    def n(self) -> int:
        """Columns of D."""
        return self.d.layout.cols

    @property
    def k(self) -> int:
        """Columns of A and rows of B."""
        return self.a.layout.cols


@dataclass(frozen=True, slots=True)
class ForwardProblem:
    """y[M,N] = dropout(act(x[M,K] · w[N,K]ᵀ + bias[N])).

    Attributes:
        preactivation: where the pre-activation is to be written; None if it is not kept.
        bias: alignment of the bias vector's address; None without a bias.
    """

    dtype: DType
    compute: Compute
    activation: Activation
    x: Spec
    w: Spec
    y: Spec
    bias: int | None = None
    preactivation: Spec | None = None
    dropout: bool = False
    propagate_nan: bool = False


@dataclass(frozen=True, slots=True)
class BackwardProblem:
    """Gradients of a `ForwardProblem`: which are wanted, and how they and dy lie in memory.

    Attributes:
        saved: the saved tensor's meaning; `saved_spec` says how it lies, None if nothing was saved.
        dx: None if the input's gradient is not wanted; likewise `dw`.
        db: whether the bias gradient is wanted.
        dz: where the gradient before the activation is to be written; None leaves it to scratch memory.
        accumulate: dw and db are added to what their buffers hold.
    """

    dtype: DType
    compute: Compute
    activation: Activation
    x: Spec
    w: Spec
    dy: Spec
    saved: Saved
    saved_spec: Spec | None
    dx: Spec | None
    dw: Spec | None
    db: bool
    dz: Spec | None = None
    dropout: bool = False
    accumulate: bool = False
