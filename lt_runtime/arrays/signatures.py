"""What tells one call of an operation from another, read off its arrays as fast as Python can: nothing is checked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

_ALIGNED: Final = 256  # what is aligned better makes no difference


class _Reader(NamedTuple):
    """How arrays of one class are read: shape, strides, type and device; and the address."""

    signature: Callable[[Any], Hashable]
    address: Callable[[Any], int]


Signature: TypeAlias = tuple[Hashable, tuple[int, ...]]
"""All that a call's course depends on but its arrays' addresses and contents; and the addresses, None left out."""

_readers: dict[type, _Reader] = {}


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
    present = [array for array in arrays if array is not None]
    try:
        return (asked, *map(reader.signature, present)), tuple(map(reader.address, present))
    except (AttributeError, TypeError):  # of another library than the first
        return None


def alignments_of(addresses: Iterable[int]) -> tuple[int, ...]:
    """The largest power of two, below 256, that divides each address; 0 for those that are aligned better."""
    return tuple(address & -address & _ALIGNED - 1 for address in addresses)


def _reader_of(kind: type) -> _Reader | None:
    """None for classes that are not known through and through: subclasses too."""
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if cupy is not None and kind is cupy.ndarray:
        reader = _Reader(attrgetter("shape", "strides", "dtype", "data.device_id"), attrgetter("data.ptr"))
    elif torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        reader = _Reader(_torch_signature, torch.Tensor.data_ptr)
    else:
        return None
    return _readers.setdefault(kind, reader)


def _torch_signature(tensor: Any) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


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
