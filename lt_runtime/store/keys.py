"""Problems as text and back: the text is canonical, so that it can serve as a key, and people can read it.

It is Python's notation with every field named, in the order of the declaration::

    MatmulProblem(dtype=DType.BFLOAT16, ..., a=Spec(layout=Layout(rows=8192, cols=768, ...), ...), c=None, ...)

Equal problems have equal keys, different problems different ones. Whoever adds, removes, renames or moves a field
changes every key of the class and must raise `SCHEMA`; a test says so.
"""

from __future__ import annotations

import ast
import enum
import functools
import types
import typing
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

from lt_runtime.problem import BackwardProblem, ForwardProblem, MatmulProblem, MLPProblem
from lt_runtime.store.records import field_types

SCHEMA: Final = 5
"""Version of keys, entries and files. Nothing written under another version is read."""

Problem: TypeAlias = MatmulProblem | ForwardProblem | BackwardProblem
Remembered: TypeAlias = Problem | MLPProblem
"""What the plan cache has entries for: problems, and whole MLPs, which are made of problems."""

_LONGEST: Final = 10_000
_SCALARS: Final = (bool, int, float, str)
_FAILURES: Final = (
    *(ArithmeticError, AttributeError, KeyError, MemoryError, RecursionError),
    *(SyntaxError, TypeError, ValueError),
)
"""What a text that is no key may lead to."""


def problem_key(problem: Remembered) -> str:
    """The key of a problem."""
    return _text_of_record(problem, typing.cast(Any, type(problem)))


def parse_key(key: str) -> Remembered:
    """The problem that has a key.

    Raises:
        ValueError: no problem has it.
    """
    try:
        if len(key) > _LONGEST:
            raise ValueError(f"it has more than {_LONGEST} characters")
        problem = _value(ast.parse(key, mode="eval").body)
        if not isinstance(problem, Remembered):
            raise TypeError("it names something else")
        if problem_key(problem) != key:  # this also finds values that are not of their field's type
            raise ValueError(f"it should be {problem_key(problem)}")
    except _FAILURES as error:
        shown = key if len(key) <= 80 else f"{key[:77]}..."
        raise ValueError(f"{shown!r} is not the key of a problem ({error})") from None
    return problem


@functools.lru_cache(maxsize=1024)  # most problems share layouts with others
def _text_of_record(value: Any, kind: Any) -> str:
    inside = ", ".join([f"{name}={_text(getattr(value, name), *of)}" for name, of in _kinds(kind).items()])
    return f"{kind.__name__}({inside})"


def _text(value: Any, kind: Any, is_optional: bool) -> str:
    """A value written as its field's type: in a field of floats 1 and True are both 1.0, because they are equal."""
    if value is None and is_optional:
        return "None"
    if typing.get_origin(kind) is tuple:
        return f"[{', '.join([_text(each, typing.get_args(kind)[0], False) for each in value])}]"
    if kind in _SCALARS:
        return repr(kind(value) + 0.0 if kind is float else kind(value))  # + 0.0, because -0.0 equals 0.0
    if issubclass(kind, enum.Enum):
        return f"{kind.__name__}.{kind(value).name}"
    return _text_of_record(value, kind)


@functools.cache
def _kinds(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The types of a class's fields by name, each without its `| None`, and whether it had one."""
    return {name: (_without_none(hint), hint is not _without_none(hint)) for name, hint in field_types(kind).items()}


def _without_none(hint: Any) -> Any:
    if not isinstance(hint, types.UnionType):
        return hint
    (kind,) = (each for each in hint.__args__ if each is not types.NoneType)
    return kind


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Call(func=ast.Name(id=name), args=[], keywords=fields):
            return _classes()[name](**{str(each.arg): _value(each.value) for each in fields})
        case ast.Attribute(value=ast.Name(id=name), attr=member):
            return _classes()[name][member]
        case ast.List(elts=items):
            return tuple([_value(each) for each in items])
    return ast.literal_eval(node)


@functools.cache
def _classes() -> dict[str, Any]:
    """Every dataclass and enumeration that keys may name."""
    return {kind.__name__: kind for problem in typing.get_args(Remembered) for kind in _classes_in(problem)}


def _classes_in(kind: Any) -> Iterator[Any]:
    if typing.get_origin(kind) is tuple:
        yield from _classes_in(typing.get_args(kind)[0])
    elif kind not in _SCALARS:
        yield kind
        for inner, _ in () if issubclass(kind, enum.Enum) else _kinds(kind).values():
            yield from _classes_in(inner)
