"""Names of the epilogues: operations on a matrix product before it is stored. `cublaslt` has their numbers."""

from __future__ import annotations

import enum
from typing import Literal

from lt_runtime.arguments import one_of


class Epilogue(enum.Enum):
    """The epilogues of a product P = α·A·B + β·C. D is the matrix that is stored.

    - NONE, BIAS, RELU, RELU_BIAS, GELU, GELU_BIAS: D = act(P + bias).
    - Names with AUX: the product also writes what the derivative needs: ReLU one bit an element, GELU the
    pre-activation.
    - DRELU, DGELU: D = P · act'(aux). Names with BGRAD: the product also writes the sum of D over M, the bias gradient.
    - BGRADA, BGRADB: D = P, and the bias gradient is the sum of A or of B over K.
    """

    NONE = "none"
    BIAS = "bias"
    RELU = "relu"
    RELU_BIAS = "relu_bias"
    RELU_AUX = "relu_aux"
    RELU_AUX_BIAS = "relu_aux_bias"
    GELU = "gelu"
    GELU_BIAS = "gelu_bias"
    GELU_AUX = "gelu_aux"
    GELU_AUX_BIAS = "gelu_aux_bias"
    DRELU = "drelu"
    DRELU_BGRAD = "drelu_bgrad"
    DGELU = "dgelu"
    DGELU_BGRAD = "dgelu_bgrad"
    BGRADA = "bgrada"
    BGRADB = "bgradb"

    @classmethod
    def parse(cls, name: object) -> Epilogue:
        """The epilogue called `name`; raises `ArgumentError` if no epilogue has the name."""
        return cls(one_of("epilogue", name, [member.value for member in cls]))

    @classmethod
    def _missing_(cls, value: object) -> Epilogue:
        """Makes `Epilogue(value)` raise `parse`'s error for an unknown name."""
        return cls.parse(value)

    @property
    def activation(self) -> Literal["relu", "gelu", "none"]:
        """The name of the activation that the epilogue applies or differentiates: "relu", "gelu" or "none"."""
        return "relu" if "relu" in self.value else "gelu" if "gelu" in self.value else "none"

    @property
    def has_bias(self) -> bool:
        """Whether the epilogue adds a bias."""
        return self.value.endswith("bias")

    @property
    def is_derivative(self) -> bool:
        """Whether the epilogue multiplies by an activation's derivative, computed from the auxiliary input."""
        return self.value.startswith(("drelu", "dgelu"))

    @property
    def has_aux_output(self) -> bool:
        """Whether the epilogue writes the auxiliary output, from which backward computes the derivative."""
        return "_aux" in self.value

    @property
    def sums_operand(self) -> bool:
        """Whether the epilogue sums A or B over K."""
        return self in (Epilogue.BGRADA, Epilogue.BGRADB)

    @property
    def has_bias_gradient(self) -> bool:
        """Whether the epilogue writes a bias gradient."""
        return self.value.endswith("bgrad") or self.sums_operand
