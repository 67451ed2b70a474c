"""LayerNorm, RMSNorm and dropout as differentiable operators of PyTorch."""

from __future__ import annotations

import torch

from lt_runtime.arguments import not_negative
from lt_runtime.errors import DTypeError, ShapeError
from lt_runtime.ops import norm
from lt_runtime.ops.dropout import dropout
from lt_runtime.problem import probability
from lt_runtime.torch.linear import masks_of
from lt_runtime.torch.operators import Needs, Operator, Options
from lt_runtime.torch.tensors import Tensor, Tensors, as_tensors, check_operands, check_shape, placed


class Norm(Operator):
    """y = normalised(x + add) · weight + bias.

    The outputs are y, the sum if there is an `add`, and the rows' statistics.

    Args:
        has_mean: whether the rows' mean is subtracted, as in LayerNorm.
        has_add: whether there is an `add`.
    """

    options = "float eps"
    is_repeatable = True

    def __init__(self, has_mean: bool, has_add: bool) -> None:
        self.has_mean, self.has_add = has_mean, has_add
        self.name = ("layer_norm" if has_mean else "rms_norm") + ("_add" if has_add else "")
        self.visible = 1 + has_add
        super().__init__()

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
        made = [x.new_empty(x.shape) for _ in range(self.visible)]
        return made + [x.new_empty(x.shape[:-1].numel(), dtype=torch.float32) for _ in range(1 + self.has_mean)]

    def compute(self, operands: Tensors, options: Options) -> list[Tensor]:
        """See `Operator`. `lt.layer_norm_fwd` allocates the outputs: the host takes longer to check given buffers."""
        x, add, *vectors = placed(operands)
        forward = norm.layer_norm_fwd if self.has_mean else norm.rms_norm_fwd
        y, context = forward(x, *vectors[: 1 + self.has_mean], eps=options[0], add=add)
        made = y, context.x if self.has_add else None, context.mean, context.rstd
        return as_tensors([each for each in made if each is not None])

    def saved(self, operands: Tensors, outputs: Tensors, needs: Needs, options: Options) -> Tensors:
        """See `Operator`: the normalised array, weight, and the statistics."""
        return outputs[1] if self.has_add else operands[0], operands[2], *outputs[self.visible :]

    def differentiate(self, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> list[Tensor]:
        """See `Operator`. The gradients of x and `add` are one tensor."""
        if dys[0] is None:
            return [dys[1] if need else None for need in needs[:2]] + [None] * 2
        dx, _, *others = super().differentiate(dys, saved, (needs[0] or needs[1], False, *needs[2:]), options)
        return [dx if need else None for need in needs[:2]] + others

    def gradients(self, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> list[Tensor]:
        """See `Operator`."""
        x, weight, *_ = saved
        pairs = zip(needs, (x, x, weight, weight), strict=True)
        return [like.new_empty(like.shape) if need else None for need, like in pairs]

    def compute_gradients(self, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> list[Tensor]:
        """See `Operator`."""
        x, weight, *statistics = placed(saved)
        dy, dsum = (*placed(dys), None)[:2]
        mean, rstd = (None, *statistics)[-2:]
        context = norm.NormContext(x, weight, mean, rstd, has_bias=needs[3])
        backward = norm.layer_norm_bwd if self.has_mean else norm.rms_norm_bwd
        made = backward(dy, context, add=dsum if needs[0] else None, need_dx=needs[0], need_dweight=needs[2])
        dx, dweight, dbias = (*made, None)[:3]
        return as_tensors((dx, None, dweight, dbias))


class Dropout(Operator):
    """y = mask · x / (1 - p); backward applies the same mask to dy."""

    name = "dropout"
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

    def saved(self, operands: Tensors, outputs: Tensors, needs: Needs, options: Options) -> Tensors:
        """See `Operator`."""
        return (operands[1],)

    def gradients(self, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> list[Tensor]:
        """See `Operator`."""
        return [*self.outputs(dys, options), None]

    def fill_gradients(self, made: Tensors, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> None:
        """See `Operator`."""
        self.fill(made[:1], (dys[0], saved[0]), options)
