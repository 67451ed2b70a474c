"""Frozen dataclasses as JSON and back, by the types of their fields. What values they accept, they check themselves."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

Json: TypeAlias = dict[str, Any]
_Record = TypeVar("_Record")
_Reader: TypeAlias = Callable[[str, Any], Any]
"""Turns what a file has of a field, given its name, into the field's value."""


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
    readers = _readers(typing.cast(Any, kind))
    if not isinstance(value, dict) or value.keys() != readers.keys():
        raise ValueError(f"{kind.__name__} has the fields {', '.join(readers)}")
    return kind(**{name: read(name, value[name]) for name, read in readers.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return dict(value)
    return to_json(value) if dataclasses.is_dataclass(value) else value


@functools.cache
def _readers(kind: Any) -> dict[str, _Reader]:
    return {name: _reader(hint) for name, hint in field_types(kind).items()}


def _reader(hint: Any) -> _Reader:
    if hint is bytes:
        return _bytes
    if typing.get_origin(hint) is tuple:
        return functools.partial(_tuple, _reader(typing.get_args(hint)[0]))
    if hint in (int, str):
        return functools.partial(_exactly, hint)
    return functools.partial(_record, hint) if dataclasses.is_dataclass(hint) else _as_it_is


def _tuple(read: _Reader, name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is {value!r}, not a list")
    return tuple([read(name, each) for each in value])


def _exactly(kind: type, name: str, value: object) -> object:
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r}, not of type {kind.__name__}")
    return value


def _record(kind: Any, _: str, value: object) -> object:
    return from_json(kind, value)


def _as_it_is(_: str, value: object) -> object:
    return value


def _bytes(name: str, value: object) -> bytes:
    try:
        return bytes.fromhex(typing.cast(str, value))
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}, not hexadecimal") from None
