"""Losses of arrays on a GPU."""

from __future__ import annotations

import functools
from typing import Any, Final

from lt_runtime.arrays import Operand, check_device, check_no_overlap, check_same, check_shape
from lt_runtime.errors import DTypeError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.memory import stream_memory
from lt_runtime.kernels.cross_entropy import CrossEntropyPass, Labels
from lt_runtime.kernels.mse import MsePass
from lt_runtime.ops._loss_types import CrossEntropyOptions, Loss, Outputs, check_grad_scale, check_labels, is_number
from lt_runtime.ops._place import Place
from lt_runtime.problem import DType

_FLOAT32: Final = DType.FLOAT32.numpy
_NAN_BITS: Final = 0x7FC00000
# A pass depends on types, layouts and the device alone, and is made at the first use of each.
_mse_pass: Final = functools.cache(MsePass)
_cross_entropy_pass: Final = functools.cache(CrossEntropyPass)


def mse_loss(prediction: Any, target: Any, outputs: Outputs, stream: Any) -> Loss:
    """See `lt_runtime.ops.loss.mse_loss`."""
    place = Place.of("prediction", prediction, stream)
    with activated(place.device):
        predicted, wanted = place.read("prediction", prediction), place.read("target", target)
        check_same(predicted, wanted)
        check_shape("target", wanted.shape, predicted.shape, "the prediction's shape")
        dtype, buffers = DType.parse("prediction", predicted.dtype), _Buffers(place, outputs, predicted, wanted)
        layouts = predicted.layout, wanted.layout, buffers.gradient.layout
        if not layouts[0].size:
            return buffers.nothing()
        loss_pass = _mse_pass(dtype, *layouts, place.device)
        memory = stream_memory(place.device, place.stream)
        with memory.lock:
            loss_pass.run(
                (predicted.address, wanted.address, buffers.gradient.address),
                buffers.loss.address,
                buffers.scale,
                memory.scratch(loss_pass.scratch_bytes),
                memory.tickets,
                place.stream,
            )
        return buffers.result()


def cross_entropy(logits: Any, labels: Any, options: CrossEntropyOptions, outputs: Outputs, stream: Any) -> Loss:
    """See `lt_runtime.ops.loss.cross_entropy`."""
    place = Place.of("logits", logits, stream)
    with activated(place.device):
        scores, classes = place.read("logits", logits), place.read("labels", labels)
        check_labels(classes.dtype, classes.shape, scores.shape)
        classes.check_vector()
        check_device(scores, classes)
        dtype, buffers = DType.parse("logits", scores.dtype), _Buffers(place, outputs, scores, classes)
        layout = scores.layout
        if not layout.size:
            return buffers.nothing()
        loss_pass = _cross_entropy_pass(dtype, layout, buffers.gradient.layout, place.device)
        memory = stream_memory(place.device, place.stream)
        with memory.lock:
            loss_pass.run(
                logits=scores.address,
                gradient=buffers.gradient.address,
                loss=buffers.loss.address,
                labels=Labels(classes.address, classes.dtype == "int64", options.ignore_index),
                smoothing=options.label_smoothing,
                scale=buffers.scale,
                scratch=memory.scratch(loss_pass.scratch_bytes),
                ticket=memory.tickets,
                stream=place.stream,
            )
        return buffers.result()


class _Buffers:
    """Where a loss and its gradient go, and what scales the gradient.

    Args:
        like: the prediction or logits, which the gradient may be written over.
        other: the target or labels.
    """

    def __init__(self, place: Place, outputs: Outputs, like: Operand, other: Operand) -> None:
        self._place, self._outputs, self._like = place, outputs, like
        self.scale, scale = self._read_scale(outputs.grad_scale, outputs.share)
        others = (other,) if scale is None else (other, scale)
        inputs = others if outputs.gradient is like.array else (like, *others)
        self.gradient = place.output("out_gradient", outputs.gradient, like.shape, like, inputs)
        self.loss = self._read_loss(outputs.loss, (like, *others, self.gradient))

    def result(self) -> Loss:
        """What the caller gets."""
        return Loss(
            self._place.result(self._outputs.loss, self.loss, self._like),
            self._place.result(self._outputs.gradient, self.gradient, self._like),
        )

    def nothing(self) -> Loss:
        """What the caller gets where there is nothing to average."""
        call("cuMemsetD32Async", self.loss.address, _NAN_BITS, 1, self._place.stream)
        return self.result()

    def _read_scale(self, scale: Any, share: float) -> tuple[tuple[float, int], Operand | None]:
        """What the gradient is multiplied by, a number and an address or 0; and the operand at that address."""
        if scale is None or is_number(scale):
            return (share * (1.0 if scale is None else float(scale)), 0), None
        operand = self._place.read("grad_scale", scale)
        check_grad_scale(operand.dtype, operand.shape)
        check_device(self._like, operand)
        return (share, operand.address), operand

    def _read_loss(self, out: Any, others: tuple[Operand, ...]) -> Operand:
        place, like = self._place, self._like
        if out is None:
            return place.read("out_loss", like.library.empty((), _FLOAT32, place.device, place.stream))
        operand = place.read("out_loss", out)
        check_shape("out_loss", operand.shape, (), "one number")
        if operand.dtype != "float32":
            raise DTypeError(f"out_loss is {operand.dtype}; it must be float32")
        check_device(like, operand)
        check_no_overlap(operand, *others)
        return operand
