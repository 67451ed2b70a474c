"""Frozen dataclasses as JSON and back, by the types of their fields."""

from __future__ import annotations

import dataclasses
import enum
import functools
import typing
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

Json: TypeAlias = dict[str, Any]
_Record = TypeVar("_Record")


@functools.cache
def field_types(kind: Any) -> dict[str, Any]:
    """Names and types of a dataclass's fields, in the order of their declaration; `str` for a choice of names."""
    hints = {
        name: str if typing.get_origin(hint) is typing.Literal else hint
        for name, hint in typing.get_type_hints(kind).items()
    }
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def to_json(record: Any) -> Json:
    """The fields of a dataclass by name.

    Bytes become hexadecimal text, members of enumerations their values, tuples lists, inner dataclasses objects.
    """
    return {name: _plain(getattr(record, name)) for name in field_types(typing.cast(Any, type(record)))}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return dict(value)
    return to_json(value) if dataclasses.is_dataclass(value) else value


def from_json(kind: type[_Record], value: object) -> _Record:
    """The instance of `kind` for which `to_json` gave `value`. Floats and mappings are left to the class to check.

    Raises:
        ValueError: there is no such instance: a field is missing or unknown, or has a value of another type.
    """
    hints = field_types(typing.cast(Any, kind))
    if not isinstance(value, dict) or value.keys() != hints.keys():
        raise ValueError(f"{kind.__name__} has the fields {', '.join(hints)}")
    return kind(**{name: _value(name, hint, value[name]) for name, hint in hints.items()})


def _value(name: str, hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), value)
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        return tuple([_value(name, typing.get_args(hint)[0], each) for each in value])
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if hint is bytes and isinstance(value, str):
        return bytes.fromhex(value)
    if (hint in (int, str, bool) and type(value) is not hint) or isinstance(value, list):
        raise ValueError(f"{name} is {value!r:.200}")
    return value
