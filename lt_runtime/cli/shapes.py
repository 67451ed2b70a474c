"""Files of shapes: the layers that they name, or the line and field where they are wrong.

A file is JSON like `presets.json`, or plain text with a layer "M N K" a line. Python's own parser reads the JSON a
second time, because it knows the line of every value, which the module `json` does not.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from lt_runtime.errors import ArgumentError
from lt_runtime.problem import ACTIVATIONS

PRESETS: Final = Path(__file__).parents[1] / "presets.json"
_FIELDS: Final = ("M", "N", "K")
_COMMENT: Final = "#"


class Layers(NamedTuple):
    """One layer that stands alone, or the layers of an MLP.

    Attributes:
        rows: M of every layer.
        dims: inputs of the first layer, then outputs of each.
        activation: as `lt.tune` takes it; None if the file does not say it.
    """

    rows: int
    dims: tuple[int, ...]
    activation: str | None = None


Shapes: TypeAlias = dict[str, list[Layers]]
"""The layers and MLPs of a file by name; the name is "" in plain text. A group of layers and an MLP may share one."""


def preset(name: str) -> list[Layers]:
    """Shapes that ship with the package.

    Raises:
        ArgumentError: there are none of that name; the message lists the known ones.
    """
    known = read_shapes(PRESETS)
    if name not in known:
        raise ArgumentError(f"--preset is {name!r}; accepted are {', '.join(sorted(known))}")
    return known[name]


def read_shapes(path: Path) -> Shapes:
    """The layers that a file names.

    Raises:
        ArgumentError: the file cannot be read, or a line or field is not as it should be; the message says which.
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
    return {"": layers}


def _plain_layer(place: str, fields: list[str]) -> Layers:
    if len(fields) != len(_FIELDS):
        raise ArgumentError(f"{place} has {len(fields)} fields; accepted are three: M N K")
    for name, text in zip(_FIELDS, fields, strict=True):
        if not (text.isascii() and text.isdigit() and int(text)):
            raise ArgumentError(f"{place}: {name} is {text!r}; accepted are integers of at least 1")
    m, n, k = map(int, fields)
    return Layers(m, (k, n))


class _Json:
    """A file of JSON in which the line of every value is known."""

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
        shapes: Shapes = {}
        for part, inside in self._items(self._root, "the file", ("layers", "mlps", "comment")):
            for name, value in self._items(inside, part) if part != "comment" else ():
                read = self._group if part == "layers" else self._mlp
                shapes.setdefault(name, []).extend(read(value, f"{part}.{name}"))
        if not shapes:
            raise self._error(self._root, "the file", "names neither layers nor mlps")
        return shapes

    def _group(self, node: ast.expr, field: str) -> Iterator[Layers]:
        for index, each in enumerate(self._list(node, field)):
            sizes = self._sizes(each, f"{field}[{index}]")
            if len(sizes) != len(_FIELDS):
                raise self._error(each, f"{field}[{index}]", f"has {len(sizes)} sizes; accepted are three: M, N, K")
            m, n, k = sizes
            yield Layers(m, (k, n))

    def _mlp(self, node: ast.expr, field: str) -> Iterator[Layers]:
        values = dict(self._items(node, field, Layers._fields))
        for name in ("rows", "dims"):
            if name not in values:
                raise self._error(node, f"{field}.{name}", "is missing")
        dims = self._sizes(values["dims"], f"{field}.dims")
        if len(dims) < 2:
            raise self._error(
                values["dims"], f"{field}.dims", "has less than two sizes: inputs, then outputs of each layer"
            )
        activation = self._activation(values["activation"], f"{field}.activation") if "activation" in values else None
        yield Layers(self._size(values["rows"], f"{field}.rows"), dims, activation)

    def _activation(self, node: ast.expr, field: str) -> str:
        if isinstance(node, ast.Constant) and node.value in ACTIVATIONS:
            return str(node.value)
        raise self._error(node, field, f"is {ast.unparse(node)}; accepted are {', '.join(ACTIVATIONS)}")

    def _sizes(self, node: ast.expr, field: str) -> tuple[int, ...]:
        return tuple(self._size(each, f"{field}[{index}]") for index, each in enumerate(self._list(node, field)))

    def _size(self, node: ast.expr, field: str) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value >= 1:
            return node.value
        raise self._error(node, field, f"is {ast.unparse(node)}; accepted are integers of at least 1")

    def _list(self, node: ast.expr, field: str) -> list[ast.expr]:
        if isinstance(node, ast.List):
            return node.elts
        raise self._error(node, field, f"is {ast.unparse(node)}; accepted are lists")

    def _items(self, node: ast.expr, field: str, accepted: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.expr]]:
        """Names and values of an object. If `accepted` is not empty, it lists the names that are accepted."""
        if not isinstance(node, ast.Dict):
            raise self._error(node, field, f"is {ast.unparse(node)}; accepted are objects")
        for key, value in zip(node.keys, node.values, strict=True):
            assert isinstance(key, ast.Constant)  # JSON has no others
            name = str(key.value)
            if accepted and name not in accepted:
                words = f"{', '.join(accepted[:-1])} and {accepted[-1]}"
                place = name if node is self._root else f"{field}.{name}"
                raise self._error(value, place, f"is no known field; accepted are {words}")
            yield name, value

    def _error(self, node: ast.expr, field: str, complaint: str) -> ArgumentError:
        return ArgumentError(f"{self._path}, line {node.lineno}: {field} {complaint[:200]}")
