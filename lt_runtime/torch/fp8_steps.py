"""The part of an optimizer's step for layers in FP8: it sets their scales, and `AdamW` also writes FP8 weights.

`AdamW` writes a weight in FP8 and its transpose from the update itself, so that the next forward does not cast it. The
copy equals the cast that this forward would make. It is made anew if anything else has changed the weight or the scale.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lt_runtime.arrays.operand import HOST, TORCH, device_of
from lt_runtime.kernels.optimizer import Fp8Copy
from lt_runtime.ops.fp8 import state
from lt_runtime.ops.fp8.state import FP8State
from lt_runtime.torch.tensors import Tensor, placed
from lt_runtime.torch.updates import is_capturing, local
from lt_runtime.training.fp8_weights import can_write, cast_weight, entry_of, is_suited

layers: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
"""Layers with FP8 scales that have been called in training."""
_copies: Final[weakref.WeakKeyDictionary[Any, WeightCopy]] = weakref.WeakKeyDictionary()
"""The copies by layer."""
_followed: Final[list[Any]] = []
"""The optimizers whose FP8 copies the graph that is being captured may read."""


class WeightCopy:
    """The weight of a layer in FP8, which the steps of one optimizer keep up to date.

    Attributes:
        owner: weak reference to the optimizer.
        out, transposed: the weight as it lies in memory, and its transpose, in FP8.
        entry: the copy's entry in the table of the update's kernel.
    """

    def __init__(self, layer: Any, owner: Any) -> None:
        (rows, cols), device = _matrix(layer.weight).shape, layer.weight.device
        self.out = torch.empty((rows, cols), dtype=torch.float8_e4m3fn, device=device)
        self.transposed = torch.empty((cols, rows), dtype=torch.float8_e4m3fn, device=device)
        self.owner, self._slots = weakref.ref(owner), layer.scales.slots
        self.entry: Fp8Copy = entry_of(layer.scales, *placed([self.out, self.transposed]))
        self._made_of: tuple[int, ...] = ()

    def suits(self, layer: Any) -> bool:
        """Whether the optimizer exists, and the layer has the same scales and a weight of the same shape and device."""
        matrix, slots = _matrix(_weight_of(layer)), getattr(layer.scales, "slots", None)
        is_alike = matrix is not None and (matrix.shape, matrix.device) == (self.out.shape, self.out.device)
        return is_alike and slots is self._slots and self.owner() is not None

    def renew(self, layer: Any) -> None:
        """Casts the weight, unless the copy is the cast of its present values by its present scale."""
        owner: Any = self.owner()
        if self._made_of == _version(layer) and not owner.is_recorded:
            return
        arrays = placed([_matrix(layer.weight).detach(), self.out, self.transposed])
        with torch.cuda.device_of(self.out):
            stream = TORCH.current_stream(self.out.get_device()) if self.out.is_cuda else None
            cast_weight(layer.scales, *arrays, stream=stream)
        self.note(layer)

    def note(self, layer: Any) -> None:
        """Notes that the copy has been made of the weight's present values by its present scale."""
        # A backward pass that would read the copy's former values raises PyTorch's error for saved tensors.
        torch.autograd.graph.increment_version([self.out, self.transposed])
        self._made_of = _version(layer)


def _version(layer: Any) -> tuple[int, ...]:
    """Numbers that change with each write into the weight that PyTorch notices, and with each change of the scales."""
    return layer.weight._version, layer.weight.data_ptr(), layer.scales.changes


def _weight_of(layer: Any) -> Tensor:
    """A layer's weight; None if each call computes the weight from other parameters, as with parametrizations.

    Reading the attribute `weight` would compute the weight once more, which changes the state of some parametrizations,
    such as that of `spectral_norm`.
    """
    return layer._parameters.get("weight")


def _matrix(weight: Tensor) -> Tensor:
    """A weight, or its transposed view, whichever is row-major; None for None, a `DTensor` or another layout."""
    if not isinstance(weight, torch.nn.Parameter) or local(weight) is not weight or weight.dim() != 2:
        return None
    return next((each for each in (weight, weight.t()) if each.is_contiguous()), None)


def _present() -> list[tuple[Any, WeightCopy]]:
    """Removes copies that do not suit their layers any more; returns the layers with a copy, and their copies."""
    for layer in [layer for layer, copy in _copies.items() if not copy.suits(layer)]:
        del _copies[layer]
    return [*_copies.items()]


def read_copies(called: Sequence[Any], weights: Sequence[Tensor]) -> None:
    """Lets the next calls of layers in FP8 read the copies of their weights, made anew if they are stale.

    A graph that `lt_runtime.torch.capture` does not capture casts the weights: nothing would renew its copies before
    its launches.
    """
    for layer, weight in zip(called, weights, strict=True):
        copy = _copies.get(layer)
        if copy is None or not copy.suits(layer):
            continue
        own = _weight_of(layer)
        if weight.data_ptr() != own.data_ptr() or weight.dtype != own.dtype:  # autocast gives a cast copy of the weight
            continue
        if copy.owner() in _followed or not is_capturing(weight):
            copy.renew(layer)
            out, transposed = placed([copy.out, copy.transposed if weight.is_cuda else copy.transposed.clone()])
            w8, w8_transposed = (out, transposed) if weight.is_contiguous() else (transposed, out)
            layer.scales.copies = w8, w8_transposed if layer.scales.needs_dx else None


@contextlib.contextmanager
def followed(optimizers: Sequence[Any]) -> Iterator[None]:
    """A `with` block for a capture whose graph reads the copies of the given optimizers.

    Before each launch of the graph, the caller must call `apply_settings` of each optimizer.
    """
    _followed.extend(optimizers)
    try:
        yield
        for each in optimizers:  # the captured step may have written weights after the optimizer's step
            if hasattr(each, "is_recorded"):
                each.refresh()
    finally:
        _followed.clear()


def refresh(optimizer: Any) -> None:
    """Casts weights to FP8 again for those of the optimizer's copies that are stale."""
    for layer, copy in _present():
        if copy.owner() is optimizer:
            copy.renew(layer)


def copies_for(optimizer: Any, *, captures: bool, is_fixed: bool) -> list[tuple[Any, WeightCopy]]:
    """The layers whose weights an optimizer's step has to write in FP8, and their copies.

    A step in a graph that `lt_runtime.torch.capture` does not capture writes no copies. From then on all copies are
    stale, because nothing tells when the graph has been launched.

    A weight gets its copy in the second step or later: after the first one, tuning may find that the layer's own type
    is faster.

    Args:
        captures: whether the step is being captured.
        is_fixed: whether there must be no new copies, because graphs hold steps without them.
    """
    optimizer.is_recorded |= captures and optimizer not in _followed
    if optimizer.is_recorded and optimizer not in _followed:
        return []
    taken = {id(layer.weight) for layer, _ in _present()}
    for layer in () if is_fixed else _layers_of(optimizer):
        weight = _weight_of(layer)
        if id(weight) in taken or (matrix := _matrix(weight)) is None or weight.grad is None:
            continue
        arrays = [weight, *[each for each in optimizer.state.get(weight, {}).values() if each.dim()]]
        was_suited = layer.scales.is_written
        layer.scales.is_written = is_suited(layer.scales, matrix.shape, arrays)
        if was_suited and layer.scales.is_written and can_write(layer.scales):
            _copies[layer] = WeightCopy(layer, optimizer)
            taken.add(id(weight))
    return [(layer, copy) for layer, copy in _present() if copy.owner() is optimizer]


def _layers_of(optimizer: Any) -> Iterator[Any]:
    """The layers in FP8 whose scales an optimizer's step sets: layers that it trains, or that nothing trains."""
    held = {id(each) for group in optimizer.param_groups for each in group["params"]} if layers else ()
    for layer in [*layers]:
        has_scales = vars(layer).get("scales") is not None  # `replace` removes `scales` after a measurement
        if has_scales and ((trained := _trained(layer)) is None or id(trained) in held):
            yield layer


def _trained(layer: Any) -> Tensor:
    """The parameter whose optimizer sets a layer's scales; None if no parameter of the layer is trained.

    It is the weight if the weight is trained. If each call computes the weight, it is the first trained parameter that
    the weight is computed from. Otherwise it is the bias.
    """
    weight, bias = _weight_of(layer), layer._parameters.get("bias")
    given = (weight, bias) if weight is not None else sorted(layer.parameters(), key=lambda each: each is bias)
    return next((each for each in given if each is not None and each.requires_grad), None)


def update_scales(optimizer: Any) -> None:
    """Sets the scales for the next step of the layers in FP8 that an optimizer trains.

    If `GradScaler` sets the optimizer's flag `found_inf`, the scales stay as they are.
    """
    found: Any = getattr(optimizer, "found_inf", None)
    states = dict[int, list[FP8State]]()
    for layer in _layers_of(optimizer):
        if layer.scales.slots is not None:
            states.setdefault(device_of("scales", layer.scales.slots), []).append(layer.scales)
    for ordinal, placed_here in states.items():
        on_gpu = ordinal != HOST
        # The flag is read as an integer: the bits of 0.0 are 0, those of 1.0 are not.
        flags = None if found is None else found.to(ordinal if on_gpu else "cpu").view(torch.uint32)
        with torch.cuda.device(ordinal):  # HOST, -1, changes nothing
            stream = torch.cuda.current_stream() if on_gpu else None
            state.update_scales(placed_here, skipped=placed([flags])[0], stream=stream)


@torch._disable_dynamo  # type: ignore[untyped-decorator]
def _after_step(optimizer: Any, *_: Any) -> None:
    """Sets scales after an optimizer's step; hidden from torch.compile, which cannot trace the package's calls."""
    if not hasattr(optimizer, "is_recorded"):  # `AdamW` sets the scales before it writes the weights
        update_scales(optimizer)


register_optimizer_step_post_hook(_after_step)
