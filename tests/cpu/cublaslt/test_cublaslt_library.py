"""Loading the library; what it says of itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from cuda import pathfinder

from lt_runtime import cublaslt
from lt_runtime.cublaslt import library
from lt_runtime.errors import ArgumentError, MissingLibraryError


@pytest.fixture
def unloaded() -> Iterator[None]:
    """The library not loaded yet, and again the usual one afterwards."""
    library.loaded.cache_clear()
    yield
    library.loaded.cache_clear()


def test_version_and_path() -> None:
    version, path = cublaslt.get_version(), Path(cublaslt.library_path())
    assert path.name.startswith("libcublasLt.so")
    assert version // 10000 in (12, 13)
    assert cublaslt.get_cudart_version() // 1000 == version // 10000
    assert library.version_text(131000) == "13.10.0"


@pytest.mark.usefixtures("unloaded")
def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> SimpleNamespace:
        raise pathfinder.DynamicLibNotFoundError(name)

    monkeypatch.delenv("LT_RUNTIME_CUBLASLT", raising=False)
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", not_found)
    with pytest.raises(MissingLibraryError, match=r"cuBLASLt is not installed: pip install 'lt_runtime\[cuda13\]'"):
        library.function("cublasLtCreate")


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("major", [12, 13])
def test_what_pathfinder_finds_is_loaded(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either major, wherever it lies: the real library under another name stands for one."""
    asked: list[str] = []
    real = pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path

    def load(name: str) -> SimpleNamespace:
        asked.append(name)
        return SimpleNamespace(abs_path=real)

    monkeypatch.delenv("LT_RUNTIME_CUBLASLT", raising=False)
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", load)
    monkeypatch.setattr(library.Library, "_read_version", lambda _: major * 10000)
    assert cublaslt.library_path() == real
    assert cublaslt.get_version() == major * 10000
    assert asked == ["cublasLt"]


@pytest.mark.usefixtures("unloaded")
def test_the_library_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path
    link = tmp_path / "libcublasLt.so.13"
    link.symlink_to(real)
    monkeypatch.setenv("LT_RUNTIME_CUBLASLT", str(link))
    assert cublaslt.library_path() == str(link)
    assert cublaslt.get_version() >= 120000


@pytest.mark.usefixtures("unloaded")
def test_a_named_library_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LT_RUNTIME_CUBLASLT", str(tmp_path / "nothing.so"))
    with pytest.raises(MissingLibraryError, match=r"nothing\.so cannot be loaded; LT_RUNTIME_CUBLASLT names it: "):
        cublaslt.get_version()
    monkeypatch.setenv("LT_RUNTIME_CUBLASLT", sys.executable)
    with pytest.raises(MissingLibraryError, match="cannot be loaded"):
        cublaslt.get_version()


@pytest.mark.usefixtures("unloaded")
def test_a_function_that_the_library_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the call that needs it fails; a library that has none of them stands for an older one."""
    monkeypatch.setenv("LT_RUNTIME_CUBLASLT", "libc.so.6")
    monkeypatch.setattr(library.Library, "_read_version", lambda _: 130000)
    assert cublaslt.get_version() == 130000
    message = r"^cublasLtEmulationDescCreate is not in .*; it came with cuBLASLt 13\.1\.0: pip install 'nvidia-cublas>="
    with pytest.raises(MissingLibraryError, match=message):
        cublaslt.EmulationDesc()


def test_the_capacity_of_the_heuristics_cache() -> None:
    before = cublaslt.heuristics_cache_get_capacity()
    try:
        cublaslt.heuristics_cache_set_capacity(17)
        assert 17 <= cublaslt.heuristics_cache_get_capacity() <= 64
    finally:
        cublaslt.heuristics_cache_set_capacity(before)
    for wrong in (-1, 2**64):
        with pytest.raises(ArgumentError, match=f"capacity is {wrong}"):
            cublaslt.heuristics_cache_set_capacity(wrong)
