"""Contents of a graph's nodes: a kernel's arguments, a memset's value, the memory at both ends of a copy."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from typing import Any, Final

from cuda.bindings import driver

from lt_runtime.errors import DriverError
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.graphs import node_type

_HOST: Final = driver.CUmemorytype.CU_MEMORYTYPE_HOST
_UNIFIED: Final = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
_MEMORY_TYPE: Final = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE


def host_values(node: int) -> tuple[bytes, ...]:
    """The values that the host gave a node at its capture: a kernel's arguments or a memset's value.

    Other nodes have no values; neither has a kernel whose arguments the driver does not reveal.
    """
    kind = node_type(node)
    if kind == "MEMSET":
        return (int(call("cuGraphMemsetNodeGetParams", node).value).to_bytes(4, "little"),)
    if kind != "KERNEL":
        return ()
    try:
        return tuple(_arguments(call("cuGraphKernelNodeGetParams", node)))
    except DriverError:
        return ()


def exchange_values(executable: Any, node: int, source: int) -> None:
    """Copies a kernel's arguments or a memset's value into a node of an executable graph.

    Args:
        executable: the executable graph.
        node: a node of the graph that `executable` was instantiated from.
        source: the node to copy from, of the same type, in any graph.

    Raises:
        DriverError: the two nodes are too different.
    """
    if node_type(node) == "MEMSET":
        context = call("cuCtxGetCurrent")
        call("cuGraphExecMemsetNodeSetParams", executable, node, call("cuGraphMemsetNodeGetParams", source), context)
    else:
        call("cuGraphExecKernelNodeSetParams", executable, node, call("cuGraphKernelNodeGetParams", source))


def _arguments(params: Any) -> Iterator[bytes]:
    by_function = int(params.func)
    about = ("cuFuncGetParamInfo", params.func) if by_function else ("cuKernelGetParamInfo", params.kern)
    pointers = int(params.kernelParams)
    for index in itertools.count() if pointers else ():
        try:
            _, size = call(*about, index)
        except DriverError:  # the index is one past the last argument
            return
        address = ctypes.c_void_p.from_address(pointers + index * ctypes.sizeof(ctypes.c_void_p)).value
        yield ctypes.string_at(address or 0, size)


def differ(first: bytes, second: bytes) -> bool:
    """Whether two arguments of equal size differ.

    Two words of 8 bytes that are both addresses known to CUDA count as equal.
    """
    words = ((first[start : start + 8], second[start : start + 8]) for start in range(0, len(first), 8))
    return any(one != other and not (_is_address(one) and _is_address(other)) for one, other in words)


def _is_address(word: bytes) -> bool:
    return len(word) == 8 and memory_type(int.from_bytes(word, "little")) is not None


def memory_type(address: int) -> Any:
    """The `CUmemorytype` of an address; None if CUDA does not know the address, as with pageable host memory."""
    try:
        return driver.CUmemorytype(call("cuPointerGetAttribute", _MEMORY_TYPE, address))
    except DriverError:
        return None


def pageable_ends(node: int) -> list[str]:
    """The ends of a copy that are in pageable host memory: "from", "to", both or none."""
    copy = call("cuGraphMemcpyNodeGetParams", node)
    ends = {
        "from": (copy.srcMemoryType, copy.srcHost, copy.srcDevice),
        "to": (copy.dstMemoryType, copy.dstHost, copy.dstDevice),
    }
    return [
        end
        for end, (kind, host, device) in ends.items()
        if kind in (_HOST, _UNIFIED) and memory_type(int(host if kind == _HOST else device)) is None
    ]
