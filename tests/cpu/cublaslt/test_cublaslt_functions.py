"""The table of functions in the package's docstring, against the header, the prototypes and the library."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest

from lt_runtime import cublaslt
from lt_runtime.cublaslt import abi, library
from lt_runtime.errors import MissingLibraryError
from tests.support import cuda_headers

NEWEST = 131000
ROWS = dict(re.findall(r"^\| (cublasLt\w+) \| (.+) \|$", cublaslt.__doc__ or "", re.MULTILINE))
BOUND = {name: text for name, text in ROWS.items() if not text.startswith("not bound: ")}


def test_every_function_of_the_header_is_in_the_table() -> None:
    if cuda_headers.version() <= NEWEST:
        assert cuda_headers.functions().keys() - ROWS == set()
    if cuda_headers.version() >= NEWEST:
        assert ROWS.keys() - cuda_headers.functions() == set()


def test_what_the_table_calls_bound_has_a_prototype() -> None:
    assert set(BOUND) == set(abi.ARGUMENTS)
    assert set(abi.RESULTS) | set(abi.SINCE) <= set(BOUND)


@pytest.mark.parametrize("name", BOUND)
def test_what_the_table_names_is_there(name: str) -> None:
    for path in re.findall(r"`([A-Za-z][\w.]*)`", BOUND[name]):
        found: Any = cublaslt
        for part in path.split("."):
            found = getattr(found, part)
        assert callable(found)
        assert path.split(".")[0] in cublaslt.__all__


@pytest.mark.parametrize("name", BOUND)
def test_as_many_arguments_as_in_the_header(name: str) -> None:
    if name in cuda_headers.functions():
        assert len(abi.ARGUMENTS[name]) == cuda_headers.functions()[name]


@pytest.mark.parametrize("name", BOUND)
def test_the_library_has_it(name: str) -> None:
    if cublaslt.get_version() < abi.SINCE.get(name, 0):
        with pytest.raises(MissingLibraryError, match=f"^{name} is not in .*libcublasLt"):
            library.function(name)
    else:
        assert library.function(name).restype is abi.RESULTS.get(name, ctypes.c_int)  # type: ignore[attr-defined]


def test_a_function_that_no_library_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(abi.ARGUMENTS, "cublasLtNoSuchThing", ())  # type: ignore[arg-type]
    with pytest.raises(MissingLibraryError, match="this library does not export it"):
        library.function("cublasLtNoSuchThing")


def test_public_names_are_sorted_and_resolve() -> None:
    def as_ruff_sorts(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[0].isupper() else 2), name

    assert cublaslt.__all__ == sorted(set(cublaslt.__all__), key=as_ruff_sorts)
    assert all(hasattr(cublaslt, name) for name in cublaslt.__all__)
