"""Parses the installed headers of cuBLASLt: enums, macros, functions, version."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from cuda import pathfinder

# Headers in the order of parsing: the last one uses names of the others.
_FILES = {"cudart": ("library_types.h",), "cublas": ("cublas_api.h", "cublasLt.h")}
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DIRECTIVE = re.compile(r"^\s*#[^\n]*", re.MULTILINE)
_ENUM = re.compile(r"typedef\s+enum\s*(?P<tag>\w*)\s*\{(?P<body>[^{}]*)\}\s*(?P<name>\w+)\s*;")
_MEMBER = re.compile(r"\s*(?P<name>\w+)(?:\s+CUBLAS_\w+)?\s*(?:=\s*(?P<value>.+?)\s*)?$", re.DOTALL)
_MACRO = re.compile(r"#define\s+(?P<name>CUBLASLT_\w+)\s+\((?P<value>0x[0-9a-f]+)ull\s*<<\s*(?P<shift>\d+)\)")
_VERSION = re.compile(r"#define\s+CUBLAS_VER_(?:MAJOR|MINOR|PATCH)\s+(\d+)")
_FUNCTION = re.compile(r"\b(?P<name>cublasLt\w+)\s*\((?P<arguments>[^()]*)\)\s*[;{]")


@functools.cache
def text_of(file: str) -> str:
    """Returns a header's text without its comments."""
    library = next(library for library, files in _FILES.items() if file in files)
    directory = pathfinder.find_nvidia_header_directory(library)
    assert directory is not None, f"the headers of {library} are not installed"
    return _COMMENT.sub("", (Path(directory) / file).read_text(encoding="utf-8", errors="replace"))


def version() -> int:
    """Reads the version of cuBLAS's headers: major·10000 + minor·100 + patch."""
    major, minor, patch = map(int, _VERSION.findall(text_of("cublas_api.h")))
    return major * 10000 + minor * 100 + patch


def members_of(body: str, known: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Enumerators and their values; an enumerator without an initialiser follows its predecessor."""
    previous = -1
    for text in filter(str.strip, body.split(",")):
        member = _MEMBER.match(text)
        assert member is not None, text
        expression = member["value"]
        previous = previous + 1 if expression is None else eval(expression, {"__builtins__": {}}, known)
        known[member["name"]] = previous
        yield member["name"], previous


@functools.cache
def enums() -> Mapping[str, Mapping[str, int]]:
    """Maps each enum type of the headers to its enumerators."""
    found: dict[str, Mapping[str, int]] = {}
    known: dict[str, int] = {}
    for file in (file for files in _FILES.values() for file in files):
        for match in _ENUM.finditer(_DIRECTIVE.sub("", text_of(file))):
            found[match["name"]] = dict(members_of(match["body"], known))
    macros = _MACRO.finditer(text_of("cublasLt.h"))
    flags = {macro["name"]: int(macro["value"], 16) << int(macro["shift"]) for macro in macros}
    found["cublasLtNumericalImplFlags_t"] = flags
    return found


def enums_of(file: str) -> set[str]:
    """The names of the enum types that one header declares."""
    return {match["name"] for match in _ENUM.finditer(_DIRECTIVE.sub("", text_of(file)))}


@functools.cache
def functions() -> Mapping[str, int]:
    """The functions of cublasLt.h, each with the number of its arguments."""
    found = _FUNCTION.finditer(_DIRECTIVE.sub("", text_of("cublasLt.h")))
    return {match["name"]: _count(match["arguments"]) for match in found}


def _count(arguments: str) -> int:
    return 0 if arguments.strip() in ("", "void") else arguments.count(",") + 1
