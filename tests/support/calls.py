"""Helpers that make the `Call` of a plan from operands by name."""

from __future__ import annotations

from typing import Any

from lt_runtime.kernels.call import Call


def call_of(
    problem: Any, stream: int = 0, *, scalars: Any = (1.0, 0.0), dropouts: Any = (None, None), **at: int
) -> Call:
    """Makes a `Call` with operands at these addresses; operands that are not named are absent."""
    assert at.keys() <= set(problem.operands)
    return Call(tuple(int(at.get(name, 0)) for name in problem.operands), stream, scalars, dropouts)


def addresses(problem: Any, call: Call) -> dict[str, int]:
    """Returns the addresses of a `Call` by the names of the operands."""
    return dict(zip(problem.operands, call.addresses, strict=True))
