"""One training step: forward, loss, backward, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from lt_runtime.errors import ArgumentError, ShapeError
from lt_runtime.ops.adamw import AdamW
from lt_runtime.ops.loss import cross_entropy, mse_loss
from lt_runtime.ranges import range_of
from lt_runtime.training.mlp import MLP

_LOSSES: Final[Mapping[str, Callable[..., Any]]] = {"cross_entropy": cross_entropy, "mse": mse_loss}


class TrainStep:
    """Trains a model by one batch a call.

    Args:
        model: an `MLP`.
        optimizer: over the model's parameters. Its step is also what dropout's masks are drawn for, so that every
            step has its own.
        loss: "cross_entropy" (labels (M,) int32 or int64) or "mse" (targets shaped as the outputs).
        batch_size: rows of every batch.

    Raises:
        ArgumentError: an unknown loss, or a batch size below 1.
    """

    def __init__(self, model: MLP, optimizer: AdamW, *, loss: str = "cross_entropy", batch_size: int) -> None:
        if loss not in _LOSSES:
            raise ArgumentError(f"loss is {loss!r}; accepted are {', '.join(_LOSSES)}")
        if batch_size < 1:
            raise ArgumentError(f"batch_size is {batch_size}; it must be positive")
        self.model, self.optimizer, self.batch_size = model, optimizer, batch_size
        self._loss = _LOSSES[loss]

    def __call__(self, x: Any, target: Any, *, stream: Any = None) -> Any:
        """Updates the model from one batch.

        Args:
            x: (batch_size, inputs), of the model's type and on its device.
            target: labels or targets, as the loss asks.
            stream: an int handle, a stream object, or None for CuPy's current stream.

        Returns:
            The loss before the update, shape () and FP32, on the model's device: reading it waits for the step.

        Raises:
            ShapeError: x is not a batch of the expected shape.
            OperandError, GpuError: as in `lt.linear_fwd`.
        """
        expected = (self.batch_size, self.model.dims[0])
        shape = tuple(getattr(x, "shape", expected))  # what has none, the first layer judges
        if shape != expected:
            raise ShapeError(f"x has shape {shape}; this step was made for {expected}")
        with range_of("forward"):
            outputs, contexts = self.model.forward(x, self.optimizer.steps, stream=stream)
        with range_of("loss"):
            loss, gradient = self._loss(outputs, target, stream=stream)
        with range_of("backward"):
            self.model.backward(gradient, contexts, stream=stream)
        with range_of("optimizer"):
            self.optimizer.step(stream=stream)
        return loss
