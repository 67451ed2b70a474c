"""What the nodes of a graph do: their kinds, a kernel's arguments, the memory of a copy."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from typing import Any, Final

from cuda.bindings import driver

from lt_runtime.errors import DriverError
from lt_runtime.gpu.driver import call

_KIND: Final = "CU_GRAPH_NODE_TYPE_"
_HOST: Final = driver.CUmemorytype.CU_MEMORYTYPE_HOST
_UNIFIED: Final = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
_MEMORY_TYPE: Final = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE


def kind_of(node: int) -> str:
    """A node's kind, such as "KERNEL" or "MEM_ALLOC"."""
    return str(call("cuGraphNodeGetType", node).name.removeprefix(_KIND))


def host_values(node: int) -> tuple[bytes, ...]:
    """What the host put into a node at its capture: a kernel's arguments, a memset's value; () for other nodes.

    Arguments that the driver cannot tell are left out.
    """
    kind = kind_of(node)
    if kind == "MEMSET":
        return (int(call("cuGraphMemsetNodeGetParams", node).value).to_bytes(4, "little"),)
    if kind != "KERNEL":
        return ()
    try:
        return tuple(_arguments(call("cuGraphKernelNodeGetParams", node)))
    except DriverError:
        return ()


def exchange_values(executable: Any, node: int, source: int) -> None:
    """Gives an executable graph's kernel or memset what `source` has, a node of the same kind, of any graph.

    Raises:
        DriverError: they are too different.
    """
    if kind_of(node) == "MEMSET":
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
        except DriverError:  # there are no more
            return
        address = ctypes.c_void_p.from_address(pointers + index * ctypes.sizeof(ctypes.c_void_p)).value
        yield ctypes.string_at(address or 0, size)


def differ(first: bytes, second: bytes) -> bool:
    """Whether two arguments of equal size differ in anything but addresses of the GPUs' memory."""
    for start in range(0, len(first), 8):
        one, other = first[start : start + 8], second[start : start + 8]
        if one != other and not (len(one) == 8 and _is_known_address(one) and _is_known_address(other)):
            return True
    return False


def _is_known_address(value: bytes) -> bool:
    return memory_type(int.from_bytes(value, "little")) is not None


def memory_type(address: int) -> Any:
    """The `CUmemorytype` of an address; None if CUDA does not know it, as it is with pageable memory."""
    try:
        return driver.CUmemorytype(call("cuPointerGetAttribute", _MEMORY_TYPE, address))
    except DriverError:
        return None


def pageable_ends(node: int) -> list[str]:
    """Which ends of a copy are in pageable memory of the host: "from", "to", both or none."""
    copy = call("cuGraphMemcpyNodeGetParams", node)
    ends = {
        "from": (copy.srcMemoryType, copy.srcHost, copy.srcDevice),
        "to": (copy.dstMemoryType, copy.dstHost, copy.dstDevice),
    }
    addresses = {
        end: int(host if kind == _HOST else device)
        for end, (kind, host, device) in ends.items()
        if kind in (_HOST, _UNIFIED)
    }
    return [end for end, address in addresses.items() if memory_type(address) is None]
