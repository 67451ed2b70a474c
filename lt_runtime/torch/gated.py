"""A gated feed-forward block, such as SwiGLU, as one operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lt_runtime import reference
from lt_runtime.errors import ShapeError
from lt_runtime.ops.gated import GatedContext, gated_bwd, gated_fwd
from lt_runtime.ops.linear import linear, linear_bwd
from lt_runtime.problem import Activation, probability
from lt_runtime.torch.linear import compute_of, masks_of, plain_context
from lt_runtime.torch.operators import (
    Operator,
    Options,
    Tensor,
    Tensors,
    as_matrix,
    as_numpy,
    as_rows,
    check_operands,
    check_shape,
    store,
)

_NAMES = "x", "add", "gate", "up", "down", "gate_bias", "up_bias", "down_bias"


class GatedLayers(Operator):
    """y = dropout(act(x · gateᵀ) ∘ (x · upᵀ)) · downᵀ + add.

    The output besides y is h (..., 2F): the columns of the gate's product, then those of the up projection's.
    """

    name = "gated"
    tensors = (
        "Tensor x, Tensor? add, Tensor? key, Tensor gate, Tensor up, Tensor down, "
        "Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias"
    )
    options = "str activation, float slope, float dropout"

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
        widths = [down.shape[0], 2 * gate.shape[0]] if options[-1] else [down.shape[0]]
        return [x.new_empty((*x.shape[:-1], width)) for width in widths]

    def fill(self, outputs: Tensors, operands: Tensors, options: Options) -> None:
        """See `Operator`."""
        x, add, key, gate, up, down, gate_bias, up_bias, down_bias = operands
        activation, slope, p, training = options
        width, rng = gate.shape[0], masks_of(p, 0, key)
        h = outputs[1] if training else x.new_empty((*x.shape[:-1], 2 * width))
        if x.is_cuda:
            x, compute = as_rows(x), compute_of(x.dtype)
            linear(x, gate, gate_bias, out=h[..., :width], compute=compute)
            linear(x, up, up_bias, out=h[..., width:], compute=compute)
            a, _ = gated_fwd(h, activation=activation, negative_slope=slope, dropout=p, rng=rng)
            linear(a, down, down_bias, add=add, out=outputs[0], compute=compute)
            return
        x, add = as_matrix(x), as_matrix(add)
        store(h[..., :width], reference.linear_fwd(x, as_numpy(gate), as_numpy(gate_bias))[0])
        store(h[..., width:], reference.linear_fwd(x, as_numpy(up), as_numpy(up_bias))[0])
        a = _gated_on_host(h, options, rng)
        store(outputs[0], reference.linear_fwd(a, as_numpy(down), as_numpy(down_bias), addend=add)[0])

    def saved(self, operands: Tensors, outputs: Tensors, needs: Sequence[bool], options: Options) -> Tensors:
        """See `Operator`."""
        x, _, key, gate, up, down, *_ = operands
        return x, key, gate, up, down, outputs[1]

    def differentiate(self, dys: Tensors, saved: Tensors, needs: Sequence[bool], options: Options) -> list[Tensor]:
        """See `Operator`. The gradient of `add` is dy itself, which the operator may not return."""
        made = super().differentiate(dys, saved, (needs[0], False, *needs[2:]), options)
        made[1] = dys[0] if needs[1] else None
        return made

    def gradients(self, dys: Tensors, saved: Tensors, needs: Sequence[bool], options: Options) -> list[Tensor]:
        """See `Operator`."""
        x, _, gate, up, down, _ = saved
        biases = [x.new_empty(weight.shape[:1]) for need, weight in zip(needs[6:], saved[2:5], strict=True) if need]
        dx = [x.new_empty(x.shape)] if needs[0] else []
        return dx + [torch.empty_like(w) for need, w in zip(needs[3:6], (gate, up, down), strict=True) if need] + biases

    def fill_gradients(
        self, made: Tensors, dys: Tensors, saved: Tensors, needs: Sequence[bool], options: Options
    ) -> None:
        """See `Operator`."""
        gradients = iter(made)
        wanted = [next(gradients) if need else None for need in needs]
        (_fill_on_gpu if dys[0].is_cuda else _fill_on_host)(wanted, dys[0], saved, options)


def _gated_on_host(h: Tensor, options: Options, rng: Any) -> Any:
    """The gated values of h, rounded to its type, as a NumPy matrix."""
    rounded = h.new_empty((*h.shape[:-1], h.shape[-1] // 2))
    factors = reference.dropout_factors(as_matrix(rounded).shape, options[2], rng)
    store(rounded, reference.gated_fwd(as_matrix(h), Activation.of(*options[:2]), factors))
    return as_matrix(rounded)


def _fill_on_gpu(wanted: Tensors, dy: Tensor, saved: Tensors, options: Options) -> None:
    """Computes the gradients on a GPU; the gated values, which forward did not keep, come from the gradient's pass."""
    x, key, gate, up, down, h = saved
    dx, _, _, dgate, dup, ddown, dgate_bias, dup_bias, ddown_bias = wanted
    x, width = as_rows(x), gate.shape[0]
    a = linear(dy, down.t(), compute=compute_of(dy.dtype))
    context = GatedContext(h, Activation.of(*options[:2]), options[2], masks_of(options[2], 0, key))
    dh = gated_bwd(a, context, remake_y=True)
    for weight, inputs, dz, outs, adds in (
        (down, a, dy, (None, ddown, ddown_bias), False),
        (gate, x, dh[..., :width], (dx, dgate, dgate_bias), False),
        (up, x, dh[..., width:], (dx, dup, dup_bias), dx is not None),
    ):
        buffers: dict[str, Any] = dict(zip(("out_dx", "out_dw", "out_db"), outs, strict=True))
        needs: Any = {f"need_{name[4:]}": each is not None for name, each in buffers.items()}
        if any(needs.values()):
            of_layer = plain_context(inputs, weight, has_bias=needs["need_db"])
            linear_bwd(dz, of_layer, accumulate_dx=adds, **buffers, **needs)


def _fill_on_host(wanted: Tensors, dy: Tensor, saved: Tensors, options: Options) -> None:
    x, key, gate, up, down, h = saved
    dx, _, _, dgate, dup, ddown, dgate_bias, dup_bias, ddown_bias = wanted
    exact_dy, exact_x, rng = as_matrix(dy), as_matrix(x), masks_of(options[2], 0, key)
    a = _gated_on_host(h, options, rng)
    of_down = reference.linear_bwd(exact_dy, a, as_numpy(down), exact_dy)
    factors = reference.dropout_factors(a.shape, options[2], rng)
    dh = reference.gated_bwd(of_down.dx, as_matrix(h), Activation.of(*options[:2]), factors)
    halves = dh[:, : a.shape[1]], dh[:, a.shape[1] :]
    of_gate, of_up = (
        reference.linear_bwd(dz, exact_x, as_numpy(weight), dz) for dz, weight in zip(halves, (gate, up), strict=True)
    )
    store(dx, of_gate.dx + of_up.dx)
    for of_layer, dw, db in ((of_gate, dgate, dgate_bias), (of_up, dup, dup_bias), (of_down, ddown, ddown_bias)):
        store(dw, of_layer.dw)
        store(db, of_layer.db)
