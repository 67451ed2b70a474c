"""Digests of the code that suites run: a row of a result file is current as long as its suite's digest is the same.

A digest covers the modules of the benchmarks, the examples and the package that the suite imports, directly or through
others; the CUDA sources that these modules name, with their headers; and the package's tables beside these modules.
Comments, docstrings, blank lines and the figures over all rows of a suite are left out. The machine that measures needs
no git.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

_HERE: Final = Path(__file__).parent
SOURCES: Final = ("benchmarks", "examples", "lt_runtime", "cuda_src")
"""The folders whose files a digest may cover."""
_PACKAGE: Final = "lt_runtime"
_STORING: Final = frozenset(f"benchmarks/{name}.py" for name in ("digests", "kept", "report", "runner", "scaling_cost"))
"""Modules that store, show or extrapolate times and measure none; digests leave them out."""
_FIGURES: Final = "findings"
"""The name of suites' functions that compute figures over rows after they were measured."""
_SUFFIXES: Final = (".py", ".json", ".cu", ".cuh")
_INCLUDE: Final = re.compile(rb'#\s*include\s*"([^"]+)"')
_CUDA_TOKEN: Final = re.compile(r"""//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')""", re.DOTALL)
"""Matches a comment; or a string or character literal, which is then the only group."""

Files = Mapping[str, bytes]
"""Type: contents of files by their paths in the repository, with slashes."""


def digest(suite: str, files: Files) -> str:
    """Hexadecimal digest of the code that a suite runs."""
    parts = [(name, code_digest(PurePosixPath(name).suffix, files[name])) for name in sorted(covered(suite, files))]
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


def covered(suite: str, files: Files) -> set[str]:
    """The files of a suite's digest: all that its module and `benchmarks.suite` need, directly or through others."""
    found, waiting = set[str](), [f"benchmarks/{suite}.py", "benchmarks/suite.py"]
    homes = _homes(files.get(f"{_PACKAGE}/__init__.py", b""))
    while waiting:
        name = waiting.pop()
        if name in files and name not in found and name not in _STORING:
            found.add(name)
            waiting += _needed(name, files[name], homes)
    folders = {PurePosixPath(name).parent for name in found if name.startswith(f"{_PACKAGE}/")}
    tables = (name for name in files if name.endswith(".json"))
    return found | {name for name in tables if PurePosixPath(name).parent in folders}


def _needed(name: str, code: bytes, homes: tuple[tuple[str, str], ...]) -> list[str]:
    """Paths of the files that a file may need, most of which do not exist."""
    if not name.endswith(".py"):
        return [f"cuda_src/{each.decode()}" for each in _INCLUDE.findall(code)]
    modules, sources = _named(code, homes)
    parents = {".".join(each.split(".")[:end]) for each in modules for end in range(1, each.count(".") + 2)}
    paths = (each.replace(".", "/") for each in parents)
    return [*(f"{path}{end}" for path in paths for end in (".py", "/__init__.py")), *sources]


@functools.cache
def _homes(code: bytes) -> tuple[tuple[str, str], ...]:
    """The package's public names, each with the module that its `_EXPORTS` says."""
    for node in ast.parse(code).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "_EXPORTS":
            exports = ast.literal_eval(node.value).items()
            return tuple((name, f"{_PACKAGE}.{module}") for module, names in exports for name in names.split())
    return ()


@functools.cache
def _named(code: bytes, homes: tuple[tuple[str, str], ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modules that code may import, and CUDA sources that it names.

    Imports for type checkers do not count. A module may be imported by `import`; by `peer`; by a public name of the
    package, as an attribute or, where `getattr` is used on the package, in a string; or in a new process. A module that
    reads the package's `__all__` may import all its public names.
    """
    tree = ast.parse(code)
    nodes, public = [*_running(tree)], dict(homes)
    looks_up = any(isinstance(node, ast.Call) and ast.unparse(node).startswith("getattr(lt,") for node in nodes)
    modules, sources = list[str](), list[str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            of_package = public if node.module == _PACKAGE else {}
            modules += [node.module, *(of_package.get(each.name, f"{node.module}.{each.name}") for each in node.names)]
        elif isinstance(node, ast.Import):
            modules += [each.name for each in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lt":
            modules += public.values() if node.attr == "__all__" else [public.get(node.attr, f"{_PACKAGE}.{node.attr}")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            modules += [node.value] if node.value.startswith("benchmarks.") else []
            modules += [public[node.value]] if looks_up and node.value in public else []
            sources += [f"cuda_src/{node.value}"] if node.value.endswith(".cu") else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "peer":
            modules += [f"benchmarks.peers.{each.value}" for each in node.args[:1] if isinstance(each, ast.Constant)]
    return tuple(modules), tuple(sources)


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a syntax tree but those under `if TYPE_CHECKING:`."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            waiting += ast.iter_child_nodes(node)


@functools.cache
def code_digest(suffix: str, content: bytes) -> str:
    """Digest of one file without comments, docstrings and blank lines."""
    text = _bare_python(content.decode()) if suffix == ".py" else content.decode()
    if suffix in (".cu", ".cuh"):
        text = _CUDA_TOKEN.sub(lambda match: match[1] or " ", text)
    lines = [line.rstrip() for line in text.split("\n")]
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()


def _bare_python(code: str) -> str:
    """Python code without comments, docstrings, and the function that computes figures over rows of results.

    Lines are removed from the source, because a dump of the syntax tree differs between versions of Python.
    """
    lines = code.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(code)):
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_left_out = is_string or (isinstance(node, ast.FunctionDef) and node.name == _FIGURES)
        if is_left_out and not lines[node.lineno - 1][: node.col_offset].strip():
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(lines)
