"""The bindings' enums and functions against the installed C headers and the library."""

from __future__ import annotations

import ctypes
import enum
import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest

from lt_runtime import cublaslt
from lt_runtime.cublaslt import library
from lt_runtime.cublaslt.enums import Status
from lt_runtime.errors import MissingLibraryError
from tests.support import cuda_headers

WRITTEN_AGAINST = 131000
"""Version of the header that the bindings follow. An older header may lack names that the bindings have."""

Enum = type[enum.IntEnum | enum.IntFlag]
FUNCTIONS = dict(re.findall(r"^\| (cublasLt\w+) \| (.+) \|$", cublaslt.__doc__ or "", re.MULTILINE))
BOUND = {name: text for name, text in FUNCTIONS.items() if not text.startswith("not bound: ")}


def our_enums() -> list[Enum]:
    """The enums of all modules of the bindings."""
    names = (module.name for module in pkgutil.iter_modules(cublaslt.__path__, f"{cublaslt.__name__}."))
    values = (value for module in map(importlib.import_module, names) for value in vars(module).values())
    classes = {value for value in values if isinstance(value, type) and issubclass(value, enum.IntEnum | enum.IntFlag)}
    classes.add(cublaslt.MatmulTile)  # MatmulTile is created on first use.
    return sorted(filter(len, classes), key=lambda cls: cls.__name__)  # Enums without members are base classes.


def c_names(name: str, prefix: str) -> Iterator[str]:
    """The names that a member may have in C: some members keep a word of the prefix, to be valid or unique names."""
    yield prefix + name
    for word in filter(None, prefix.split("_")):
        if name.startswith(f"{word}_"):
            yield prefix + name.removeprefix(f"{word}_")


def c_enum(ours: Enum) -> tuple[str, list[str]]:
    """Parses an enum's docstring: returns the name of the C enum, and the prefixes of its members."""
    match = re.match(r"`(\w+)`, (.*?)[:.]( |\n|$)", ours.__doc__ or "", re.DOTALL)
    assert match is not None, f"the docstring of {ours.__name__} does not name the C enum and the prefix"
    return match[1], re.findall(r"\bCU\w*_(?=\W|$)", match[2]) or [""]


def test_the_parser_of_the_headers() -> None:
    body = "A, B = 4, C, D = (A | 8), E = D | B, F = -1, G, H = 0x10,"
    values = dict(cuda_headers.members_of(body, {}))
    assert values == {"A": 0, "B": 4, "C": 5, "D": 8, "E": 12, "F": -1, "G": 0, "H": 16}
    assert cuda_headers.enums()["cublasLtEpilogue_t"]["CUBLASLT_EPILOGUE_GELU_AUX_BIAS"] == 164


@pytest.mark.parametrize("ours", our_enums(), ids=lambda cls: cls.__name__)
def test_values_are_the_headers(ours: Enum) -> None:
    theirs_name, prefixes = c_enum(ours)
    theirs = cuda_headers.enums().get(theirs_name, {})
    differing: dict[str, tuple[int, set[int]]] = {}
    matched: set[str] = set()
    for name, value in ours.__members__.items():
        names = {c_name for prefix in prefixes for c_name in c_names(name, prefix)} & theirs.keys()
        found = {theirs[c_name] for c_name in names}
        if found != {int(value)} and (found or cuda_headers.version() >= WRITTEN_AGAINST):
            differing[name] = (int(value), found)
        matched |= names
    assert differing == {}
    if cuda_headers.version() <= WRITTEN_AGAINST:
        assert {name for name in theirs.keys() - matched if not re.search(r"_END$|_RESERVED(_\d+)?$", name)} == set()


def test_every_enum_and_function_of_the_header_is_bound_or_listed() -> None:
    if cuda_headers.version() <= WRITTEN_AGAINST:
        assert cuda_headers.enums_of("cublasLt.h") - {c_enum(ours)[0] for ours in our_enums()} == set()
        assert cuda_headers.functions().keys() - FUNCTIONS == set()
    if cuda_headers.version() >= WRITTEN_AGAINST:
        assert FUNCTIONS.keys() - cuda_headers.functions() == set()


def test_the_library_knows_the_statuses_by_the_same_names() -> None:
    get_name = library.function("cublasLtGetStatusName")
    assert {get_name(status).decode() for status in Status} == {f"CUBLAS_STATUS_{status.name}" for status in Status}


def test_every_bound_function_has_a_prototype() -> None:
    assert set(BOUND) == set(library.ARGUMENTS)
    assert set(library.RESULTS) | set(library.SINCE) <= set(BOUND)
    headers = cuda_headers.functions()
    counts = {name: len(library.ARGUMENTS[name]) for name in BOUND if name in headers}
    assert counts == {name: headers[name] for name in counts}


@pytest.mark.parametrize("name", BOUND)
def test_a_bound_function_is_public_and_in_the_library(name: str) -> None:
    for path in re.findall(r"`([A-Za-z][\w.]*)`", BOUND[name]):
        found: Any = cublaslt
        for part in path.split("."):
            found = getattr(found, part)
        assert callable(found)
        assert path.split(".")[0] in cublaslt.__all__
    if cublaslt.get_version() < library.SINCE.get(name, 0):
        with pytest.raises(MissingLibraryError, match=f"^{name} is not in .*libcublasLt"):
            library.function(name)
    else:
        assert library.function(name).restype is library.RESULTS.get(name, ctypes.c_int)  # type: ignore[attr-defined]


def test_a_function_that_no_library_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library.ARGUMENTS, "cublasLtNoSuchThing", ())  # type: ignore[arg-type]
    with pytest.raises(MissingLibraryError, match="this library does not export it"):
        library.function("cublasLtNoSuchThing")


def test_public_names_resolve() -> None:
    assert len(cublaslt.__all__) == len(set(cublaslt.__all__))
    assert all(hasattr(cublaslt, name) for name in cublaslt.__all__)
