"""Faults of weights on their way in and out: values, master copies, state dicts, saved models."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Fault, fault

_FILE: Final = "lt_runtime/saving/checkpoint_file.py"
_SAVED_TEST: Final = "tests/cpu/saving/test_saved_models.py"

FAULTS: Final[tuple[Fault, ...]] = (
    fault(
        "more is read than memory can hold",
        _FILE,
        "    if needed > memory:\n",
        "    if needed > memory << 20:\n",
        f"{_SAVED_TEST}::test_holes_are_no_memory",
    ),
    fault(
        "a digest is of what is wanted alone",
        _FILE,
        "                    digest.add(array)\n                    if name in names:\n",
        "                    if name in names:\n                        digest.add(array)\n",
        f"{_SAVED_TEST}::test_a_model_comes_back_as_it_was",
    ),
)
