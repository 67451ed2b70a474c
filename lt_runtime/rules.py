"""Update rules of `lt.Optimizer` as data: SGD, Lion, AdamW and AMSGrad.

In every rule θ is a parameter, g its gradient, lr the rule's learning rate times the schedule's factor and the
parameter's `lr_scale`, and λ the weight decay. Weight decay is decoupled from the gradient in all of them, as in AdamW:
θ is multiplied by 1 - lr·λ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

from lt_runtime.arguments import flag, not_negative, number, shown
from lt_runtime.errors import ArgumentError, KindError

__all__ = ["SGD", "AMSGrad", "AdamW", "Lion"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True, slots=True)
class SGD:
    """Stochastic gradient descent: θ ← θ·(1 - lr·λ) - lr·d.

    Without momentum d = g, and the rule has no moments. With momentum μ the moment is m ← μ·m + g, and d = m, or
    d = g + μ·m with Nesterov's form, as in `torch.optim.SGD` (dampening 0). Without momentum the weight decay equals
    PyTorch's, which adds λ·θ to g; with momentum it differs, because PyTorch's decay enters m.

    Attributes:
        lr: learning rate.
        momentum: μ, in [0, 1).
        nesterov: whether to use Nesterov's form; needs momentum.
        weight_decay: λ.
        moments: names of the arrays that the rule keeps for each parameter.

    Raises:
        ArgumentError: a value is out of its range.
    """

    lr: float = 1e-2
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        momentum, nesterov = number("momentum", self.momentum), flag("nesterov", self.nesterov)
        if not 0.0 <= momentum < 1.0:
            raise ArgumentError(f"momentum is {momentum}; it must be in [0, 1)")
        if nesterov and not momentum:
            raise ArgumentError("nesterov is True, but momentum is 0.0; give a momentum above 0, such as 0.9")
        _set(self, momentum=momentum, nesterov=nesterov)

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the arrays that the rule keeps for each parameter."""
        return ("m",) if self.momentum else ()


@dataclass(frozen=True, slots=True)
class Lion:
    """Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023, algorithm 2).

    θ ← θ·(1 - lr·λ) - lr·sign(β₁·m + (1 - β₁)·g), and then m ← β₂·m + (1 - β₂)·g. Every element moves by lr, so that
    lr is usually 3 to 10 times smaller than AdamW's, and λ as much larger. sign(0) is 0, and sign(NaN) is NaN.

    Attributes:
        lr: learning rate.
        betas: β₁ and β₂, in [0, 1).
        weight_decay: λ.
        moments: names of the arrays that the rule keeps for each parameter.

    Raises:
        ArgumentError: a value is out of its range.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    moments: ClassVar[tuple[str, ...]] = ("m",)

    def __post_init__(self) -> None:
        _set(self, betas=_betas(self.betas))


@dataclass(frozen=True, slots=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, 2019) as in `torch.optim.AdamW`: θ ← θ·(1 - lr·λ) - lr·m̂ / (√v̂ + ε).

    m ← β₁·m + (1 - β₁)·g and v ← β₂·v + (1 - β₂)·g², and in update t m̂ = m / (1 - β₁ᵗ) and v̂ = v / (1 - β₂ᵗ).

    Attributes:
        lr: learning rate.
        betas: β₁ and β₂, in [0, 1).
        eps: ε.
        weight_decay: λ.
        moments: names of the arrays that the rule keeps for each parameter.

    Raises:
        ArgumentError: a value is out of its range.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    moments: ClassVar[tuple[str, ...]] = ("m", "v")

    def __post_init__(self) -> None:
        _set(self, betas=_betas(self.betas), eps=not_negative("eps", self.eps))


@dataclass(frozen=True, slots=True)
class AMSGrad(AdamW):
    """AdamW whose v̂ is made of the largest v so far (Reddi, Kale and Kumar, 2018), as PyTorch's `amsgrad=True`."""

    moments: ClassVar[tuple[str, ...]] = ("m", "v", "v_max")


Rule: TypeAlias = SGD | Lion | AdamW
RULES: Final = (SGD, Lion, AdamW, AMSGrad)


def _betas(betas: Any) -> tuple[float, float]:
    try:
        first, second = betas
    except (TypeError, ValueError):
        raise KindError(f"betas is {shown(betas)}; it must be two numbers in [0, 1)") from None
    rates = number("betas[0]", first), number("betas[1]", second)
    if not all(0.0 <= rate < 1.0 for rate in rates):
        raise ArgumentError(f"betas is {rates}; accepted are two numbers in [0, 1)")
    return rates


def _set(rule: Rule, **values: Any) -> None:
    """Sets values that the caller has checked; checks and sets `lr` and `weight_decay`, which every rule has."""
    rates = {name: not_negative(name, getattr(rule, name)) for name in ("lr", "weight_decay")}
    for name, value in (values | rates).items():
        object.__setattr__(rule, name, value)
