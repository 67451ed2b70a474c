"""The kernel variants that are tested on the CPU: all in FP32, and a few of each kernel in FP16 and BF16.

Of each kernel a few variants are built with sanitizers too; both ways to load and store (aligned, any layout) are among
them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

from lt_runtime import rules
from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.compiler import Macros
from lt_runtime.kernels.epilogue import ACTIVATION_NAMES
from lt_runtime.kernels.kernel import SCALAR
from lt_runtime.kernels.narrow import _SHARED_ROWS, narrow_macros
from lt_runtime.kernels.optimizer import update_macros
from lt_runtime.kernels.tiling import Access
from lt_runtime.problem import ACTIVATIONS, DType, Saved
from tests.host_kernels.build import Variant

TYPES: Final = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
F32, F16, BF16 = TYPES
ANY, ALIGNED, FLAT = Access
_SAVED: Final = {Saved.NOTHING: "0", Saved.PREACTIVATION: "1", Saved.OUTPUT: "2", Saved.MASK: "3"}
_FROM_OUTPUT: Final = ("relu", "sigmoid", "tanh")


@dataclass(frozen=True)
class Forward:
    """A variant of the kernel epilogue_fwd, as its macros select it.

    Attributes:
        access: how groups of eight elements (octets) are loaded and stored.
        keeps: whether the pre-activation is written.
        once: whether the product is FP32, so that a 16-bit result is rounded only once.
        adds: whether there is an addend.
    """

    dtype: DType
    activation: str
    dropout: bool
    access: Access
    keeps: bool = False
    once: bool = False
    adds: bool = False

    @property
    def product(self) -> DType:
        """The product's element type."""
        return F32 if self.once else self.dtype

    @property
    def macros(self) -> Macros:
        """The macros in the order in which the runtime passes them."""
        read_and_kept = (
            ("PRODUCT", SCALAR[self.product]),
            ("KEEP", str(int(self.keeps))),
            ("ADD", str(int(self.adds))),
        )
        return (*_epilogue_macros(self), *read_and_kept, *self.access.macros(1))

    def __str__(self) -> str:
        options = (("kept", self.keeps), ("once", self.once), ("added", self.adds))
        return "-".join([*_epilogue_names(self), *(name for name, given in options if given)])


@dataclass(frozen=True)
class Backward:
    """A variant of the kernel epilogue_bwd, as its macros select it.

    Attributes:
        saved: kind of the tensor from which the derivative is computed.
        dz: how the gradient dz is written: 0 not at all, 1 in the order of dy, 2 transposed.
    """

    dtype: DType
    activation: str
    dropout: bool
    access: Access
    saved: Saved
    dz: int = 1

    @property
    def macros(self) -> Macros:
        """The macros in the order in which the runtime passes them."""
        written = (("SAVED", _SAVED[self.saved]), ("DZ", str(self.dz)))
        return (*_epilogue_macros(self), *written, *self.access.macros(1))

    @property
    def transposes(self) -> bool:
        return self.dz == 2

    def __str__(self) -> str:
        return "-".join([*_epilogue_names(self), self.saved.value, ("sum", "dz", "transposed")[self.dz]])


@dataclass(frozen=True)
class Dropping:
    """A variant of the kernels in dropout.cu or add.cu; `aligned` rows allow 16-byte accesses."""

    dtype: DType
    aligned: bool

    @property
    def macros(self) -> Macros:
        return (*scalar_macros(self.dtype), *Access(self.aligned).macros(1))

    def __str__(self) -> str:
        return f"{self.dtype.value}-{_access_name(Access(self.aligned))}"


@dataclass(frozen=True)
class Gated:
    """A variant of the kernels in gated.cu; with `remakes`, backward also computes y again."""

    dtype: DType
    activation: str
    dropout: bool
    access: Access
    remakes: bool = False

    @property
    def macros(self) -> Macros:
        """The macros in the order in which the runtime passes them."""
        return (*_epilogue_macros(self), ("REMAKES", str(int(self.remakes))), *self.access.macros(1))

    def __str__(self) -> str:
        return "-".join([*_epilogue_names(self), *(["remade"] if self.remakes else [])])


def _epilogue_macros(epilogue: Forward | Backward | Gated) -> Macros:
    return (
        ("SCALAR", SCALAR[epilogue.dtype]),
        ("ACTIVATION", ACTIVATION_NAMES[epilogue.activation]),
        ("DROPOUT", str(int(epilogue.dropout))),
    )


def _epilogue_names(epilogue: Forward | Backward | Gated) -> list[str]:
    dropout = "dropout" if epilogue.dropout else "whole"
    return [epilogue.dtype.value, epilogue.activation, dropout, _access_name(epilogue.access)]


def _access_name(access: Access) -> str:
    return "scattered" if access is ANY else access.name.lower()


def scalar_macros(dtype: DType) -> Macros:
    return (("SCALAR", SCALAR[dtype]),)


def _saved_modes(activation: str) -> tuple[Saved, ...]:
    if activation == "none":
        return (Saved.NOTHING,)
    return (Saved.PREACTIVATION, Saved.OUTPUT) if activation in _FROM_OUTPUT else (Saved.PREACTIVATION,)


# The compiled variants of epilogue_fwd.cu. In FP32 every activation is compiled with and without dropout, one of the
# two for rows that allow 16-byte accesses (ALIGNED), the other for any rows (ANY).
FORWARD_EPILOGUES: Final = (
    *(
        Forward(F32, name, dropout, Access((index + dropout) % 2 == 0))
        for (index, name), dropout in itertools.product(enumerate(ACTIVATIONS), (False, True))
    ),
    *(Forward(F32, "gelu", dropout=True, access=access, keeps=True) for access in Access),
    Forward(F16, "gelu", dropout=True, access=ALIGNED),
    Forward(F16, "leaky_relu", dropout=False, access=ANY, keeps=True),
    Forward(BF16, "relu", dropout=True, access=ANY),
    Forward(BF16, "silu", dropout=False, access=ALIGNED, keeps=True),
    Forward(F16, "none", dropout=False, access=ALIGNED, once=True),
    Forward(F16, "gelu", dropout=True, access=ANY, keeps=True, once=True),
    Forward(BF16, "none", dropout=False, access=ANY, once=True),
    Forward(BF16, "silu", dropout=False, access=ALIGNED, keeps=True, once=True),
    Forward(BF16, "gelu", dropout=False, access=FLAT, keeps=True, once=True),
    Forward(F16, "relu", dropout=True, access=FLAT),
    *(Forward(F32, "gelu", dropout=True, access=access, keeps=access is not FLAT, adds=True) for access in Access),
    Forward(F16, "none", dropout=False, access=ALIGNED, adds=True),
    Forward(BF16, "silu", dropout=True, access=ANY, once=True, adds=True),
)

_SAVING: Final = [(name, saved) for name in ACTIVATIONS for saved in _saved_modes(name)]
BACKWARD_EPILOGUES: Final = (
    *(
        Backward(F32, name, dropout, Access((index + dropout) % 2 == 0), saved)
        for (index, (name, saved)), dropout in itertools.product(enumerate(_SAVING), (False, True))
    ),
    *(
        Backward(F32, "gelu", dropout=True, access=access, saved=Saved.PREACTIVATION, dz=dz)
        for access, dz in ((ANY, 0), (ANY, 2), (ALIGNED, 0), (ALIGNED, 2), (FLAT, 0))
    ),
    Backward(F16, "gelu", dropout=False, access=ALIGNED, saved=Saved.PREACTIVATION, dz=2),
    Backward(F16, "tanh", dropout=True, access=ANY, saved=Saved.OUTPUT),
    Backward(BF16, "relu", dropout=False, access=ANY, saved=Saved.OUTPUT, dz=2),
    Backward(BF16, "none", dropout=True, access=ALIGNED, saved=Saved.NOTHING),
    Backward(F32, "none", dropout=False, access=ALIGNED, saved=Saved.NOTHING, dz=0),
    Backward(F32, "relu", dropout=False, access=ANY, saved=Saved.MASK),
    Backward(F32, "relu", dropout=False, access=ANY, saved=Saved.MASK, dz=2),
    Backward(F16, "relu", dropout=False, access=ALIGNED, saved=Saved.MASK),
    Backward(BF16, "relu", dropout=False, access=ALIGNED, saved=Saved.MASK, dz=0),
    Backward(BF16, "relu", dropout=False, access=ALIGNED, saved=Saved.MASK, dz=2),
    Backward(BF16, "gelu", dropout=False, access=FLAT, saved=Saved.PREACTIVATION),
    Backward(F32, "relu", dropout=True, access=FLAT, saved=Saved.OUTPUT),
    Backward(F16, "none", dropout=True, access=FLAT, saved=Saved.NOTHING),
    Backward(BF16, "none", dropout=False, access=FLAT, saved=Saved.NOTHING, dz=0),
)

# The compiled variants of gated.cu. In FP32 they cover every activation, alternately for rows that allow 16-byte
# accesses (ALIGNED) and for any rows (ANY), each of the two with and without dropout.
GATED: Final = (
    *(Gated(F32, name, index % 4 > 1, ALIGNED if index % 2 else ANY) for index, name in enumerate(ACTIVATIONS)),
    *(Gated(F16, "relu", dropout=dropout, access=ALIGNED) for dropout in (False, True)),
    Gated(F16, "gelu", dropout=False, access=ANY),
    Gated(F32, "gelu_erf", dropout=True, access=ALIGNED, remakes=True),
    Gated(BF16, "silu", dropout=True, access=ANY, remakes=True),
    Gated(BF16, "silu", dropout=False, access=ALIGNED, remakes=True),
)

DROPPING: Final = tuple(Dropping(dtype, aligned) for dtype in TYPES for aligned in (False, True))


@dataclass(frozen=True)
class MatmulEpilogue:
    """A variant of the kernels in matmul_epilogue.cu.

    Attributes:
        dtype, operand: the type of D, and the type of A and B.
        once: whether the stored product is FP32, so that a 16-bit D is rounded only once.
    """

    dtype: DType
    operand: DType
    activation: str
    once: bool = False

    @property
    def macros(self) -> Macros:
        return (
            ("SCALAR", SCALAR[self.dtype]),
            ("PRODUCT", SCALAR[F32 if self.once else self.dtype]),
            ("OPERAND", SCALAR[self.operand]),
            ("ACTIVATION", ACTIVATION_NAMES[self.activation]),
        )

    def __str__(self) -> str:
        return f"{self.dtype.value}-{self.operand.value}-{self.activation}{'-once' if self.once else ''}"


MATMUL_EPILOGUES: Final = (
    *(MatmulEpilogue(F32, F32, activation) for activation in ("none", "relu", "gelu")),
    *(MatmulEpilogue(F16, F16, "gelu"), MatmulEpilogue(BF16, BF16, "relu"), MatmulEpilogue(F32, BF16, "none")),
    MatmulEpilogue(F16, F16, "none", once=True),
    *(MatmulEpilogue(BF16, BF16, activation, once=True) for activation in ("relu", "gelu")),
)


@dataclass(frozen=True)
class Narrow:
    """A variant of a kernel for products that are tiny in one dimension, for each number of rows a thread computes.

    Attributes:
        entry: the kernel: "narrow_n", "narrow_k" or "narrow_m", named for the tiny dimension.
        width: the tiny dimension, rounded up to a power of two.
        aligned: whether rows allow 16-byte accesses.
        epilogue: the epilogue that narrow_k is compiled for; None for the other kernels.
    """

    entry: str
    dtype: DType
    width: int
    aligned: bool
    epilogue: Epilogue | None = None

    @property
    def variants(self) -> list[Variant]:
        several = self.aligned and self.entry != "narrow_m"
        rows = (None,) if self.entry == "narrow_m" else (1, _SHARED_ROWS) if several else (1,)
        macros = (narrow_macros(self.dtype, self.width, self.aligned, each, self.epilogue) for each in rows)
        return [Variant(f"{self.entry}.cu", each) for each in macros]

    @property
    def shares(self) -> bool:
        """Whether threads of a block exchange partial sums."""
        return self.epilogue is None or self.epilogue.has_bias_gradient

    def __str__(self) -> str:
        epilogue = f"-{self.epilogue.value}" if self.epilogue is not None else ""
        return f"{self.entry}-{self.dtype.value}-{self.width}-{_access_name(Access(self.aligned))}{epilogue}"


NARROW: Final = (
    *(
        Narrow(entry, dtype, width, aligned, epilogue)
        for entry, epilogue in (("narrow_n", None), ("narrow_k", Epilogue.NONE), ("narrow_m", None))
        for dtype, width, aligned in (
            *((F32, 16, True), (F32, 4, False)),
            *((F16, 8, True), (F16, 1, False)),
            *((BF16, 2, True), (BF16, 16, False)),
        )
    ),
    *(
        Narrow("narrow_k", dtype, width, aligned, epilogue)
        for dtype, width, aligned, epilogue in (
            *((F32, 16, True, Epilogue.DRELU_BGRAD), (F32, 4, False, Epilogue.DGELU_BGRAD)),
            *((F16, 8, True, Epilogue.DGELU), (F16, 1, False, Epilogue.DRELU_BGRAD)),
            *((BF16, 2, True, Epilogue.DGELU_BGRAD), (BF16, 16, False, Epilogue.DRELU)),
        )
    ),
)


@dataclass(frozen=True)
class Tile:
    """A variant of the kernel in tile_matmul.cu, which multiplies 16-bit matrices with ragged rows.

    Attributes:
        a_along_k, b_along_k: whether A, and whether B, is contiguous along K.
        derivative: whether D is multiplied by the activation's derivative, instead of being activated.
    """

    dtype: DType
    a_along_k: bool
    b_along_k: bool
    activation: str = "none"
    derivative: bool = False

    @property
    def macros(self) -> Macros:
        return (
            ("SCALAR", SCALAR[self.dtype]),
            ("A_ALONG_K", str(int(self.a_along_k))),
            ("B_ALONG_K", str(int(self.b_along_k))),
            ("ACTIVATION", ACTIVATION_NAMES[self.activation]),
            ("DERIVATIVE", str(int(self.derivative))),
        )

    def __str__(self) -> str:
        lies = "".join("along" if each else "across" for each in (self.a_along_k, self.b_along_k))
        return f"{self.dtype.value}-{lies}-{self.activation}{'-derivative' if self.derivative else ''}"


TILE: Final = (
    Tile(BF16, a_along_k=True, b_along_k=True, activation="gelu"),
    Tile(BF16, a_along_k=True, b_along_k=False, activation="gelu", derivative=True),
    Tile(BF16, a_along_k=False, b_along_k=False),
    Tile(BF16, a_along_k=False, b_along_k=True, activation="relu"),
    Tile(F16, a_along_k=True, b_along_k=True),
    Tile(F16, a_along_k=False, b_along_k=False),
    Tile(F16, a_along_k=True, b_along_k=False, activation="gelu", derivative=True),
)


@dataclass(frozen=True)
class AdamWVariant:
    """A variant of the kernel in optimizer.cu, for AdamW or AMSGrad.

    Attributes:
        moments: type of the moments.
        stochastic: whether a BF16 parameter may lack a master copy, so that its update is rounded stochastically.
    """

    moments: DType
    amsgrad: bool
    stochastic: bool

    @property
    def macros(self) -> Macros:
        rule = rules.AMSGrad() if self.amsgrad else rules.AdamW()
        return update_macros(rule, self.moments, stochastic=self.stochastic)

    def __str__(self) -> str:
        options = (("amsgrad", self.amsgrad), ("stochastic", self.stochastic))
        return "-".join([self.moments.value, *(name for name, given in options if given)])


PLAIN_ADAMW: Final = AdamWVariant(F32, amsgrad=False, stochastic=False)
FULL_ADAMW: Final = AdamWVariant(BF16, amsgrad=True, stochastic=True)
ADAMW: Final = (
    PLAIN_ADAMW,
    AdamWVariant(F32, amsgrad=True, stochastic=False),
    AdamWVariant(F32, amsgrad=False, stochastic=True),
    AdamWVariant(BF16, amsgrad=False, stochastic=False),
    FULL_ADAMW,
)
