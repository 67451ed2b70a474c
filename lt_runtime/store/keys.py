"""Problems as text and back: canonical, so that it can be a key, and readable.

The text is Python's notation with every field named, in the order of its declaration::

    MatmulProblem(dtype=DType.BFLOAT16, ..., a=Spec(layout=Layout(rows=8192, cols=768, ...), ...), c=None, ...)

Equal problems have equal keys, different problems different ones. A field that is added, removed, renamed or moved
changes every key of its class: then `SCHEMA` must be raised, and a test says so.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import types
import typing
from typing import Any, Final, TypeAlias

from lt_runtime.problem import BackwardProblem, ForwardProblem, MatmulProblem
from lt_runtime.store.records import field_types

SCHEMA: Final = 2
"""Version of keys, entries and files: what was written under another is not read."""

Problem: TypeAlias = MatmulProblem | ForwardProblem | BackwardProblem

_PROBLEMS: Final[dict[str, type[Problem]]] = {kind.__name__: kind for kind in typing.get_args(Problem)}
_SCALARS: Final = (bool, int, float, str)


def problem_key(problem: Problem) -> str:
    """The key of a problem."""
    return _text(problem, type(problem))


def parse_key(key: str) -> Problem:
    """The problem that a key stands for.

    Raises:
        ValueError: the text is not what `problem_key` gives for any problem.
    """
    try:
        node = ast.parse(key, mode="eval").body
        problem = typing.cast(Problem, _value(node, _PROBLEMS[_called(node)]))
    except (SyntaxError, KeyError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{_shortened(key)} is not the key of a problem ({error})") from None
    if problem_key(problem) != key:
        raise ValueError(f"{_shortened(key)} is not the key of a problem: it should be {problem_key(problem)!r}")
    return problem


@functools.cache
def _without_none(hint: Any) -> Any:
    """X of the type `X | None`; any other type as it is."""
    if not isinstance(hint, types.UnionType):
        return hint
    (kind,) = (each for each in hint.__args__ if each is not types.NoneType)
    return kind


def _text(value: Any, kind: Any) -> str:
    """A value as the type of its field has it: 1 and True in a field of floats are both 1.0, as they are equal."""
    if value is None:
        return "None"
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if kind in _SCALARS:
        return repr(kind(value) + 0.0 if kind is float else kind(value))  # + 0.0, for -0.0 equals 0.0
    return _text_of_record(value, kind)


@functools.lru_cache(maxsize=1024)  # most problems share layouts with others
def _text_of_record(value: Any, kind: Any) -> str:
    inside = ", ".join([f"{name}={_text(getattr(value, name), of)}" for name, of in _kinds(kind)])
    return f"{kind.__name__}({inside})"


@functools.cache
def _kinds(kind: Any) -> list[tuple[str, Any]]:
    """Names and types of a class's fields, the types without None."""
    return [(name, _without_none(hint)) for name, hint in field_types(kind).items()]


def _value(node: ast.expr, hint: Any) -> Any:
    kind = _without_none(hint)
    if kind is not hint and isinstance(node, ast.Constant) and node.value is None:
        return None
    if dataclasses.is_dataclass(kind):
        return _instance(node, typing.cast(type, kind))
    if issubclass(kind, enum.Enum):
        return _member(node, kind)
    value = ast.literal_eval(node)
    if type(value) is not kind:
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return value


def _instance(node: ast.expr, kind: type) -> Any:
    fields = field_types(kind)
    if _called(node) != kind.__name__:
        raise ValueError(f"no {kind.__name__}")
    given = {str(each.arg): each.value for each in typing.cast(ast.Call, node).keywords}
    if given.keys() != fields.keys():
        raise ValueError(f"{kind.__name__} has the fields {', '.join(fields)}")
    return kind(**{name: _value(given[name], hint) for name, hint in fields.items()})


def _member(node: ast.expr, kind: type[enum.Enum]) -> enum.Enum:
    match node:
        case ast.Attribute(value=ast.Name(id=name), attr=member) if name == kind.__name__:
            return kind[member]
    raise ValueError(f"no {kind.__name__}")


def _called(node: ast.expr) -> str:
    """The name before the parentheses; '' if there is none."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name
    return ""


def _shortened(key: str) -> str:
    return repr(key if len(key) <= 80 else f"{key[:77]}...")
