"""A stand-in for CuPy: arrays in a pretended GPU's memory, and the used parts of `cupy.cuda`."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Final, Protocol, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.support.device_memory import DeviceMemory, FullError, matrix_at
from tests.support.fake_streams import KERNEL, MEMCPY, Capture, Streams
from tests.support.races import HOST


class Gpu(Protocol):
    """The parts of a pretended GPU that arrays use."""

    memory: DeviceMemory
    streams: Streams

    def pin(self, size: int) -> NDArray[np.uint8]:
        """Makes an array in page-locked memory."""


class Memory:
    """An allocation of a pool. It returns to the pool of its stream when it is garbage-collected.

    Memory without a stream goes back to the driver, which invalidates all captures.
    """

    def __init__(self, gpu: Gpu, size: int, stream: Hashable) -> None:
        pool = stream, size
        try:
            self.ptr, self.size, self.device_id = gpu.memory.allocate(max(size, 1), pool), size, 0
        except FullError:
            raise CUDARuntimeError(2) from None
        weakref.finalize(self, _free, gpu, self.ptr, pool).atexit = False


def _free(gpu: Gpu, address: int, pool: tuple[Hashable, int]) -> None:
    gpu.memory.free(address, pool)
    if not isinstance(pool[0], int):
        for each in gpu.streams.captures.values():
            each.is_broken = True


class MemoryPointer:
    """An address in an allocation."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, 0

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)


class Array(np.lib.mixins.NDArrayOperatorsMixin):
    """Stands in for `cupy.ndarray`. NumPy computes its operations, once the current stream has done its work.

    `fake_cupy` makes a subclass for each pretended GPU.
    """

    _gpu: Gpu
    _module: Any
    __array_priority__ = 100

    def __init__(
        self,
        shape: int | Sequence[int],
        dtype: Any = np.float32,
        memptr: MemoryPointer | None = None,
        strides: Sequence[int] | None = None,
    ) -> None:
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = np.dtype(dtype)
        if memptr is None and self.dtype.kind in "Vf" and self.dtype.itemsize == 1:
            # CuPy raises the same error for FP8, except for views of bytes.
            raise TypeError(f"Unsupported dtype {self.dtype}")
        self.itemsize, self.ndim, self.size = self.dtype.itemsize, len(self.shape), math.prod(self.shape)
        self.nbytes = self.size * self.itemsize
        self.strides = _packed_strides(self.shape, self.itemsize) if strides is None else tuple(strides)
        self.data = memptr if memptr is not None else self._module.cuda.alloc(self.nbytes)
        self.device = SimpleNamespace(id=0)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        is_bfloat16 = self.dtype.name == "bfloat16"
        return {
            "shape": self.shape,
            "strides": self.strides,
            "typestr": "<V2" if is_bfloat16 else self.dtype.str,
            "data": (self.data.ptr, False),
            "version": 3,
            "stream": None,
        }

    @property
    def _host(self) -> NDArray[Any]:
        """Returns a NumPy view of the array's present values."""
        strides = tuple(stride // self.itemsize for stride in self.strides)
        return matrix_at(self._gpu.memory, self.data.ptr, self.dtype, self.shape, strides, "an array")

    @property
    def _settled(self) -> NDArray[Any]:
        self._gpu.streams.synchronize(self._module.cuda.get_current_stream().ptr)
        races = self._gpu.streams.races
        races.add(races.put(HOST), "the host", self._gpu.memory.touched_by(self._host, "an array", writes=False))
        return self._host

    def _part(self, view: NDArray[Any]) -> Any:
        offset = view.ctypes.data - self._host.ctypes.data if self.size and view.size else 0
        return type(self)(view.shape, view.dtype, self.data + offset, view.strides)

    @property
    def T(self) -> Any:  # noqa: N802  # its name in NumPy
        return type(self)(self.shape[::-1], self.dtype, self.data, self.strides[::-1])

    @property
    def flags(self) -> Any:
        return self._host.flags

    def swapaxes(self, first: int, second: int) -> Any:
        return self._part(self._host.swapaxes(first, second))

    def reshape(self, *shape: Any) -> Any:
        view = self._host.view()
        view.shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape  # never copies
        return self._part(view)

    def view(self, dtype: Any) -> Any:
        return self._part(self._host.view(dtype))

    def __getitem__(self, key: Any) -> Any:
        return self._part(self._host[_view_key(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        _refuse_compilation("an assignment")
        self._assign(key, value)

    def _assign(self, key: Any, value: Any) -> None:
        if self._is_capturing:
            self._part(self._host[_view_key(key)])._put(lambda: _present(value))
            return
        values = value._settled.copy() if isinstance(value, Array) else np.array(value)
        target = self._host[_view_key(_settled(key))]
        if not np.shares_memory(target, self._host):  # true if `key` is a mask or an index array, which makes a copy
            self._settled[_settled(key)] = values
            return

        def run() -> None:
            target[...] = values

        self._write(MEMCPY, "set", run, target)

    def set(self, values: NDArray[Any]) -> None:
        """Copies an array from the host, on the current stream."""
        self._assign(..., values)

    def fill(self, value: Any) -> None:
        _refuse_compilation("fill")
        self[...] = value

    def get(self) -> NDArray[Any]:
        """Returns a copy on the host, once the current stream has done its work."""
        return self._settled.copy()

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        options.pop("casting", None)  # as in CuPy, the assigned values are cast to the array's type
        return self._result(getattr(function, method), inputs, options, *out)

    def __array_function__(self, function: Any, _: Any, arguments: Any, options: Any) -> Any:
        return self._result(function, arguments, options)

    @property
    def _is_capturing(self) -> bool:
        return self._module.cuda.get_current_stream().ptr in self._gpu.streams.captures

    def _result(self, function: Any, arguments: Any, options: Any, out: Any = None) -> Any:
        """The result of a NumPy function, computed now, or at each launch of the graph that is being captured."""
        _refuse_compilation("arithmetic")
        if not self._is_capturing:
            made = self._made(function(*map(_settled, arguments), **options))
            if out is not None:
                out[...] = made
            return made if out is None else out

        def compute() -> Any:
            with np.errstate(all="ignore"):
                return function(*map(_present, arguments), **options)

        if out is None:
            found = np.asarray(compute())
            out = self._module.ndarray(found.shape, found.dtype)
        out._put(compute)
        return out

    def _put(self, compute: Callable[[], Any]) -> None:
        """Launches the computation of this array's values on the current stream."""
        target = self._host

        def run() -> None:
            target[...] = compute()

        self._write(KERNEL, "cupy", run, target)

    def _write(self, kind: Any, name: str, run: Callable[[], None], target: NDArray[Any]) -> None:
        """Launches work on the current stream that writes to elements of this array."""
        touches = self._gpu.memory.touched_by(target, "an array", writes=True)
        self._gpu.streams.put(self._module.cuda.get_current_stream().ptr, kind, name, run, lambda: touches)

    def _made(self, result: Any) -> Any:
        """Converts a result of NumPy to an array of this kind."""
        if isinstance(result, tuple):
            return tuple(map(self._made, result))
        return self._module.asarray(np.asarray(result))

    def _computed(self, name: str) -> Callable[..., Any]:
        return lambda *arguments, **options: self._result(
            lambda own, *others, **more: getattr(own, name)(*others, **more), (self, *arguments), options
        )

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS:
            return self._computed(name)
        raise AttributeError(name)

    def item(self) -> Any:
        return self.get().item()

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, *_: Any, **__: Any) -> NDArray[Any]:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")  # as CuPy says


class CompilationError(AssertionError):
    """The stand-in for CuPy raises this where the real CuPy would compile a kernel."""


def _refuse_compilation(what: str) -> None:
    """Raises if the package itself asks for something that CuPy compiles a kernel for, which takes half a second."""
    frame = sys._getframe(2)
    while (name := frame.f_globals.get("__name__", "")).startswith((__name__, "numpy")) and frame.f_back is not None:
        frame = frame.f_back
    if name.startswith("lt_runtime"):
        raise CompilationError(f"{what} on CuPy's arrays in {name}, line {frame.f_lineno}")


_METHODS: Final = ("all", "any", "astype", "copy", "max", "mean", "min", "nonzero", "sum")


def _present(value: Any) -> Any:
    """Returns the present values of an array; returns other objects as they are."""
    return value._host if isinstance(value, Array) else value


def _settled(value: Any) -> Any:
    return value._settled if isinstance(value, Array) else value


def _view_key(key: Any) -> tuple[Any, ...]:
    """Replaces an index by an equivalent one with which NumPy returns an array even for one element."""
    keys = key if isinstance(key, tuple) else (key,)
    return keys if any(each is ... for each in keys) else (*keys, ...)


def _packed_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(max(1, length) for length in shape[axis + 1 :]) for axis in range(len(shape)))


class Stream:
    """Stands in for `cupy.cuda.Stream`; without a handle, it makes a new stream."""

    _handles = iter(range(0x5000_0000, 0x6000_0000, 0x10))
    _current: _Current
    _streams: Streams

    def __init__(self, non_blocking: bool = False, ptr: int | None = None) -> None:
        self.ptr = next(self._handles) if ptr is None else ptr

    @classmethod
    def from_external(cls, other: Any) -> Self:
        return cls(ptr=other.__cuda_stream__()[1])

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    def __enter__(self) -> Self:
        self._current.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._current.stack.pop()

    def synchronize(self) -> None:
        self._streams.synchronize(self.ptr)

    def begin_capture(self) -> None:
        self._streams.begin_capture(self.ptr)

    def end_capture(self) -> Graph:
        return Graph(self._streams, self._streams.end_capture(self.ptr))


class _Current(threading.local):
    """The stack of current streams of each thread; the last one is current."""

    def __init__(self, default: Stream) -> None:
        self.stack = [default]


class Graph:
    """Stands in for `cupy.cuda.Graph`."""

    _handles = itertools.count(0x70_0000, 0x10)

    def __init__(self, streams: Streams, capture: Capture) -> None:
        self._streams, self._capture, self._executable = streams, capture, next(self._handles)
        streams.observer.instantiated(capture.handle, self._executable)

    def launch(self, stream: Stream) -> None:
        self._streams.launch_graph(self._capture, stream.ptr, self._executable)


class OutOfMemoryError(MemoryError):
    """Raised by CuPy's pools when memory is exhausted."""


class CUDARuntimeError(Exception):
    """Stands in for CuPy's error of the CUDA runtime."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class _Block:
    """Memory of a pool in use; it returns to the pool when it is garbage-collected."""

    def __init__(self, mem: Memory, back: list[Memory]) -> None:
        self.ptr, self.size, self.device_id = mem.ptr, mem.size, 0
        weakref.finalize(self, back.append, mem).atexit = False


class UnownedMemory:
    """Stands in for CuPy's memory that another object owns."""

    _memory: DeviceMemory

    def __init__(self, ptr: int, size: int, owner: object, device_id: int) -> None:
        self.ptr, self.size, self.device_id, self._owner = ptr, size, device_id, owner
        self._memory.divide(self, ptr, size)


class MemoryPool:
    """Stands in for CuPy's memory pool, which reuses freed memory for requests of the same size on the same stream."""

    default: Callable[[int], MemoryPointer]
    current_stream: Callable[[], int]

    def __init__(self, allocator: Callable[[int], MemoryPointer] | None = None) -> None:
        self._allocator = allocator or self.default
        self._free: dict[tuple[int, int], list[Memory]] = {}

    def malloc(self, size: int) -> MemoryPointer:
        back = self._free.setdefault((self.current_stream(), size), [])
        mem = back.pop() if back else self._allocator(size).mem
        return MemoryPointer(_Block(mem, back), 0)

    def free_all_blocks(self) -> None:
        for each in self._free.values():
            each.clear()


_CREATORS: Final = ("ones", "arange")  # the real CuPy compiles a kernel for these functions


def fake_cupy(gpu: Gpu) -> ModuleType:
    """Makes the module that stands in for cupy."""
    module: Any = ModuleType("cupy")
    module.ndarray = type("ndarray", (Array,), {"_gpu": gpu, "_module": module, "__module__": "cupy"})
    module.cuda = _cuda(gpu)

    def asarray(values: Any, dtype: Any = None) -> Any:
        if isinstance(values, Array):
            return values
        host = np.asarray(values, dtype)
        made = module.ndarray(host.shape, host.dtype)
        made._host[...] = host  # the real CuPy has read pageable host memory when the call returns
        stream = module.cuda.get_current_stream().ptr
        # Real streams wait for the default stream; those of the pretended GPU do not.
        if stream and not made._is_capturing:
            touches = gpu.memory.touched_by(made._host, "an array", writes=True)
            gpu.streams.races.add(gpu.streams.races.put(stream), "asarray", touches)
        return made

    def ascontiguousarray(array: Any) -> Any:
        return array if array._host.flags.c_contiguous else asarray(np.ascontiguousarray(array.get()))

    module.asarray = module.array = asarray
    module.ascontiguousarray = ascontiguousarray
    module.asnumpy = lambda array, **_: array.get() if isinstance(array, Array) else np.asarray(array)
    module.empty = lambda shape, dtype=np.float32: module.ndarray(shape, dtype)
    module.empty_like = lambda array: module.ndarray(array.shape, array.dtype)
    module.zeros = _created(np.zeros, asarray)
    for name in _CREATORS:
        setattr(module, name, _compiled(name, _created(getattr(np, name), asarray)))
    module.full = _compiled("full", _created(np.full, asarray))
    module.float32, module.float16, module.uint8, module.uint32 = np.float32, np.float16, np.uint8, np.uint32
    module.exp = np.exp
    module.bfloat16, module.nan = np.dtype(ml_dtypes.bfloat16), np.nan
    module.lib = SimpleNamespace(
        stride_tricks=SimpleNamespace(
            as_strided=lambda array, shape, strides: module.ndarray(shape, array.dtype, array.data, strides)
        )
    )
    return module


def _created(make: Callable[..., NDArray[Any]], asarray: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **more: asarray(make(*arguments, **more))


def _compiled(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    def compiled(*arguments: Any, **more: Any) -> Any:
        _refuse_compilation(name)
        return make(*arguments, **more)

    return compiled


def _cuda(gpu: Gpu) -> Any:
    stream = type("Stream", (Stream,), {"_streams": gpu.streams})
    stream.null = stream(ptr=0)
    stream._current = _Current(stream.null)

    def allocation(size: int) -> Memory:
        return Memory(gpu, size, stream._current.stack[-1].ptr)

    def allocate(size: int, pool: Hashable) -> MemoryPointer:
        try:
            return MemoryPointer(Memory(gpu, size, pool), 0)
        except CUDARuntimeError as error:
            raise OutOfMemoryError(f"Out of memory allocating {size} bytes") from error

    def of_default_pool(size: int) -> MemoryPointer:
        return allocate(size, stream._current.stack[-1].ptr)

    def of_driver(size: int) -> MemoryPointer:
        return allocate(size, object())  # A pool frees memory by the driver, which first waits for all work.

    allocators: list[Callable[[int], MemoryPointer]] = [of_default_pool]
    here = {
        "default": staticmethod(of_driver),
        "current_stream": staticmethod(lambda: stream._current.stack[-1].ptr),
    }
    pool = type("MemoryPool", (MemoryPool,), here)

    @contextlib.contextmanager
    def using_allocator(allocator: Callable[[int], MemoryPointer]) -> Iterator[None]:
        allocators.append(allocator)
        try:
            yield
        finally:
            allocators.pop()

    class Device:
        def __init__(self, ordinal: int = 0) -> None:
            self.id = ordinal

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def synchronize(self) -> None:
            if gpu.streams.captures:  # during a capture the driver refuses this wait, and invalidates every capture
                for capture in gpu.streams.captures.values():
                    capture.is_broken = True
                raise CUDARuntimeError(900)
            gpu.streams.synchronize_all()

    return SimpleNamespace(
        Stream=stream,
        get_current_stream=lambda *_: stream._current.stack[-1],
        Device=Device,
        alloc=lambda size: allocators[-1](size),
        alloc_pinned_memory=gpu.pin,
        using_allocator=using_allocator,
        MemoryPool=pool,
        UnownedMemory=type("UnownedMemory", (UnownedMemory,), {"_memory": gpu.memory}),
        MemoryPointer=MemoryPointer,
        Memory=allocation,
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        runtime=SimpleNamespace(CUDARuntimeError=CUDARuntimeError, getDevice=lambda: 0),
    )
