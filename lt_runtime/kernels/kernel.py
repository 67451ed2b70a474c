"""Our kernels: named by entry, compiled under definitions, loaded once a device, launched with one argument block.

The structs of `cuda_src`'s headers that several kernels take are here as well, as ctypes sees them. A kernel takes one
struct by value, so that a launch passes one pointer. Each family's module has the structs of its own kernels.
"""

from __future__ import annotations

import functools
from ctypes import Structure, c_float, c_int, c_int64, c_uint32, c_void_p, sizeof
from typing import Any, Final, NamedTuple, TypeVar

from cuda.bindings import driver

from lt_runtime.errors import GpuError
from lt_runtime.gpu.compiler import Macros, compile_kernel
from lt_runtime.gpu.devices import device_info
from lt_runtime.gpu.driver import Launch, call
from lt_runtime.kernels.tiling import Tiling
from lt_runtime.layout import Layout
from lt_runtime.problem import DType, Spec

_OVERLAP_CAPABILITY: Final = 90
_SHARED_WITHOUT_ASKING: Final = 32 << 10  # bytes; the limit is 48 KiB, less what the kernel declares
_ATTRIBUTE: Final = driver.CUfunction_attribute

SCALAR: Final = {DType.FLOAT32: "float", DType.FLOAT16: "__half", DType.BFLOAT16: "__nv_bfloat16"}
"""The CUDA C++ name of each type."""
ROUNDS: Final = 10
"""Rounds of Philox4x32."""
_BITS: Final = 8
Params = TypeVar("Params", bound=Structure)


def fields(*groups: tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
    """A structure's `_fields_`: each group has the names of consecutive fields, and their type."""
    return tuple((name, kind) for names, kind in groups for name in names.split())


class Matrix(Structure):
    """`lt::Matrix`; strides are in elements."""

    _fields_ = fields(("data", c_void_p), ("row_stride col_stride", c_int64))

    @classmethod
    def of(cls, matrix: Layout | Spec | None, *, is_mask: bool = False) -> Matrix:
        """How a matrix lies, its address to be filled in; an absent matrix for None.

        Args:
            is_mask: whether it counts bits. The kernels take a mask as bytes, each of which is eight columns.
        """
        if matrix is None:
            return cls()
        layout = matrix.layout if isinstance(matrix, Spec) else matrix
        return cls(0, layout.leading_dimension // _BITS, 1) if is_mask else cls(0, *layout.strides)


class Dropout(Structure):
    """`lt::Dropout`."""

    _fields_ = fields(
        ("keys", (c_uint32 * 2) * ROUNDS),
        ("step_pointer", c_void_p),
        ("step layer limit", c_uint32),
        ("scale", c_float),
    )


class ColumnSum(Structure):
    """`lt::ColumnSum<SCALAR>`."""

    _fields_ = fields(("sum partial tickets", c_void_p), ("accumulate", c_int))


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
