"""What is measured, and what it has to reach: pure data, readable without a GPU."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from lt_runtime.problem import DType

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Target:
    """What a case has to reach.

    Attributes:
        fraction_of_copy: of the best copy kernel's bandwidth, at the case's bytes.
        ratio: by contender, the multiple of our time that its own must be at least.
    """

    fraction_of_copy: float | None = None
    ratio: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.fraction_of_copy is not None or bool(self.ratio)


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """One row of a suite.

    Attributes:
        target: what it has to reach.
        rotated: whether repetitions go round several sets of buffers, more than the L2 cache holds. Not where a
            launch's latency is the point, and all that it touches stays in that cache; nor where the one set is
            many times as large.
    """

    target: Target = Target()
    rotated: bool = True

    @property
    @abstractmethod
    def name(self) -> str:
        """What the row is called."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """The fewest bytes that the task reads and writes."""


@dataclass(frozen=True)
class EpilogueBackward(Case):
    """dz = dropout'(dy) · GELU'(z) and its column sums, in BF16: reads dy and z, writes dz."""

    rows: int
    cols: int
    dropout: float = 0.0

    @property
    def name(self) -> str:
        """What the row is called."""
        dropout = f" + dropout {self.dropout}" if self.dropout else ""
        return f"epilogue_bwd GELU{dropout} BF16 {self.rows}×{self.cols}, bias gradient"

    @property
    def bytes(self) -> int:
        """Six an element."""
        return 3 * DType.BFLOAT16.itemsize * self.rows * self.cols


@dataclass(frozen=True)
class EpilogueForward(Case):
    """y = dropout(GELU(z)), in BF16: reads z, writes y."""

    rows: int
    cols: int
    dropout: float

    @property
    def name(self) -> str:
        """What the row is called."""
        return f"epilogue_fwd GELU + dropout {self.dropout} BF16 {self.rows}×{self.cols}"

    @property
    def bytes(self) -> int:
        """Four an element."""
        return 2 * DType.BFLOAT16.itemsize * self.rows * self.cols


@dataclass(frozen=True)
class Dropout(Case):
    """Dropout of x and of dy: two passes that read and write once each."""

    dtype: DType
    rows: int
    cols: int
    p: float = 0.1

    @property
    def name(self) -> str:
        """What the row is called."""
        return f"dropout {self.p} {short(self.dtype)} {self.rows}×{self.cols}, forward + backward"

    @property
    def bytes(self) -> int:
        """Two passes of a read and a write."""
        return 2 * 2 * self.dtype.itemsize * self.rows * self.cols


@dataclass(frozen=True)
class AdamWStep(Case):
    """One update: reads g, reads and writes m, v and the FP32 parameter, and writes the BF16 one where there is one.

    Attributes:
        dtype: of parameters and gradients; those that are not FP32 have an FP32 master.
        max_norm: gradients are clipped to this global norm, for which they are read once more.
    """

    model: str
    shapes: Shapes
    dtype: DType
    max_norm: float | None = None

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(map(math.prod, self.shapes))

    @property
    def name(self) -> str:
        """What the row is called."""
        kind = "FP32" if self.dtype is DType.FLOAT32 else f"{short(self.dtype)} + FP32 master"
        clipping = ", clipped" if self.max_norm is not None else ""
        return f"AdamW {kind}{clipping}, {self.model}, {len(self.shapes)} tensors"

    @property
    def bytes(self) -> int:
        """28 a parameter, and the gradient once more for its norm."""
        moments_and_values = 6 * 4
        values = 0 if self.dtype is DType.FLOAT32 else self.dtype.itemsize
        gradients = (1 if self.max_norm is None else 2) * self.dtype.itemsize
        return (moments_and_values + values + gradients) * self.size


@dataclass(frozen=True)
class CrossEntropy(Case):
    """Softmax cross-entropy and its gradient, in BF16: the floor is one read of the logits and one write."""

    rows: int
    classes: int

    @property
    def name(self) -> str:
        """What the row is called."""
        return f"cross_entropy + gradient BF16 {self.rows}×{self.classes}"

    @property
    def bytes(self) -> int:
        """Four an element."""
        return 2 * DType.BFLOAT16.itemsize * self.rows * self.classes


def short(dtype: DType) -> str:
    """A type's short name."""
    return {DType.FLOAT32: "FP32", DType.FLOAT16: "FP16", DType.BFLOAT16: "BF16", DType.FLOAT64: "FP64"}[dtype]


_WIDTH: Final = 768
_GPT2_BLOCK: Final[Shapes] = (
    *((_WIDTH,), (_WIDTH,)),  # layer norm
    *((3 * _WIDTH, _WIDTH), (3 * _WIDTH,), (_WIDTH, _WIDTH), (_WIDTH,)),  # attention
    *((_WIDTH,), (_WIDTH,)),  # layer norm
    *((4 * _WIDTH, _WIDTH), (4 * _WIDTH,), (_WIDTH, 4 * _WIDTH), (_WIDTH,)),  # MLP
)
GPT2: Final[Shapes] = ((50257, _WIDTH), (1024, _WIDTH), *(_GPT2_BLOCK * 12), (_WIDTH,), (_WIDTH,))
"""The tensors of GPT-2 with 124 million parameters."""

_SMALL: Final[Shapes] = ((64, 64), (64,)) * 3
_NOT_SLOWER_THAN_TORCH: Final = Target(ratio={"torch": 1.0})
_DROPOUT_IS_CHEAP: Final = Target(ratio={"lt_without_dropout": 1 / 1.04})

KERNELS: Final[tuple[Case, ...]] = (
    EpilogueBackward(8192, 3072, target=Target(0.88, {"torch": 1.5})),
    EpilogueBackward(8192, 12288, target=Target(0.93, {"torch": 1.33})),
    EpilogueBackward(8192, 3072, 0.1, target=_DROPOUT_IS_CHEAP),
    EpilogueBackward(8192, 12288, 0.1, target=_DROPOUT_IS_CHEAP),
    EpilogueBackward(256, 512, target=Target(ratio={"torch_without_bias_gradient": 1.0}), rotated=False),
    EpilogueForward(8192, 3072, 0.1, target=Target(0.88)),
    Dropout(DType.BFLOAT16, 8192, 8192, target=Target(0.9, {"torch": 1.2})),
    Dropout(DType.FLOAT32, 8192, 8192, target=Target(0.9, {"torch": 1.2})),
    AdamWStep("GPT-2 124M", GPT2, DType.FLOAT32, target=Target(0.96, {"torch": 1.15}), rotated=False),
    AdamWStep("GPT-2 124M", GPT2, DType.BFLOAT16, 1.0, target=Target(0.92), rotated=False),
    AdamWStep("12 k parameters", _SMALL, DType.FLOAT32, target=_NOT_SLOWER_THAN_TORCH, rotated=False),
    CrossEntropy(8192, 50304, target=Target(0.85)),
    CrossEntropy(65536, 1000),
    CrossEntropy(8192, 10, rotated=False),
)
"""The suite of `benchmarks.kernels`."""
