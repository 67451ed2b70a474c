"""Which folders ("rooms") of the package may import which others, and which modules `import lt_runtime` may load.

Every import is read from the source, also imports inside functions and under TYPE_CHECKING.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import lt_runtime

PACKAGE = Path(lt_runtime.__file__).parent

FLOORS = (
    {"environment", "errors", "paths"},
    {"arguments", "files", "tables"},
    {"epilogue", "grad_scaler", "layout", "problem", "ranges", "rules", "schedules"},
    {"fp8"},
    {"arrays", "cublaslt", "gpu", "reference"},
    {"kernels", "store"},
    {"products"},
    {"plans"},
    {"tuner"},
    {"ops"},
    {"nn"},
    {"distributed"},
    {"binding", "profiling", "training"},
    {"saving"},
    {"fitting"},
    {"cli"},
    {"__main__", "torch"},
)
NEIGHBOURS = {("problem", "epilogue"), ("problem", "layout"), ("arrays", "gpu")}
"""The only imports between rooms (folders of the package) of the same floor."""

LIKE_A_USER = {"cli", "__main__"}
"""Rooms that may import the package's public names, as a user does, because they are built on them."""

SHARED_BY_OPERATIONS = {"call", "first_use", "fp8", "optimizers"}
"""Modules and folders of `ops` that operations share; other helpers have names that begin with an underscore."""

KNOW_CTYPES = {"cublaslt", "gpu", "kernels"}
KNOWS_CTYPES_BESIDES = ("lt_runtime", "profiling", "cupti", "library")
"""The module that binds CUPTI, which only profiling needs."""


class Import(NamedTuple):
    """One import statement's importing module and imported name, as tuples such as ('lt_runtime', 'ops', 'linear')."""

    importer: tuple[str, ...]
    line: int
    imported: tuple[str, ...]

    @property
    def is_own(self) -> bool:
        return self.imported[0] == "lt_runtime"

    def __str__(self) -> str:
        return f"{'.'.join(self.importer)}, line {self.line}, imports {'.'.join(self.imported)}"


def name_of(file: Path) -> tuple[str, ...]:
    parts = ("lt_runtime", *file.relative_to(PACKAGE).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(importer: tuple[str, ...], source: str) -> Iterator[Import]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(importer, node.lineno, tuple(alias.name.split("."))) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{importer}, line {node.lineno}: a relative import"
            module = (node.module or "").split(".")
            yield from (Import(importer, node.lineno, (*module, alias.name)) for alias in node.names)


def all_imports() -> list[Import]:
    return [found for file in sorted(PACKAGE.rglob("*.py")) for found in imports_of(name_of(file), file.read_text())]


def room(name: tuple[str, ...]) -> str:
    """The room (folder of the package) of a module or public name; '' for the package itself."""
    if name[1:2] == ("raw",):
        return "ops"
    return name[1] if len(name) > 1 and name[1] in set().union(*FLOORS) else ""


def floor(name: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if name in rooms)


def goes_down(found: Import) -> bool:
    here, there = room(found.importer), room(found.imported)
    if not here:  # the package's __init__ imports the public names
        return True
    if not there:
        return here in LIKE_A_USER
    return here == there or floor(there) < floor(here) or (here, there) in NEIGHBOURS


def joins_operations(found: Import) -> bool:
    """Whether an operation's module imports another operation's, directly or through `ops`; helpers do not count."""
    if room(found.importer) != "ops" or room(found.imported) != "ops" or found.importer == ("lt_runtime", "ops"):
        return False
    is_helper = found.imported[2:] and (found.imported[2].startswith("_") or found.imported[2] in SHARED_BY_OPERATIONS)
    return not is_helper and found.imported[: len(found.importer)] != found.importer


def test_every_module_has_a_floor():
    modules = {name_of(file)[:2] for file in PACKAGE.rglob("*.py")} - {("lt_runtime",)}
    assert {name for name in modules if not room(name)} == set()


def test_imports_go_down():
    assert [str(found) for found in all_imports() if found.is_own and not goes_down(found)] == []


def test_operations_do_not_import_each_other():
    assert [str(found) for found in all_imports() if found.is_own and joins_operations(found)] == []


def test_only_the_bindings_know_ctypes():
    imports = (found for found in all_imports() if found.importer != KNOWS_CTYPES_BESIDES)
    users = [found for found in imports if found.imported[0] == "ctypes"]
    assert [str(found) for found in users if room(found.importer) not in KNOW_CTYPES] == []


@pytest.mark.parametrize(
    ("importer", "source", "allowed"),
    [
        ("lt_runtime", "from lt_runtime.ops.linear import linear", True),
        ("lt_runtime.layout", "from lt_runtime.problem import Problem", False),
        ("lt_runtime.arrays", "from lt_runtime.gpu import streams", True),
        ("lt_runtime.gpu.streams", "from lt_runtime import arrays", False),
        ("lt_runtime.reference.linear", "def f():\n    from lt_runtime.gpu import streams", False),
        ("lt_runtime.plans.layers", "if TYPE_CHECKING:\n    from lt_runtime.ops import linear", False),
        ("lt_runtime.training.step", "import lt_runtime.profiling.report", False),
        ("lt_runtime.training.step", "from lt_runtime import linear_fwd", False),
        ("lt_runtime.cli.demo", "import lt_runtime as lt", True),
    ],
)
def test_the_rule_of_floors(importer: str, source: str, allowed: bool):
    (found,) = imports_of(tuple(importer.split(".")), source)
    assert goes_down(found) == allowed


@pytest.mark.parametrize(
    ("importer", "source", "joined"),
    [
        ("lt_runtime.ops.linear", "from lt_runtime.ops.dropout import dropout", True),
        ("lt_runtime.ops.linear", "from lt_runtime.ops import dropout", True),
        ("lt_runtime.raw", "from lt_runtime.ops.linear import linear_fwd", True),
        ("lt_runtime.ops.linear", "from lt_runtime.ops._checks import check", False),
        ("lt_runtime.ops", "from lt_runtime.ops.linear import linear_fwd", False),
        ("lt_runtime.ops.linear", "from lt_runtime.ops.fp8.linear import forward", False),
        ("lt_runtime.ops.fp8.linear", "from lt_runtime.ops.linear import linear_fwd", True),
    ],
)
def test_the_rule_of_operations(importer: str, source: str, joined: bool):
    (found,) = imports_of(tuple(importer.split(".")), source)
    assert joins_operations(found) == joined


def test_importing_loads_no_gpu_library_and_writes_nothing(tmp_path: Path):
    code = "import sys, lt_runtime; print(*{name.split('.')[0] for name in sys.modules})"
    places = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "LT_RUNTIME_CACHE_DIR"} | places
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert {"cuda", "cupy", "torch"}.isdisjoint(done.stdout.split())
    assert list(tmp_path.iterdir()) == []


def test_public_names_are_listed_once_and_resolve():
    assert len(lt_runtime.__all__) == len(set(lt_runtime.__all__))
    for name in lt_runtime.__all__:
        assert getattr(lt_runtime, name) is not None
