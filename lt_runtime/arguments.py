"""Checks of arguments other than arrays, and the form in which error messages show values.

NumPy's integers, floats and truth values count as Python's. A truth value is neither an integer nor a number.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final, SupportsIndex, TypeGuard, TypeVar

import numpy as np

from lt_runtime.errors import ArgumentError, FixedError, KindError

Value = TypeVar("Value")
Name = TypeVar("Name", bound=str)
_INTEGERS: Final = (int, np.integer)
_NUMBERS: Final = (int, float, np.integer, np.floating)
_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def shown(value: object) -> str:
    """The text by which error messages show a value: its `repr` in one line; for an array on a GPU, type and shape."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and not isinstance(value, (np.ndarray, np.generic)):
        return f"a {type(value).__name__} of shape {shape}"
    try:
        return " ".join(_SHORT.repr(value).split())
    # `repr` of a caller's class may raise any exception, and that of an int with thousands of digits raises ValueError.
    except Exception:
        return f"a {type(value).__name__}"


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is an int or a float of Python or NumPy, rather than an array or a truth value."""
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)


def number(name: str, value: object) -> float:
    """Returns a number as a float, which may be NaN or infinite.

    Raises:
        KindError: the value is no number.
        ArgumentError: the value is an integer larger than any float.
    """
    if not is_number(value):
        raise KindError(f"{name} is {shown(value)}; it must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(f"{name} is {shown(value)}; it must be a number that a float can hold") from None


def not_negative(name: str, value: object) -> float:
    """Returns a finite number that is not negative as a float.

    Raises:
        KindError: the value is no number.
        ArgumentError: the number is negative, infinite or NaN.
    """
    checked = number(name, value)
    if not (math.isfinite(checked) and checked >= 0):
        raise ArgumentError(f"{name} is {checked}; it must be finite and not negative")
    return checked


def integer(name: str, value: object) -> int:
    """Returns an integer as an int; raises `KindError` for any other value."""
    if not isinstance(value, _INTEGERS) or isinstance(value, bool):
        raise KindError(f"{name} is {shown(value)}; it must be an integer")
    return int(value)


def integers(name: str, values: Any) -> tuple[int, ...]:
    """Returns a sequence of integers as ints; raises `KindError` for any other value."""
    try:
        given = [*values]
    except TypeError:
        raise KindError(f"{name} is {shown(values)}; it must be a sequence of integers") from None
    return tuple(integer(f"{name}[{i}]", value) for i, value in enumerate(given))


def flag(name: str, value: object) -> bool:
    """Returns True, False, 1 or 0 as a bool; raises `KindError` for any other value."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, _INTEGERS) and value in (0, 1)):
        return bool(value)
    raise KindError(f"{name} is {shown(value)}; it must be True or False")


def one_of(name: str, value: object, accepted: Collection[Name]) -> Name:
    """Returns a string if it is one of the accepted names.

    Raises:
        KindError: the value is no string.
        ArgumentError: the string is not accepted.
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
    """One value for each layer, from an argument that is a single value, or a list or tuple of `layers` values.

    Args:
        parse: function that checks and converts one value; it is called with the argument's name and the value.
        last: the last layer's value where `given` is a single value; with None the last layer gets the single value
            too.

    Returns:
        The single value, or None if `given` is a sequence; and the list of all layers' values.

    Raises:
        ArgumentError: the sequence does not have one value for each layer.
    """
    if not isinstance(given, (list, tuple)):
        single = parse(name, given)
        return single, [*[single] * (layers - 1), single if last is None else last]
    if len(given) != layers:
        accepted = f"a value, or a sequence with one for each of the {layers} layers"
        raise ArgumentError(f"{name} is {shown(given)}, of length {len(given)}; it must be {accepted}")
    return None, [parse(f"{name}[{i}]", value) for i, value in enumerate(given)]


def batches_of(name: str, given: Any, sizes: Collection[int], batch: str, accepted: str) -> Iterator[Any]:
    """The batches of an iterable, each of which must be a tuple or a list of one of the sizes.

    Args:
        batch: describes one batch in error messages.
        accepted: describes the whole iterable in error messages.

    Raises:
        KindError: `given` is not an iterable of batches.
    """
    try:
        batches = iter(given)
    except TypeError:
        raise KindError(f"{name} is {shown(given)}; it must be {accepted}") from None
    for i, each in enumerate(batches):
        if not isinstance(each, (tuple, list)) or len(each) not in sizes:
            raise KindError(f"number {i} of {name} is {shown(each)}; it must be a {batch}")
        yield each


def check_instance(name: str, value: object, kind: type | tuple[type, ...], accepted: str) -> None:
    """Raises `KindError` unless a value is an instance of `kind`, which the message describes by `accepted`."""
    if not isinstance(value, kind):
        raise KindError(f"{name} is {shown(value)}; it must be {accepted}")


class Uncopied:
    """Base class that refuses copies and pickles of an object that holds graphs or launches on a GPU, or threads.

    Without it, `copy` and `pickle` would name the first part that they cannot copy, such as a ctypes array or a lock.
    """

    __slots__ = ()
    _is_uncopied = True
    """Whether the object is refused; subclasses may set it, such as to False for an object without a GPU."""
    _instead: ClassVar[str] = "save its values with lt.save, and make another one to load them into"

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if not self._is_uncopied:
            return super().__reduce_ex__(protocol)
        why = "it holds graphs, launches or threads of this process"
        raise KindError(f"{shown(self)} can be neither copied nor pickled, because {why}; {self._instead}")


class Fixed(Uncopied):
    """Base class that refuses to set public attributes once `__init__` has set `_is_made`.

    In an ordinary class, setting a misspelt attribute, or an option that only `__init__` reads, would silently do
    nothing.
    """

    _changeable: ClassVar[tuple[str, ...]] = ()
    """Names of the public attributes that a subclass allows to be set at any time."""
    _is_made = False
    _is_uncopied = False

    # `__setattr__` is hidden from type checkers: they would otherwise accept assignments to any attribute.
    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: object) -> None:
            may_change = name in self._changeable or name.startswith("_")
            # Setting an attribute to its present value is allowed, because `optimizer.steps += 1` updates the array in
            # place and then assigns the same array to `steps`.
            if self._is_made and not may_change and value is not getattr(self, name, self):
                kind, accepted = type(self).__name__, ", ".join(self._changeable)
                what = f"what can be set are {accepted}" if accepted else f"make another {kind}"
                raise FixedError(f"{kind}.{name} cannot be set to {shown(value)}; {what}")
            object.__setattr__(self, name, value)
