"""Softmax cross-entropy for PyTorch: of logits, and of a linear layer whose logits are computed in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch

from lt_runtime.arguments import flag, integer, number, shown
from lt_runtime.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from lt_runtime.ops.class_chunk import SmoothedLabels, add_chunk, chunk_gradient
from lt_runtime.ops.linear import linear
from lt_runtime.ops.losses import cross_entropy as loss_of
from lt_runtime.ops.matmul import matmul
from lt_runtime.torch.functional import LINEAR, PLAIN, cast
from lt_runtime.torch.operators import Needs, Operator, Options, is_eager
from lt_runtime.torch.padded import columns_of, padded_like, whole_rows
from lt_runtime.torch.tensors import (
    Tensor,
    Tensors,
    check_dense,
    check_operands,
    check_shape,
    check_tensors,
    compute_of,
    placed,
)

_REDUCTIONS: Final = ("mean", "sum")
_CALLERS: Final = {"labels": "target", "class_weights": "weight"}
"""PyTorch's names of operands of `lt.cross_entropy`."""
_CHUNK_BYTES: Final = 1 << 28
_CHUNK_ROWS: Final = 128
"""The number of rows of a chunk of logits is a multiple of 128, the height of cuBLASLt's tiles."""
_CHUNK_CLASSES: Final = 3072
"""Classes in a chunk: a multiple of 256, the width of cuBLASLt's tiles. A row of a chunk takes 6 KiB in BF16."""


class CrossEntropy(Operator):
    """Mean cross-entropy of logits (M, C) and labels (M,).

    Backward computes the gradient itself, times the incoming gradient. A gradient that was kept from forward would have
    to be read and written once more to be scaled, and in FP16 it would vanish before a loss scale reaches it.
    """

    name = "cross_entropy"
    options = "int ignore_index, float label_smoothing"

    def check(self, operands: Tensors, options: Options) -> None:
        """See `Operator`."""
        logits, labels, weight = operands
        check_operands({"input": logits})
        _check_labels("target", labels, logits.shape[:-1], logits.device)
        check_shape("weight", weight, (logits.shape[-1],), "one for each class of input")
        if weight is not None and weight.device != logits.device:
            raise DeviceError(f"weight is on {weight.device} but input on {logits.device}")

    def outputs(self, operands: Tensors, options: Options) -> list[Tensor]:
        """See `Operator`."""
        return [operands[0].new_empty((), dtype=_loss_type(operands[0]))]

    def fill(self, outputs: Tensors, operands: Tensors, options: Options) -> None:
        """See `Operator`."""
        self._run(outputs[0], None, operands, options)

    def gradients(self, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> list[Tensor]:
        """See `Operator`. The gradient's rows are padded if the logits' rows are: the layer then needs no copy."""
        return [padded_like(saved[0]), None, None]

    def fill_gradients(self, made: Tensors, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> None:
        """See `Operator`."""
        (loss,) = self.outputs(saved, options)
        self._run(loss, made[0], saved, options, dys[0])

    def _run(self, loss: Tensor, gradient: Tensor, operands: Tensors, options: Options, scale: Tensor = None) -> None:
        logits, labels, weight, gradient, loss, scale = placed((*operands, gradient, loss, scale))
        arrays: Any = {"out_gradient": gradient, "out_loss": loss, "grad_scale": scale, "class_weights": weight}
        (ignored, smoothing), wanted = options[:2], gradient is not None
        try:
            loss_of(logits, labels, ignore_index=ignored, label_smoothing=smoothing, need_gradient=wanted, **arrays)
        except ArgumentError as error:  # on the CPU the values of labels and weights are checked
            operand, _, found = str(error).partition(" ")
            raise ArgumentError(f"{_CALLERS.get(operand, operand)} {found}") from None


class LinearCrossEntropy(Operator):
    """Mean cross-entropy of logits x · weightᵀ + bias (M, N), computed in chunks together with its gradients.

    The option `chunk` is the number of rows in a chunk; if it is 0, `compute` chooses between chunks of rows and chunks
    of classes. The outputs besides the loss are the gradients of x, weight and bias, unscaled; a gradient that the
    option `wanted` leaves out is empty. Gradients of FP16 operands are FP32, because they could underflow before
    backward multiplies them by the loss scale.
    """

    name = "linear_cross_entropy"
    options = "int ignore_index, float label_smoothing, int chunk, bool is_half, bool[] wanted"

    def check(self, operands: Tensors, options: Options) -> None:
        """See `Operator`; `linear_cross_entropy` has checked the labels."""
        x, weight, bias, _ = operands
        LINEAR.check((x, None, None, weight, bias), PLAIN)

    def outputs(self, operands: Tensors, options: Options) -> list[Tensor]:
        """See `Operator`."""
        x, (*_, is_half, needs, _) = operands[0], options
        dtype = torch.float32 if is_half else x.dtype
        pairs = zip(operands[:3], needs, strict=True)
        made = [torch.empty_like(each, dtype=dtype) if need else x.new_empty(0, dtype=dtype) for each, need in pairs]
        return [x.new_empty((), dtype=_loss_type(x)), *made]

    def compute(self, operands: Tensors, options: Options) -> list[Tensor]:
        """See `Operator`."""
        x, weight, bias, labels = operands
        ignore_index, smoothing, chunk, is_half, wanted, _ = options
        kept = labels != ignore_index
        count, exact = kept.sum(), _loss_type(x)
        divisor = count.clamp(min=1).to(exact)
        # In FP16 the gradient of the logits would underflow if it were divided by the count of labels here. Instead the
        # gradients of x, weight and bias are divided afterwards.
        weights, after = kept.to(exact) / (1 if is_half else divisor), divisor if is_half else 1
        dtype = exact if is_half else x.dtype
        # A transposed weight is not padded, so that the weight's gradient gets the weight's layout.
        w, b = map(whole_rows, (weight, bias)) if weight.is_contiguous() else (weight, bias)
        head = _Head(x, w, b, torch.where(kept, labels, 0), weights, smoothing, len(weight), wanted, dtype)
        # Bytes of all logits, or of the FP32 sums for weight's gradient, whichever are fewer.
        largest = min(len(x) * x.itemsize, 4 * x.shape[1]) * len(weight)
        by_classes = not chunk and wanted[1] and largest > _CHUNK_BYTES
        loss, *sums = head.by_classes() if by_classes else head.by_rows(chunk or _rows_of_chunk(x, len(weight)))
        del head, w, b, kept, weights  # frees memory for the rounded gradients
        dx, dw, db = sums
        made = [each.div_(after) if is_half else each.to(dtype) for each in (dx, dw[: len(weight)], db[: len(weight)])]
        return [torch.where(count > 0, loss / after, math.nan), *made]

    def saved(self, operands: Tensors, outputs: Tensors, needs: Needs, options: Options) -> Tensors:
        """See `Operator`."""
        return outputs[1:]

    def differentiate(self, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> list[Tensor]:
        """See `Operator`. Traced calls use plain products, which Inductor can compute in place."""
        if is_eager((*dys, *saved)):
            return super().differentiate(dys, saved, needs, options)
        factor, dtype = dys[0].reshape(1), torch.float16 if options[3] else saved[0].dtype
        return [*((each * factor).to(dtype) if need else None for each, need in zip(saved, needs, strict=False)), None]

    def gradients(self, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> list[Tensor]:
        """See `Operator`. Saved gradients of the operands' type are scaled in place if autograd frees them."""
        is_half, keeps = options[3], options[-1]
        made = [each if need else None for each, need in zip(saved, needs[:3], strict=True)]
        if is_half or keeps:
            dtype = torch.float16 if is_half else None
            made = [each if each is None else torch.empty_like(each, dtype=dtype) for each in made]
        return [*made, None]

    def fill_gradients(self, made: Tensors, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> None:
        """See `Operator`."""
        for each, unscaled in zip(made[:3], saved, strict=True):
            if each is not None:
                torch.mul(unscaled, dys[0].reshape(1), out=each)  # PyTorch would round a factor of shape () to 16 bits


class _Head(NamedTuple):
    """A linear layer and the cross-entropy of its logits.

    Attributes:
        x, weight, bias: the layer's operands; weight and bias may have rows of zeros after the rows of the classes.
        labels: classes, one for each row.
        row_weights: factors of the rows' losses, FP32 (FP64 for FP64 operands).
        smoothing: label smoothing, from 0 (none) to 1.
        classes: the number of classes.
        wanted: three flags: whether the gradients of x, of weight and of bias are wanted.
        dtype: type of the gradients that are not sums over chunks; sums have the type of `row_weights`.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor
    labels: Tensor
    row_weights: Tensor
    smoothing: float
    classes: int
    wanted: tuple[bool, bool, bool]
    dtype: Any

    def by_rows(self, chunk: int) -> list[Tensor]:
        """Computes the weighted sum of the losses, and the wanted gradients, in chunks of `chunk` rows.

        With more than one chunk the gradients of weight and bias are sums over the chunks, in FP32 (FP64 for FP64
        operands).
        """
        x, rows = self.x, len(self.x)
        losses = x.new_zeros(-(-rows // chunk), dtype=self.row_weights.dtype)
        dx, dw, db = made = self._gradients(of_x=self.dtype, of_weight=losses.dtype if len(losses) > 1 else self.dtype)
        logits = x.new_empty((min(chunk, rows), columns_of(self.classes)))[:, : len(self.weight)]
        for i, start in enumerate(range(0, rows, chunk)):
            part, z = slice(start, start + chunk), logits[: rows - start]
            self._layer(x[part], self.weight, self.bias, z)
            # `lt.cross_entropy` divides by the number of rows that it gets.
            arrays = z[:, : self.classes], self.labels[part], losses[i], self.row_weights[part] * len(z)
            own, of, loss, factors = placed(arrays)
            more: Any = {"label_smoothing": self.smoothing, "row_weights": factors, "out_loss": loss}
            loss_of(own, of, ignore_index=None, out_gradient=own, **more)
            if self.wanted[0]:
                _multiply(z, self.weight, dx[part])
            if self.wanted[1]:
                _multiply(z.t(), x[part], dw, adds=i > 0)
            if self.wanted[2]:
                torch.add(z.sum(0, dtype=db.dtype), db if i else 0, out=db)
        return [losses.sum(), *made]

    def by_classes(self) -> list[Tensor]:
        """As `by_rows`, but in chunks of classes: the gradient of x is a sum over the chunks, the others are not.

        This takes less memory if rows are few and the weight is large. But each logit is computed twice, because its
        gradient depends on all logits of its row.
        """
        is_wrong = (self.labels < 0) | (self.labels >= self.classes)
        if not self.x.is_cuda and is_wrong.any():
            raise ArgumentError(f"labels holds {self.labels[is_wrong][0]}; accepted are 0 to {self.classes - 1}")
        log_sums = torch.full_like(self.row_weights, -math.inf)
        targets = torch.where(is_wrong, math.nan, torch.zeros_like(log_sums))
        labels, sums, means, weights = placed((self.labels, log_sums, targets, self.row_weights))
        of, memory = SmoothedLabels(self.classes, self.smoothing), self.x.new_empty((len(self.x), _CHUNK_CLASSES))
        for part, _, own in self._chunks(memory):
            add_chunk(placed([own])[0], labels, sums, means, first=part.start, of=of)
        loss = ((log_sums - targets) * self.row_weights).sum()
        dx, dw, db = made = self._gradients(of_x=loss.dtype, of_weight=self.dtype)
        for part, z, own in self._chunks(memory):
            chunk_gradient(placed([own])[0], labels, sums, weights, first=part.start, of=of)
            if self.wanted[0]:
                _multiply(z, self.weight[part], dx, adds=part.start > 0)
            if self.wanted[1]:
                _multiply(z.t(), self.x, dw[part])
            if self.wanted[2]:
                db[part] = z.sum(0, dtype=loss.dtype)
        return [loss, *made]

    def _chunks(self, memory: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Computes the logits of one chunk of classes after another, all in `memory`, (M, `_CHUNK_CLASSES`).

        Yields:
            The slice of weight's rows that the chunk covers; the logits of these rows; and a view of the logits of the
            classes among them. Rows of zeros after the classes have logits of 0.
        """
        for start in range(0, len(self.weight), _CHUNK_CLASSES):
            part = slice(start, min(start + _CHUNK_CLASSES, len(self.weight)))
            z = memory[:, : part.stop - start]
            self._layer(self.x, self.weight[part], None if self.bias is None else self.bias[part], z)
            yield part, z, z[:, : self.classes - start]

    def _layer(self, x: Tensor, weight: Tensor, bias: Tensor, logits: Tensor) -> None:
        linear(*placed((x, weight, bias)), compute=compute_of(x.dtype), out=placed([logits])[0])

    def _gradients(self, of_x: Any, of_weight: Any) -> list[Tensor]:
        """Memory for the gradients of x, weight and bias; an empty tensor for one that is not wanted."""
        empty = torch.empty_like if len(self.x) else torch.zeros_like
        operands = zip(self[:3], self.wanted, (of_x, of_weight, of_weight), strict=True)
        return [empty(each, dtype=of) if want else self.x.new_empty(0, dtype=of) for each, want, of in operands]


_CROSS_ENTROPY: Final = CrossEntropy()
_LINEAR_CROSS_ENTROPY: Final = LinearCrossEntropy()


def cross_entropy(
    input: Tensor,  # noqa: A002  # PyTorch's name
    target: Tensor,
    weight: Tensor = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` for class indices. Arithmetic is in FP32 on a GPU, and in FP64 on the CPU.

    Args:
        input: logits (N, C), (N, C, d1, ...) or (C,), float32, float16 or bfloat16; on the CPU float64 too. With axes
            after C they are copied once.
        target: classes (N), (N, d1, ...) or (), int64 or int32, in [0, C), or `ignore_index`. A class that is out of
            range makes the loss NaN on a GPU.
        weight: (C,), a factor for each class, not negative; it gets no gradient.
        ignore_index: elements with this target are left out.
        reduction: "mean" or "sum".
        label_smoothing: in [0, 1].

    Returns:
        The loss, shape (), FP32 (float64 for float64). The mean of no elements is NaN, and their sum is 0.

    Raises:
        OperandError: shapes, types or devices that do not fit; `target` has probabilities.
        ArgumentError: an argument is no tensor; an option is out of its range; `weight` requires a gradient; or, on
            the CPU, a target or a weight is out of its range.
        SecondDerivativeError: as `linear_cross_entropy`.
    """
    check_tensors(input=input, target=target)
    options, logits = _options(ignore_index, reduction, label_smoothing), input
    if input.dim() == 0:
        raise ShapeError("input has shape (); accepted are (N, C), (N, C, d1, ...) and (C,)")
    if input.dim() != 2:
        axis = min(input.dim() - 1, 1)
        rows = (*input.shape[:axis], *input.shape[axis + 1 :])
        _check_labels("target", target, rows, input.device)
        logits, target = input.movedim(axis, -1).reshape(-1, input.shape[axis]), target.reshape(-1)
    if weight is not None:
        check_operands({"weight": weight})
        if weight.requires_grad and torch.is_grad_enabled():
            raise ArgumentError("weight requires a gradient, which this loss does not have; give weight.detach()")
        weight = weight.to(_loss_type(input))
    if reduction == "mean":
        return _CROSS_ENTROPY((logits, target, weight), options)
    _CROSS_ENTROPY.check((logits, target, weight), options)
    divisor = _divisor(target, weight, ignore_index, _loss_type(input))
    if weight is not None:  # if all labels have weight 0, the mean is NaN, and so is its gradient times 0
        weight = torch.where(divisor == 0, 1.0, weight)
    return _sum_of_mean(_CROSS_ENTROPY((logits, target, weight), options), divisor)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    shift: bool = False,
    chunk: int | None = None,
) -> Tensor:
    """Cross-entropy of the logits x · weightᵀ + bias, which are made and consumed in chunks.

    The gradients are computed with the loss, so that backward only scales them. A chunk usually has the logits of some
    rows, and the gradients of weight and bias are added up over the chunks in FP32. If these sums and all logits would
    each take more than 256 MiB, a chunk has the logits of 3,072 classes instead, and the gradient of x is added up in
    FP32. Chunks of classes take less memory but a third more arithmetic, because each logit is computed twice. A single
    chunk, `chunk=labels.numel()`, is faster, but needs memory for all logits. A weight that is shared with an embedding
    gets both gradients, as usual. Under `torch.autocast` operands are cast as for `torch.nn.functional.linear`.

    Args:
        x: (..., K), float32, float16 or bfloat16; on the CPU float64 too.
        weight: (N, K), of x's type. bias: (N,), or None.
        labels: (...), int64 or int32, in [0, N), or `ignore_index`; see `cross_entropy`.
        ignore_index, reduction, label_smoothing: as for `cross_entropy`.
        shift: whether row i is to predict label i + 1, as in causal language models; the last row is left out. Row i
            is then index i of the last axis of x but one.
        chunk: rows whose logits lie in memory at a time. None for about as many as take 256 MiB, at least 128, or for
            chunks of classes.

    Returns:
        The loss, shape (), FP32 (float64 for float64).

    Raises:
        OperandError: shapes, types or devices that do not fit.
        ArgumentError: an argument is no tensor; or an option, or on the CPU a label, is out of its range.
        SecondDerivativeError: in backward with `create_graph=True`, and under transforms of `torch.func`.
    """
    check_tensors(x=x, weight=weight, labels=labels, bias=bias)
    options = _options(ignore_index, reduction, label_smoothing)
    if x.dim() < 1 + flag("shift", shift):
        raise ShapeError(f"x has shape {tuple(x.shape)}; accepted are (..., K), with shift (..., rows, K)")
    _check_labels("labels", labels, x.shape[:-1], x.device)
    if shift:
        labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    x, weight, bias = cast((x, weight, bias))
    x, labels = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    if chunk is not None and integer("chunk", chunk) < 1:
        raise ArgumentError(f"chunk is {chunk}; it must be at least 1")
    is_training = torch.is_grad_enabled()
    wanted = tuple([is_training and each is not None and each.requires_grad for each in (x, weight, bias)])
    of_layer = chunk or 0, x.dtype is torch.float16, wanted
    loss = _LINEAR_CROSS_ENTROPY((x, weight, bias, labels), (*options, *of_layer))
    return loss if reduction == "mean" else _sum_of_mean(loss, _divisor(labels, None, ignore_index, loss.dtype))


def _options(ignore_index: Any, reduction: Any, label_smoothing: Any) -> tuple[int, float]:
    """Checks the options that both losses have, and returns those that their operators take."""
    if reduction not in _REDUCTIONS:
        others = "; for 'none' use torch.nn.functional.cross_entropy"
        raise ArgumentError(f"reduction is {shown(reduction)}; accepted are {_REDUCTIONS}{others}")
    smoothing = number("label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise ArgumentError(f"label_smoothing is {smoothing}; accepted are numbers from 0 to 1")
    return integer("ignore_index", ignore_index), smoothing


def _check_labels(name: str, labels: Tensor, rows: Any, device: Any) -> None:
    check_dense(name, labels)
    if labels.dtype not in (torch.int64, torch.int32):
        others = "for probabilities use torch.nn.functional.cross_entropy"
        raise DTypeError(f"{name} is {labels.dtype}; accepted are int64 and int32; {others}")
    if labels.device != device:
        raise DeviceError(f"{name} is on {labels.device}, but the logits are on {device}")
    check_shape(name, labels, tuple(rows), "one for each row of logits")


def _loss_type(like: Tensor) -> Any:
    return torch.float64 if like.dtype is torch.float64 else torch.float32


def _divisor(labels: Tensor, weight: Tensor, ignore_index: int, dtype: Any) -> Tensor:
    """The divisor of a mean loss: the number of labels that are not ignored, or the sum of their class weights."""
    kept = labels != ignore_index
    terms = kept if weight is None else torch.where(kept, weight[labels.clamp(0, len(weight) - 1).long()], 0.0)
    return terms.sum(dtype=dtype)


def _sum_of_mean(mean: Tensor, divisor: Tensor) -> Tensor:
    return torch.where(divisor == 0, 0.0, mean * divisor)


def _rows_of_chunk(x: Tensor, classes: int) -> int:
    """The number of rows in a chunk, a multiple of 128.

    Chunks are about equal, and about as large as allowed, because each chunk reads the whole weight.
    """
    most: int = max(_CHUNK_BYTES // max(1, classes * x.itemsize), _CHUNK_ROWS)
    chunks = max(1, -(-len(x) // most))
    return max(1, -(-len(x) // (chunks * _CHUNK_ROWS))) * _CHUNK_ROWS


def _multiply(a: Tensor, b: Tensor, out: Tensor, *, adds: bool = False) -> None:
    """out = a · b, or out += a · b."""
    left, right, into = placed((a, b, out))
    matmul(left, right, into if adds else None, dtype=into.dtype, compute=compute_of(a.dtype), out=into)
