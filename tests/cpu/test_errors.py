"""The classes of exceptions agree with the tree in the docstring of `lt_runtime.errors`."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from lt_runtime import errors

CLASSES = {name: value for name, value in vars(errors).items() if inspect.isclass(value)}
_LINE = re.compile(r"^(?P<indent>[ │├└─]*)(?P<name>[A-Z]\w+)(?: \((?P<builtin>\w+)\))?(?:\s|$)")


def drawn() -> dict[str, tuple[str, ...]]:
    """The bases of each class in the docstring's tree: its parent and, if one is named, a builtin exception."""
    parents: list[tuple[int, str]] = []
    found: dict[str, tuple[str, ...]] = {}
    tree = (errors.__doc__ or "").split("::")[1].split("Everything")[0]
    for line in filter(str.strip, tree.splitlines()):
        match = _LINE.match(line)
        assert match is not None, line
        depth = len(match["indent"])
        while parents and parents[-1][0] >= depth:
            parents.pop()
        above = (parents[-1][1],) if parents else ("Exception",)
        found[match["name"]] = (*above, *filter(None, [match["builtin"]]))
        parents.append((depth, match["name"]))
    return found


def test_the_tree_is_as_drawn() -> None:
    assert drawn() == {name: tuple(base.__name__ for base in cls.__bases__) for name, cls in CLASSES.items()}


@pytest.mark.parametrize("name", CLASSES)
def test_one_clause_catches_everything(name: str) -> None:
    assert issubclass(CLASSES[name], errors.LtError)


def test_what_a_failure_says() -> None:
    driver = errors.DriverError("cuMemAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
    assert str(driver) == "cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"
    assert (driver.call, driver.status, driver.name) == ("cuMemAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY")
    compile_error = errors.CompileError("dropout.cu", "line 3: no")
    assert str(compile_error) == "NVRTC could not compile dropout.cu:\nline 3: no"
    library_error = errors.CublasLtError("cublasLtMatmul", 15, "CUBLAS_STATUS_NOT_SUPPORTED", "it cannot")
    assert str(library_error) == "cublasLtMatmul returned CUBLAS_STATUS_NOT_SUPPORTED (15): it cannot"


def test_plain_errors_cross_process_boundaries() -> None:
    again = pickle.loads(pickle.dumps(errors.ShapeError("x has shape ()")))
    assert isinstance(again, errors.ShapeError)
    assert str(again) == "x has shape ()"
