"""Loading the library and holding the tables against it; what it says of itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cuda import pathfinder

from lt_runtime import cublaslt
from lt_runtime.cublaslt import abi, library
from lt_runtime.errors import AbiError, ArgumentError, MissingLibraryError
from tests.support.cublaslt_recorder import Recorder

GUARD_SECONDS = 0.005


@pytest.fixture
def unloaded() -> Iterator[None]:
    """The library not loaded yet, and again the usual one afterwards."""
    library.loaded.cache_clear()
    yield
    library.loaded.cache_clear()


class Pretended:
    """The real functions, but for the widths of some attributes."""

    def __init__(self, widths: dict[tuple[str, int], int | None], missing: tuple[str, ...] = ()) -> None:
        # Of 12.9 and 13.0, which have something else there; that is a test of its own.
        self._widths = {(DESC, int(M.EMULATION_DESCRIPTOR)): 8, **widths}
        self._missing = missing

    def find(self, name: str) -> Callable[..., int] | None:
        if name in self._missing:
            return None
        real = library.loaded().find(name)
        return self._told(name, real) if real is not None and name.endswith("GetAttribute") else real

    def _told(self, name: str, real: Callable[..., int]) -> Callable[..., int]:
        def get(owner: Any, attribute: int, *rest: Any) -> int:
            if (name, attribute) not in self._widths:
                return real(owner, attribute, *rest)
            width = self._widths[name, attribute]
            if width is None:
                return int(cublaslt.Status.INVALID_VALUE)
            rest[-1]._obj.value = width
            return 0

        return get


DESC, CONFIG = "cublasLtMatmulDescGetAttribute", "cublasLtMatmulAlgoConfigGetAttribute"
M = cublaslt.MatmulDescAttribute


def test_version_and_path() -> None:
    version, path = cublaslt.get_version(), Path(cublaslt.library_path())
    assert path.name.startswith("libcublasLt.so")
    assert version // 10000 in (12, 13)
    assert cublaslt.get_cudart_version() // 1000 == version // 10000
    assert library.version_text(131000) == "13.10.0"


def test_the_installed_library_fits_and_is_checked_fast() -> None:
    loaded = library.loaded()
    began = time.perf_counter()
    abi.check(loaded.find, loaded.version, loaded.path)
    assert time.perf_counter() - began < GUARD_SECONDS


def test_the_library_tells_every_width() -> None:
    """What the check rests on: it is no check if the library stays silent."""
    version = cublaslt.get_version()
    told = list(abi._widths(library.loaded().find, ""))
    for attribute, theirs in told:
        if version >= attribute.since:
            assert theirs == attribute.size, repr(attribute)
    if version >= 130800:
        kinds = [kind for _, _, kind in abi._DESCRIPTORS] + [cublaslt.AlgoConfigAttribute]
        assert [attribute for attribute, _ in told] == [attribute for kind in kinds for attribute in kind]
        assert len(told) == sum(map(len, kinds))


@pytest.mark.parametrize(
    ("function", "attribute", "message"),
    [
        (DESC, M.TRANSA, r"MatmulDescAttribute\.TRANSA has 4 bytes here and 8 in cuBLASLt 131500 \(/here\)"),
        (CONFIG, cublaslt.AlgoConfigAttribute.INNER_SHAPE_ID, r"INNER_SHAPE_ID has 2 bytes here and 8"),
    ],
)
def test_a_contradiction_is_refused(function: str, attribute: int, message: str) -> None:
    with pytest.raises(AbiError, match=message):
        abi.check(Pretended({(function, attribute): 8}).find, 131500, "/here")


def test_an_older_library_may_lack_attributes_and_functions() -> None:
    lacking = {(DESC, attribute): None for attribute in M if attribute.since}
    abi.check(Pretended(lacking, ("cublasLtEmulationDescCreate",)).find, 120002, "/here")


def test_a_number_that_meant_something_else_before() -> None:
    """12.9 and 13.0 have 4 bytes under the number that 13.1 gave to the emulation descriptor."""
    pretended = Pretended({(DESC, M.EMULATION_DESCRIPTOR): 4})
    abi.check(pretended.find, 130002, "/here")
    with pytest.raises(AbiError, match="EMULATION_DESCRIPTOR has 8 bytes here and 4"):
        abi.check(pretended.find, 130100, "/here")


def test_a_newer_library_may_have_more() -> None:
    abi.check(Pretended({}).find, 149900, "/here")


def test_what_the_check_makes_it_destroys(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder.install(monkeypatch)
    abi.check(recorder.find, recorder.version, recorder.path)
    assert recorder.created == recorder.destroyed
    assert recorder.created


@pytest.mark.usefixtures("unloaded")
def test_a_contradiction_is_told_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(M.TRANSA, "size", 8)
    for _ in range(2):
        with pytest.raises(AbiError, match="TRANSA has 8 bytes here and 4 in cuBLASLt"):
            cublaslt.get_version()


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


def test_a_function_that_the_library_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the call that needs it fails."""
    loaded = library.Library(cublaslt.library_path())
    monkeypatch.setattr(library, "loaded", lambda: loaded)
    monkeypatch.setattr(loaded, "find", lambda name: None)
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
