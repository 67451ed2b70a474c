"""Where an operation runs, and what its dropout and its outputs are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.arrays import Operand, check_no_overlap, check_same, check_shape, device_of, library_of, read, read_step
from lt_runtime.errors import ArgumentError, DeviceError, DTypeError, OperandError, OverlapError
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.kernels.call import DropoutState
from lt_runtime.problem import DType, Philox, keep_threshold


@dataclass(frozen=True, slots=True)
class Place:
    """A device and one of its streams."""

    device: int
    stream: int

    @classmethod
    def of(cls, name: str, array: Any, stream: Any) -> Place:
        """Where `array` lives, with the stream that the caller asked for."""
        device = device_of(name, array)
        return cls(device, stream_handle(stream, device, library_of(array).current_stream))

    def read(self, name: str, array: Any) -> Operand:
        """The operand that an array is."""
        return read(name, array, self.stream)

    def read_optional(self, name: str, array: Any) -> Operand | None:
        """The operand that an array is, if there is one."""
        return None if array is None else self.read(name, array)

    def given(
        self, name: str, out: Any, shape: tuple[int, ...], like: Operand, inputs: tuple[Operand | None, ...]
    ) -> Operand:
        """The caller's buffer for a result.

        Raises:
            ShapeError, DTypeError, DeviceError, LayoutError, OverlapError: it does not serve.
        """
        operand = self.read(name, out)
        check_shape(name, operand.shape, shape, "the result's shape")
        check_same(like, operand)
        check_no_overlap(operand, *(other for other in inputs if other is not None))
        return operand

    def output(
        self, name: str, out: Any, shape: tuple[int, ...], like: Operand, inputs: tuple[Operand | None, ...]
    ) -> Operand:
        """The buffer for a result: the caller's, see `given`, or a new one of the kind and type of `like`."""
        if out is None:
            array = like.library.empty(shape, DType.parse(like.name, like.dtype).numpy, self.device, self.stream)
            return self.read(name, array)
        return self.given(name, out, shape, like, inputs)

    def result(self, out: Any, operand: Operand, like: Operand) -> Any:
        """What the caller gets: its own buffer, or the new array in the form of its library."""
        return out if out is not None else like.library.export(operand.array, self.stream)

    def dropout(self, p: float, rng: Philox | None) -> DropoutState | None:
        """Dropout as a launch needs it; None if `p` is 0."""
        philox = check_dropout(p, rng)
        if philox is None:
            return None
        address = 0 if isinstance(philox.step, int) else read_step(philox.step, self.device, self.stream).address
        return DropoutState(keep_threshold(p), philox, address)


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


def host_dropout(shape: tuple[int, ...], p: float, rng: Philox | None) -> NDArray[np.float64] | None:
    """The reference's factors for NumPy arrays; None without dropout.

    Raises:
        DeviceError: the step does not live in host memory.
        DTypeError: it is an array, but not of one uint32.
    """
    if rng is None:
        return None
    step = rng.step
    if not isinstance(step, (int, np.ndarray)):
        raise DeviceError(f"step is a {type(step).__name__}; with NumPy arrays, accepted are an int or one uint32")
    if not isinstance(step, int) and (step.dtype != np.uint32 or step.size != 1):
        raise DTypeError(f"step is {step.dtype.name} of shape {step.shape}; accepted are an int or one uint32")
    return reference.dropout_scale(shape, p, rng)


def host_output(
    name: str,
    out: np.ndarray[Any, Any] | None,
    shape: tuple[int, ...],
    dtype: DType,
    inputs: Mapping[str, np.ndarray[Any, Any] | None],
) -> np.ndarray[Any, Any]:
    """The NumPy buffer for a result: the caller's, checked, or a new one.

    Raises:
        ShapeError, DTypeError, OperandError, OverlapError: the caller's does not serve.
    """
    if out is None:
        return np.empty(shape, dtype.numpy)
    check_shape(name, out.shape, shape, "the result's shape")
    if out.dtype != dtype.numpy:
        raise DTypeError(f"{name} is {out.dtype.name}; it must be {dtype.value}")
    if not out.flags.writeable:
        raise OperandError(f"{name} is read-only; it must be writeable")
    for other, array in inputs.items():
        if array is not None and np.shares_memory(out, array):
            raise OverlapError(f"{name} shares memory with {other}; it must not")
    return out
