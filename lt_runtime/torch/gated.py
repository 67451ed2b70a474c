"""A gated feed-forward block, such as SwiGLU, as one operator."""

from __future__ import annotations

import torch

from lt_runtime.errors import ShapeError
from lt_runtime.ops._gated import GatedContext
from lt_runtime.ops.gated import gated_bwd, gated_fwd
from lt_runtime.ops.linear import linear
from lt_runtime.problem import Activation, probability
from lt_runtime.torch.linear import compute_of, masks_of, plain_backward
from lt_runtime.torch.operators import Needs, Operator, Options
from lt_runtime.torch.tensors import Tensor, Tensors, check_operands, check_shape, placed

_NAMES = "x", "add", "gate", "up", "down", "gate_bias", "up_bias", "down_bias"


class GatedLayers(Operator):
    """y = dropout(act(x · gateᵀ) ∘ (x · upᵀ)) · downᵀ + add.

    The second output is h (..., 2F): the columns of the gate's product, then those of the up projection's product.
    """

    name = "gated"
    options = "str activation, float slope, float dropout"
    addend = 1

    def check(self, operands: Tensors, options: Options) -> None:
        """See `Operator`."""
        Activation.of(*options[:2])
        probability("dropout", options[2])
        x, add, _, gate, up, down, *biases = operands
        check_operands(dict(zip(_NAMES, (x, add, gate, up, down, *biases), strict=True)))
        if x.dim() < 2 or gate.dim() != 2 or down.dim() != 2:
            shapes = f"x has shape {tuple(x.shape)}, gate {tuple(gate.shape)}, down {tuple(down.shape)}"
            raise ShapeError(f"{shapes}; accepted are (..., K), (F, K) and (N, F)")
        hidden, outputs = gate.shape[0], down.shape[0]
        check_shape("gate", gate, (hidden, x.shape[-1]), "with x's columns")
        check_shape("up", up, (hidden, x.shape[-1]), "as gate")
        check_shape("down", down, (outputs, hidden), "with gate's rows as columns")
        for name, bias, rows in zip(_NAMES[5:], biases, (hidden, hidden, outputs), strict=True):
            check_shape(name, bias, (rows,), "one for each row of its weight")
        check_shape("add", add, (*x.shape[:-1], outputs), "y's shape")

    def outputs(self, operands: Tensors, options: Options) -> list[Tensor]:
        """See `Operator`."""
        x, _, _, gate, _, down, *_ = operands
        return [x.new_empty((*x.shape[:-1], width)) for width in (down.shape[0], 2 * gate.shape[0])]

    def fill(self, outputs: Tensors, operands: Tensors, options: Options) -> None:
        """See `Operator`."""
        x, add, key, gate, up, down, gate_bias, up_bias, down_bias = placed(operands)
        activation, slope, p, _ = options
        (y, h), width, compute = placed(outputs), gate.shape[0], compute_of(x.dtype)
        linear(x, gate, gate_bias, out=h[..., :width], compute=compute)
        linear(x, up, up_bias, out=h[..., width:], compute=compute)
        a, _ = gated_fwd(h, activation=activation, negative_slope=slope, dropout=p, rng=masks_of(p, 0, key))
        linear(a, down, down_bias, add=add, out=y, compute=compute)

    def saved(self, operands: Tensors, outputs: Tensors, needs: Needs, options: Options) -> Tensors:
        """See `Operator`."""
        x, _, key, gate, up, down, *_ = operands
        return x, key, gate, up, down, outputs[1]

    def gradients(self, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> list[Tensor]:
        """See `Operator`."""
        x, _, *weights, _ = saved
        of_weights = [torch.empty_like(each) if need else None for each, need in zip(weights, needs[3:6], strict=True)]
        of_biases = [x.new_empty(len(each)) if need else None for each, need in zip(weights, needs[6:], strict=True)]
        return [x.new_empty(x.shape) if needs[0] else None, None, None, *of_weights, *of_biases]

    def fill_gradients(self, made: Tensors, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> None:
        """See `Operator`.

        The kernel that reads h computes the gated values again, because forward did not keep them. The gradient of h is
        written over h if autograd frees h.
        """
        dx, _, _, dgate, dup, ddown, *of_biases = placed(made)
        (dy,), (x, key, gate, up, down, h) = placed(dys), placed(saved)
        activation, p, width = Activation.of(*options[:2]), options[2], gate.shape[0]
        a = linear(dy, down.T, compute=compute_of(dy.dtype))
        context, over_h = GatedContext(h, activation, p, masks_of(p, 0, key)), None if options[-1] else h
        dh = gated_bwd(a, context, remake_y=True, out=over_h)
        plain_backward(dy, a, down, (None, ddown, of_biases[2]))
        plain_backward(dh[..., :width], x, gate, (dx, dgate, of_biases[0]))
        plain_backward(dh[..., width:], x, up, (dx, dup, of_biases[1]), accumulate_dx=dx is not None)
