"""Our kernels: found by file and definitions, loaded once a device, launched with one argument block."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

from cuda.bindings import driver

from lt_runtime.errors import GpuError
from lt_runtime.gpu.compiler import Macros, compile_kernel
from lt_runtime.gpu.devices import device_info
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.launch import Launch
from lt_runtime.kernels.params import (
    AdamWParams,
    CountLabelsParams,
    CrossEntropyParams,
    DropoutParams,
    EpilogueBwdParams,
    EpilogueFwdParams,
    GradientNormParams,
    MatmulBackwardParams,
    MatmulForwardParams,
    MseParams,
    NarrowParams,
    OperandSumParams,
    ResizeParams,
    TallyParams,
)

THREADS: Final = 256
OCTET: Final = 8
VECTOR_BYTES: Final = 16  # of the widest access
MAX_GRID_Y: Final = 65535
_OVERLAP_CAPABILITY: Final = 90
_SHARED_WITHOUT_ASKING: Final = 32 << 10  # bytes; the limit is 48 KiB, less what the kernel declares
_ATTRIBUTE: Final = driver.CUfunction_attribute

_SOURCES: Final[dict[str, tuple[str, type[ctypes.Structure]]]] = {
    "epilogue_fwd": ("epilogue_fwd.cu", EpilogueFwdParams),
    "epilogue_bwd": ("epilogue_bwd.cu", EpilogueBwdParams),
    "dropout": ("dropout.cu", DropoutParams),
    "matmul_forward": ("matmul_epilogue.cu", MatmulForwardParams),
    "matmul_backward": ("matmul_epilogue.cu", MatmulBackwardParams),
    "operand_sum": ("matmul_epilogue.cu", OperandSumParams),
    "narrow_n": ("narrow_n.cu", NarrowParams),
    "narrow_k": ("narrow_k.cu", NarrowParams),
    "narrow_m": ("narrow_m.cu", NarrowParams),
    "resize": ("resize.cu", ResizeParams),
    "mse_loss": ("mse.cu", MseParams),
    "cross_entropy": ("cross_entropy.cu", CrossEntropyParams),
    "cross_entropy_few": ("cross_entropy.cu", CrossEntropyParams),
    "count_labels": ("cross_entropy.cu", CountLabelsParams),
    "gradient_norm": ("gradient_norm.cu", GradientNormParams),
    "adamw": ("adamw.cu", AdamWParams),
    "tally": ("tally.cu", TallyParams),
}


class Kernel:
    """A kernel loaded on one device; it keeps its module alive."""

    def __init__(self, entry: str, module: Any, params: type[ctypes.Structure], *, overlaps: bool) -> None:
        self._module = module
        self._function = int(call("cuModuleGetFunction", module, entry.encode()))
        self._overlaps = overlaps
        self._shared = _SHARED_WITHOUT_ASKING
        _, size = call("cuFuncGetParamInfo", self._function, 0)
        if size != ctypes.sizeof(params):
            raise GpuError(f"{entry} takes {size} bytes of parameters, {params.__name__} has {ctypes.sizeof(params)}")

    def prepare(
        self,
        grid: tuple[int, int],
        block: tuple[int, int],
        params: ctypes.Structure,
        stream: int,
        batch: int = 1,
        shared: int = 0,
    ) -> Launch:
        """A launch to be made any number of times, each with what `params` hold then.

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
        """Lets a block have `size` bytes, and as many blocks as can have them share a multiprocessor."""
        call("cuFuncSetAttribute", self._function, _ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, size)
        call("cuFuncSetAttribute", self._function, _ATTRIBUTE.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
        self._shared = size


@functools.cache
def get_kernel(entry: str, macros: Macros, device: int) -> Kernel:
    """The kernel `entry` under the given definitions, compiled and loaded at first use; `device` is current.

    Raises:
        CompileError, MissingLibraryError: see `compile_kernel`.
    """
    source, params = _SOURCES[entry]
    overlaps = device_info(device).capability >= _OVERLAP_CAPABILITY
    return Kernel(entry, _load_module(source, macros, device), params, overlaps=overlaps)


@functools.cache
def _load_module(source: str, macros: Macros, device: int) -> Any:
    return call("cuModuleLoadData", compile_kernel(source, macros, device_info(device).architecture))
