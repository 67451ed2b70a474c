"""LayerNorm, RMSNorm and dropout as operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from lt_runtime.arguments import not_negative
from lt_runtime.errors import DTypeError, OperandError, ShapeError
from lt_runtime.ops import norm
from lt_runtime.ops.dropout import dropout
from lt_runtime.problem import probability
from lt_runtime.torch.linear import masks_of
from lt_runtime.torch.operators import (
    Operator,
    Options,
    Tensor,
    Tensors,
    as_rows,
    begin_backward,
    check_operands,
    check_shape,
    named,
    past_transforms,
    placed,
)


class Norm(Operator):
    """y = normalised(x + add) · weight + bias. The outputs are y, with `add` the sum, then the rows' statistics.

    Args:
        has_mean: whether the rows' mean is subtracted, as in LayerNorm.
        has_add: whether there is an `add`.
    """

    tensors = "Tensor x, Tensor? add, Tensor weight, Tensor? bias"
    options = "float eps"

    def __init__(self, has_mean: bool, has_add: bool) -> None:
        self.has_mean, self.has_add = has_mean, has_add
        self.name = ("layer_norm" if has_mean else "rms_norm") + ("_add" if has_add else "")
        self.visible = 1 + has_add
        super().__init__()

    def eager(self, operands: Tensors, options: Options, *, training: bool) -> Tensors:
        """See `Operator`."""
        if not (training and operands[0].is_cuda):
            return super().eager(operands, options, training=training)
        try:
            made = _apply_on_gpu(self.has_mean, *options, *operands)
        except OperandError:  # the package has other names for the operands
            self.check(operands, (*options, training))
            raise
        return made if self.has_add else (made,)

    def check(self, operands: Tensors, options: Options) -> None:
        """See `Operator`."""
        x, add, weight, bias = operands
        not_negative("eps", options[0])
        check_operands({"x": x, "add": add})
        check_operands({"weight": weight, "bias": bias})
        if weight.dtype not in (x.dtype, torch.float32) or weight.device != x.device:
            found = f"weight is {weight.dtype} on {weight.device} but x is {x.dtype} on {x.device}"
            raise DTypeError(f"{found}; accepted are x's type and float32, on x's device")
        if x.dim() < 1 or weight.dim() != 1:
            raise ShapeError(f"x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}; accepted: (..., N) and (N,)")
        check_shape("weight", weight, (x.shape[-1],), "one for each column of x")
        check_shape("bias", bias, (x.shape[-1],), "one for each column of x")
        check_shape("add", add, tuple(x.shape), "x's shape")

    def outputs(self, operands: Tensors, options: Options) -> list[Tensor]:
        """See `Operator`."""
        x = operands[0]
        rows = (x.shape[:-1].numel(),)
        made = [torch.empty_like(x) for _ in range(1 + self.has_add)]
        return made + [x.new_empty(rows, dtype=torch.float32) for _ in range((1 + self.has_mean) * options[-1])]

    def fill(self, outputs: Tensors, operands: Tensors, options: Options) -> None:
        """See `Operator`."""
        x, add, weight, bias = placed(operands)
        y, *others = placed(outputs)
        mean, rstd = _mean_and_rstd(others[self.has_add :])
        buffers = {"eps": options[0], "add": add, "out": y, "out_rstd": rstd}
        buffers["out_sum"] = others[0] if self.has_add else None
        if self.has_mean:
            norm.layer_norm_fwd(x, weight, bias, **buffers, out_mean=mean)
        else:
            norm.rms_norm_fwd(x, weight, **buffers)

    def saved(self, operands: Tensors, outputs: Tensors, needs: Sequence[bool], options: Options) -> Tensors:
        """See `Operator`: the normalised array, weight, and the statistics."""
        return outputs[1] if self.has_add else operands[0], operands[2], *outputs[self.visible :]

    def differentiate(self, dys: Tensors, saved: Tensors, needs: Sequence[bool], options: Options) -> list[Tensor]:
        """See `Operator`. The gradients of x and `add` are one tensor."""
        if dys[0] is None:
            return [dys[1] if need else None for need in needs[:2]] + [None] * 2
        dx, _, *others = super().differentiate(dys, saved, (needs[0] or needs[1], False, *needs[2:]), options)
        return [dx if need else None for need in needs[:2]] + others

    def gradients(self, dys: Tensors, saved: Tensors, needs: Sequence[bool], options: Options) -> list[Tensor]:
        """See `Operator`."""
        x, weight, *_ = saved
        return [torch.empty_like(like) for need, like in zip(needs, (x, x, weight, weight), strict=True) if need]

    def fill_gradients(
        self, made: Tensors, dys: Tensors, saved: Tensors, needs: Sequence[bool], options: Options
    ) -> None:
        """See `Operator`."""
        gradients = iter(placed(made))
        dx, _, dweight, dbias = [next(gradients) if need else None for need in needs]
        x, weight, *statistics = placed(saved)
        dy, dsum = (*placed(dys), None)[:2]
        context = norm.NormContext(x, weight, *_mean_and_rstd(statistics), has_bias=dbias is not None)
        buffers: dict[str, Any] = {"out_dx": dx, "out_dweight": dweight, "add": dsum if needs[0] else None}
        wanted = {"need_dx": dx is not None, "need_dweight": dweight is not None}
        if self.has_mean:
            norm.layer_norm_bwd(dy, context, **buffers, **wanted, out_dbias=dbias)
        else:
            norm.rms_norm_bwd(dy, context, **buffers, **wanted)


class _OnGpu(torch.autograd.Function):
    """An eager call of a norm on a GPU, in as few steps as possible."""

    @staticmethod
    def forward(ctx: Any, has_mean: bool, eps: float, x: Tensor, add: Tensor, weight: Tensor, bias: Tensor) -> Any:
        """y, or with `add` y and the sum."""
        ctx.set_materialize_grads(False)
        vectors = (weight, bias) if has_mean else (weight,)
        y, context = (norm.layer_norm_fwd if has_mean else norm.rms_norm_fwd)(as_rows(x), *vectors, eps=eps, add=add)
        ctx.save_for_backward(context.x, weight, context.mean, context.rstd)
        return y if add is None else (y, context.x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dsum: Tensor = None) -> tuple[Tensor, ...]:
        """The gradients of x, `add`, weight and bias; those of x and `add` are one tensor."""
        begin_backward("norm")
        of_x, of_add, *of_vectors = ctx.needs_input_grad[2:]
        dx, dvectors, wanted = dsum, [None, None], of_x or of_add
        if dy is not None:
            x, weight, mean, rstd = ctx.saved_tensors
            context = norm.NormContext(x, weight, mean, rstd, of_vectors[1])
            options = {"add": as_rows(dsum) if wanted and dsum is not None else None, "need_dx": wanted}
            backward = norm.rms_norm_bwd if mean is None else norm.layer_norm_bwd
            dx, *dvectors = backward(as_rows(dy), context, **options, need_dweight=of_vectors[0])
            dvectors += [None] * (2 - len(dvectors))
        return None, None, dx if of_x else None, dx if of_add else None, *dvectors


_apply_on_gpu: Final = past_transforms(named(_OnGpu, "norm"))


def _mean_and_rstd(statistics: Tensors) -> tuple[Any, Any]:
    """The rows' statistics, None for those that are not kept."""
    mean, rstd = (None, None, *statistics)[-2:]
    return mean, rstd


class Dropout(Operator):
    """y = mask · x / (1 - p); backward applies the same mask to dy."""

    name = "dropout"
    tensors = "Tensor x, Tensor key"
    options = "float p"

    def check(self, operands: Tensors, options: Options) -> None:
        """See `Operator`."""
        probability("p", options[0])
        check_operands({"x": operands[0]})

    def outputs(self, operands: Tensors, options: Options) -> list[Tensor]:
        """See `Operator`."""
        return [operands[0].new_empty(operands[0].shape)]

    def fill(self, outputs: Tensors, operands: Tensors, options: Options) -> None:
        """See `Operator`."""
        x, key = placed(operands)
        dropout(x, options[0], masks_of(options[0], 0, key), out=placed(outputs)[0])

    def saved(self, operands: Tensors, outputs: Tensors, needs: Sequence[bool], options: Options) -> Tensors:
        """See `Operator`."""
        return (operands[1],)

    def gradients(self, dys: Tensors, saved: Tensors, needs: Sequence[bool], options: Options) -> list[Tensor]:
        """See `Operator`."""
        return self.outputs(dys, options)

    def fill_gradients(
        self, made: Tensors, dys: Tensors, saved: Tensors, needs: Sequence[bool], options: Options
    ) -> None:
        """See `Operator`."""
        self.fill(made, (dys[0], saved[0]), options)
