"""Digests of the code that suites run: a row of a result file is current as long as its suite's digest is the same.

A digest covers the package, its CUDA sources, and the modules of the benchmarks and examples that the suite imports,
directly or through others. Comments, docstrings and blank lines are left out. The machine that measures needs no git.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import re
import tokenize
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

_HERE: Final = Path(__file__).parent
SOURCES: Final = ("benchmarks", "examples", "lt_runtime", "cuda_src")
"""The folders whose files a digest may cover."""
_PACKAGE: Final = ("lt_runtime/", "cuda_src/")
_BESIDE: Final = ("lt_runtime/cli/", "lt_runtime/torch/")  # The rest of the package never imports these folders,
_USING_TORCH: Final = "torch"  # and only the suite of this name imports the second.
_STORING: Final = frozenset(f"benchmarks/{name}.py" for name in ("digests", "kept", "report"))
"""Modules that store and show times and measure none; digests leave them out."""
_SUFFIXES: Final = (".py", ".json", ".cu", ".cuh")
_CUDA_TOKEN: Final = re.compile(r"""//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')""", re.DOTALL)
"""Matches a comment; or a string or character literal, which is then the only group."""

Files = Mapping[str, bytes]
"""Type: contents of files by their paths in the repository, with slashes."""


def digest(suite: str, files: Files) -> str:
    """Hexadecimal digest of the code that a suite runs."""
    run, left_out = _imported(f"benchmarks/{suite}.py", files), _BESIDE[: 1 if suite == _USING_TORCH else 2]
    package = {name for name in files if name.startswith(_PACKAGE) and not name.startswith(left_out)}
    parts = [(name, _digest_of(PurePosixPath(name).suffix, files[name])) for name in sorted(run | package)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def working_files() -> dict[str, bytes]:
    """The files that this process runs: the imported package and its sources, the benchmarks and the examples."""
    import lt_runtime
    from lt_runtime.paths import kernel_sources

    package = Path(lt_runtime.__file__).parent
    folders = zip(SOURCES, (_HERE, _HERE.parent / "examples", package, kernel_sources()), strict=True)
    return {
        f"{name}/{file.relative_to(folder).as_posix()}": file.read_bytes()
        for name, folder in folders
        for file in folder.rglob("*")
        if file.suffix in _SUFFIXES
    }


def _imported(start: str, files: Files) -> set[str]:
    """The module `start`, the one that runs all suites, and every module in `files` that these import."""
    found, waiting = set[str](), [start, "benchmarks/suite.py"]
    while waiting:
        name = waiting.pop()
        if name in files and name not in found and name not in _STORING and not name.startswith(_PACKAGE):
            found.add(name)
            waiting += _named(files[name])
    return found


@functools.cache
def _named(code: bytes) -> tuple[str, ...]:
    """Paths of the modules that code may import: by `import`, by `peer`, or in the command line of a new process."""
    names = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("benchmarks."):
            names.append(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "peer":
            names += [f"benchmarks.peers.{each.value}" for each in node.args[:1] if isinstance(each, ast.Constant)]
    return tuple(f"{name.replace('.', '/')}{end}" for name in names for end in (".py", "/__init__.py"))


@functools.cache
def _digest_of(suffix: str, content: bytes) -> str:
    """Digest of one file without comments, docstrings and blank lines."""
    text = content.decode()
    if suffix == ".py":
        text = _bare_python(text)
    elif suffix != ".json":
        text = _CUDA_TOKEN.sub(lambda match: match[1] or " ", text)
    lines = [line.rstrip() for line in text.split("\n")]
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()


def _bare_python(code: str) -> str:
    """Python code without comments and docstrings. All versions of Python give the same text, unlike syntax trees."""
    lines = code.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(code)):
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_string and not lines[node.lineno - 1][: node.col_offset].strip():
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(lines)
