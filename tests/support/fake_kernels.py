"""NVRTC and modules of the pretended GPU. The "machine code" of a kernel only names its file and macros; g++ compiles
the kernel for the CPU.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from cuda.bindings import nvrtc

from tests.host_kernels.harness import HostKernel, HostKernels
from tests.support.device_memory import BadAddressError, DeviceMemory
from tests.support.fake_driver import Work
from tests.support.fake_streams import DriverStatusError, Status
from tests.support.kernel_families import ENTRIES
from tests.support.kernel_memory import KernelCall, pointers

_MACRO: Final = re.compile(r"--define-macro=(\w+)=(.*)")
_OCCUPANCY: Final = ("BLOCKS", "1")
"""One value for the macro BLOCKS, blocks of a multiprocessor: it has no effect on the host, and fewer builds are
needed."""


class FakeKernels:
    """The functions of NVRTC, and the driver's functions about modules and kernels.

    Args:
        host: builds and launches kernels on the host.
        memory: every address in an argument block must belong to it.

    Attributes:
        launched: names of the kernels that were launched, in the order of the calls.
        fault: changes the argument block of each kernel, to pretend that the program had made a wrong launch.
    """

    def __init__(self, host: HostKernels, memory: DeviceMemory) -> None:
        self._host, self._memory = host, memory
        self.fault: Callable[[str, Any], None] = lambda name, params: None
        self._handles = itertools.count(0x9000, 0x10)
        self._programs: dict[int, bytes] = {}
        self._names: dict[int, str] = {}
        self._modules: dict[int, dict[str, Any]] = {}
        self._functions: dict[int, tuple[str, HostKernel, type[ctypes.Structure], dict[str, str]]] = {}
        self._count = itertools.count()
        self.launched: list[str] = []

    @property
    def nvrtc_functions(self) -> dict[str, Callable[..., tuple[Any, ...]]]:
        """NVRTC's functions by name, as in `cuda.bindings.nvrtc`."""
        return {
            "nvrtcCreateProgram": self._create,
            "nvrtcCompileProgram": self._compile,
            "nvrtcGetCUBINSize": lambda program: (nvrtc.nvrtcResult.NVRTC_SUCCESS, len(self._programs[program])),
            "nvrtcGetCUBIN": self._write,
            "nvrtcGetProgramLogSize": lambda _: (nvrtc.nvrtcResult.NVRTC_SUCCESS, 1),
            "nvrtcGetProgramLog": lambda *_: (nvrtc.nvrtcResult.NVRTC_SUCCESS,),
            "nvrtcDestroyProgram": lambda _: (nvrtc.nvrtcResult.NVRTC_SUCCESS,),
        }

    @property
    def driver_functions(self) -> dict[str, Callable[..., Any]]:
        """The driver's functions by name, in the way of `FakeDriver`."""
        return {
            "cuModuleLoadData": self._load,
            "cuModuleGetFunction": self._find,
            "cuFuncGetParamInfo": self._parameter,
            "cuFuncSetAttribute": lambda *_: None,
        }

    def _create(self, code: bytes, name: bytes, *_: Any) -> tuple[Any, ...]:
        handle = next(self._handles)
        self._names[handle] = name.decode()
        return nvrtc.nvrtcResult.NVRTC_SUCCESS, handle

    def _compile(self, program: int, _: int, options: Sequence[bytes]) -> tuple[Any, ...]:
        macros = [match.groups() for match in map(_MACRO.fullmatch, (option.decode() for option in options)) if match]
        self._programs[program] = json.dumps({"source": self._names[program], "macros": macros}).encode()
        return (nvrtc.nvrtcResult.NVRTC_SUCCESS,)

    def _write(self, program: int, out: bytes) -> tuple[Any, ...]:
        cubin = self._programs[program]
        ctypes.memmove(ctypes.cast(ctypes.c_char_p(out), ctypes.c_void_p), cubin, len(cubin))
        return (nvrtc.nvrtcResult.NVRTC_SUCCESS,)

    def _load(self, cubin: bytes) -> int:
        handle = next(self._handles)
        self._modules[handle] = json.loads(cubin)
        return handle

    def _find(self, module: int, entry: bytes) -> int:
        made, name, handle = self._modules[module], entry.decode(), next(self._handles)
        macros = tuple(_OCCUPANCY if key == _OCCUPANCY[0] else (key, value) for key, value in made["macros"])
        self._functions[handle] = name, self._host.get(ENTRIES[name], macros), ENTRIES[name].params, dict(macros)
        return handle

    def _parameter(self, function: int, index: int) -> tuple[int, int]:
        if index:  # each of our kernels has one parameter
            raise DriverStatusError(Status.CUDA_ERROR_INVALID_VALUE)
        return 0, ctypes.sizeof(self._functions[function][2])

    def launch(
        self, function: int, params: int, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int
    ) -> Work:
        """Turns a launch into work for a stream, with a copy of the argument block.

        The order of blocks and threads varies.
        """
        name, kernel, kind, macros = self._functions[function]
        copied = kind.from_buffer_copy(ctypes.string_at(params, ctypes.sizeof(kind)))
        self.fault(name, copied)
        for field, _, address in pointers(copied):
            if not self._memory.holds(address):
                raise BadAddressError(f"{name} is given {field} {address:#x}, which belongs to no allocation")
        self.launched.append(name)
        order = next(self._count) % 3

        def run() -> None:
            kernel.launch(grid[:2], block[:2], copied, 0, grid[2], shared, order=order)  # type: ignore[arg-type]

        call = KernelCall(name, macros, copied, grid)
        touches = call.touches(self._memory)
        return run, lambda: [*touches, *call.touches_by_table(self._memory)], name
