"""Dynamic loss scaling as data; the optimizer's kernel checks the gradients and changes the scale on the device."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final

from lt_runtime.arguments import Fixed, integer, number, shown
from lt_runtime.errors import ArgumentError

SMALLEST_SCALE: Final = 2.0**-126
LARGEST_SCALE: Final = (2.0 - 2.0**-23) * 2.0**127


@dataclass(eq=False)
class GradScaler(Fixed):
    """A loss scale that adapts to the gradients as PyTorch's `torch.amp.GradScaler` does, but on the device alone.

    Multiply the gradient of the loss by `scale`, as `lt.TrainStep` does, and pass the scaler to one `lt.Optimizer`,
    such as `lt.AdamW`. The optimizer's step divides the gradients by the scale. If one of them is NaN or infinite, the
    step updates no parameter, and the scale is multiplied by `backoff_factor`. After `growth_interval` updates in a row
    the scale is multiplied by `growth_factor`. All of this happens in the optimizer's launch, so that a captured graph
    can be replayed.

    The scale stays a normal FP32 number: it does not grow where that would overflow, as in PyTorch, and it does not
    fall below 2⁻¹²⁶.

    Args:
        init_scale: the scale of the first step.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: the number of updates without a NaN or infinite gradient between two growths.

    Raises:
        ArgumentError: an argument is out of its range.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    _arrays: tuple[Any, Any] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("init_scale", "growth_factor", "backoff_factor"):
            setattr(self, name, number(name, getattr(self, name)))
        self.growth_interval = integer("growth_interval", self.growth_interval)
        if not SMALLEST_SCALE <= self.init_scale <= LARGEST_SCALE:
            raise ArgumentError(f"init_scale is {self.init_scale}; it must be a positive, normal FP32 number")
        if not 1.0 < self.growth_factor <= LARGEST_SCALE:
            raise ArgumentError(f"growth_factor is {self.growth_factor}; it must be finite and above 1")
        if not 0.0 < self.backoff_factor < 1.0:
            raise ArgumentError(f"backoff_factor is {self.backoff_factor}; it must be between 0 and 1")
        if not 1 <= self.growth_interval < 1 << 31:
            raise ArgumentError(f"growth_interval is {shown(self.growth_interval)}; it must be in [1, 2**31)")
        self._is_made = True

    @property
    def scale(self) -> Any:
        """The scale: an FP32 array of shape (), on the device of the optimizer's parameters.

        Raises:
            ArgumentError: no optimizer has the scaler yet.
        """
        return self._bound()[0]

    @property
    def growth_tracker(self) -> Any:
        """The number of updates since the scale last changed: an int32 array of shape (), beside `scale`.

        Raises:
            ArgumentError: no optimizer has the scaler yet.
        """
        return self._bound()[1]

    @property
    def options(self) -> dict[str, float]:
        """The arguments that the scaler was made with, by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    @property
    def is_bound(self) -> bool:
        """Whether an optimizer has the scaler."""
        return self._arrays is not None

    def bind(self, scale: Any, growth_tracker: Any) -> None:
        """Gives the scaler the arrays of scale and tracker, which hold `init_scale` and 0. The optimizer calls this."""
        self._arrays = scale, growth_tracker

    def _bound(self) -> tuple[Any, Any]:
        if self._arrays is None:
            raise ArgumentError("the scaler has no arrays yet: pass it to lt.AdamW(..., scaler=scaler) first")
        return self._arrays
