"""The bindings' enum values against the installed C headers."""

from __future__ import annotations

import enum
import importlib
import pkgutil
import re
from collections.abc import Iterator

import pytest

from lt_runtime import cublaslt
from lt_runtime.cublaslt import library
from lt_runtime.cublaslt.enums import Status
from tests.support import cuda_headers

WRITTEN_AGAINST = 131000
"""Version of the header that the bindings follow; an older one may lack what they have."""

Enum = type[enum.IntEnum | enum.IntFlag]


def our_enums() -> list[Enum]:
    """Those of all modules of the bindings."""
    names = (module.name for module in pkgutil.iter_modules(cublaslt.__path__, f"{cublaslt.__name__}."))
    values = (value for module in map(importlib.import_module, names) for value in vars(module).values())
    classes = {value for value in values if isinstance(value, type) and issubclass(value, enum.IntEnum | enum.IntFlag)}
    return sorted(filter(len, classes), key=lambda cls: cls.__name__)  # the base classes have no members


def c_names(name: str, prefix: str) -> Iterator[str]:
    """What a member may be called in C: some names keep a word of the prefix, to be names at all, or to be unique."""
    yield prefix + name
    for word in filter(None, prefix.split("_")):
        if name.startswith(f"{word}_"):
            yield prefix + name.removeprefix(f"{word}_")


def test_the_parser() -> None:
    body = "A, B = 4, C, D = (A | 8), E = D | B, F = -1, G, H = 0x10,"
    values = dict(cuda_headers.members_of(body, {}))
    assert values == {"A": 0, "B": 4, "C": 5, "D": 8, "E": 12, "F": -1, "G": 0, "H": 16}
    assert list(c_names("COMPUTE_32F", "CUBLAS_COMPUTE_")) == ["CUBLAS_COMPUTE_COMPUTE_32F", "CUBLAS_COMPUTE_32F"]
    assert "CUBLASLT_GROUPED_LAYOUT_ROWS" in c_names("GROUPED_ROWS", "CUBLASLT_GROUPED_LAYOUT_")
    assert list(c_names("RELU", "CUBLASLT_EPILOGUE_")) == ["CUBLASLT_EPILOGUE_RELU"]


def test_there_is_something_to_compare() -> None:
    assert {cls.__name__ for cls in our_enums()} >= {"Status", "DataType", "Epilogue", "MatmulDescAttribute"}
    assert cuda_headers.enums()["cublasLtEpilogue_t"]["CUBLASLT_EPILOGUE_GELU_AUX_BIAS"] == 164


def c_enum(ours: Enum) -> tuple[str, list[str]]:
    """The C enum that the docstring names, and the prefixes of its enumerators."""
    match = re.match(r"`(\w+)`, (.*?)[:.]( |\n|$)", ours.__doc__ or "", re.DOTALL)
    assert match is not None, f"the docstring of {ours.__name__} does not name the C enum and the prefix"
    return match[1], re.findall(r"\bCU\w*_(?=\W|$)", match[2]) or [""]


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


def test_every_enum_of_the_header_is_bound() -> None:
    if cuda_headers.version() <= WRITTEN_AGAINST:
        assert cuda_headers.enums_of("cublasLt.h") - {c_enum(ours)[0] for ours in our_enums()} == set()


def test_the_library_knows_the_statuses_by_the_same_names() -> None:
    get_name = library.function("cublasLtGetStatusName")
    assert {get_name(status).decode() for status in Status} == {f"CUBLAS_STATUS_{status.name}" for status in Status}
