"""What tells one call of an operation from another, read off its arrays as fast as Python can: nothing is checked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, TypeAlias

_ALIGNED: Final = 256  # what is aligned better makes no difference


Reader: TypeAlias = Callable[[Any], tuple[Any, ...]]
"""Gives an array's address, device, shape, strides and type."""
Signature: TypeAlias = tuple[Any, ...]
"""All that a call's course depends on but its arrays' contents: what is asked, and what each array looks like."""

_readers: dict[type, Reader] = {}


def signature_of(arrays: tuple[Any, ...], asked: tuple[Any, ...]) -> Signature | None:
    """What a call with these arrays, some of which may be None, looks like.

    Args:
        asked: all else that its course depends on; which arrays are None is part of it.

    Returns:
        None unless all arrays are CuPy's, or all are PyTorch's.
    """
    kind = type(arrays[0])
    reader = _readers.get(kind) or _reader_of(kind)
    if reader is None:
        return None
    try:
        return (asked, *[reader(array) for array in arrays if array is not None])
    except (AttributeError, TypeError):  # of another library than the first
        return None


def device_in(signature: Signature) -> int:
    """The ordinal of the first array's device."""
    device: int = signature[1][1]
    return device


def without_addresses(signature: Signature) -> tuple[Hashable, tuple[int, ...]]:
    """What is the same for all calls that differ in nothing but where their arrays begin; and where they do."""
    asked, *looks = signature
    addresses = tuple(look[0] for look in looks)
    return (asked, *(look[1:] for look in looks), alignments_of(addresses)), addresses


def alignments_of(addresses: Iterable[int]) -> tuple[int, ...]:
    """The largest power of two, below 256, that divides each address; 0 for those that are aligned better."""
    return tuple(address & -address & _ALIGNED - 1 for address in addresses)


def _reader_of(kind: type) -> Reader | None:
    """None for classes that are not known through and through: subclasses too."""
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if cupy is not None and kind is cupy.ndarray:
        reader: Reader = attrgetter("data.ptr", "data.device_id", "shape", "strides", "dtype")
    elif torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        reader = _look_at_tensor
    else:
        return None
    return _readers.setdefault(kind, reader)


def _look_at_tensor(tensor: Any) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.get_device(), tensor.shape, tensor.stride(), tensor.dtype


def are_apart(addresses: Sequence[int], sizes: Sequence[int], inputs: int) -> bool:
    """Whether no array but the first `inputs` shares an address with one before it, by where they begin and end.

    Args:
        sizes: bytes from each array's first element to its last.
    """
    for i in range(inputs, len(addresses)):
        start = addresses[i]
        end = start + sizes[i]
        for j in range(i):
            if start < addresses[j] + sizes[j] and addresses[j] < end:
                return False
    return True
