"""The operations of a training step, on the host and on a GPU: forward, loss, backward, update, sums of the losses."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from lt_runtime.gpu.memory import branch, stream_memory
from lt_runtime.ops.adamw import AdamW
from lt_runtime.problem import Compute
from lt_runtime.ranges import range_of
from lt_runtime.training.averages import EMA, Scores, Tally
from lt_runtime.training.losses import Batch, StepLoss, read_batch
from lt_runtime.training.mlp import MLP
from lt_runtime.training.parts import backward_layer

if TYPE_CHECKING:
    from lt_runtime.tuner.chain import LayerChain

IGNORE_INDEX: Final = -100


def chains_of(model: MLP, rows: int, *, accumulates: bool) -> list[LayerChain]:
    """The problems of a model's layers in a training step, for the tuner.

    Args:
        rows: number of rows of a micro-batch.
        accumulates: whether a step has several micro-batches: all but the first add to the gradients.
    """
    from lt_runtime.tuner.chain import LayerChain  # imported here, because only tuning needs it

    layers, types = model.layers, (model.dtype, Compute(model.compute))
    dropout, bias = [each.dropout > 0 for each in layers], [each.bias is not None for each in layers]
    activations = [each.activation for each in layers]
    chain = LayerChain.of_mlp(rows, model.dims, activations, *types, dropout=dropout, bias=bias)
    return [chain, chain.accumulating] if accumulates else [chain]


class StepBody:
    """One step: the checks of its batch, and its operations in the order in which they run.

    Args:
        rows: the number of rows of every batch; None for any number.
        parts: the number of micro-batches. All have the same size; the gradients are those of the mean of their losses.
        ema: the averages to update after the optimizer; None if there are no averages.
    """

    def __init__(
        self, model: MLP, optimizer: AdamW, loss: StepLoss, *, rows: int | None, parts: int, ema: EMA | None = None
    ) -> None:
        self.model, self.optimizer, self.loss, self.ema = model, optimizer, loss, ema
        self.rows, self.parts = rows, parts

    def read(self, batch: Sequence[Any], stream: int) -> Batch:
        """Reads and checks the arrays of a batch; see `read_batch`."""
        return read_batch(self.model, batch, self.loss, self.rows, self.parts, stream)

    def run(self, parts: Sequence[tuple[Any, ...]], tally: Tally, stream: Any, *, updates: bool = True) -> None:
        """Runs a step.

        Args:
            parts: inputs, targets and, if given, row weights of each micro-batch.
            tally: receives the losses.
            stream: a handle on a GPU, None on the host.
            updates: whether the optimizer and the averages are updated.
        """
        for i, part in enumerate(parts):
            self._run_part(part, i, tally, stream)
        if updates:
            with range_of("optimizer"):
                self.optimizer.step(stream=stream)
            if self.ema is not None:
                with range_of("ema"):
                    self.ema.update(stream=stream)

    def _run_part(self, part: tuple[Any, ...], index: int, tally: Tally, stream: Any) -> None:
        (x, target, *weights), model, loss, scaler = part, self.model, self.loss, self.optimizer.scaler
        narrow = model.narrow if model.narrow.take(x, backward=True) else None
        scale, share, first = None if scaler is None else scaler.scale, 1.0 / self.parts, index == 0
        options: dict[str, Any] = {"accumulate": not first, "stream": stream}
        if narrow is not None and not weights and loss.elementwise is not None:
            with range_of("backward"):
                number = narrow.backward(x, target, loss=loss.elementwise, scale=scale, share=share, **options)
            with range_of("loss"):
                tally.add(number, None, share, first=first, stream=stream)
            return
        contexts: list[Any] = []
        with range_of("forward"):
            if narrow is not None:
                outputs = narrow.outputs(x, stream)
            else:
                step = self.optimizer.steps
                outputs, contexts = model.forward(x, step, micro_batch=index, copy_step=False, stream=stream)
        with range_of("loss"):
            # The gradient is written over the outputs if neither a tally of classes nor the last layer's derivative
            # reads them later.
            is_read_later = loss.classifies or (contexts and contexts[-1].saved is outputs)
            scaling = {"row_weights": weights[0] if weights else None, "grad_scale": scale, "share": share}
            out = None if is_read_later else outputs
            value, gradient = loss.compute(outputs, target, **scaling, out_gradient=out, stream=stream)
        scores = Scores(outputs, target, IGNORE_INDEX) if loss.classifies else None
        del outputs, out  # From here on, each array is freed after its last use, so that later arrays get its memory.
        device = model.device.ordinal
        # No later operation of the step reads the tally: on a GPU it is updated on a second stream, concurrently.
        concurrent = contextlib.nullcontext() if device is None else branch(stream_memory(device, stream))
        with concurrent as memory:
            with range_of("loss"):
                tally.add(value, scores, share, first=first, stream=memory and memory.stream)
            with range_of("backward"):
                if narrow is not None:
                    narrow.backward(x, gradient, **options)
                while contexts:
                    gradient = backward_layer(model.layers, gradient, contexts, need_dx=False, **options)
                    contexts.pop()
                    if contexts:
                        contexts[-1].y = None  # no later work reads y: other arrays may reuse its memory
