"""A GPU for tests: the driver, NVRTC, cuBLASLt and CuPy replaced, on host memory.

What is replaced is not the package's own: functions of `cuda.bindings`, libraries that ctypes loads, the module CuPy.
The package is imported anew on top of it, so that no state of other tests is met and none is left behind. Products are
interpreted in NumPy from what the real library's descriptors hold; our kernels run as g++ built them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import pytest
from cuda.bindings import driver, nvrtc
from numpy.typing import NDArray

from tests.host_kernels.harness import HostKernels
from tests.support.device_memory import DeviceMemory
from tests.support.fake_cublaslt import FakeCublasLt
from tests.support.fake_cupy import fake_cupy
from tests.support.fake_driver import FakeDriver
from tests.support.fake_kernels import FakeKernels
from tests.support.fake_streams import Streams
from tests.support.fake_torch import fake_torch

_PACKAGE: Final = "lt_runtime"
_OPEN: Final = ctypes.CDLL


class FakeGpu:
    """A pretended GPU with its own copy of the package.

    Args:
        kernels: builds our kernels.
        directory: where that copy keeps compiled kernels and plans.
        package: the directory that holds `lt_runtime`, if not the one that is imported anyway.

    Attributes:
        lt: the package, imported on top of the GPU.
        cp, torch: stand in for CuPy and PyTorch.
        stream, other_stream: two that are not the default stream, for tests to use.
        library: cuBLASLt.
    """

    lt: Any

    def __init__(self, kernels: HostKernels, directory: Path, package: Path | None = None) -> None:
        self.memory, self.streams = DeviceMemory(), Streams()
        self._directory, self._package = directory, package
        self._modules: dict[str, ModuleType] = {}
        self._others: dict[str, ModuleType] = {}
        self.kernels = FakeKernels(kernels, self.memory)
        self.driver = FakeDriver(self.memory, self.streams, self.kernels.launch, self.kernels.driver_functions)
        self.library: FakeCublasLt
        self.cp = fake_cupy(self)
        self.torch = fake_torch(self.cp)
        self.stream, self.other_stream = self.cp.cuda.Stream(), self.cp.cuda.Stream()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Puts everything in place; afterwards checks that nobody wrote beside an allocation."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("LT_RUNTIME_CACHE_DIR", str(self._directory))
            monkeypatch.setitem(sys.modules, "cupy", self.cp)
            monkeypatch.setitem(sys.modules, "torch", self.torch)
            for name in self.driver.functions:
                monkeypatch.setattr(driver, name, self.driver.by_bindings(name))
            for name, function in self.kernels.nvrtc_functions.items():
                monkeypatch.setattr(nvrtc, name, function)
            monkeypatch.setattr(ctypes, "CDLL", self._open)
            with self._own_package(monkeypatch):
                yield

    def settle(self) -> None:
        """Fails if work was left on a stream that nobody waits for, or memory was written that is nobody's."""
        undone = self.streams.left_undone()
        self.streams.synchronize_all()
        self.memory.check_guards()
        self.memory.release()
        assert not undone, f"work that nobody waited for, by stream: {undone}"

    def synchronize(self, stream: int = 0) -> None:
        """Waits for a stream."""
        self.streams.synchronize(stream)

    def pin(self, size: int) -> NDArray[np.uint8]:
        """Page-locked memory."""
        memory = np.empty(size, np.uint8)
        self.driver.pin(memory.ctypes.data, size)
        return memory

    @contextlib.contextmanager
    def _own_package(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """The copy of the package in the place of the others' one."""
        if self._package is not None:
            monkeypatch.syspath_prepend(self._package)
        self._others = _taken_modules()
        sys.modules.update(self._modules)
        try:
            if not self._modules:
                self.lt = importlib.import_module(_PACKAGE)
                self.lt.cublaslt.get_version()  # loads the library
            yield
        finally:
            self._modules = _taken_modules()
            sys.modules.update(self._others)

    @contextlib.contextmanager
    def others_package(self) -> Iterator[Any]:
        """The package that the tests themselves have imported. It imports some of its modules at their first use."""
        own = _taken_modules()
        sys.modules.update(self._others)
        try:
            yield sys.modules[_PACKAGE]
        finally:
            self._others = _taken_modules()
            sys.modules.update(own)

    def _open(self, name: str | None, *arguments: Any, **more: Any) -> Any:
        """Stands in for `ctypes.CDLL`."""
        file = Path(name or "").name
        if file.startswith("libcuda.so"):
            return _Library(None, {}, self.driver)
        if file.startswith("libcublasLt.so"):
            real = _OPEN(name, *arguments, **more)
            if not hasattr(self, "library"):
                self.library = FakeCublasLt(_OPEN(name), self.memory, self.streams)
            return _Library(real, self.library.functions, None)
        return _OPEN(name, *arguments, **more)


class _Library:
    """A library with some functions replaced."""

    def __init__(self, real: ctypes.CDLL | None, replaced: Mapping[str, Any], driver: FakeDriver | None) -> None:
        self._real, self._replaced, self._driver = real, replaced, driver

    def __getitem__(self, name: str) -> Any:
        if self._driver is not None:
            return self._driver.by_ctypes(name)
        replaced = self._replaced.get(name)
        if replaced is None:
            return getattr(self._real, name)

        def function(*arguments: Any) -> int:  # its types can be declared, as those of a C function
            status: int = replaced(*arguments)
            return status

        return function

    __getattr__ = __getitem__


def _named(modules: Mapping[str, Any]) -> list[str]:
    return [name for name in modules if name == _PACKAGE or name.startswith(f"{_PACKAGE}.")]


def _taken_modules() -> dict[str, ModuleType]:
    """Takes the package's modules out of `sys.modules`."""
    return {name: sys.modules.pop(name) for name in _named(sys.modules)}
