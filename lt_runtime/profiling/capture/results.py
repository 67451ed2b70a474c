"""The arrays that a function returns, read and written as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lt_runtime.arrays.operand import HOST, Operand, read
from lt_runtime.gpu.driver import call


class Results:
    """The arrays on a GPU that a function returned; arrays on the host are left out.

    Args:
        returned: an array, several in a tuple or list, a mapping from names to arrays, or None.
        stream: handle of the stream that the arrays belong to.
    """

    def __init__(self, returned: Any, stream: int) -> None:
        self._stream = stream
        operands = (read(name, array, stream) for name, array in _named(returned) if array is not None)
        self._arrays = {each.name: each for each in operands if each.device != HOST}

    @property
    def names(self) -> tuple[str, ...]:
        """Keys of the returned mapping; otherwise "result", or "result[i]" if several arrays were returned."""
        return tuple(self._arrays)

    def addresses(self) -> dict[str, int]:
        """Device addresses of the arrays, by name."""
        return {name: each.address for name, each in self._arrays.items()}

    def kept(self, addresses: Mapping[str, int]) -> Results:
        """The arrays that have the given addresses."""
        kept = Results(None, self._stream)
        kept._arrays = {name: each for name, each in self._arrays.items() if addresses.get(name) == each.address}
        return kept

    def read(self) -> dict[str, bytes]:
        """Waits for the stream; returns the bytes of each array, including gaps between rows."""
        contents = {name: np.empty(_size(each), np.uint8) for name, each in self._arrays.items()}
        for name, each in self._arrays.items():
            call("cuMemcpyDtoHAsync", contents[name].ctypes.data, each.address, contents[name].nbytes, self._stream)
        call("cuStreamSynchronize", self._stream)
        return {name: content.tobytes() for name, content in contents.items()}

    def write(self, contents: Mapping[str, bytes]) -> None:
        """Writes contents that `read` has returned, and waits for the stream."""
        for name, each in self._arrays.items():
            content = np.frombuffer(contents[name], np.uint8)
            call("cuMemcpyHtoDAsync", each.address, content.ctypes.data, content.nbytes, self._stream)
        call("cuStreamSynchronize", self._stream)


def _named(returned: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(returned, Mapping):
        yield from ((str(name), array) for name, array in returned.items())
    elif isinstance(returned, (tuple, list)):
        yield from ((f"result[{index}]", array) for index, array in enumerate(returned))
    else:
        yield "result", returned


def _size(operand: Operand) -> int:
    """Bytes from the first element to the end of the last."""
    if 0 in operand.shape:
        return 0
    last = sum((length - 1) * stride for length, stride in zip(operand.shape, operand.strides, strict=True))
    return (last + 1) * operand.itemsize
