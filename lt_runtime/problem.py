"""Problems: types, activations, layouts and dropout of products and layers, as frozen data without a GPU."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, Protocol, TypeAlias, get_args

import ml_dtypes
import numpy as np

from lt_runtime.arguments import integer, number, one_of, shown
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import ArgumentError, DTypeError, KindError
from lt_runtime.layout import Layout

ActivationName: TypeAlias = Literal["none", "relu", "leaky_relu", "sigmoid", "tanh", "gelu", "gelu_erf", "silu"]
ComputeName: TypeAlias = Literal["float32", "tf32"]
DTypeName: TypeAlias = Literal["float32", "float16", "bfloat16"]


class TorchDType(Protocol):
    """Lets type checkers accept a `torch.dtype` without PyTorch: names attributes that only it has."""

    @property
    def is_floating_point(self) -> bool:
        """Whether the type's values are floating-point numbers."""

    @property
    def is_complex(self) -> bool:
        """Whether the type's values are complex numbers."""


class DType(enum.Enum):
    """Element types of operands. Products are accumulated in FP32, those of FP64 in FP64."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"

    @property
    def is_float8(self) -> bool:
        """Whether the type is one of the 8-bit types, which only matrix products and casts accept."""
        return self in FLOAT8

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return self.numpy.itemsize

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy type of the same name (`ml_dtypes.bfloat16` for BF16)."""
        return _NUMPY_TYPES[self]

    @classmethod
    def parse(cls, operand: str, dtype: object, *, fp64: bool = False, fp8: bool = False) -> DType:
        """Converts an element type, in any form that callers may use, to the enum's member.

        Args:
            operand: name of the operand or option, for the error message.
            dtype: a name such as "bfloat16"; a type of NumPy, `ml_dtypes` or PyTorch; or a `DType`.
            fp64: whether FP64 is accepted. Only plain matrix products compute in it.
            fp8: whether FP8 is accepted. Only matrix products read it.

        Raises:
            DTypeError: the type is not accepted. The message names the operand, the type and the accepted types.
        """
        name = type_name(dtype)
        member = _BY_NAME.get(name)
        if member is None or (member is cls.FLOAT64 and not fp64) or (member.is_float8 and not fp8):
            accepted = [each for each in cls if (fp64 or each is not cls.FLOAT64) and (fp8 or not each.is_float8)]
            raise DTypeError(f"{operand} has type {name}; accepted are {', '.join(each.value for each in accepted)}")
        return member


FLOAT8: Final = frozenset({DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2})
"""E4M3 has 3 bits of mantissa and reaches 448; E5M2 has 2 bits and reaches 57344."""

DTypeLike: TypeAlias = DTypeName | DType | np.dtype[Any] | type[Any] | TorchDType
"""An element type in the forms that public functions accept."""

_BY_NAME: Final[Mapping[str, DType]] = {member.value: member for member in DType}


def type_name(dtype: object) -> str:
    """The name of an element type, such as "bfloat16", from whichever library it comes."""
    if isinstance(dtype, DType):
        return dtype.value
    name = getattr(dtype, "name", None)  # NumPy's dtypes have an attribute `name`
    if isinstance(name, str):
        return name
    if isinstance(dtype, type):  # scalar types, such as numpy.float16 and ml_dtypes.bfloat16, are classes
        return dtype.__name__
    return dtype if isinstance(dtype, str) else shown(dtype).removeprefix("torch.")


_NUMPY_TYPES: Final[Mapping[DType, np.dtype[Any]]] = {
    member: np.dtype(getattr(ml_dtypes, name, name)) for name, member in _BY_NAME.items()
}


class Compute(enum.Enum):
    """How products are formed: in FP32, on tensor cores with FP32 operands rounded to TF32, or in FP64."""

    FLOAT32 = "float32"
    TF32 = "tf32"
    FLOAT64 = "float64"

    @classmethod
    def parse(cls, compute: str, dtype: DType) -> Compute:
        """The member named `compute`; `ArgumentError` if it is unknown, or TF32 with operands that are not FP32.

        Products of FP64 operands are always computed in FP64; "float32" is accepted for them.
        """
        one_of("compute", compute, ("float32", "tf32"))
        if compute == "tf32" and dtype is not DType.FLOAT32:
            raise ArgumentError(f"compute='tf32' needs float32 operands, not {dtype.value}")
        return cls.FLOAT64 if dtype is DType.FLOAT64 else cls(compute)


class Saved(enum.Enum):
    """Kind of the tensor that forward keeps for backward, which computes the activation's derivative from it.

    A mask has one bit for each element, as cuBLASLt writes it: set where ReLU's pre-activation is positive, along rows
    that are a multiple of 128 bits apart. At exactly 0, where ReLU has no derivative, the bit may be set (cuBLASLt 13.1
    sets it); the derivative that is computed from an output of 0 is 0.
    """

    NOTHING = "nothing"
    PREACTIVATION = "preactivation"
    OUTPUT = "output"
    MASK = "mask"


ACTIVATIONS: Final[tuple[ActivationName, ...]] = get_args(ActivationName)
"""Names of the activations.

`gelu` is GELU's tanh form, as in cuBLASLt and GPT-2: z/2 · (1 + tanh(√(2/π) · (z + 0.044715 z³))). `gelu_erf` is the
exact form, as PyTorch's default: z/2 · (1 + erf(z/√2)).
"""


@dataclass(frozen=True, slots=True)
class Activation:
    """An elementwise function between a layer's matrix product and its output.

    Attributes:
        name: one of `ACTIVATIONS`. "gelu" is GELU's tanh form, as in GPT-2; "gelu_erf" is the exact form.
        negative_slope: slope of `leaky_relu` below zero; 0.01 for every other activation, where it has no meaning.

    Raises:
        ArgumentError: unknown name, or a slope that is not finite.
    """

    name: ActivationName = "none"
    negative_slope: float = 0.01

    def __post_init__(self) -> None:
        one_of("activation", self.name, ACTIVATIONS)
        slope = number("negative_slope", self.negative_slope)
        if not math.isfinite(slope):
            raise ArgumentError(f"negative_slope is {slope}; it must be finite")
        object.__setattr__(self, "negative_slope", slope if self.name == "leaky_relu" else 0.01)

    @classmethod
    def of(cls, activation: ActivationName | Activation, negative_slope: float = 0.01) -> Activation:
        """Makes an `Activation` from a name and a slope, or returns the given one. Raises as `Activation(...)`."""
        if isinstance(activation, Activation):
            # Raises if the argument `negative_slope` is not finite, although `activation` has a slope of its own.
            cls(negative_slope=negative_slope)
            return activation
        return cls(activation, negative_slope)


Chosen: TypeAlias = ActivationName | Activation | Mapping[str, Any]
"""An activation in the forms that callers may use: a name, an `Activation`, or a dict of its fields (from JSON)."""


def activation_of(name: str, value: Chosen) -> Activation:
    """Converts a caller's argument to an `Activation`; `name` is the argument's name in error messages.

    Raises:
        KindError: the argument has another type.
        ArgumentError: the activation is unknown, or its slope is not finite.
    """
    if isinstance(value, Mapping) and value.keys() == {"name", "negative_slope"}:
        return Activation(**value)
    return value if isinstance(value, Activation) else Activation(one_of(name, value, ACTIVATIONS))


@dataclass(frozen=True, slots=True)
class Philox:
    """Source of a dropout mask's random numbers: Philox4x32-10, counter-based and stateless.

    The mask of an M×N array depends on seed, layer, step and the element's row-major index, and not on type, layout,
    tiling or GPU. Nothing is stored; backward computes the mask again.

    Attributes:
        seed: 64-bit key.
        layer: 32-bit id that separates the layers of a model.
        step: 32-bit training step: an int, or an array of one uint32 that lives where the operands live, so that
            a captured graph advances it between replays.

    Raises:
        ArgumentError: a value is no integer, or is out of its range.
    """

    seed: int = 0
    layer: int = 0
    step: Any = field(default=0, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", _of_bits("seed", self.seed, 64))
        object.__setattr__(self, "layer", _of_bits("layer", self.layer, 32))
        if isinstance(self.step, (int, np.generic)) or not _is_array(self.step):
            object.__setattr__(self, "step", _of_bits("step", self.step, 32))


_ARRAY_PROTOCOLS: Final = ("__array_interface__", "__cuda_array_interface__", "__dlpack__")


def _is_array(step: Any) -> bool:
    """Whether an object has an array protocol. The class is asked first, as a tensor makes the protocol in 10 µs."""
    return any(hasattr(owner, each) for owner in (type(step), step) for each in _ARRAY_PROTOCOLS)


def _of_bits(name: str, value: object, bits: int) -> int:
    checked = value if type(value) is int else integer(name, value)
    if not 0 <= checked < 1 << bits:
        raise ArgumentError(f"{name} is {shown(checked)}; it must be an integer in [0, 2**{bits})")
    return checked


def keep_threshold(p: float, name: str = "dropout probability") -> int:
    """The 16-bit lane value below which dropout with probability `p` keeps an element: round((1 - p)·65536).

    The probability is thus rounded to a multiple of 2^-16. The threshold is at least 1, so that the scale stays finite.

    Raises:
        ArgumentError: `p` is outside [0, 1), or it is positive and would be rounded to 0.
    """
    if type(p) is not float:
        p = number(name, p)
    if not 0.0 <= p < 1.0:
        raise ArgumentError(f"{name} is {p}; it must be in [0, 1)")
    threshold = max(1, round((1.0 - p) * 65536))
    if threshold == 65536 and p > 0.0:
        found = f"{name} is {p}, which is rounded to 0, as probabilities are multiples of 2^-16"
        raise ArgumentError(f"{found}; accepted are 0 and all above 2^-17 (7.63e-06)")
    return threshold


def probability(name: str, p: Any) -> float:
    """Checks a dropout probability, and returns it as a float; raises as `keep_threshold`."""
    keep_threshold(p, name)
    return float(p)


def check_dropout(p: float, rng: Philox | None) -> Philox | None:
    """Checks a dropout probability and the source of its random numbers; returns the source, or None if `p` is 0.

    Raises:
        ArgumentError: see `keep_threshold`; or `p` is above 0 and there is no source.
    """
    keep_threshold(p)
    if p == 0:
        return None
    if not isinstance(rng, Philox):
        kind = ArgumentError if rng is None else KindError
        raise kind(f"dropout is {p} but rng is {shown(rng)}; pass rng=lt.Philox(seed, layer, step)")
    return rng


def keep_scale(threshold: int) -> float:
    """The factor of a kept element: 65536 / threshold, which keeps the expectation exact; rounded to FP32."""
    return float(np.float32(65536 / threshold))


LATER: Final = MappingProxyType({"is_later": True})
"""Metadata of a field that was added to a problem class later: plan-cache keys leave the field out while it has its
default, so that older entries of the plan cache keep their keys.
"""

ALIGNMENT: Final = 256
"""Bytes: allocations begin at multiples of this, and no plan depends on a better alignment."""


@dataclass(frozen=True, slots=True)
class Spec:
    """Layout and alignment of a matrix, or of a batch of matrices, in memory.

    Attributes:
        layout: layout of each matrix.
        alignment: the largest power of two, at most 256, that divides the address.
        batch_stride: elements from one matrix to the next; 0 if the batch repeats one matrix.
    """

    layout: Layout
    alignment: int = ALIGNMENT
    batch_stride: int = 0

    @property
    def transposed(self) -> Spec:
        """The spec of the transposed matrix, which is the same memory."""
        return Spec(self.layout.transposed, self.alignment, self.batch_stride)


SCALES: Final = ("scale_a", "scale_b", "scale_d", "amax_d")
"""Names of the FP32 numbers on the device that an FP8 product may have: D = scale_d · epilogue(α · scale_a · scale_b ·
A·B + β·C), and amax_d, which is written, is the largest magnitude of D before scale_d. With `scale_vectors`, scale_a
has a number for each row of A and scale_b one for each column of B."""


def bias_type(operand: DType, result: DType) -> DType:
    """The type of a product's bias: the result's, or BF16 if operands are FP8 and the result does not have 16 bits."""
    return DType.BFLOAT16 if operand.is_float8 and result.itemsize != 2 else result


def aux_type(result: DType) -> DType:
    """The type of a product's C and of GELU's auxiliary matrix: the result's, or BF16 if the result is FP8."""
    return DType.BFLOAT16 if result.is_float8 else result


@dataclass(frozen=True, slots=True)
class MatmulProblem:
    """A batch of matrix products D[M,N] = epilogue(α·A[M,K]·B[K,N] + β·C[M,N]).

    Attributes:
        dtype: type of A and B. d_dtype: type of C, D, bias and auxiliary matrix, but see `bias_dtype`, `aux_dtype`.
        c: None if β is 0.
        batch: number of products.
        bias_alignment: alignment of the epilogue's bias or bias gradient.
        aux: spec of the epilogue's auxiliary matrix; a ReLU mask's layout counts bits.
        device_scalars: α and β are addresses on the device, read when the product runs.
        no_split_k: an algorithm that splits K, and so takes a second kernel, is used only if cuBLASLt offers no other.
        b_dtype: type of B, if A is FP8 and B of the other FP8 type; None otherwise.
        scales: names of the FP32 numbers on the device that an FP8 product has, in the order of `SCALES`.
        fast_accumulation: whether an FP8 product may be summed with fewer bits than FP32 has.
        scale_vectors: whether scale_a and scale_b, which the FP8 product then has, are vectors of M and N numbers.
    """

    dtype: DType
    d_dtype: DType
    compute: Compute
    a: Spec
    b: Spec
    d: Spec
    epilogue: Epilogue = Epilogue.NONE
    c: Spec | None = None
    batch: int = 1
    bias_alignment: int = 256
    aux: Spec | None = None
    device_scalars: bool = False
    no_split_k: bool = False
    b_dtype: DType | None = field(default=None, metadata=LATER)
    scales: tuple[str, ...] = field(default=(), metadata=LATER)
    fast_accumulation: bool = field(default=False, metadata=LATER)
    scale_vectors: bool = field(default=False, metadata=LATER)

    operands: ClassVar = ("a", "b", "c", "vector", "aux", "d")
    """Names of the addresses of a `Call`, in their order; `vector` is the bias or the bias gradient. The addresses of
    an FP8 product's `scales` follow."""

    @property
    def types(self) -> tuple[DType, DType]:
        """The types of A and B."""
        return self.dtype, self.b_dtype or self.dtype

    @property
    def bias_dtype(self) -> DType:
        """The type of the bias: D's, or BF16 if the operands are FP8 and D does not have 16 bits."""
        return bias_type(self.dtype, self.d_dtype) if self.epilogue.has_bias else self.d_dtype

    @property
    def aux_dtype(self) -> DType:
        """The type of C and of GELU's auxiliary matrix: D's, or BF16 if D is FP8."""
        return aux_type(self.d_dtype)

    @property
    def is_empty(self) -> bool:
        """Whether the product has nothing to multiply: M, N, K or the batch is 0."""
        return 0 in (self.batch, self.m, self.n, self.k)

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
    """y[M,N] = dropout(act(x[M,K] · w[N,K]ᵀ + bias[N])) + addend[M,N].

    Attributes:
        preactivation: spec of the caller's buffer for the pre-activation; None without one.
        bias: alignment of the bias vector's address; None without a bias.
        backward: whether a tensor is kept for backward.
        addend: spec of the matrix that is added last, which may be the memory of y; None without one.
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
    backward: bool = False
    addend: Spec | None = field(default=None, metadata=LATER)

    operands: ClassVar = ("x", "w", "bias", "y", "kept", "addend")
    """Names of the addresses of a `Call`, in their order; `kept` is the tensor that is written besides y."""


@dataclass(frozen=True, slots=True)
class Derivative:
    """How backward computes dz from dy: by a layer's activation and dropout, perhaps with the bias gradient.

    Attributes:
        saved: kind of the saved tensor.
        saved_spec: spec of the saved tensor (a mask's layout counts bits); None if nothing was saved.
        db: alignment of the bias gradient's address; None if the bias gradient is not wanted.
    """

    activation: Activation
    saved: Saved
    saved_spec: Spec | None
    db: int | None = None
    dropout: bool = False

    @property
    def is_identity(self) -> bool:
        """Whether dz equals dy: the layer has no derivative to apply and no dropout."""
        return self.saved is Saved.NOTHING and not self.dropout


@dataclass(frozen=True, slots=True)
class BackwardProblem:
    """Gradients of a `ForwardProblem`: which are wanted, and the specs of dy and of the gradients.

    Attributes:
        output_derivative: computes from dy this layer's dz, the gradient with respect to the pre-activation, and its
            bias gradient.
        dx, dw: None if the gradient is not wanted.
        dz: spec of the caller's buffer for dz; None leaves dz to scratch memory.
        accumulate: whether dw and bias gradients are added to what their buffers hold.
        input_derivative: of the layer below, whose output is x, if dx is to be the gradient before that layer's
            activation; None otherwise.
        accumulate_dx: whether dx is added to what its buffer holds; False if there is an `input_derivative`.
    """

    dtype: DType
    compute: Compute
    x: Spec
    w: Spec
    dy: Spec
    output_derivative: Derivative
    dx: Spec | None
    dw: Spec | None
    dz: Spec | None = None
    accumulate: bool = False
    input_derivative: Derivative | None = None
    accumulate_dx: bool = field(default=False, metadata=LATER)

    operands: ClassVar = ("dy", "x", "w", "saved", "saved_below", "dx", "dw", "db", "dz", "db_below")
    """Names of the addresses of a `Call`, in order; `saved_below` and `db_below` belong to the layer below."""


@dataclass(frozen=True, slots=True)
class MLPProblem:
    """Linear layers in a row, without dropout: inputs to outputs, or a training step's forward and backward pass.

    Attributes:
        rows: M of every matrix.
        dims: columns of the inputs, of each hidden layer and of the outputs.
        biases: whether each layer has a bias.
        activation: activation of every layer but the last, which has none.
        backward: whether the gradients of all parameters are wanted too.
        loss: whether the backward pass also computes the loss, so that the outputs are not computed before it.
    """

    dtype: DType
    rows: int
    dims: tuple[int, ...]
    biases: tuple[bool, ...]
    activation: Activation
    backward: bool = False
    loss: bool = field(default=False, metadata=LATER)

    compute: ClassVar = Compute.FLOAT32
