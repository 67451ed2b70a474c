"""Loading the library, its version and its cache."""

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
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Starts a test without a loaded cuBLASLt, and restores the loaded library afterwards."""
    monkeypatch.delenv("LT_RUNTIME_CUBLASLT", raising=False)
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

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", not_found)
    with pytest.raises(MissingLibraryError, match=r"cuBLASLt is not installed: pip install 'lt_runtime\[cuda13\]'"):
        library.function("cublasLtCreate")


@pytest.mark.usefixtures("unloaded")
def test_an_environment_variable_names_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    link = tmp_path / "libcublasLt.so.13"
    link.symlink_to(pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path)
    monkeypatch.setenv("LT_RUNTIME_CUBLASLT", str(link))
    assert cublaslt.library_path() == str(link)
    assert cublaslt.get_version() >= 120000


@pytest.mark.usefixtures("unloaded")
def test_a_named_file_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for file in (tmp_path / "nothing.so", sys.executable):
        monkeypatch.setenv("LT_RUNTIME_CUBLASLT", str(file))
        with pytest.raises(MissingLibraryError, match=rf"^{file} cannot be loaded; LT_RUNTIME_CUBLASLT names it: "):
            cublaslt.get_version()


def test_a_function_that_an_older_library_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the library lacks a function, only the call that needs it fails.

    The C library (libc), which has none of cuBLASLt's functions, is loaded in its place.
    """
    older = object.__new__(library.Library)
    older.__dict__.update(path="libc.so.6", version=130000, _functions={}, _dll=library.ctypes.CDLL("libc.so.6"))
    monkeypatch.setattr(library, "loaded", lambda: older)
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


def test_a_block_closes_what_it_owns() -> None:
    with cublaslt.MatmulPreference() as preference:
        assert preference.handle
    with pytest.raises(ArgumentError, match="this MatmulPreference is closed"):
        preference.handle  # noqa: B018
