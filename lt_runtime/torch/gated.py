"""A gated feed-forward block, such as SwiGLU, as one operator."""

from __future__ import annotations

from typing import Any, Final

from lt_runtime.errors import ShapeError
from lt_runtime.ops._gated import GatedContext
from lt_runtime.ops.gated import gated_bwd, gated_fwd
from lt_runtime.ops.linear import linear
from lt_runtime.problem import Activation, Philox
from lt_runtime.torch.linear import LinearLayers, check_options, masks_of, plain_backward
from lt_runtime.torch.operators import Needs, Operator, Options
from lt_runtime.torch.tensors import Tensor, Tensors, check_operands, check_shape, compute_of, placed

_NAMES: Final = "x", "add", "gate", "gate_bias", "up", "up_bias", "down", "down_bias"


class GatedLayers(LinearLayers):
    """y = dropout(act(x · gateᵀ) ∘ (x · upᵀ)) · downᵀ + add; act is the activation of gate, dropout that of up.

    Operands and options are those of `LinearLayers` for the layers gate, up and down. The second output is h (..., 2F):
    the columns of the gate's product, then those of the up projection's product.
    """

    name = "gated"
    is_repeatable = False
    eager = Operator.eager

    def check(self, operands: Tensors, options: Options) -> None:
        """See `Operator`."""
        x, add, _, *parameters = operands
        (gate, up, down), biases = parameters[::2], parameters[1::2]
        check_options(options)
        check_operands(dict(zip(_NAMES, (x, add, *parameters), strict=True)))
        if x.dim() < 2 or gate.dim() != 2 or down.dim() != 2:
            shapes = f"x has shape {tuple(x.shape)}, gate {tuple(gate.shape)}, down {tuple(down.shape)}"
            raise ShapeError(f"{shapes}; accepted are (..., K), (F, K) and (N, F)")
        hidden, outputs = gate.shape[0], down.shape[0]
        check_shape("gate", gate, (hidden, x.shape[-1]), "with x's columns")
        check_shape("up", up, (hidden, x.shape[-1]), "as gate")
        check_shape("down", down, (outputs, hidden), "with gate's rows as columns")
        for name, bias, rows in zip(_NAMES[3::2], biases, (hidden, hidden, outputs), strict=True):
            check_shape(name, bias, (rows,), "one for each row of its weight")
        check_shape("add", add, (*x.shape[:-1], outputs), "y's shape")

    def outputs(self, operands: Tensors, options: Options) -> list[Tensor]:
        """See `Operator`."""
        x, _, _, gate, *_, down, _ = operands
        return [x.new_empty((*x.shape[:-1], width)) for width in (down.shape[0], 2 * gate.shape[0])]

    def fill(self, outputs: Tensors, operands: Tensors, options: Options) -> None:
        """See `Operator`."""
        x, add, key, gate, gate_bias, up, up_bias, down, down_bias = placed(operands)
        (y, h), width, compute = placed(outputs), gate.shape[0], compute_of(x.dtype)
        linear(x, gate, gate_bias, out=h[..., :width], compute=compute)
        linear(x, up, up_bias, out=h[..., width:], compute=compute)
        (activation, *_), (slope, *_), (_, p, _), _ = options
        a, _ = gated_fwd(h, activation=activation, negative_slope=slope, dropout=p, rng=masks_of(p, 0, key))
        linear(a, down, down_bias, add=add, out=y, compute=compute)

    def saved(self, operands: Tensors, outputs: Tensors, needs: Needs, options: Options) -> Tensors:
        """See `Operator`: key, the weights, x and h."""
        x, _, key, *parameters = operands
        return key, *parameters[::2], x, outputs[1]

    def fill_gradients(self, made: Tensors, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> None:
        """See `Operator`.

        The kernel that reads h computes the gated values again, because forward did not keep them. The gradient of h is
        written over h if autograd frees h.
        """
        dx, _, _, *of_layers = placed(made)
        (dy,), (key, gate, up, down, x, h) = placed(dys), placed(saved)
        context, over_h = GatedContext(h, *gate_of(options, key)), None if options[-1] else h
        a, width = linear(dy, down.T, compute=compute_of(dy.dtype)), gate.shape[0]
        dh = gated_bwd(a, context, remake_y=True, out=over_h)
        plain_backward(dy, a, down, (None, *of_layers[4:]))
        plain_backward(dh[..., :width], x, gate, (dx, *of_layers[:2]))
        plain_backward(dh[..., width:], x, up, (dx, *of_layers[2:4]), accumulate_dx=dx is not None)


def gate_of(options: Options, key: Any) -> tuple[Activation, float, Philox | None]:
    """The gate's activation, and the probability of dropout and the source of its mask, as `GatedContext` has them."""
    (activation, *_), (slope, *_), (_, p, _), *_ = options
    return Activation.of(activation, slope), p, masks_of(p, 0, key)
