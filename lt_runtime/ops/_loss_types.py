"""What losses take and return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from lt_runtime.arrays import check_shape
from lt_runtime.errors import DTypeError, ShapeError

_LABELS: Final = ("int32", "int64")


class Loss(NamedTuple):
    """The loss, one FP32 number that stays on its device until it is read, and its gradient."""

    loss: Any
    gradient: Any


@dataclass(frozen=True, slots=True)
class CrossEntropyOptions:
    """Label smoothing in [0, 1], and the label that leaves its row out, if one does."""

    label_smoothing: float
    ignore_index: int | None


@dataclass(frozen=True, slots=True)
class Outputs:
    """The caller's buffers, and the gradient's scale: a number, an array of one, or None for 1; times the share."""

    gradient: Any
    loss: Any
    grad_scale: Any
    share: float

    @property
    def arrays(self) -> Mapping[str, Any]:
        """Those that must live where the operands do, by name; None where there is none."""
        scale = None if is_number(self.grad_scale) else self.grad_scale
        return {"out_gradient": self.gradient, "out_loss": self.loss, "grad_scale": scale}


def is_number(value: Any) -> bool:
    """Whether a value is a Python number, rather than an array."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_labels(dtype: str, shape: tuple[int, ...], logits_shape: tuple[int, ...]) -> None:
    """Raises `DTypeError` or `ShapeError` unless there is an integer a row."""
    if dtype not in _LABELS:
        raise DTypeError(f"labels has type {dtype}; accepted are int32 and int64")
    check_shape("labels", shape, logits_shape[:1], "one a row of logits")


def check_grad_scale(dtype: str, shape: tuple[int, ...]) -> None:
    """Raises `DTypeError` or `ShapeError` unless an array is one FP32."""
    if dtype != "float32":
        raise DTypeError(f"grad_scale is {dtype}; it must be float32")
    if shape not in ((), (1,)):
        raise ShapeError(f"grad_scale has shape {shape}; accepted are () and (1,)")
