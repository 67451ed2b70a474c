"""Converts frozen dataclasses to JSON and back, according to the types of their fields, and problems to keys.

A key is a readable text that identifies a problem. It is JSON with the problem's class and all its fields by name, in
the order of their declaration::

    {"MatmulProblem": {"dtype": "bfloat16", ..., "a": {"layout": {"rows": 8192, "cols": 768, ...}, ...}, ...}}

Equal problems have equal keys, and different problems different keys. Adding, removing, renaming or moving a field
changes all keys of a class, so that `SCHEMA` must be raised, which a test checks. The exception is an added field with
the metadata `LATER`, which keys leave out as long as it has its default.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from lt_runtime.files import parse_json
from lt_runtime.fp8 import Fp8ChainProblem
from lt_runtime.layout import Layout, Order
from lt_runtime.problem import ALIGNMENT, LATER, BackwardProblem, ForwardProblem, MatmulProblem, MLPProblem

SCHEMA: Final = 6
"""Version of keys, entries and files. Files of another version are not read."""

Problem: TypeAlias = MatmulProblem | ForwardProblem | BackwardProblem
Remembered: TypeAlias = Problem | MLPProblem | Fp8ChainProblem
"""A problem that can have an entry in the plan cache: a layer's pass, a matrix product, a whole MLP, or the choice of
the precision of layers."""

Json: TypeAlias = dict[str, Any]
_Record = TypeVar("_Record")
_SCALARS: Final = (bool, int, float, str)
_LONGEST: Final = 10_000
_LIMITS: Final[Mapping[type, tuple[float, float]]] = {int: (0, 2**48), float: (-1e30, 1e30)}
"""Lowest and highest accepted value of numeric fields, by type. No GPU's memory holds 2**48 elements."""
_ALIGNMENTS: Final = ("alignment", "bias_alignment", "bias", "db")
"""Names of fields that hold alignments of addresses (if they hold an int)."""
_CLASSES: Final = {kind.__name__: kind for kind in typing.get_args(Remembered)}
_FAILURES: Final = (ArithmeticError, AttributeError, KeyError, MemoryError, RecursionError, TypeError, ValueError)
"""Exceptions that reading a key may raise if the text is not a key."""


@functools.lru_cache(maxsize=1024)
def problem_key(problem: Remembered) -> str:
    """The key of a problem."""
    return json.dumps({type(problem).__name__: to_json(problem)})


def parse_key(key: str) -> Remembered:
    """The problem that a key identifies.

    Raises:
        ValueError: the text is not the key of any problem.
    """
    try:
        if len(key) > _LONGEST:
            raise ValueError(f"it has more than {_LONGEST} characters")
        ((name, fields),) = parse_json(key.encode()).items()
        problem: Remembered = from_json(_CLASSES[name], fields)
        if isinstance(problem, MatmulProblem):
            specs = (problem.a, problem.b, problem.c, problem.d, problem.aux)
            _require_small(max(problem.batch * each.batch_stride for each in specs if each is not None))
        if isinstance(problem, MLPProblem | Fp8ChainProblem):
            _require_small(max(problem.dims) * max(problem.rows, *problem.dims))
        if problem_key(problem) != key:  # the text is another spelling of the key, such as 1.0 in place of 1
            raise ValueError(f"it should be {problem_key(problem)}")
    except _FAILURES as error:
        raise ValueError(f"{key[:80]!r} is not the key of a problem ({error})") from None
    return problem


@functools.cache
def field_types(kind: Any) -> dict[str, Any]:
    """Types of a dataclass's fields by name, in the order of their declaration."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@functools.cache
def _later_defaults(kind: Any) -> dict[str, Any]:
    """Defaults of those fields of a dataclass that have the metadata `LATER`, by name."""
    return {field.name: field.default for field in dataclasses.fields(kind) if field.metadata == LATER}


def to_json(record: Any) -> Json:
    """The fields of a dataclass by name, as JSON values, without `LATER` fields that have their default.

    Bytes become hexadecimal text, enum members their values, tuples lists, and nested dataclasses objects. Numbers are
    converted to their field's type and -0.0 to 0.0, so that problems which compare equal (1 == 1.0 == True) have equal
    texts.
    """
    kind = typing.cast(Any, type(record))
    hints, absent = field_types(kind).items(), _later_defaults(kind).items()
    values = [(name, getattr(record, name), hint) for name, hint in hints]
    return {name: _plain(value, _without_none(hint)) for name, value, hint in values if (name, value) not in absent}


def _plain(value: Any, hint: Any) -> Any:
    if value is None:
        return None
    if hint in _SCALARS:
        return hint(value) + 0.0 if hint is float else hint(value)  # + 0.0 turns -0.0 into 0.0
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(each, typing.get_args(hint)[0]) for each in value]
    if isinstance(value, Mapping):
        return dict(value)
    return to_json(value) if dataclasses.is_dataclass(value) else value


def _without_none(hint: Any) -> Any:
    """The type `T` of a hint `T` or `T | None`."""
    if not isinstance(hint, types.UnionType):
        return hint
    kinds = [each for each in hint.__args__ if each is not types.NoneType]
    return kinds[0] if len(kinds) == 1 else hint


def from_json(kind: type[_Record], value: object) -> _Record:
    """Makes an instance of `kind` from the JSON that `to_json` made of it.

    Raises:
        ValueError: a field is missing or unknown, or its value has another type, is beyond `_LIMITS`, or is not a valid
            alignment.
    """
    hints, later = field_types(typing.cast(Any, kind)), _later_defaults(typing.cast(Any, kind)).keys()
    if not isinstance(value, dict) or value.keys() - later != hints.keys() - later:
        raise ValueError(f"{kind.__name__} has the fields {', '.join(hints)}")
    made = kind(**{name: _value(name, hint, value[name]) for name, hint in hints.items() if name in value})
    if isinstance(made, Layout):
        _require_small(made.extent)
        if made.leading_dimension < max(1, made.cols if made.order is Order.ROW else made.rows):
            raise ValueError(f"leading_dimension is {made.leading_dimension}, and the matrix has {made.shape}")
    return made


def _require_small(elements: int) -> None:
    if elements > _LIMITS[int][1]:
        raise ValueError(f"an operand has {elements:.1e} elements, more than any memory holds")


def _value(name: str, hint: Any, value: Any) -> Any:
    if value is None and hint is not _without_none(hint):
        return None
    hint = _without_none(hint)
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), value)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (tuple, Sequence) and isinstance(value, list):
        return tuple([_value(name, inner[0], each) for each in value])
    if origin is Mapping and isinstance(value, dict):  # the dataclass itself checks values that are no floats
        return {key: _value(name, float, each) if inner[1] is float else each for key, each in value.items()}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if hint is bytes and isinstance(value, str):
        return bytes.fromhex(value)
    if origin in (tuple, Sequence, Mapping):
        raise ValueError(f"{name} is {value!r:.200}")
    kinds = (int, float) if hint is float else (hint,) if hint in _SCALARS else _SCALARS
    if type(value) not in kinds or (hint in _LIMITS and not _LIMITS[hint][0] <= value <= _LIMITS[hint][1]):
        raise ValueError(f"{name} is {value!r:.200}")
    if hint is int and name in _ALIGNMENTS and (value == 0 or ALIGNMENT % value):
        raise ValueError(f"{name} is {value}; accepted are the powers of two up to {ALIGNMENT}")
    return value
