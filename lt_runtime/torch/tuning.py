"""`tune`: measures the layers of a PyTorch model at the shapes of example inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lt_runtime.arguments import check_instance
from lt_runtime.nn.run import Met
from lt_runtime.ops import tuning
from lt_runtime.ops.first_use import not_tuning
from lt_runtime.ops.fp8.state import FP8State
from lt_runtime.tuner.chain import Tunable
from lt_runtime.tuner.report import TuningReport


def tune(model: Any, *example_inputs: Any, progress: bool = True, **keywords: Any) -> TuningReport:
    """Measures how the package's layers in a model run fastest, and stores the results in the plan cache.

    The model runs forward and backward once, in its present mode (train or eval), and computes the gradients that its
    parameters require now. Its parameters, buffers, gradients and FP8 scales, and PyTorch's generators, stay as they
    are. Problems in the plan cache are not measured again. `ltt.capture` does the same in the first call of each shape.
    See `lt.tune` for what other threads must not do meanwhile.

    Args:
        model: a `torch.nn.Module` on a GPU, such as one that `ltt.replace` has changed.
        example_inputs, keywords: arguments for a call of the model. Tensors whose gradients training needs must require
            them.
        progress: show a progress bar, if standard error is a terminal.

    Returns:
        The decisions, with microseconds before and after; as text, a table. It is empty for a model without layers of
        this package.

    Raises:
        KindError: model is not a module.
        DeviceError: the model is not on a GPU, or there is none.
        CaptureError, GpuError: see `lt.tune`.
    """
    check_instance("model", model, torch.nn.Module, "a torch.nn.Module")
    return tuning.tune(_Model(model, keywords), example_inputs, progress=progress)


class _Model:
    """A PyTorch model with the interface of the models that `lt.tune` takes."""

    def __init__(self, model: Any, keywords: Mapping[str, Any]) -> None:
        self._model, self._keywords = model, keywords
        self.device = next((each.device for each in model.parameters()), None)

    def rehearse(self, x: tuple[Any, ...]) -> list[Tunable]:
        """Runs the model forward and backward; returns the layers and products that ran."""
        with torch.random.fork_rng(devices=[self.device]), contextlib.ExitStack() as restored:
            for module in self._model.modules():
                restored.callback(module._buffers.update, {**module._buffers})
                if isinstance(scales := vars(module).get("scales"), FP8State):
                    restored.enter_context(_unchanged(scales))
            for each in self._model.buffers():
                restored.callback(each.copy_, each.clone())
            with torch.cuda.device(self.device), torch.enable_grad(), not_tuning(), Met(all_threads=True) as met:
                made = pytree.tree_leaves(self._model(*x, **self._keywords))
                outputs = [each for each in made if isinstance(each, torch.Tensor) and each.requires_grad]
                given = pytree.tree_leaves((x, self._keywords, [*self._model.parameters()]))
                leaves = [each for each in given if isinstance(each, torch.Tensor) and each.requires_grad]
                if outputs:
                    torch.autograd.grad(outputs, leaves, [*map(torch.ones_like, outputs)], allow_unused=True)
        del made, outputs
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # frees memory for the tuner, which does not use PyTorch's allocator
        return met.to_tune()


@contextlib.contextmanager
def _unchanged(scales: FP8State) -> Iterator[None]:
    """Restores a layer's FP8 state after a `with` block, whose gradients are not gradients of training."""
    fields = {**vars(scales), "calibrated": {*scales.calibrated}}
    # PyTorch copies the arrays, so that its current stream orders the copies with the calls of the layer.
    arrays = [] if scales.slots is None else [torch.as_tensor(each) for each in (scales.slots, scales.history)]
    values = [each.clone() for each in arrays]
    try:
        yield
    finally:
        for array, value in zip(arrays, values, strict=True):
            array.copy_(value)
        # A larger `changes` marks FP8 copies of the weight that were made within the block as stale.
        vars(scales).update(fields, changes=scales.changes + 1)
