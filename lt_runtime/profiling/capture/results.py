"""The arrays that a function returns, read and written as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from lt_runtime.arrays.operand import HOST, Operand, read
from lt_runtime.gpu.driver import call

Arrays: TypeAlias = dict[str, Operand]


def arrays_of(returned: Any, stream: int) -> Arrays:
    """The arrays on a GPU that a function returned, by name; arrays on the host are left out.

    Args:
        returned: an array, several in a tuple or list, a mapping from names to arrays, or None. The names are the
            mapping's keys; otherwise "result", or "result[i]" if several arrays were returned.
        stream: handle of the stream that the arrays belong to.
    """
    named: Mapping[Any, Any] = {"result": returned}
    if isinstance(returned, Mapping):
        named = returned
    elif isinstance(returned, (tuple, list)):
        named = {f"result[{index}]": array for index, array in enumerate(returned)}
    operands = (read(str(name), array, stream) for name, array in named.items() if array is not None)
    return {each.name: each for each in operands if each.device != HOST}


def read_arrays(arrays: Arrays, stream: int) -> dict[str, bytes]:
    """Waits for the stream; returns the bytes of each array, including gaps between rows."""
    contents = {name: np.empty(_size(each), np.uint8) for name, each in arrays.items()}
    for name, each in arrays.items():
        call("cuMemcpyDtoHAsync", contents[name].ctypes.data, each.address, contents[name].nbytes, stream)
    call("cuStreamSynchronize", stream)
    return {name: content.tobytes() for name, content in contents.items()}


def write_arrays(arrays: Arrays, contents: Mapping[str, bytes], stream: int) -> None:
    """Writes contents that `read_arrays` returned back into the arrays, and waits for the stream."""
    for name, each in arrays.items():
        content = np.frombuffer(contents[name], np.uint8)
        call("cuMemcpyHtoDAsync", each.address, content.ctypes.data, content.nbytes, stream)
    call("cuStreamSynchronize", stream)


def _size(operand: Operand) -> int:
    """Bytes from the start of an array's first element to the end of its last element."""
    if 0 in operand.shape:
        return 0
    last = sum((length - 1) * stride for length, stride in zip(operand.shape, operand.strides, strict=True))
    return (last + 1) * operand.itemsize
