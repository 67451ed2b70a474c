"""Loads the values of parameters from the named arrays of a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lt_runtime.arguments import check_instance, shown
from lt_runtime.errors import ArgumentError, OperandError
from lt_runtime.ops.optimizers.parameters import Parameter, values_for, write_values


class LeftOut(NamedTuple):
    """Names that `load_state_dict(..., strict=False)` left out, as they are spelled in the state.

    Attributes:
        missing: names of parameters that the state lacks; they kept their values.
        unexpected: names of entries that belong to no parameter.
    """

    missing: list[str]
    unexpected: list[str]


def by_name(parameters: Sequence[Parameter], names: Mapping[str, str] | None) -> dict[str, Parameter]:
    """Maps names in a state to the parameters.

    Args:
        names: the state's name for each parameter whose name differs in the state.

    Raises:
        ArgumentError: `names` has a name of no parameter, or gives two parameters one name.
    """
    names = {} if names is None else names
    check_instance("names", names, Mapping, "None or a mapping from the model's names to the state's")
    ours = [each.name for each in parameters]
    for name, theirs in names.items():
        check_instance(f"names[{shown(name)}]", theirs, str, "a string")
        if name not in ours:
            raise ArgumentError(f"names has {shown(name)}; the model's parameters are {', '.join(ours)}")
    renamed: dict[str, Parameter] = {}
    for each in parameters:
        name = names.get(each.name, each.name)
        if name in renamed:
            raise ArgumentError(f"names gives {renamed[name].name} and {each.name} the same name, {shown(name)}")
        renamed[name] = each
    return renamed


def load_values(parameters: Mapping[str, Parameter], state: Any, *, strict: bool) -> LeftOut:
    """Assigns a state's values to parameters, or raises an error that lists every entry that does not fit.

    Args:
        parameters: maps names in the state to parameters.
        strict: refuse a state that lacks a parameter or has an entry of no parameter.
    """
    check_instance("state", state, Mapping, "a mapping from names to arrays, such as state_dict() gives")
    missing = [name for name in parameters if name not in state]
    left = LeftOut(missing, [name for name in state if name not in parameters])
    complaints, assigned = [], []
    if strict or len(missing) == len(parameters):
        complaints += [f"missing: {name}" for name in missing]
        complaints += [f"unexpected: {shown(name)}" for name in left.unexpected]
        if missing and left.unexpected:
            names = f"{{{missing[0]!r}: {shown(left.unexpected[0])}, ...}}"
            complaints.append(f"where a parameter has another name in the state, pass names={names}")
    for name, parameter in parameters.items():
        if name in state:
            try:
                assigned.append((parameter, values_for(parameter, name, state[name])))
            except (ArgumentError, OperandError) as error:
                complaints.append(str(error))
    if complaints:
        found = f"state has the names {shown([*state])}, which does not fit the model"
        raise OperandError("\n  ".join([f"{found}; nothing was loaded:", *complaints]))
    write_values(assigned)
    return left
