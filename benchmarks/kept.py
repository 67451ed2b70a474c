"""Reads the repository's result files; compares our times with the fastest other library that does the same task.

`report` writes a digest of each suite's code. A row is current if it was measured with code of that digest; other rows
are stale.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from benchmarks.report import RESULTS, Json

_WITH_COMPILE: Final = frozenset(("PyTorch", "torch.compile"))
_EVERY: Final = _WITH_COMPILE | {"JAX"}
WANTED: Final[Mapping[str, frozenset[str]]] = {
    **dict.fromkeys(("kernels", "wide"), _WITH_COMPILE),
    **dict.fromkeys(("layers", "steps", "models", "narrow"), _EVERY),
    **dict.fromkeys(("host", "growth"), frozenset({"PyTorch"})),
}
"""For each suite with other libraries, the peers that a row must have to count in means over the fastest peer."""
CODE: Final = "code.json"
"""The file beside the results with the commit for which `report` ran last, and the digest of each suite's code."""

_LABELS: Final = {
    "torch_max_autotune": "torch.compile max-autotune",
    "torch_compile": "torch.compile",
    "torch_graph": "PyTorch in a graph",
    "torch_log_softmax": "PyTorch log_softmax by hand",
    "torchao": "torchao",
    "torch": "PyTorch",
    "liger": "Liger",
    "jax": "JAX",
    "cupy": "CuPy",
}
"""Maps prefixes of contenders' names to the names of libraries that tables show; the first match counts."""
_DOES_LESS: Final = "without"  # Occurs in the name of a contender that leaves out a part of the task.
_CALL: Final = "_call"  # Occurs in the name of a contender whose time includes the host's work for a call.


def result(suite: str) -> dict[str, Any]:
    """Reads the result file of a suite."""
    return dict(json.loads((RESULTS / f"{suite}.json").read_text()))


def code() -> dict[str, Any]:
    """Reads `CODE`: "commit", and "digests" by suite."""
    return dict(json.loads((RESULTS / CODE).read_text()))


def rows_of(suite: str) -> list[dict[str, Any]]:
    """The rows of a suite that hold times, with their commit and "stale"; an empty list if the suite has no results."""
    if not (RESULTS / f"{suite}.json").exists():
        return []
    kept, digest = result(suite), code()["digests"].get(suite)
    default = {"commit": kept["commit"], "when": kept.get("when", "")}
    return [default | row | {"stale": row.get("digest", "") != digest} for row in kept["rows"] if row["us"]]


def mark(row: Json) -> str:
    """The suffix of a row's name in tables; empty if the row is current."""
    return " (stale)" if row["stale"] else ""


def peers_of(row: Json) -> list[str]:
    """The other libraries that a row was measured against; torch.compile counts as a library."""
    return [*dict.fromkeys(label(name).split()[0] for name in row["us"] if is_peer(name))]


def missing_peers(suite: str, row: Json) -> list[str]:
    """The peers of `WANTED` that a row lacks; figures about the fastest peer leave the row out if there are any."""
    return sorted(WANTED.get(suite, frozenset()) - {*peers_of(row)})


def is_peer(name: str) -> bool:
    """Whether a contender is another library's and does the whole task."""
    return name.startswith(tuple(_LABELS)) and _DOES_LESS not in name


def label(name: str) -> str:
    """The name of another library's contender as tables show it."""
    return next(told for start, told in _LABELS.items() if name.startswith(start))


class Comparison(NamedTuple):
    """One of lt_runtime's times beside that of the fastest other library (the peer), in microseconds.

    Attributes:
        what: the case, and which of its calls was timed if it has several.
        peer: the contender's name.
        theirs: the peer's time.
        row: all measurements of the case.
    """

    suite: str
    what: str
    ours: float
    peer: str
    theirs: float
    row: Json

    @property
    def ratio(self) -> float:
        """The peer's time divided by ours: more than 1 if we are faster."""
        return self.theirs / self.ours

    @property
    def marked(self) -> str:
        """The comparison's name, marked if its row is stale."""
        return self.what + mark(self.row)


def against(row: Json, suite: str = "", ours: str = "lt", what: str = "", *names: str) -> Comparison | None:
    """Compares one of lt_runtime's contenders with the fastest of the peers; None if either side was not measured.

    Args:
        what: the comparison's name; by default the row's case.
        names: the peers; by default all that do the whole task. Steps timed as calls are compared with each other only.
    """
    theirs = names or [name for name in row["us"] if is_peer(name) and (_CALL in name) == (_CALL in ours)]
    peer = min((name for name in theirs if name in row["us"]), key=row["us"].__getitem__, default=None)
    if peer is None or ours not in row["us"]:
        return None
    return Comparison(suite, what or row["case"], row["us"][ours], peer, row["us"][peer], row)


def comparisons(suite: str) -> Iterator[Comparison]:
    """All comparisons of a suite, in the order of its rows."""
    for row in rows_of(suite):
        if suite == "host":
            yield from _of_calls(row)
            continue
        for ours, told in (("lt", row["case"]), ("lt_call", f"{row['case']}, called")):
            if found := against(row, suite, ours, told):
                yield found


# Comparisons of the suite `host`: each call with the calls of other libraries that do the same.

_KEEPS: Final = ("torch_eager_recording",)
_PRODUCTS: Final = ("torch_eager", "torch_linear")
_REPLAY: Final = ("torch_graph",)
_CALLS: Final[Mapping[str, Mapping[str, tuple[str, Sequence[str]]]]] = {
    "matmul": {"lt": ("matmul{}", (*_PRODUCTS, "cupy")), "lt_bound": ("matmul{}, through lt.bind", _REPLAY)},
    "linear_fwd": {
        "lt_inference": ("linear{}, which keeps nothing for backward", ("torch_eager",)),
        "lt": ("linear_fwd{}", _KEEPS),
        "lt_out_z": ("linear_fwd{} out_z=", _KEEPS),
        "lt_elsewhere": ("linear_fwd{} out_z=, x at a new address each time", _KEEPS),
        "lt_bound": ("linear_fwd{} out_z=, through lt.bind", _REPLAY),
    },
    "linear_fwd + linear_bwd": {"lt": ("linear_fwd + linear_bwd{}", ("torch_eager_one_thread",))},
    "AdamW": {"lt": ("AdamW{}", ("torch_eager",))},
    "TrainStep": {"lt": ("TrainStep{}", _REPLAY)},
}
"""Maps a case's kind and a contender to a call's title and peers (contenders of other libraries).

{} in the title stands for the rest of the case's name.
"""


def _of_calls(row: Json) -> Iterator[Comparison]:
    kind = max((each for each in _CALLS if row["case"].startswith(each)), key=len, default=None)
    for ours, (call, names) in _CALLS.get(kind or "", {}).items():
        if found := against(row, "host", ours, call.format(row["case"].removeprefix(kind or "")), *names):
            yield found
