"""Our kernels: named by entry, compiled under definitions, loaded once a device, launched with one argument block."""

from __future__ import annotations

import functools
from ctypes import Structure, sizeof
from typing import Any, Final, NamedTuple, TypeVar

from cuda.bindings import driver

from lt_runtime.errors import GpuError
from lt_runtime.gpu.compiler import Macros, compile_kernel
from lt_runtime.gpu.devices import device_info
from lt_runtime.gpu.driver import Launch, call
from lt_runtime.kernels.tiling import Tiling

_OVERLAP_CAPABILITY: Final = 90
_SHARED_WITHOUT_ASKING: Final = 32 << 10  # bytes; the limit is 48 KiB, less what the kernel declares
_ATTRIBUTE: Final = driver.CUfunction_attribute

Params = TypeVar("Params", bound=Structure)


class Entry(NamedTuple):
    """A kernel of `cuda_src`: its name, the file that defines it, and the struct that it takes by value."""

    name: str
    source: str
    params: type[Structure]


class Kernel:
    """A kernel loaded on one device; it keeps its module alive.

    Raises:
        GpuError: the driver knows another size of the kernel's parameter than the struct has.
    """

    def __init__(self, entry: Entry, module: Any, *, overlaps: bool) -> None:
        self._module = module
        self._function = int(call("cuModuleGetFunction", module, entry.name.encode()))
        self._overlaps = overlaps
        self._shared = _SHARED_WITHOUT_ASKING
        _, size = call("cuFuncGetParamInfo", self._function, 0)
        expected = sizeof(entry.params)
        if size != expected:
            raise GpuError(f"{entry.name} takes {size} bytes of parameters, {entry.params.__name__} has {expected}")

    def prepare(
        self,
        grid: tuple[int, int],
        block: tuple[int, int],
        params: Structure,
        stream: int,
        batch: int = 1,
        shared: int = 0,
    ) -> Launch:
        """A launch that may be repeated; each one reads the present contents of `params`.

        Args:
            grid: blocks in x and y.
            block: threads in x and y.
            batch: blocks in z.
            shared: bytes of a block's dynamic shared memory.
        """
        if shared > self._shared:
            self._allow_shared(shared)
        overlaps = self._overlaps
        return Launch(self._function, (*grid, batch), (*block, 1), params, stream, shared=shared, overlaps=overlaps)

    def _allow_shared(self, size: int) -> None:
        """Allows blocks `size` bytes of shared memory.

        Also reserves as much shared memory of a multiprocessor as its blocks can use.
        """
        call("cuFuncSetAttribute", self._function, _ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, size)
        call("cuFuncSetAttribute", self._function, _ATTRIBUTE.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
        self._shared = size


@functools.cache
def get_kernel(entry: Entry, macros: Macros, device: int) -> Kernel:
    """The kernel `entry` under the given definitions, compiled and loaded at first use; `device` is current.

    Raises:
        CompileError, MissingLibraryError: see `compile_kernel`.
    """
    overlaps = device_info(device).capability >= _OVERLAP_CAPABILITY
    return Kernel(entry, _load_module(entry.source, macros, device), overlaps=overlaps)


@functools.cache
def _load_module(source: str, macros: Macros, device: int) -> Any:
    return call("cuModuleLoadData", compile_kernel(source, macros, device_info(device).architecture))


class Launches(dict[int, tuple[Params, Launch]]):
    """A kernel with its grid, prepared once for each stream: `params, launch = launches[stream]`.

    The caller writes into `params` what differs from the call before, then calls `launch`. Both belong to the stream:
    one thread at a time may use them, which callers ensure with a lock.

    Args:
        device: ordinal of the GPU, which is current, and will be at every launch.
        params: the argument block that every stream's own begins as a copy of.
        batch: the grid's blocks in z.
        shared: bytes of a block's dynamic shared memory.

    Raises:
        CompileError, MissingLibraryError: see `compile_kernel`.
    """

    def __init__(
        self, entry: Entry, macros: Macros, device: int, tiling: Tiling, params: Params, batch: int = 1, shared: int = 0
    ) -> None:
        super().__init__()
        self._kernel = get_kernel(entry, macros, device)
        self._tiling, self._params, self._batch, self._shared = tiling, params, batch, shared

    def __missing__(self, stream: int) -> tuple[Params, Launch]:
        params = type(self._params).from_buffer_copy(self._params)
        self[stream] = params, self._kernel.prepare(*self._tiling, params, stream, self._batch, self._shared)
        return self[stream]
