"""Dynamic loss scaling as data: the optimizer's kernel judges the gradients and moves the scale, on the device."""

from __future__ import annotations

from typing import Any, Final

from lt_runtime.errors import ArgumentError

SMALLEST_SCALE: Final = 2.0**-126
LARGEST_SCALE: Final = (2.0 - 2.0**-23) * 2.0**127


class GradScaler:
    """A loss scale that follows the gradients, as PyTorch's `torch.amp.GradScaler` does, without a host in the loop.

    Multiply the loss's gradient by `scale`, as `lt.TrainStep` does, and hand the scaler to one `lt.AdamW`. Its step
    divides the gradients by the scale, and is left out if one of them is NaN or infinite; then the scale is multiplied
    by `backoff_factor`. After `growth_interval` updates in a row it is multiplied by `growth_factor`. Both happen on
    the device, in the optimizer's own launch, so that a captured graph can be replayed.

    The scale stays a normal FP32 number: growth that would overflow is left out, as in PyTorch, and it does not fall
    below 2⁻¹²⁶.

    Args:
        init_scale: of the first step.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: updates without a NaN or infinite gradient between two growths.

    Raises:
        ArgumentError: one of them is out of its range.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if not SMALLEST_SCALE <= init_scale <= LARGEST_SCALE:
            raise ArgumentError(f"init_scale is {init_scale}; it must be a positive, normal FP32 number")
        if not 1.0 < growth_factor <= LARGEST_SCALE:
            raise ArgumentError(f"growth_factor is {growth_factor}; it must be finite and above 1")
        if not 0.0 < backoff_factor < 1.0:
            raise ArgumentError(f"backoff_factor is {backoff_factor}; it must be between 0 and 1")
        if not 1 <= growth_interval < 1 << 31:
            raise ArgumentError(f"growth_interval is {growth_interval}; it must be in [1, 2**31)")
        self.init_scale, self.growth_interval = init_scale, growth_interval
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self._arrays: tuple[Any, Any] | None = None

    @property
    def scale(self) -> Any:
        """The scale: an FP32 array of shape (), living where the optimizer's parameters live.

        Raises:
            ArgumentError: no optimizer has the scaler yet.
        """
        return self._bound()[0]

    @property
    def growth_tracker(self) -> Any:
        """Updates since the scale last moved: an int32 array of shape (), beside `scale`.

        Raises:
            ArgumentError: no optimizer has the scaler yet.
        """
        return self._bound()[1]

    @property
    def options(self) -> dict[str, float]:
        """What it was made with, by argument."""
        names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
        return {name: getattr(self, name) for name in names}

    @property
    def is_bound(self) -> bool:
        """Whether an optimizer has the scaler."""
        return self._arrays is not None

    def bind(self, scale: Any, growth_tracker: Any) -> None:
        """Gives the scaler its arrays, which hold `init_scale` and 0: what an optimizer does with it."""
        self._arrays = scale, growth_tracker

    def _bound(self) -> tuple[Any, Any]:
        if self._arrays is None:
            raise ArgumentError("the scaler has no arrays yet: pass it to lt.AdamW(..., scaler=scaler) first")
        return self._arrays
