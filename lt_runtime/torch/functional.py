"""Functions with autograd over the package's operations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import torch

from lt_runtime.errors import DTypeError
from lt_runtime.problem import Activation, ActivationName, probability
from lt_runtime.torch.gated import GatedLayers
from lt_runtime.torch.linear import LinearLayers
from lt_runtime.torch.norms import Dropout, Norm
from lt_runtime.torch.operators import Operator, Options
from lt_runtime.torch.padded import PaddedLinear, is_ragged
from lt_runtime.torch.tensors import Tensor, Tensors, check_dense, check_tensors, is_autocast

LINEAR: Final = LinearLayers()
_PADDED: Final = PaddedLinear()
GATED: Final = GatedLayers()
_NORMS: Final = {flags: Norm(*flags) for flags in itertools.product((True, False), repeat=2)}
"""The norm operators; the key's two flags say whether the rows' mean is subtracted, and whether there is an `add`."""
_DROPOUT: Final = Dropout()
PLAIN: Final = ("none",), (0.01,), (0.0,)
"""The options of one linear layer without activation and dropout."""
_AUTOCAST_TYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor = None,
    *,
    activation: ActivationName | Activation = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    training: bool = True,
    add: Tensor = None,
) -> Tensor:
    """y = dropout(act(x · weightᵀ + bias)) + add, with the first derivatives of all operands.

    Gradients of operands that do not require one are not computed. Under `torch.autocast` operands are cast as for
    `torch.nn.functional.linear`. FP32 products run in TF32 where PyTorch's own would
    (`torch.set_float32_matmul_precision`).

    Args:
        x: (..., K), float32, float16 or bfloat16; on the CPU float64 too. It is read where it lies if its rows, or
            its columns, are contiguous, at equal distances and do not overlap, and is copied once otherwise. The same
            holds for the other operands; a bias must be contiguous to be read where it lies.
        weight: (N, K), of x's type and device, like all operands. A transposed view of a (K, N) tensor is copied
            neither in forward nor in backward.
        bias: (N,), or None.
        activation: a name of `lt.ACTIVATIONS`, or an `lt.Activation`. "gelu" is `gelu(approximate="tanh")` of PyTorch,
            "gelu_erf" its default.
        negative_slope: of "leaky_relu".
        dropout: probability in [0, 1), rounded to a multiple of 2^-16. The mask is drawn by PyTorch's generator of x's
            device, and recomputed in backward.
        training: whether dropout is applied.
        add: (..., N), or None.

    Returns:
        y (..., N), of x's type. It is contiguous, unless N is at least 4096 and no multiple of 8, x has K rows or more,
        weight is contiguous, and there is no activation, dropout or `add`: then y's rows begin at multiples of 8
        elements, to save copies.

    Raises:
        KindError: an operand is no tensor.
        OperandError: shapes, types, devices or layouts that do not fit.
        ArgumentError: an unknown activation; `dropout` outside [0, 1).
        SecondDerivativeError: in backward with `create_graph=True`, under transforms of `torch.func`, and under
            `torch.jit.trace`.
    """
    name, slope = _named(activation, negative_slope)
    options = (name,), (slope,), (dropout if training else 0.0,)
    return linear_layers(x, (weight, bias), options, add)


def linear_layers(
    x: Tensor, parameters: Tensors, options: Options, add: Tensor = None, operator: Operator = LINEAR
) -> Tensor:
    """Linear layers with activations and dropout, which run as one operator.

    Args:
        parameters: the weight and the bias (None without one) of each layer.
        options: activations, slopes of leaky ReLU, and probabilities of dropout: three tuples with one item per layer.
        operator: `LINEAR` for consecutive layers; `GATED` for the layers gate, up and down of a gated block.
    """
    if getattr(x, "ndim", 2) == 1:  # the operator refuses an x that is no tensor
        check_tensors(add=add)
        if add is not None:
            check_dense("add", add)
            add = add[None]
        return linear_layers(x[None], parameters, options, add, operator)[0]
    if add is None and options == PLAIN and is_ragged(x, parameters[0]):
        operator = _PADDED
    return operator(cast((x, add, draw_key(x, options[2]), *parameters)), options)


def gated(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor = None,
    up_bias: Tensor = None,
    down_bias: Tensor = None,
    *,
    activation: ActivationName | Activation = "silu",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    training: bool = True,
    add: Tensor = None,
) -> Tensor:
    """y = dropout(act(x · gateᵀ) ∘ (x · upᵀ)) · downᵀ + add, a gated feed-forward block; with "silu" SwiGLU.

    Forward does not keep the gated values: the kernel of backward that reads their gradient recomputes the values.

    Args:
        x: (..., K). gate, up: (F, K). down: (N, F). gate_bias, up_bias: (F,). down_bias: (N,). add: (..., N).
        activation, negative_slope, dropout, training: as in `linear`, and so are types, autocast and errors.

    Returns:
        y (..., N), of x's type.
    """
    name, slope = _named(activation, negative_slope)
    options = (name, "none", "none"), (slope, 0.01, 0.01), (0.0, dropout if training else 0.0, 0.0)
    return linear_layers(x, (gate, gate_bias, up, up_bias, down, down_bias), options, add, GATED)


def dropout(x: Tensor, p: float = 0.5, *, training: bool = True) -> Tensor:
    """y = mask · x / (1 - p), as `torch.nn.functional.dropout`; backward draws the mask again instead of keeping it.

    Args:
        x: any shape and one of the types of `linear`.
        p: in [0, 1), rounded to a multiple of 2^-16.
        training: if False, y is x.

    Returns:
        y, of x's shape and type.

    Raises:
        OperandError, ArgumentError, SecondDerivativeError: as `linear`.
    """
    probability("p", p)
    return _DROPOUT((x, draw_key(x, (p,))), (p,)) if training and p else x


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor = None, *, eps: float = 1e-5, add: Tensor = None) -> Any:
    """y = (x - mean) / √(variance + eps) · weight + bias over the last axis, with FP32 statistics.

    Args:
        x: (..., N), one of the types of `linear`; also under `torch.autocast`, which does not change it.
        weight, bias: (N,), of x's type or float32; bias may be None.
        eps: is added to the variance.
        add: (..., N): a residual. The sum x + add is normalised in place of x.

    Returns:
        y (..., N), of x's type; with `add` the pair (y, x + add), for the next residual connection.

    Raises:
        OperandError, ArgumentError, SecondDerivativeError: as `linear`.
    """
    return _NORMS[True, add is not None]((x, add, weight, bias), (eps,))


def rms_norm(x: Tensor, weight: Tensor, *, eps: float | None = 1e-6, add: Tensor = None) -> Any:
    """y = x / √(mean square + eps) · weight over the last axis; arguments, results and errors are `layer_norm`'s.

    If `eps` is None, it is the machine epsilon of the type in which PyTorch computes, as in `torch.nn.RMSNorm`.
    """
    if eps is None:
        check_tensors(x=x)
        eps = torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).eps
    return _NORMS[False, add is not None]((x, add, weight, None), (eps,))


def _named(activation: Any, negative_slope: float) -> tuple[Any, float]:
    """Name and slope of an activation."""
    if isinstance(activation, Activation):
        return activation.name, activation.negative_slope
    return activation, negative_slope


def draw_key(like: Tensor, dropouts: Sequence[float]) -> Tensor:
    """Draws 32 random bits from PyTorch's generator, the key of dropout masks; None if all probabilities are 0."""
    if not any(dropouts):
        return None
    check_tensors(x=like)
    return torch.randint(-(2**31), 2**31, (1,), dtype=torch.int32, device=like.device)


def cast(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Casts the operands as `torch.autocast` does where it is enabled; integers and float64 are not cast.

    Raises:
        DTypeError: autocast's type is not accepted.
    """
    if not torch._C._is_any_autocast_enabled():
        return operands
    check_tensors(x=operands[0])
    if not is_autocast(operands[0]):
        return operands
    dtype = torch.get_autocast_dtype(operands[0].device.type)
    if dtype not in _AUTOCAST_TYPES:
        raise DTypeError(f"torch.autocast casts to {dtype}; accepted are bfloat16, float16 and float32")
    return tuple([each if each is None or each.dtype not in _AUTOCAST_TYPES else each.to(dtype) for each in operands])
