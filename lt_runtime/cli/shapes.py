"""Files of shapes: what they say, and where in them something is wrong.

JSON as in `presets.json`, or plain text with a layer "M N K" a line. Python's own parser reads the JSON a second time,
because it tells the line of every value, which the module `json` does not.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from lt_runtime.errors import ArgumentError
from lt_runtime.problem import ACTIVATIONS

PRESETS: Final = Path(__file__).parents[1] / "presets.json"
_FIELDS: Final = ("M", "N", "K")
_COMMENT: Final = "#"


@dataclass(frozen=True, slots=True)
class Mlp:
    """Layers in a row: rows, inputs and outputs of each, and what follows all but the last; None if not said."""

    rows: int
    dims: tuple[int, ...]
    activation: str | None = None


@dataclass(frozen=True, slots=True)
class Shapes:
    """What a file names.

    Attributes:
        layers: (M, N, K) of single layers, by the name of their group; "" in plain text.
        mlps: by name.
    """

    layers: dict[str, list[tuple[int, int, int]]]
    mlps: dict[str, Mlp]

    @property
    def names(self) -> list[str]:
        """Of groups and MLPs, which may share one."""
        return sorted({*self.layers, *self.mlps})

    def named(self, name: str) -> Shapes:
        """The group and the MLP of that name alone."""
        layers = {name: self.layers[name]} if name in self.layers else {}
        return Shapes(layers, {name: self.mlps[name]} if name in self.mlps else {})


def preset(name: str) -> Shapes:
    """Shapes that ship with the package.

    Raises:
        ArgumentError: there are none of that name; the message lists the known ones.
    """
    known = read_shapes(PRESETS)
    if name not in known.names:
        raise ArgumentError(f"--preset is {name!r}; accepted are {', '.join(known.names)}")
    return known.named(name)


def read_shapes(path: Path) -> Shapes:
    """What a file of shapes says.

    Raises:
        ArgumentError: it cannot be read, or a line or field is not as it should be; the message says which.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    return _Json(path, text).shapes() if text.lstrip()[:1] in ("{", "[") else _plain(path, text)


def _plain(path: Path, text: str) -> Shapes:
    lines = ((number, line.partition(_COMMENT)[0].split()) for number, line in enumerate(text.splitlines(), 1))
    layers = [_plain_layer(f"{path}, line {number}", fields) for number, fields in lines if fields]
    if not layers:
        raise ArgumentError(f"{path} names no layer; accepted are lines M N K, or JSON")
    return Shapes({"": layers}, {})


def _plain_layer(place: str, fields: list[str]) -> tuple[int, int, int]:
    if len(fields) != len(_FIELDS):
        raise ArgumentError(f"{place} has {len(fields)} fields; accepted are three: M N K")
    for name, text in zip(_FIELDS, fields, strict=True):
        if not (text.isascii() and text.isdigit() and int(text)):
            raise ArgumentError(f"{place}: {name} is {text!r}; accepted are integers of at least 1")
    m, n, k = map(int, fields)
    return m, n, k


class _Json:
    """A file of JSON, of which every value's line is known."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        try:
            json.loads(text)
            self._root = ast.parse(f"({text})", mode="eval").body
        except json.JSONDecodeError as error:
            raise ArgumentError(f"{path}, line {error.lineno}: no JSON ({error.msg})") from None
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ArgumentError(f"{path} cannot be read ({error})") from None

    def shapes(self) -> Shapes:
        layers: dict[str, list[tuple[int, int, int]]] = {}
        mlps: dict[str, Mlp] = {}
        for name, value in self._items(self._root, "the file"):
            if name == "layers":
                layers = {group: self._group(each, f"layers.{group}") for group, each in self._items(value, name)}
            elif name == "mlps":
                mlps = {each: self._mlp(inside, f"mlps.{each}") for each, inside in self._items(value, name)}
            elif name != "comment":
                self._refuse(value, name, "is no known field; accepted are layers, mlps and comment")
        if not layers and not mlps:
            self._refuse(self._root, "the file", "names neither layers nor mlps")
        return Shapes(layers, mlps)

    def _group(self, node: ast.expr, field: str) -> list[tuple[int, int, int]]:
        return [self._layer(each, f"{field}[{index}]") for index, each in enumerate(self._list(node, field))]

    def _layer(self, node: ast.expr, field: str) -> tuple[int, int, int]:
        sizes = self._sizes(node, field)
        if len(sizes) != len(_FIELDS):
            self._refuse(node, field, f"has {len(sizes)} sizes; accepted are three: M, N, K")
        m, n, k = sizes
        return m, n, k

    def _mlp(self, node: ast.expr, field: str) -> Mlp:
        values = dict(self._items(node, field))
        for name, value in values.items():
            if name not in ("rows", "dims", "activation"):
                self._refuse(value, f"{field}.{name}", "is no known field; accepted are rows, dims and activation")
        for name in ("rows", "dims"):
            if name not in values:
                self._refuse(node, f"{field}.{name}", "is missing")
        dims = self._sizes(values["dims"], f"{field}.dims")
        if len(dims) < 2:
            self._refuse(values["dims"], f"{field}.dims", "has less than two sizes: inputs, then outputs of each layer")
        activation = self._activation(values["activation"], f"{field}.activation") if "activation" in values else None
        return Mlp(self._size(values["rows"], f"{field}.rows"), dims, activation)

    def _activation(self, node: ast.expr, field: str) -> str:
        value = node.value if isinstance(node, ast.Constant) else None
        if not isinstance(value, str) or value not in ACTIVATIONS:
            self._refuse(node, field, f"is {ast.unparse(node)}; accepted are {', '.join(ACTIVATIONS)}")
        return value

    def _sizes(self, node: ast.expr, field: str) -> tuple[int, ...]:
        return tuple(self._size(each, f"{field}[{index}]") for index, each in enumerate(self._list(node, field)))

    def _size(self, node: ast.expr, field: str) -> int:
        value = node.value if isinstance(node, ast.Constant) else None
        if type(value) is not int or value < 1:
            self._refuse(node, field, f"is {ast.unparse(node)}; accepted are integers of at least 1")
        return value

    def _list(self, node: ast.expr, field: str) -> list[ast.expr]:
        if not isinstance(node, ast.List):
            self._refuse(node, field, f"is {ast.unparse(node)}; accepted are lists")
        return node.elts

    def _items(self, node: ast.expr, field: str) -> Iterator[tuple[str, ast.expr]]:
        if not isinstance(node, ast.Dict):
            self._refuse(node, field, f"is {ast.unparse(node)}; accepted are objects")
        for key, value in zip(node.keys, node.values, strict=True):
            assert isinstance(key, ast.Constant)  # JSON has no others
            yield str(key.value), value

    def _refuse(self, node: ast.expr, field: str, complaint: str) -> NoReturn:
        raise ArgumentError(f"{self._path}, line {node.lineno}: {field} {complaint[:200]}")
