"""A hypothesis strategy that damages files: it changes a valid file's bytes, or the values of its JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from hypothesis import strategies as st

LARGEST: Final = 1_000_000
"""Limit of a changed file's bytes."""
VALUES: Final = (None, True, 0, -1, 1e308, 10**30, "", "\x1b[2J\ud800", "9" * 5000, [], [[[]]], {}, {"\x1b[31m": 1})
"""A value of each JSON type, and values at the limits of the types."""


@st.composite
def mutated(draw: st.DrawFn, content: bytes, resigned: Callable[[Any], Any] = lambda value: value) -> bytes:
    """A changed copy of a file's content.

    Bytes are changed, cut or doubled. If the content is JSON, or lines of JSON, a value or a name may also be replaced.

    Args:
        resigned: function that recomputes the digests of changed JSON, so that checks after the digests' are reached;
            used for half of the changes.
    """
    kind = draw(st.sampled_from(("flip", "cut", "double", "replace", "replace", "rename")))
    start = draw(st.integers(0, len(content) - 1))
    end = draw(st.integers(start, min(len(content), start + 1000)))
    if kind == "flip":
        return content[:start] + bytes([content[start] ^ draw(st.integers(1, 255))]) + content[start + 1 :]
    if kind == "cut":
        return content[:start] + content[draw(st.sampled_from((end, len(content)))) :]
    if kind == "double":
        return (content[:end] + content[start:end] * draw(st.sampled_from((1, 100))) + content[end:])[:LARGEST]
    try:
        data = json.loads(content)
    except ValueError:  # content that is not one JSON value may be lines of JSON, of which one is changed
        lines = content.splitlines()
        numbers = [index for index, line in enumerate(lines) if line.startswith(b"{")]
        if not numbers:  # no line begins a JSON object: the content is not a text of JSON lines
            return content[:start] + content[end:]
        number = draw(st.sampled_from(numbers))
        lines[number] = draw(mutated(lines[number], resigned))
        return b"\n".join(lines) + b"\n"
    holder, place = draw(st.sampled_from([*_places(data)]))
    if kind == "rename" and isinstance(holder, dict):
        holder[draw(st.sampled_from(("", "\x1b[2J", "\ud800", "digest", "x" * 20_000)))] = holder.pop(place)
    else:
        holder[place] = draw(st.sampled_from(VALUES))
    return json.dumps(resigned(data) if draw(st.booleans()) else data).encode()[:LARGEST]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """The places of all values within a JSON value: the object or list, and the name or index."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for place, each in [*inside]:
        yield value, place
        yield from _places(each)
