"""A pretended GPU for tests: the driver, NVRTC, cuBLASLt, CuPy and PyTorch are replaced and work on host memory.

Only code outside the package is replaced: functions of `cuda.bindings`, libraries that ctypes loads, and the modules
cupy and torch. The package is imported once more on top of the replacements, so that it shares no state with other
tests. NumPy computes the products that the real library's descriptors describe; our kernels are compiled by g++.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

import numpy as np
import pytest
from cuda.bindings import driver, nvrtc
from numpy.typing import NDArray

from lt_runtime.cublaslt.library import ARGUMENTS, RESULTS
from tests.host_kernels.harness import HostKernels
from tests.support.device_memory import DeviceMemory, matrix_at
from tests.support.fake_cublaslt import FakeCublasLt
from tests.support.fake_cupti import FakeCupti
from tests.support.fake_cupy import fake_cupy
from tests.support.fake_driver import FakeDriver
from tests.support.fake_kernels import FakeKernels
from tests.support.fake_nccl import FakeNccl
from tests.support.fake_streams import Status, Streams
from tests.support.fake_torch import fake_torch
from tests.support.library_calls import LibraryCalls

_PACKAGE: Final = "lt_runtime"
_OPEN: Final = ctypes.CDLL
_GET_CODE: Final = SourceFileLoader.get_code
_INTERNAL_ERROR: Final = 14  # of cuBLASLt


class FakeGpu:
    """A pretended GPU with its own copy of the package.

    Args:
        kernels: builds our kernels for the host.
        directory: the cache directory of the GPU's copy of the package, for compiled kernels and plans.
        package: the directory that contains `lt_runtime`, if it is another than the tests import.

    Attributes:
        directory: see above.
        lt: the GPU's copy of the package.
        cp, torch: stand-ins for CuPy and PyTorch.
        stream, other_stream: two streams for tests, neither of them the default stream.
        library: the stand-in for cuBLASLt.
        cupti: the stand-in for CUPTI.
        nccl: the stand-in for nccl4py.
        calls: counts the calls of cuBLASLt, the driver and NVRTC, and can make one fail.
    """

    lt: Any
    gelu_error = 0.0
    """Relative error of the pretended cuBLASLt's GELU; `RealGpu` has another one."""

    def __init__(self, kernels: HostKernels, directory: Path, package: Path | None = None) -> None:
        self.memory, self.streams, self.calls = DeviceMemory(), Streams(), LibraryCalls()
        self.directory, self._package = directory, package
        self._modules: dict[str, ModuleType] = {}
        self._others: dict[str, ModuleType] = {}
        self.kernels = FakeKernels(kernels, self.memory)
        self.driver = FakeDriver(self.memory, self.streams, self.kernels.launch, self.kernels.driver_functions)
        self.cupti = FakeCupti(self.streams, self.driver)
        self.nccl = FakeNccl(self)
        self.library: FakeCublasLt
        self.cp = fake_cupy(self)
        self.torch = fake_torch(self.cp)
        self.stream, self.other_stream = self.cp.cuda.Stream(), self.cp.cuda.Stream()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes this pretended GPU the process's GPU within a `with` block.

        The block's imports of the driver, NVRTC, cuBLASLt, CuPy and PyTorch give the stand-ins, and imports of
        `lt_runtime` give the copy of the package that runs on them.
        """
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("LT_RUNTIME_CACHE_DIR", str(self.directory))
            monkeypatch.setitem(sys.modules, "cupy", self.cp)
            monkeypatch.setitem(sys.modules, "torch", self.torch)
            for name, module in self.nccl.modules.items():
                monkeypatch.setitem(sys.modules, name, module)
            for name in self.driver.functions:
                monkeypatch.setattr(
                    driver, name, self._of_bindings(name, self.driver.by_bindings(name), is_driver=True)
                )
            for name, function in self.kernels.nvrtc_functions.items():
                monkeypatch.setattr(nvrtc, name, self._of_bindings(name, function, is_driver=False))
            monkeypatch.setattr(ctypes, "CDLL", self._open)
            monkeypatch.setattr(SourceFileLoader, "get_code", lambda loader, name: _code(loader.path, name))
            with self._own_package(monkeypatch):
                # The package must not give up captures because the host takes too long for them.
                monkeypatch.setattr("lt_runtime.ops.call._CAPTURE_SHARE", 1.0)
                yield

    def settle(self) -> None:
        """Fails if some work still waits on a stream, wrote outside of all allocations, or raced with other work."""
        undone = self.streams.left_undone()
        self.streams.synchronize_all()
        self.memory.check_guards()
        self.memory.release()
        races = self.streams.races.take()
        assert not undone, f"work that nobody waited for, by stream: {undone}"
        assert not races, "races:\n" + "\n".join(races)

    def synchronize(self, stream: int = 0) -> None:
        """Waits for a stream."""
        self.streams.synchronize(stream)

    def host_of(self, array: Any) -> NDArray[Any]:
        """Returns an array's present values, without waiting for any stream.

        A test that waits only for the stream of its calls therefore misses results of work on another stream.
        """
        strides = tuple(stride // array.itemsize for stride in array.strides)
        return matrix_at(self.memory, array.data.ptr, array.dtype, tuple(array.shape), strides, "an array")

    def memory_used(self) -> int:
        """Number of bytes that are allocated on the pretended GPU."""
        return self.memory.size

    def synchronize_all(self) -> None:
        """Waits for all streams."""
        self.streams.synchronize_all()

    def pin(self, size: int) -> NDArray[np.uint8]:
        """Makes an array in page-locked memory."""
        memory = np.empty(size, np.uint8)
        self.driver.pin(memory.ctypes.data, size)
        return memory

    @contextlib.contextmanager
    def _own_package(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Within a `with` block, `sys.modules` has this GPU's copy of the package instead of the tests' own copy."""
        if self._package is not None:
            monkeypatch.syspath_prepend(self._package)
        self._others = _taken_modules()
        sys.modules.update(self._modules)
        try:
            if not self._modules:
                self.lt = importlib.import_module(_PACKAGE)
                self.lt.cublaslt.get_version()  # the first call loads the library
            yield
        finally:
            self._modules = _taken_modules()
            sys.modules.update(self._others)

    @contextlib.contextmanager
    def others_package(self) -> Iterator[Any]:
        """Within a `with` block, `sys.modules` has the tests' own copy of the package, which is yielded."""
        own = _taken_modules()
        sys.modules.update(self._others)
        try:
            yield sys.modules[_PACKAGE]
        finally:
            self._others = _taken_modules()
            sys.modules.update(own)

    def _of_bindings(self, name: str, run: Callable[..., tuple[Any, ...]], *, is_driver: bool) -> Any:
        """Wraps a function of `cuda.bindings`, so that its calls are counted."""
        unknown, internal = Status.CUDA_ERROR_UNKNOWN, nvrtc.nvrtcResult.NVRTC_ERROR_INTERNAL_ERROR
        failure = (unknown, None) if is_driver else (internal,)
        return self.calls.counted(name, run, failure, lambda results: not results[0])

    def _open(self, name: str | None, *arguments: Any, **more: Any) -> Any:
        """Stands in for `ctypes.CDLL`."""
        file = Path(name or "").name
        if file.startswith("libcuda.so"):
            return _Driver(self.driver, self.calls)
        if file.startswith("libcublasLt.so"):
            real = _OPEN(name, *arguments, **more)
            if not hasattr(self, "library"):
                self.library = FakeCublasLt(_OPEN(name), self.memory, self.streams)
            return _Library(real, self.library.functions, self.calls)
        if file.startswith("libcupti.so"):
            return self.cupti.opened(_OPEN(name, *arguments, **more))
        return _OPEN(name, *arguments, **more)


class _Driver:
    """Stands in for libcuda.so.1, and counts its calls."""

    def __init__(self, driver: FakeDriver, calls: LibraryCalls) -> None:
        self._driver, self._calls = driver, calls

    def __getitem__(self, name: str) -> Any:
        failure = int(Status.CUDA_ERROR_UNKNOWN)
        return self._calls.counted(name, self._driver.by_ctypes(name), failure, lambda status: not status)


class _Library:
    """cuBLASLt with some functions replaced. Calls of functions that return a status are counted."""

    def __init__(self, real: ctypes.CDLL, replaced: Mapping[str, Any], calls: LibraryCalls) -> None:
        self._real, self._replaced, self._calls = real, replaced, calls

    def __getitem__(self, name: str) -> Any:
        if name in RESULTS or name not in ARGUMENTS:
            return getattr(self._real, name)
        replaced = self._replaced.get(name)
        if replaced is not None:
            return self._calls.counted(name, replaced, _INTERNAL_ERROR, lambda status: not status)
        real = self._real[name]

        def run(*arguments: Any) -> int:
            # The package declares the argument types on this replacement; the real function needs them as well.
            real.argtypes, real.restype = function.argtypes, function.restype
            status: int = real(*arguments)
            return status

        function = self._calls.counted(name, run, _INTERNAL_ERROR, lambda status: not status)
        return function

    __getattr__ = __getitem__


@functools.cache
def _code(path: str, name: str) -> CodeType | None:
    """Compiles a module's code once for all copies of the package, also if Python writes no bytecode."""
    return _GET_CODE(SourceFileLoader(name, path), name)


def _named(modules: Mapping[str, Any]) -> list[str]:
    return [name for name in modules if name == _PACKAGE or name.startswith(f"{_PACKAGE}.")]


def _taken_modules() -> dict[str, ModuleType]:
    """Takes the package's modules out of `sys.modules`."""
    return {name: sys.modules.pop(name) for name in _named(sys.modules)}
