"""Frozen dataclasses as JSON and back, by the types of their fields. What values they accept, they check themselves."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

Json: TypeAlias = dict[str, Any]
_Record = TypeVar("_Record")


@functools.cache
def field_types(kind: Any) -> dict[str, Any]:
    """Names and types of a dataclass's fields, in the order of their declaration."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def to_json(record: Any) -> Json:
    """The fields of a dataclass by name: bytes in hexadecimal, tuples as lists, dataclasses within as theirs."""
    return {name: _plain(getattr(record, name)) for name in field_types(typing.cast(Any, type(record)))}


def from_json(kind: type[_Record], value: object) -> _Record:
    """The instance of `kind` of which `to_json` gave `value`.

    Raises:
        ValueError: there is none: a field too few or too many, a value that its type does not have.
    """
    hints = field_types(typing.cast(Any, kind))
    if not isinstance(value, dict) or value.keys() != hints.keys():
        raise ValueError(f"{kind.__name__} has the fields {', '.join(hints)}")
    return kind(**{name: _read(name, hint, value[name]) for name, hint in hints.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return dict(value)
    return to_json(value) if dataclasses.is_dataclass(value) else value


def _read(name: str, hint: Any, value: Any) -> Any:
    if hint is bytes:
        return _bytes(name, value)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{name} is {value!r}, not a list")
        return tuple(_read(name, typing.get_args(hint)[0], each) for each in value)
    if hint in (int, str) and type(value) is not hint:
        raise ValueError(f"{name} is {value!r}, not of type {hint.__name__}")
    return from_json(typing.cast(type[Any], hint), value) if dataclasses.is_dataclass(hint) else value


def _bytes(name: str, value: object) -> bytes:
    try:
        return bytes.fromhex(typing.cast(str, value))
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}, not hexadecimal") from None
