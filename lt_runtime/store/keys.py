"""Problems as text and back: the text is canonical, so that it can serve as a key, and people can read it.

It is JSON, with the class of the problem and all its fields by name in the order of their declaration::

    {"MatmulProblem": {"dtype": "bfloat16", ..., "a": {"layout": {"rows": 8192, "cols": 768, ...}, ...}, ...}}

Equal problems have equal keys, different problems different ones. Adding, removing, renaming or moving a field changes
every key of the class: `SCHEMA` must be raised then, which a test checks.
"""

from __future__ import annotations

import functools
import json
import typing
from typing import Final, TypeAlias

from lt_runtime.problem import BackwardProblem, ForwardProblem, MatmulProblem, MLPProblem
from lt_runtime.store.records import from_json, to_json

SCHEMA: Final = 6
"""Version of keys, entries and files. Files of another version are not read."""

Problem: TypeAlias = MatmulProblem | ForwardProblem | BackwardProblem
Remembered: TypeAlias = Problem | MLPProblem
"""The plan cache has entries for problems, and for whole MLPs, which consist of problems."""

_LONGEST: Final = 10_000
_CLASSES: Final = {kind.__name__: kind for kind in typing.get_args(Remembered)}
_FAILURES: Final = (ArithmeticError, AttributeError, KeyError, MemoryError, RecursionError, TypeError, ValueError)
"""Errors that a text may lead to that is no key."""


@functools.lru_cache(maxsize=1024)
def problem_key(problem: Remembered) -> str:
    """The key of a problem."""
    return json.dumps({type(problem).__name__: to_json(problem)})


def parse_key(key: str) -> Remembered:
    """The problem that has a key.

    Raises:
        ValueError: no problem has it.
    """
    try:
        if len(key) > _LONGEST:
            raise ValueError(f"it has more than {_LONGEST} characters")
        ((name, fields),) = json.loads(key).items()
        problem: Remembered = from_json(_CLASSES[name], fields)
        if problem_key(problem) != key:  # this also finds values that are not of their field's type
            raise ValueError(f"it should be {problem_key(problem)}")
    except _FAILURES as error:
        shown = key if len(key) <= 80 else f"{key[:77]}..."
        raise ValueError(f"{shown!r} is not the key of a problem ({error})") from None
    return problem
