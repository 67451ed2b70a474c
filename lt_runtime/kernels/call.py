"""The arguments of one run of a plan: everything that may differ between two runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Final, Self

from lt_runtime.arrays.operand import read_step
from lt_runtime.kernels.kernel import Dropout, Tally
from lt_runtime.problem import Philox, check_dropout, keep_scale, keep_threshold
from lt_runtime.reference.philox import round_keys

_ROUNDS: Final = 10  # rounds of Philox4x32
_NO_TALLY: Final = Tally()


@functools.lru_cache(maxsize=1024)
def _round_keys(seed: int) -> tuple[tuple[int, int], ...]:
    """The Philox keys of all rounds for a seed."""
    return tuple(round_keys((seed & 0xFFFFFFFF, seed >> 32), _ROUNDS))


@dataclass(frozen=True, slots=True)
class DropoutState:
    """The state of the random numbers from which a kernel draws a layer's dropout mask.

    Attributes:
        threshold: the value of `keep_threshold` for the dropout probability.
        philox: seed, layer and step that the random numbers come from; the step is 0 if it is on the device.
        step_address: address of a uint32 on the device that the kernel reads instead of `philox.step`; 0 if none.
    """

    threshold: int
    philox: Philox
    step_address: int = 0

    @classmethod
    def of(cls, p: float, rng: Philox | DropoutState | None, device: int, stream: int) -> DropoutState | None:
        """Dropout with probability `p`; None if `p` is 0; `rng` itself if it is such a state already.

        Raises:
            ArgumentError: see `check_dropout`.
            OperandError: the step is an array, but not of one uint32 on the device.
        """
        if isinstance(rng, DropoutState):
            return rng
        philox = check_dropout(p, rng)
        if philox is None:
            return None
        if isinstance(philox.step, int):
            return cls(keep_threshold(p), philox)
        # The array is not kept: a repeated call is remembered by the address of its step, at which a later call's step
        # can lie only if the array has been freed.
        address = read_step(philox.step, device, stream).address
        return cls(keep_threshold(p), Philox(philox.seed, philox.layer), address)

    def block(self) -> Dropout:
        """Packs the mask's parameters into the C++ struct `lt::Dropout`, which kernels take."""
        philox, limit, scale = self.philox, (self.threshold << 16) - 1, keep_scale(self.threshold)
        return Dropout(_round_keys(philox.seed), self.step_address, philox.step, philox.layer, limit, scale)


@dataclass(slots=True)
class Call:
    """The arguments of one run of a plan, not to be changed. Not a frozen dataclass, which takes longer to construct.

    Attributes:
        addresses: of the operands, in the order of `problem.operands`; 0 where an operand is absent.
        stream: handle of the stream on which the plan launches its work.
        scalars: for a product, α and β: numbers, or device addresses if the problem has `device_scalars`. For a loss, a
            number by which its gradient is multiplied, and the address of an FP32 number that is a second factor, or 0.
        dropouts: state of the layer's dropout and, in a backward pass, of the layer below; None without dropout.
        tally: the `lt::Tally` to which the pass adds its loss; its `state` is 0 if the loss is not added.
        computed: a plan, a stream's memory, and the launch arguments that the plan has computed from this call for that
            memory; a repeated call reuses them.
    """

    addresses: tuple[int, ...]
    stream: int
    scalars: tuple[Any, Any] = (1.0, 0.0)
    dropouts: tuple[DropoutState | None, DropoutState | None] = (None, None)
    tally: Tally = field(default=_NO_TALLY, compare=False, repr=False)
    computed: tuple[Any, ...] = field(default=(None, None), compare=False, repr=False)

    @property
    def has_all_steps_on_device(self) -> bool:
        """Whether the device holds the steps of all dropout masks: a graph of the call then draws each step's masks."""
        return all(each is None or each.step_address for each in self.dropouts)

    @classmethod
    def of_loss(
        cls, addresses: tuple[int, ...], stream: int, scalars: tuple[float, bool], scale: int, state: int
    ) -> Self:
        """Makes the call of a loss.

        Args:
            scalars: a number by which the gradient is multiplied, and whether the loss is of the first micro-batch of a
                step.
            scale: address of an FP32 number that is a second factor of the gradient, or 0.
            state: address of the `TallyState` to which the loss, times the first factor, is added; or 0.
        """
        if not state:
            return cls(addresses, stream, (scalars[0], scale))
        return cls(addresses, stream, (scalars[0], scale), tally=Tally(state, *scalars))
