"""A layer's dropout, from what the caller gives to what a launch or the reference needs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.arrays import read_step
from lt_runtime.errors import ArgumentError, DeviceError, DTypeError
from lt_runtime.kernels.call import DropoutState
from lt_runtime.problem import Philox, keep_threshold


def check_dropout(p: float, rng: Philox | None) -> Philox | None:
    """The random numbers' source; None if `p` is 0.

    Raises:
        ArgumentError: `p` is outside [0, 1), or above 0 without a source.
    """
    keep_threshold(p)
    if p == 0:
        return None
    if not isinstance(rng, Philox):
        raise ArgumentError(f"dropout is {p} but rng is {rng!r}; pass rng=lt.Philox(seed, layer, step)")
    return rng


def dropout_state(p: float, rng: Philox | None, device: int, stream: int) -> DropoutState | None:
    """Dropout as a launch needs it; None if `p` is 0.

    Raises:
        ArgumentError: see `check_dropout`.
        OperandError: the step is an array, but not of one uint32 on the device.
    """
    philox = check_dropout(p, rng)
    if philox is None:
        return None
    address = 0 if isinstance(philox.step, int) else read_step(philox.step, device, stream).address
    return DropoutState(keep_threshold(p), philox, address)


def host_dropout(shape: tuple[int, ...], p: float, rng: Philox | None) -> NDArray[np.float64] | None:
    """The reference's factors for NumPy arrays; None without dropout.

    Raises:
        ArgumentError: see `check_dropout`.
        DeviceError: the step does not live in host memory.
        DTypeError: the step is an array, but not of one uint32.
    """
    philox = check_dropout(p, rng)
    if philox is None:
        return None
    step: Any = philox.step
    if not isinstance(step, (int, np.ndarray)):
        raise DeviceError(f"step is a {type(step).__name__}; with NumPy arrays, accepted are an int or one uint32")
    if not isinstance(step, int) and (step.dtype != np.uint32 or step.size != 1):
        raise DTypeError(f"step is {step.dtype.name} of shape {step.shape}; accepted are an int or one uint32")
    return reference.dropout_scale(shape, p, philox)
