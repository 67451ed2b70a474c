"""Arguments that are no arrays: whether they are of the kind that is asked for, and how errors show them.

NumPy's integers, floats and truth values count as Python's. A truth value is neither an integer nor a number.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeGuard, TypeVar

import numpy as np

from lt_runtime.errors import ArgumentError, FixedError, KindError

Value = TypeVar("Value")
Name = TypeVar("Name", bound=str)
_INTEGERS: Final = (int, np.integer)
_NUMBERS: Final = (int, float, np.integer, np.floating)
_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def shown(value: object) -> str:
    """A value as errors show it: its representation in one line, shortened; of an array on a GPU, type and shape."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and not isinstance(value, (np.ndarray, np.generic)):
        return f"a {type(value).__name__} of shape {shape}"
    try:
        return " ".join(_SHORT.repr(value).split())
    except Exception:  # what a class of the caller's raises, or Python for an int of too many digits
        return f"a {type(value).__name__}"


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number, rather than an array or a truth value."""
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)


def number(name: str, value: object) -> float:
    """A number as a float, which may be NaN or infinite.

    Raises:
        KindError: it is none.
        ArgumentError: it is an integer larger than any float.
    """
    if not is_number(value):
        raise KindError(f"{name} is {shown(value)}; it must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(f"{name} is {shown(value)}; it must be a number that a float can hold") from None


def not_negative(name: str, value: object) -> float:
    """A finite number that is not negative, as a float.

    Raises:
        KindError: it is no number.
        ArgumentError: it is negative, infinite or NaN.
    """
    checked = number(name, value)
    if not (math.isfinite(checked) and checked >= 0):
        raise ArgumentError(f"{name} is {checked}; it must be finite and not negative")
    return checked


def integer(name: str, value: object) -> int:
    """An integer as an int; `KindError` if it is none."""
    if not isinstance(value, _INTEGERS) or isinstance(value, bool):
        raise KindError(f"{name} is {shown(value)}; it must be an integer")
    return int(value)


def integers(name: str, values: Any) -> tuple[int, ...]:
    """A sequence of integers as ints; `KindError` if it is none."""
    try:
        given = [*values]
    except TypeError:
        raise KindError(f"{name} is {shown(values)}; it must be a sequence of integers") from None
    return tuple(integer(f"{name}[{i}]", value) for i, value in enumerate(given))


def flag(name: str, value: object) -> bool:
    """A truth value, which 0 and 1 stand for too; `KindError` if it is none."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, _INTEGERS) and value in (0, 1)):
        return bool(value)
    raise KindError(f"{name} is {shown(value)}; it must be True or False")


def one_of(name: str, value: object, accepted: Collection[Name]) -> Name:
    """A name out of several.

    Raises:
        KindError: it is no string.
        ArgumentError: it is none of those.
    """
    if isinstance(value, str):
        for each in accepted:
            if value == each:
                return each
    kind = ArgumentError if isinstance(value, str) else KindError
    raise kind(f"{name} is {shown(value)}; accepted are {', '.join(accepted)}")


def by_layer(
    name: str, given: Any, layers: int, parse: Callable[[str, Any], Value], last: Value | None = None
) -> tuple[Value | None, list[Value]]:
    """A value for each layer, given as a single value or as a list or tuple with one for each.

    Args:
        parse: makes the value of a name and of what was given by that name, or refuses it.
        last: the last layer's where `given` is a single value; None where that is meant for the last layer too.

    Returns:
        The single value, None if there is a sequence; and the value of each layer.

    Raises:
        ArgumentError: the sequence has another length.
    """
    if not isinstance(given, (list, tuple)):
        single = parse(name, given)
        return single, [*[single] * (layers - 1), single if last is None else last]
    if len(given) != layers:
        accepted = f"a value, or a sequence with one for each of the {layers} layers"
        raise ArgumentError(f"{name} is {shown(given)}, of length {len(given)}; it must be {accepted}")
    return None, [parse(f"{name}[{i}]", value) for i, value in enumerate(given)]


def check_instance(name: str, value: object, kind: type | tuple[type, ...], accepted: str) -> None:
    """Raises `KindError` unless a value is of a class, or of one of several; `accepted` says in words what is."""
    if not isinstance(value, kind):
        raise KindError(f"{name} is {shown(value)}; it must be {accepted}")


class Fixed:
    """Refuses to set public attributes of an object once its `__init__` has set `_is_made`.

    An option that was read when an object was made would otherwise seem to change, and a misspelt name to exist.
    """

    _changeable: ClassVar[tuple[str, ...]] = ()
    """Attributes that may be set all the same."""
    _is_made = False

    if not TYPE_CHECKING:  # A type checker that sees it takes any name for an attribute that may be set.

        def __setattr__(self, name: str, value: object) -> None:
            may_change = name in self._changeable or name.startswith("_")
            # Python assigns the same array to `steps` after `optimizer.steps += 1`.
            if self._is_made and not may_change and value is not getattr(self, name, self):
                kind, accepted = type(self).__name__, ", ".join(self._changeable)
                what = f"what can be set are {accepted}" if accepted else f"make another {kind}"
                raise FixedError(f"{kind}.{name} cannot be set to {shown(value)}; {what}")
            object.__setattr__(self, name, value)
