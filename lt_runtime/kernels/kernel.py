"""Loads the package's CUDA kernels, once for each device and set of macros, and prepares their launches.

A kernel takes one struct by value, so that a launch passes one pointer. The structs are declared only in `cuda_src`:
`struct` parses the declarations and makes ctypes classes of them, and so needs one member and one kernel signature on a
line. A test compares the classes' sizes and offsets with the C++ compiler's.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Mapping
from keyword import iskeyword
from typing import Any, Final, NamedTuple, TypeVar

from cuda.bindings import driver

from lt_runtime.errors import GpuError
from lt_runtime.gpu.compiler import Macros, compile_kernel
from lt_runtime.gpu.devices import device_info
from lt_runtime.gpu.driver import Launch, call
from lt_runtime.kernels.tiling import Pair, Tiling
from lt_runtime.layout import Layout
from lt_runtime.paths import kernel_sources
from lt_runtime.problem import DType, Spec

_OVERLAP_CAPABILITY: Final = 90
# bytes of dynamic shared memory that every kernel may use without a function attribute: the limit is 48 KiB, of which
# static shared memory takes a part
_SHARED_WITHOUT_ASKING: Final = 32 << 10
_ATTRIBUTE: Final = driver.CUfunction_attribute

SCALAR: Final = {DType.FLOAT32: "float", DType.FLOAT16: "__half", DType.BFLOAT16: "__nv_bfloat16"}
"""The CUDA C++ name of each element type."""
_BITS: Final = 8


def define(**definitions: DType | str | int) -> Macros:
    """Preprocessor definitions: types by their CUDA C++ names, numbers and booleans by their digits."""
    texts = {name: SCALAR[each] if isinstance(each, DType) else each for name, each in definitions.items()}
    return tuple((name, each if isinstance(each, str) else str(int(each))) for name, each in texts.items())


class Struct(ctypes.Structure):
    """Base of the ctypes classes for structs of `cuda_src`. C++ members `in` and `from` are named `in_` and `from_`."""


# types of fields, named as in ctypes without "c_"
_NAMED: Final = ("int", "uint32", "int64", "uint64", "float", "double")
_NUMBERS: Final = {"unsigned char": ctypes.c_uint8, **{name: getattr(ctypes, f"c_{name}") for name in _NAMED}}
_STRUCT: Final = re.compile(r"^struct (?:alignas\(\d+\) )?(\w+) {\n(.*?)^};", re.MULTILINE | re.DOTALL)
_TYPE: Final = r"(?:const )?(?:struct )?(unsigned char|\w+)(?:<\w+>)?(\*?)"
_MEMBER: Final = re.compile(rf"^  {_TYPE} (\w+)([\[\w\]]*);", re.MULTILINE)
_PARAMETER: Final = re.compile(r'^extern "C" __global__ .* (\w+)\(const .*lt::(\w+) p\) {$', re.MULTILINE)
_CONSTANT: Final = re.compile(r"^constexpr \w+ (\w+) = (\d+);", re.MULTILINE)
_structs: Final[dict[str, type[Struct]]] = {}
_lock: Final = threading.RLock()
_Struct = TypeVar("_Struct", bound=Struct)


@functools.cache
def _declarations() -> tuple[Mapping[str, str], ...]:
    """Returns what `cuda_src` declares: bodies of structs, names of kernels' argument structs, constants; by name."""
    text = "\n".join(path.read_text() for path in sorted(kernel_sources().glob("*.cu*")))
    return tuple(dict(each.findall(text)) for each in (_STRUCT, _PARAMETER, _CONSTANT))


def struct(name: str) -> type[Struct]:
    """The ctypes class for the C++ struct `lt::NAME`: the class that `declared` decorates, or else a new one."""
    with _lock:
        return _structs[name] if name in _structs else declared(type(name, (Struct,), {}))


def declared(cls: type[_Struct]) -> type[_Struct]:
    """Gives a class the fields that `cuda_src` declares for the struct of the same name. Pointers become addresses."""
    (bodies, _, constants), fields = _declarations(), []
    for kind, pointer, name, lengths in _MEMBER.findall(bodies[cls.__name__]):
        field = ctypes.c_void_p if pointer else _NUMBERS.get(kind) or struct(kind)
        for length in reversed(re.findall(r"\w+", lengths)):
            field *= int(constants.get(length, length))
        fields.append((f"{name}_" if iskeyword(name) else name, field))
    cls._fields_ = fields
    _structs[cls.__name__] = cls
    return cls


@declared
class Matrix(Struct):
    """The C++ struct `lt::Matrix`: an address and the strides of a matrix in elements."""

    @classmethod
    def of(cls, matrix: Layout | Spec | None, *, is_mask: bool = False) -> Matrix:
        """The struct for a matrix of this layout, whose address is 0 until the caller sets it.

        All fields are 0 for None, an absent matrix.

        Args:
            is_mask: whether the layout is a bit mask's and counts bits. Kernels read a mask in bytes of eight columns.
        """
        if matrix is None:
            return cls()
        layout = matrix.layout if isinstance(matrix, Spec) else matrix
        return cls(0, layout.leading_dimension // _BITS, 1) if is_mask else cls(0, *layout.strides)


@declared
class Dropout(Struct):
    """The C++ struct `lt::Dropout`: the state of the random numbers, and the threshold and scale of a dropout mask."""


@declared
class Tally(Struct):
    """The C++ struct `lt::Tally`: sums over training steps, and the weight of the loss that is added."""


class Entry(NamedTuple):
    """A kernel of `cuda_src`: its name, and the file that defines it."""

    name: str
    source: str

    @property
    def params(self) -> type[Struct]:
        """The ctypes class of the struct that the kernel takes by value."""
        _, parameters, _ = _declarations()
        return struct(parameters[self.name])


class Kernel:
    """A kernel loaded on one device. The object keeps the CUDA module loaded.

    Raises:
        GpuError: the driver's size of the kernel's parameter differs from the struct's.
    """

    def __init__(self, entry: Entry, module: Any, *, overlaps: bool) -> None:
        self._module = module
        self._function = int(call("cuModuleGetFunction", module, entry.name.encode()))
        self._overlaps = overlaps
        self._shared = _SHARED_WITHOUT_ASKING
        _, size = call("cuFuncGetParamInfo", self._function, 0)
        expected = ctypes.sizeof(entry.params)
        if size != expected:
            raise GpuError(f"{entry.name} takes {size} bytes of parameters, {entry.params.__name__} has {expected}")

    def prepare(self, grid: Pair, block: Pair, params: Struct, stream: int, batch: int = 1, shared: int = 0) -> Launch:
        """Prepares a launch that may be repeated; each launch copies the contents that `params` has at that time.

        Args:
            grid: blocks in x and y.
            block: threads in x and y.
            batch: blocks in z.
            shared: bytes of a block's dynamic shared memory.
        """
        if shared > self._shared:
            self._allow_shared(shared)
        return Launch(self._function, (*grid, batch), (*block, 1), params, stream, shared, self._overlaps)

    def _allow_shared(self, size: int) -> None:
        """Allows a kernel's blocks `size` bytes of dynamic shared memory each.

        The driver is also asked for the largest share of L1 as shared memory, so that several blocks fit a
        multiprocessor.
        """
        call("cuFuncSetAttribute", self._function, _ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, size)
        call("cuFuncSetAttribute", self._function, _ATTRIBUTE.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
        self._shared = size


@functools.cache
def get_kernel(entry: Entry, macros: Macros, device: int) -> Kernel:
    """The kernel `entry` with the given definitions, compiled and loaded on first use. `device` must be current.

    Raises:
        CompileError, MissingLibraryError: see `compile_kernel`.
    """
    overlaps = device_info(device).capability >= _OVERLAP_CAPABILITY
    return Kernel(entry, _load_module(entry.source, macros, device), overlaps=overlaps)


@functools.cache
def _load_module(source: str, macros: Macros, device: int) -> Any:
    return call("cuModuleLoadData", compile_kernel(source, macros, device_info(device).architecture))


class Launches(dict[int, tuple[Struct, Launch]]):
    """A kernel with its grid, prepared on first use of each stream: `params, launch = launches[stream]`.

    The caller writes the fields of `params` that differ from the previous call, then calls `launch`. Only one thread at
    a time may use the `params` and `launch` of a stream, which callers ensure with a lock.

    Args:
        device: ordinal of the GPU, which must be current now and at every launch.
        params: the initial argument block, of which each stream gets a copy.
        batch: gridDim.z.
        shared: bytes of a block's dynamic shared memory.

    Raises:
        CompileError, MissingLibraryError: see `compile_kernel`.
    """

    def __init__(
        self, entry: Entry, macros: Macros, device: int, tiling: Tiling, params: Struct, batch: int = 1, shared: int = 0
    ) -> None:
        super().__init__()
        self._kernel = get_kernel(entry, macros, device)
        self._tiling, self._params, self._batch, self._shared = tiling, params, batch, shared

    def __missing__(self, stream: int) -> tuple[Struct, Launch]:
        params = type(self._params).from_buffer_copy(self._params)
        self[stream] = params, self._kernel.prepare(*self._tiling, params, stream, self._batch, self._shared)
        return self[stream]
