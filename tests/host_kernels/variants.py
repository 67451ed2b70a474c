"""The variants of the kernels that are tested: everything in FP32, a few of each in FP16 and BF16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.params import SCALAR
from lt_runtime.planning.launches import ACTIVATION_NAMES
from lt_runtime.problem import ACTIVATIONS, DType, Saved
from tests.host_kernels.build import Variant

TYPES: Final = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
F32, F16, BF16 = TYPES
_LABELS: Final = {"int32": "int", "int64": "long long"}
_SAVED: Final = {Saved.NOTHING: "0", Saved.PREACTIVATION: "1", Saved.OUTPUT: "2"}
_FROM_OUTPUT: Final = ("relu", "sigmoid", "tanh")


@dataclass(frozen=True)
class Epilogue:
    """A variant of epilogue_fwd, or of epilogue_bwd where it says what is saved."""

    dtype: DType
    activation: str
    dropout: bool
    saved: Saved | None = None

    @property
    def macros(self) -> Macros:
        common = (
            ("SCALAR", SCALAR[self.dtype]),
            ("ACTIVATION", ACTIVATION_NAMES[self.activation]),
            ("DROPOUT", str(int(self.dropout))),
        )
        return common if self.saved is None else (*common, ("SAVED", _SAVED[self.saved]))

    def __str__(self) -> str:
        parts = [self.dtype.value, self.activation, "dropout" if self.dropout else "keep"]
        return "-".join(parts if self.saved is None else [*parts, self.saved.value])


def scalar_macros(dtype: DType) -> Macros:
    return (("SCALAR", SCALAR[dtype]),)


def loss_macros(dtype: DType, labels: str) -> Macros:
    return (("SCALAR", SCALAR[dtype]), ("LABEL", _LABELS[labels]))


def _saved_modes(activation: str) -> tuple[Saved, ...]:
    if activation == "none":
        return (Saved.NOTHING,)
    return (Saved.PREACTIVATION, Saved.OUTPUT) if activation in _FROM_OUTPUT else (Saved.PREACTIVATION,)


FORWARD_EPILOGUES: Final = (
    *(Epilogue(F32, name, dropout) for name in ACTIVATIONS for dropout in (False, True)),
    *(Epilogue(F16, "gelu", True), Epilogue(F16, "leaky_relu", False)),
    *(Epilogue(BF16, "relu", True), Epilogue(BF16, "silu", False)),
)

BACKWARD_EPILOGUES: Final = (
    *(
        Epilogue(F32, name, dropout, saved)
        for name in ACTIVATIONS
        for saved in _saved_modes(name)
        for dropout in (False, True)
    ),
    *(Epilogue(F16, "gelu", False, Saved.PREACTIVATION), Epilogue(F16, "tanh", True, Saved.OUTPUT)),
    *(Epilogue(BF16, "relu", False, Saved.OUTPUT), Epilogue(BF16, "none", True, Saved.NOTHING)),
)

LOSSES: Final = ((F32, "int32"), (F32, "int64"), (F16, "int64"), (BF16, "int32"))


@dataclass(frozen=True)
class MatmulEpilogue:
    """A variant of matmul_epilogue.cu: D's type, that of A and B, and the activation."""

    dtype: DType
    operand: DType
    activation: str

    @property
    def macros(self) -> Macros:
        return (
            ("SCALAR", SCALAR[self.dtype]),
            ("OPERAND", SCALAR[self.operand]),
            ("ACTIVATION", ACTIVATION_NAMES[self.activation]),
        )

    def __str__(self) -> str:
        return f"{self.dtype.value}-{self.operand.value}-{self.activation}"


MATMUL_EPILOGUES: Final = (
    *(MatmulEpilogue(F32, F32, activation) for activation in ("none", "relu", "gelu")),
    *(MatmulEpilogue(F16, F16, "gelu"), MatmulEpilogue(BF16, BF16, "relu"), MatmulEpilogue(F32, BF16, "none")),
)

SANITIZED_FORWARD: Final = (Epilogue(F32, "gelu", dropout=True), Epilogue(BF16, "silu", dropout=False))
SANITIZED_BACKWARD: Final = (
    Epilogue(F32, "gelu", dropout=True, saved=Saved.PREACTIVATION),
    Epilogue(F16, "tanh", dropout=True, saved=Saved.OUTPUT),
)
SANITIZED_LOSSES: Final = ((F32, "int64"),)
SANITIZED_MATMULS: Final = (MatmulEpilogue(F32, F32, "relu"),)
SANITIZED: Final = (
    *(Variant("epilogue_fwd.cu", epilogue.macros) for epilogue in SANITIZED_FORWARD),
    *(Variant("epilogue_bwd.cu", epilogue.macros) for epilogue in SANITIZED_BACKWARD),
    *(Variant("loss.cu", loss_macros(dtype, labels)) for dtype, labels in SANITIZED_LOSSES),
    *(Variant("matmul_epilogue.cu", epilogue.macros) for epilogue in SANITIZED_MATMULS),
    *(Variant(file, scalar_macros(F32)) for file in ("dropout.cu", "column_sum.cu")),
    Variant("adamw.cu"),
    Variant("dropout_probe.cu"),
)
"""What is built with sanitizers: every kernel, and between them both ways to load and store."""

ALL: Final = (
    Variant("dropout_probe.cu"),
    Variant("shim_probe.cu"),
    *(Variant("dropout.cu", scalar_macros(dtype)) for dtype in TYPES),
    *(Variant("epilogue_fwd.cu", epilogue.macros) for epilogue in FORWARD_EPILOGUES),
    *(Variant("column_sum.cu", scalar_macros(dtype)) for dtype in TYPES),
    *(Variant("epilogue_bwd.cu", epilogue.macros) for epilogue in BACKWARD_EPILOGUES),
    *(Variant("matmul_epilogue.cu", epilogue.macros) for epilogue in MATMUL_EPILOGUES),
    *(Variant("loss.cu", loss_macros(dtype, labels)) for dtype, labels in LOSSES),
    Variant("adamw.cu"),
)
