"""Blocks of one operation, or of a few: norms, gated layers, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np

from lt_runtime.arguments import flag, not_negative, shown
from lt_runtime.errors import ArgumentError
from lt_runtime.fp8 import FP8
from lt_runtime.gpu.devices import parse_device
from lt_runtime.nn.block import Block
from lt_runtime.nn.linear import Linear, Maker, backward_layers, forward_layers, seed_of, size_of
from lt_runtime.nn.run import Pass
from lt_runtime.ops import norm
from lt_runtime.ops._gated import GatedContext
from lt_runtime.ops.dropout import dropout
from lt_runtime.ops.gated import gated_bwd
from lt_runtime.ops.optimizers.parameters import Parameter
from lt_runtime.problem import ActivationName, Chosen, ComputeName, DType, DTypeLike, activation_of, probability

if TYPE_CHECKING:
    from lt_runtime.ops.fp8.state import FP8State


class _Norm(Block):
    """Base of both norms: has the width, eps, the weight, and backward."""

    bias: Parameter | None = None
    _operations: ClassVar[tuple[Callable[..., Any], Callable[..., Any]]]
    """The operations of forward and backward."""

    def _make(self, width: int, eps: float, *, dtype: DTypeLike, master_weights: bool, device: object) -> Maker:
        """Sets the attributes; returns a `Maker` for further parameters."""
        self.inputs = self.outputs = size_of("width", width)
        self.eps = not_negative("eps", eps)
        has_master = flag("master_weights", master_weights)
        make = Maker(DType.parse("the norm", dtype), parse_device(device), has_master=has_master)
        self.weight = make(np.ones(width))
        return make

    def forward(self, x: Any, run: Pass) -> Any:
        """See `Block`."""
        vectors = [each.data for each in (self.weight, self.bias) if each is not None]
        y, context = self._operations[0](x, *vectors, eps=self.eps, stream=run.stream)
        run.keep(context, run.needs_gradient(x))
        return y

    def backward(self, dy: Any, run: Pass, add: Any = None) -> Any:
        """See `Block`. The same pass adds `add` to dx."""
        context, needs_dx = run.take()
        (dweight, dbias), adds = run.grads(self.weight, self.bias)
        if not needs_dx and dweight is None and dbias is None:
            return None
        options: dict[str, Any] = {"need_dx": needs_dx, "need_dweight": dweight is not None, "out_dweight": dweight}
        options |= {} if self.bias is None else {"need_dbias": dbias is not None, "out_dbias": dbias}
        options |= {"add": add if needs_dx else None, "accumulate": adds}
        return self._operations[1](dy, context, **options, stream=run.stream).dx


class LayerNorm(_Norm):
    """y = (x - mean) / √(variance + eps) · weight + bias over the columns of each row (Ba, Kiros, Hinton, 2016).

    Args:
        width: number of columns.
        eps: is added to the variance.
        bias: whether there is a bias.
        dtype, master_weights, device: as for `lt.MLP`.
    """

    _operations = norm.layer_norm_fwd, norm.layer_norm_bwd

    def __init__(
        self,
        width: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        dtype: DTypeLike = "float32",
        master_weights: bool = True,
        device: object = "auto",
    ) -> None:
        make = self._make(width, eps, dtype=dtype, master_weights=master_weights, device=device)
        self.bias = make(np.zeros(width)) if flag("bias", bias) else None


class RMSNorm(_Norm):
    """y = x / √(mean(x²) + eps) · weight over the columns of each row (Zhang and Sennrich, 2019).

    Args:
        width: number of columns.
        eps: is added to the mean of the squares.
        dtype, master_weights, device: as for `lt.MLP`.
    """

    _operations = norm.rms_norm_fwd, norm.rms_norm_bwd

    def __init__(
        self,
        width: int,
        *,
        eps: float = 1e-6,
        dtype: DTypeLike = "float32",
        master_weights: bool = True,
        device: object = "auto",
    ) -> None:
        self._make(width, eps, dtype=dtype, master_weights=master_weights, device=device)


class Gated(Block):
    """y = dropout(act(x · gateᵀ) ∘ (x · upᵀ)) · downᵀ, a gated feed-forward block (Shazeer, 2020).

    The gate's and the up projection's weights are the two halves of `up.weight`, for one product; the derived classes
    name the usual activations.

    Args:
        width: number of columns of x and y.
        hidden: number of columns between.
        activation: of the gate, a name of `lt.ACTIVATIONS`.
        dropout: probability of dropout of the gated values.
        bias: whether the products have biases.
        recompute: whether backward computes the gated values again, in its one pass over their gradient, so that an
            array of `hidden` columns less is kept for each block. The results are the same; a step takes 1 to 3 %
            longer. Not with a precision, because FP8 keeps the values in 8 bits.
        seed: of the initial values and of dropout; if None, the next of a sequence that begins at 0 in each process.
        dtype, compute, master_weights, device: as for `lt.MLP`.
        precision: as for `lt.Linear`, for both layers. The gate and the up projection share one cast of x.

    Raises:
        ArgumentError: an option that is not accepted, or `recompute` with a precision.

    Attributes:
        up: the layer (2·hidden, width). down: the layer (width, hidden).
    """

    overwrites: ClassVar[bool] = False
    usual: ClassVar[ActivationName] = "silu"
    """The activation of the class, if the caller gives none."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: Chosen | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        recompute: bool = False,
        seed: int | None = None,
        dtype: DTypeLike = "float32",
        compute: ComputeName = "float32",
        master_weights: bool = True,
        precision: Literal["fp8"] | FP8 | None = None,
        device: object = "auto",
    ) -> None:
        self.inputs = self.outputs = size_of("width", width)
        self.activation = activation_of("activation", type(self).usual if activation is None else activation)
        self.dropout, self.seed = probability("dropout", dropout), seed_of(seed)
        self.recompute: Final = flag("recompute", recompute)
        if self.recompute and precision is not None:
            raise ArgumentError(f"recompute is True, which excludes a precision, and precision is {shown(precision)}")
        of_types: dict[str, Any] = {"dtype": dtype, "compute": compute, "master_weights": master_weights}
        options = of_types | {"bias": bias, "precision": precision, "device": device}
        self.up = Linear(width, 2 * size_of("hidden", hidden), seed=self.seed, **options)
        self.down = Linear(hidden, width, seed=(self.seed + 1) % 2**64, **options)

    def forward(self, x: Any, run: Pass, add: Any = None) -> Any:
        """See `Block`. Adds `add` to y."""
        h, rng = self.up.forward(x, run), run.rng(self.seed)
        gate = GatedContext(h, self.activation, self.dropout if rng else 0.0, rng if self.dropout else None)
        run.keep(gate, self._scales_for_gate(h) if rng else None)
        # If backward recomputes the gated values, `down` keeps half of h, which has their shape, in their place.
        stand_in = h[..., : self.down.inputs] if self.recompute else None
        return forward_layers([self.down], h, run, add=add, stand_in=stand_in, gate=gate)

    def _scales_for_gate(self, h: Any) -> FP8State | None:
        """The scales with which backward casts the gradients of gate and value to FP8; None if it does not."""
        if self.up.scales is None or self.up.bias is not None:
            return None
        from lt_runtime.ops.fp8.gradients import casts_gate  # imported late: few models use FP8

        return self.up.scales if casts_gate(h, self.up.scales) else None

    def backward(self, dy: Any, run: Pass) -> Any:
        """See `Block`."""
        held, dh = [dy], list[Any]()
        del dy  # `held` has the only reference, so that the array is freed after its last reader

        def through_gate(gradient: Any) -> Any:
            (context, scales), cast = run.take(), None
            if scales is not None:
                from lt_runtime.ops.fp8.gradients import gated_bwd_in_fp8  # imported late: few models use FP8

                cast = gated_bwd_in_fp8(gradient, context, scales, stream=run.stream)
            options: dict[str, Any] = {"remake_y": self.recompute, "out": context.h, "stream": run.stream}
            dh.append(gated_bwd(gradient, context, **options) if cast is None else cast)
            return gradient

        if self.recompute:
            backward_layers([self.down], held, run, remake=through_gate)
        else:
            through_gate(backward_layers([self.down], held, run))
        return self.up.backward(dh.pop(), run)


class SwiGLU(Gated):
    """A gated block with SiLU."""


class GEGLU(Gated):
    """A gated block with GELU, in the tanh form."""

    usual = "gelu"


class ReGLU(Gated):
    """A gated block with ReLU."""

    usual = "relu"


class Dropout(Block):
    """y = mask · x / (1 - p) in training, y = x in inference.

    Args:
        p: probability in [0, 1), rounded to a multiple of 2^-16.
        seed: of the masks; if None, the next of a sequence that begins at 0 in each process.
    """

    def __init__(self, p: float, *, seed: int | None = None) -> None:
        self.p: Final = probability("p", p)
        self.seed: Final = seed_of(seed)

    def forward(self, x: Any, run: Pass) -> Any:
        """See `Block`."""
        rng = run.rng(self.seed)
        run.keep(rng)
        return dropout(x, self.p, rng, stream=run.stream) if rng and self.p else x

    def backward(self, dy: Any, run: Pass) -> Any:
        """See `Block`."""
        rng = run.take()
        return dropout(dy, self.p, rng, stream=run.stream) if self.p else dy
