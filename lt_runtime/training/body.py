"""The operations of a training step, on the host and on a GPU: forward, loss, backward, the optimizer's update."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from lt_runtime.gpu.memory import branch, stream_memory
from lt_runtime.ops.adamw import AdamW
from lt_runtime.problem import Compute
from lt_runtime.ranges import range_of
from lt_runtime.training.ema import EMA
from lt_runtime.training.losses import StepLoss
from lt_runtime.training.mlp import MLP, backward_layer
from lt_runtime.training.tally import Scores, Tally

if TYPE_CHECKING:
    from lt_runtime.tuner.chain import LayerChain

IGNORE_INDEX: Final = -100


def chains_of(model: MLP, rows: int, *, accumulates: bool) -> list[LayerChain]:
    """The problems of a model's layers in a training step, for the tuner.

    Args:
        rows: of a micro-batch.
        accumulates: whether a step has several micro-batches, of which all but the first add to the gradients.
    """
    from lt_runtime.tuner.chain import LayerChain  # imported here, because only tuning needs it

    chain = LayerChain.of_mlp(
        rows,
        model.dims,
        [each.activation for each in model.layers],
        model.dtype,
        Compute(model.compute),
        dropout=[each.dropout > 0 for each in model.layers],
        bias=[each.bias is not None for each in model.layers],
    )
    return [chain, chain.accumulating] if accumulates else [chain]


class StepBody:
    """The operations of one step, in their order.

    Args:
        ema: the averages to update after the optimizer; None for none.
    """

    def __init__(self, model: MLP, optimizer: AdamW, loss: StepLoss, ema: EMA | None = None) -> None:
        self.model, self.optimizer, self.loss, self.ema = model, optimizer, loss, ema

    def run(self, parts: Sequence[tuple[Any, ...]], tally: Tally, stream: Any, *, updates: bool = True) -> None:
        """Runs a step.

        Args:
            parts: inputs, targets and, if there are any, row weights of each micro-batch. All micro-batches have the
                same size; the gradients are those of the mean over all of them.
            tally: receives the losses.
            stream: a handle on a GPU, None on the host.
            updates: whether the optimizer and the averages are updated.
        """
        for i, part in enumerate(parts):
            self._run_part(part, i, 1.0 / len(parts), tally, stream)
        if updates:
            with range_of("optimizer"):
                self.optimizer.step(stream=stream)
            if self.ema is not None:
                with range_of("ema"):
                    self.ema.update(stream=stream)

    def _run_part(self, part: tuple[Any, ...], index: int, share: float, tally: Tally, stream: Any) -> None:
        x, target, *weights = part
        scaler, row_weights = self.optimizer.scaler, weights[0] if weights else None
        narrow = self.model.narrow
        if narrow is not None and not narrow.take(x, backward=True):
            narrow = None
        scale = None if scaler is None else scaler.scale
        if narrow is not None and row_weights is None and self.loss.elementwise is not None:
            with range_of("backward"):
                number = narrow.loss_and_backward(
                    x, target, self.loss.elementwise, scale=scale, share=share, accumulate=index > 0, stream=stream
                )
            with range_of("loss"):
                tally.add(number, None, share, first=index == 0, stream=stream)
            return
        contexts: list[Any] = []
        with range_of("forward"):
            if narrow is not None:
                outputs = narrow.outputs(x, stream)
            else:
                outputs, contexts = self.model.forward(
                    x, self.optimizer.steps, micro_batch=index, copy_step=False, stream=stream
                )
        with range_of("loss"):
            reuse = self._only_loss_reads(outputs, contexts)
            loss, gradient = self.loss.compute(
                outputs, target, row_weights, scale=scale, share=share, reuse=reuse, stream=stream
            )
        scores = Scores(outputs, target, IGNORE_INDEX) if self.loss.classifies else None
        del outputs  # From here on, each array is freed after its last use, so that later arrays get its memory.
        device = self.model.device.ordinal
        # No later operation of the step reads the tally: on a GPU it is updated on a second stream, concurrently.
        concurrent = contextlib.nullcontext() if device is None else branch(stream_memory(device, stream))
        with concurrent as memory:
            with range_of("loss"):
                tally.add(loss, scores, share, first=index == 0, stream=memory and memory.stream)
            with range_of("backward"):
                if narrow is not None:
                    narrow.backward(x, gradient, accumulate=index > 0, stream=stream)
                while contexts:
                    gradient = backward_layer(
                        self.model.layers, gradient, contexts, accumulate=index > 0, need_dx=False, stream=stream
                    )
                    contexts.pop()
                    if contexts:
                        contexts[-1].y = None  # no later work reads y: other arrays may reuse its memory

    def _only_loss_reads(self, outputs: Any, contexts: Sequence[Any]) -> bool:
        """Whether only the loss reads the outputs: neither a tally of classes nor the last layer's derivative does."""
        return not self.loss.classifies and not (contexts and contexts[-1].saved is outputs)
