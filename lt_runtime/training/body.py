"""What a training step does, whichever way it is run: forward, loss, backward, and the optimizer's update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from lt_runtime.gpu.branches import branch
from lt_runtime.gpu.direct import is_capturing
from lt_runtime.gpu.memory import stream_memory
from lt_runtime.gpu.streams import private_stream
from lt_runtime.ops.adamw import AdamW
from lt_runtime.ops.loss import cross_entropy, mse_loss
from lt_runtime.ops.tally import Scores, Tally
from lt_runtime.ranges import range_of
from lt_runtime.training.mlp import MLP
from lt_runtime.training.updates import BESIDE_FROM, LayerDone, late_layers, updates_beside

LOSSES: Final[Mapping[str, Callable[..., Any]]] = {"cross_entropy": cross_entropy, "mse": mse_loss}
IGNORE_INDEX: Final = -100


class StepBody:
    """The operations of one step, one after the other.

    Args:
        loss: one of `LOSSES`.
        beside_from: parameters of a layer from which on a captured step updates it beside the backward pass of the
            layers before it; infinity updates everything at the end.
    """

    def __init__(self, model: MLP, optimizer: AdamW, loss: str, *, beside_from: float = BESIDE_FROM) -> None:
        self.model, self.optimizer = model, optimizer
        self._late = late_layers(model, optimizer, beside_from)
        self._loss, self._classifies = LOSSES[loss], loss == "cross_entropy"

    def run(self, parts: Sequence[tuple[Any, Any]], tally: Tally, stream: Any, *, updates: bool = True) -> None:
        """Puts a step on a stream.

        Args:
            parts: inputs and targets of the micro-batches, all of one size. Gradients are of the mean over all.
            tally: what the losses are added to.
            stream: of a GPU, its handle; of the host, None.
            updates: whether the optimizer makes its step.
        """
        beside = self._stream_for_updates(stream)
        with self._updating(stream, beside) if updates else contextlib.nullcontext() as layer_done:
            for i, (x, target) in enumerate(parts):
                done = layer_done if i == len(parts) - 1 else None  # before, the gradients are not complete
                self._run_part(x, target, i, 1.0 / len(parts), tally, stream, done)

    @contextlib.contextmanager
    def _updating(self, stream: Any, beside: int | None) -> Iterator[LayerDone | None]:
        """Has everything updated at its end, but on `beside` those layers that it is told of before."""
        # outside of a capture the events and further launches would cost the host more than the GPU gains
        step = None if beside is None or not is_capturing(stream) else self.optimizer.step_in_parts()
        if beside is None or step is None:
            yield None
            with range_of("optimizer"):
                self.optimizer.step(stream=stream)
            return
        with updates_beside(step, self._late, stream, beside) as layer_done:
            yield layer_done

    def _stream_for_updates(self, stream: Any) -> int | None:
        """A stream that only updates beside `stream` are on; None if there are to be none.

        It is made before a capture, by the step's rehearsals. `branch` has another: a weight's gradient is not to wait
        for an update.
        """
        device = self.model.device.ordinal
        return private_stream(device, f"updates beside {stream:#x}") if device is not None and self._late else None

    def _run_part(
        self, x: Any, target: Any, index: int, share: float, tally: Tally, stream: Any, layer_done: LayerDone | None
    ) -> None:
        scaler = self.optimizer.scaler
        with range_of("forward"):
            outputs, contexts = self.model.forward(x, self.optimizer.steps, micro_batch=index, stream=stream)
        with range_of("loss"):
            scale = None if scaler is None else scaler.scale
            loss, gradient = self._loss(outputs, target, grad_scale=scale, share=share, stream=stream)
        scores = Scores(outputs, target, IGNORE_INDEX) if self._classifies else None
        with self._beside(stream) as other:
            tally.add(loss, scores, share, first=index == 0, stream=other)
            with range_of("backward"):
                accumulate = index > 0
                self.model.backward(gradient, contexts, accumulate=accumulate, stream=stream, layer_done=layer_done)

    @contextlib.contextmanager
    def _beside(self, stream: Any) -> Iterator[Any]:
        """A stream for what nothing in the step waits for."""
        device = self.model.device.ordinal
        if device is None:
            yield stream
            return
        with branch(stream_memory(device, stream)) as memory:
            yield memory.stream
