"""A layer with many outputs, such as a vocabulary, whose number is no multiple of 8: the output has padded rows.

cuBLASLt has fast kernels only for rows of a multiple of 8 elements, see `products.padded`. Copying the logits of GPT-2
and their gradient (8192x50257, BF16) to padded rows and back took 1.6 ms of a training step of 19 ms on an H200. So the
layer writes into padded rows, the loss writes its gradient into padded rows, and only the weight is copied.
"""

from __future__ import annotations

from typing import Final

import torch

from lt_runtime.torch.linear import LinearLayers
from lt_runtime.torch.operators import Needs, Operator, Options
from lt_runtime.torch.tensors import Tensor, Tensors

_MULTIPLE: Final = 8
_LEAST: Final = 4096
"""The least number of outputs that are padded. The output of a smaller layer is contiguous, as in PyTorch."""
_MARK: Final = "_lt_runtime_columns"
"""Attribute of a tensor's memory: the number of elements in each row that are followed by zeros up to the next row."""


class PaddedLinear(LinearLayers):
    """`LinearLayers` for one layer with neither activation nor dropout; rows of y begin at multiples of 8 elements."""

    name = "padded_linear"
    is_repeatable = False
    eager = Operator.eager

    def outputs(self, operands: Tensors, options: Options) -> list[Tensor]:
        """See `Operator`."""
        return [padded(operands[0], (*operands[0].shape[:-1], len(operands[3])))]

    def fill(self, outputs: Tensors, operands: Tensors, options: Options) -> None:
        """See `Operator`."""
        *others, weight, bias = operands
        super().fill([_widened(outputs[0])], (*others, whole_rows(weight), whole_rows(bias)), options)

    def compute_gradients(self, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> list[Tensor]:
        """See `Operator`. The gradients of weight and bias are the first rows of larger tensors."""
        key, weight, *others = saved
        whole = key, whole_rows(weight), *others
        dx, _, _, *larger = super().compute_gradients([_with_zeros(dys[0])], whole, needs, options)
        return [dx, None, None, *[each if each is None else each[: len(weight)] for each in larger]]


def is_ragged(x: Tensor, weight: Tensor) -> bool:
    """Whether a layer's output gets padded rows: not if x has so few rows that copying the weight costs more."""
    if getattr(weight, "ndim", 0) != 2 or not isinstance(x, torch.Tensor):
        return False  # an error, which the operator raises
    count, width = weight.shape
    return bool(count % _MULTIPLE and count >= _LEAST and weight.is_contiguous() and x.numel() >= width * width)


def columns_of(count: int) -> int:
    """The number of elements from one padded row to the next: `count`, rounded up to a multiple of 8."""
    return -(-count // _MULTIPLE) * _MULTIPLE


def padded(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor with padded rows, of `like`'s type and device: the padding is zero, the elements are uninitialised."""
    full = like.new_empty((*shape[:-1], columns_of(shape[-1])))
    full[..., shape[-1] :] = 0
    setattr(full.untyped_storage(), _MARK, shape[-1])
    return full[..., : shape[-1]].detach()  # autograd must not take it for a view: users may change it in place


def padded_like(tensor: Tensor) -> Tensor:
    """An uninitialised tensor of the shape of `tensor`, with padded rows if `tensor` has padded rows."""
    *_, count = tensor.shape
    is_padded = count % _MULTIPLE and tensor.stride()[-2:] == (columns_of(count), 1)
    return padded(tensor, tensor.shape) if is_padded else torch.empty_like(tensor)


def whole_rows(matrix: Tensor) -> Tensor:
    """A weight or bias with rows of zeros appended up to a multiple of 8 rows; the tensor itself if it needs none."""
    missing = 0 if matrix is None else columns_of(len(matrix)) - len(matrix)
    return torch.nn.functional.pad(matrix, (0, 0) * (matrix.dim() - 1) + (0, missing)) if missing else matrix


def _with_zeros(dy: Tensor) -> Tensor:
    """dy and the zeros that pad its rows: a view if dy's memory has these zeros, otherwise a copy."""
    count = dy.shape[-1]
    has_zeros = getattr(dy.untyped_storage(), _MARK, None) == count and dy.stride()[-2:] == (columns_of(count), 1)
    return _widened(dy) if has_zeros else torch.nn.functional.pad(dy, (0, columns_of(count) - count))


def _widened(rows: Tensor) -> Tensor:
    return rows.as_strided((*rows.shape[:-1], columns_of(rows.shape[-1])), rows.stride())
