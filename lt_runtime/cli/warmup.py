"""The command `warmup`: tunes layers before any training, and prints a table of the results.

A file of shapes is JSON like `presets.json`, or plain text in which each line "M N K" is a layer. Errors name the line
and the field that is wrong. Python's own parser reads the JSON a second time, because this parser knows the line of
every value, which the module `json` does not.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from lt_runtime.arguments import shown
from lt_runtime.cli import INTERRUPTED
from lt_runtime.cli.output import show
from lt_runtime.errors import ArgumentError, LtError
from lt_runtime.files import parse_json, read_regular
from lt_runtime.ops.tuning import mlp_chain, ordinal_of
from lt_runtime.problem import ACTIVATIONS, ComputeName
from lt_runtime.store.recording import read_recorded
from lt_runtime.tuner import search
from lt_runtime.tuner.chain import Tunable, chains_of
from lt_runtime.tuner.report import Tuned, TuningReport, progress_bar

PRESETS: Final = Path(__file__).parents[1] / "presets.json"
_FIELDS: Final = ("M", "N", "K")
_COMMENT: Final = "#"
_LARGEST: Final = 1 << 17
"""Limit of a file's bytes: a hundred times the size of presets.json, and read within a second."""
_MOST: Final = 2**63 - 1
"""The largest accepted number of rows, inputs or outputs of a layer."""
_SIZES: Final = "integers of at least 1, below 2**63"


class Layers(NamedTuple):
    """A single layer, or the layers of an MLP.

    Attributes:
        rows: M of every layer.
        dims: inputs of the first layer, then outputs of each.
        activation: the activation, as `lt.tune` takes it; None if the file names none.
    """

    rows: int
    dims: tuple[int, ...]
    activation: str | None = None


Shapes: TypeAlias = dict[str, list[Layers]]
"""The layers and MLPs of a file by name; the name is "" in plain text. Layers and an MLP may have the same name."""


def run(arguments: argparse.Namespace) -> int:
    """Tunes the requested problems, and prints the report as a table or as one JSON object.

    Returns:
        The exit status: 0, or 130 after an interrupt; results up to then are kept and printed.

    Raises:
        ArgumentError: an option or a file is not accepted.
        DeviceError: there is no such GPU.
        LtError: the tuner failed; results up to then are kept and printed.
    """
    chains = _chains(arguments)
    device = ordinal_of(arguments.device)
    tuned: list[Tuned] = []
    try:
        with progress_bar() as progress:
            tuned.extend(search.tune_chains(chains, device, progress=progress))
    except (KeyboardInterrupt, LtError) as error:
        if tuned or isinstance(error, KeyboardInterrupt):
            _show(tuned, is_complete=False, as_json=arguments.json)
        if isinstance(error, LtError):
            raise
        return INTERRUPTED
    return _show(tuned, is_complete=True, as_json=arguments.json)


def _show(tuned: list[Tuned], *, is_complete: bool, as_json: bool) -> int:
    report = TuningReport(tuned)
    result = {"ok": is_complete, "gain": report.gain, "seconds": report.seconds, "tuned": report.to_json()}
    stopped = [] if is_complete else ["Stopped: what is in the table is kept."]
    return show(result, [report.table(), report.summary, *stopped], as_json=as_json)


def _chains(arguments: argparse.Namespace) -> list[Tunable]:
    """All chains of layers and all matrix products that the command's arguments name.

    Raises:
        ArgumentError: the arguments name no problem, or a value is not accepted.
    """
    found: list[Tunable] = []
    given, types = list(_layers(arguments)), dict.fromkeys(arguments.dtype or ["float32"])
    if arguments.compute == "tf32" and "float32" not in types:
        raise ArgumentError("--compute is tf32, which needs --dtype float32")
    for dtype in types:
        compute: ComputeName = arguments.compute if dtype == "float32" else "float32"
        for layers in given:
            names = arguments.activation or [layers.activation]
            found += [mlp_chain(layers.dims, layers.rows, name, dtype=dtype, compute=compute) for name in names]
    if arguments.recorded is not None:
        if not arguments.recorded.exists():
            written = "a script that runs with LT_RUNTIME_RECORD writes it at its first operation on a GPU"
            raise ArgumentError(f"--recorded is {arguments.recorded}, which does not exist; {written}")
        found += chains_of(read_recorded(arguments.recorded))
    if not found:
        raise ArgumentError("there is nothing to tune: give --shapes, --mlp with --rows, --preset or --recorded")
    return found


def _layers(arguments: argparse.Namespace) -> Iterator[Layers]:
    if arguments.shapes is not None:
        for layers in read_shapes(arguments.shapes).values():
            yield from layers
    for name in arguments.preset or ():
        yield from preset(name)
    if arguments.mlp and arguments.rows is None:
        raise ArgumentError("--mlp needs --rows, the rows of its batch")
    if arguments.rows is not None and not arguments.mlp:
        raise ArgumentError("--rows needs --mlp; the layers of files and presets say their own")
    yield from (Layers(arguments.rows, dims) for dims in arguments.mlp or ())


def preset(name: str) -> list[Layers]:
    """Reads a preset: named shapes that ship with the package.

    Raises:
        ArgumentError: the name is unknown; the message lists the known names.
    """
    known = read_shapes(PRESETS)
    if name not in known:
        raise ArgumentError(f"--preset is {name!r}; accepted are {', '.join(sorted(known))}")
    return known[name]


def read_shapes(path: Path) -> Shapes:
    """Reads the layers and MLPs of a file of shapes.

    Raises:
        ArgumentError: the file cannot be read, or a line or field is wrong; the message says which.
    """
    try:
        text = read_regular(path, _LARGEST).decode()
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    return _json(path, text) if text.lstrip()[:1] in ("{", "[") else _plain(path, text)


def _plain(path: Path, text: str) -> Shapes:
    layers = []
    for number, line in enumerate(text.splitlines(), 1):
        fields, place = line.partition(_COMMENT)[0].split(), f"{path}, line {number}"
        if fields and len(fields) != len(_FIELDS):
            raise ArgumentError(f"{place} has {len(fields)} fields; accepted are three: M N K")
        for name, size in zip(_FIELDS, fields, strict=False):
            # The digits are counted first, because Python refuses to convert thousands of them.
            if not (size.isascii() and size.isdigit() and len(size) <= len(str(_MOST)) and 1 <= int(size) <= _MOST):
                raise ArgumentError(f"{place}: {name} is {shown(size)}; accepted are {_SIZES}")
        if fields:
            m, n, k = map(int, fields)
            layers.append(Layers(m, (k, n)))
    if not layers:
        raise ArgumentError(f"{path} names no layer; accepted are lines M N K, or JSON")
    return {"": layers}


class _Field(NamedTuple):
    """A value of a JSON file, with its line and its name, which errors show."""

    path: Path
    name: str
    node: ast.expr

    def elements(self) -> list[_Field]:
        if not isinstance(self.node, ast.List):
            raise self._refusal("lists")
        return [self._replace(name=f"{self.name}[{i}]", node=each) for i, each in enumerate(self.node.elts)]

    def items(self, *accepted: str, prefix: str = "") -> Iterator[tuple[str, _Field]]:
        """Yields names and values of a JSON object; errors show a name after `prefix`.

        Without `accepted` the object may have any names.
        """
        if not isinstance(self.node, ast.Dict):
            raise self._refusal("objects")
        for key, node in zip(self.node.keys, self.node.values, strict=True):
            # a key of a JSON object is a string, which Python's parser reads as a Constant
            assert isinstance(key, ast.Constant)
            name = str(key.value)
            field = self._replace(name=f"{prefix}{name}", node=node)
            if accepted and name not in accepted:
                raise field.error(f"is no known field; accepted are {', '.join(accepted[:-1])} and {accepted[-1]}")
            yield name, field

    def value(self, accepts: Callable[[Any], bool], accepted: str) -> Any:
        """Checks and returns a number or string; errors describe the accepted values by `accepted`."""
        value = getattr(self.node, "value", None)
        if not accepts(value):
            raise self._refusal(accepted)
        return value

    def sizes(self) -> tuple[int, ...]:
        return tuple(each.size() for each in self.elements())

    def size(self) -> int:
        return int(self.value(lambda value: type(value) is int and 1 <= value <= _MOST, _SIZES))

    def error(self, complaint: str) -> ArgumentError:
        return ArgumentError(f"{self.path}, line {self.node.lineno}: {self.name} {complaint[:200]}")

    def _refusal(self, accepted: str) -> ArgumentError:
        return self.error(f"is {ast.unparse(self.node)}; accepted are {accepted}")


def _json(path: Path, text: str) -> Shapes:
    try:
        parse_json(text.encode())
        file = _Field(path, "the file", ast.parse(f"({text})", mode="eval").body)
    except json.JSONDecodeError as error:
        raise ArgumentError(f"{path}, line {error.lineno}: no JSON ({error.msg})") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ArgumentError(f"{path} cannot be read ({error})") from None
    shapes: Shapes = {}
    for part, inside in file.items("layers", "mlps", "comment"):
        for name, field in inside.items(prefix=f"{part}.") if part != "comment" else ():
            layers = map(_layer, field.elements()) if part == "layers" else [_mlp(field)]
            shapes.setdefault(name, []).extend(layers)
    if not shapes:
        raise file.error("names neither layers nor mlps")
    return shapes


def _layer(field: _Field) -> Layers:
    sizes = field.sizes()
    if len(sizes) != len(_FIELDS):
        raise field.error(f"has {len(sizes)} sizes; accepted are three: M, N, K")
    m, n, k = sizes
    return Layers(m, (k, n))


def _mlp(field: _Field) -> Layers:
    values = dict(field.items(*Layers._fields, prefix=f"{field.name}."))
    for name in ("rows", "dims"):
        if name not in values:
            raise field._replace(name=f"{field.name}.{name}").error("is missing")
    dims = values["dims"].sizes()
    if len(dims) < 2:
        raise values["dims"].error("has less than two sizes: inputs, then outputs of each layer")
    named = values.get("activation")
    activation = named.value(ACTIVATIONS.__contains__, ", ".join(ACTIVATIONS)) if named else None
    return Layers(values["rows"].size(), dims, activation)
