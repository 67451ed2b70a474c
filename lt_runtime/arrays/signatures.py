"""Call signatures: what tells one call from another, read off its arrays as fast as Python can; nothing is checked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any, Final, TypeAlias

from lt_runtime.arrays.libraries import TorchLibrary
from lt_runtime.gpu.streams import cupy_current

_ALIGNED: Final = 256  # the best alignment that makes a difference

Look: TypeAlias = Callable[[Any], tuple[Any, ...]]
"""Gives an array's address, device, shape, strides and type."""
Signature: TypeAlias = tuple[Any, ...]
"""What a call asks for, then the look of each of its arrays, None for an absent one."""

_looks: dict[type, Look] = {}

current_streams: Final[dict[type, Callable[[int], int]]] = {}
"""For each kind of array that has signatures, the function that gives its library's current stream on a device."""


def signature_of(arrays: tuple[Any, ...], asked: Hashable) -> Signature | None:
    """The signature of a call with these arrays, any of which but the first may be None.

    Args:
        asked: all else that the call's course depends on.

    Returns:
        None unless all arrays are CuPy's, or all are PyTorch's.
    """
    kind = type(arrays[0])
    look = _looks.get(kind) or _look_of(kind)
    if look is None:
        return None
    try:
        return (asked, *[None if array is None else look(array) for array in arrays])
    except (AttributeError, TypeError):  # an array of another library than the first
        return None


def device_in(signature: Signature) -> int:
    """The ordinal of the first array's device."""
    device: int = signature[1][1]
    return device


def without_addresses(signature: Signature) -> tuple[Hashable, tuple[int, ...]]:
    """The part that is the same for all calls whose arrays differ in nothing but their addresses; and the addresses.

    An absent array has address 0. How well the addresses are aligned is in the first part.
    """
    asked, *looks = signature
    addresses = tuple([0 if look is None else look[0] for look in looks])
    alignments = tuple([address & -address & _ALIGNED - 1 for address in addresses])
    return (asked, *[look and look[1:] for look in looks], alignments), addresses


def _look_of(kind: type) -> Look | None:
    """None for classes that are not known through and through, subclasses among them."""
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if cupy is not None and kind is cupy.ndarray:
        look: Look = attrgetter("data.ptr", "data.device_id", "shape", "strides", "dtype")
        current_streams[kind] = cupy_current
    elif torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        look = _look_at_tensor
        current_streams[kind] = TorchLibrary().current_stream
    else:
        return None
    return _looks.setdefault(kind, look)


def _look_at_tensor(tensor: Any) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.get_device(), tensor.shape, tensor.stride(), tensor.dtype
