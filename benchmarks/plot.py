"""Draws lt_runtime's speed-up over the fastest other library from the result files, with one line for each shape.

The picture holds a digest of the rows that it was drawn from. Its colours are Okabe's and Ito's, which colour-blind
people can tell apart; the markers' shapes and fillings tell types and activations apart as well.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.growth import LAYERS
from benchmarks.kept import Comparison, comparisons, is_peer, label, missing_peers, result, rows_of
from benchmarks.report import RESULTS

FILE: Final = RESULTS / "plots" / "speedup.png"
GROWTH: Final = RESULTS / "plots" / "growth.png"
DIGEST: Final = "Source"
"""The key in the picture's metadata that holds the digest of the results that it shows."""

_KINDS: Final = {"bf16": ("#0072B2", "o"), "tf32": ("#E69F00", "s")}
_ACTIVATIONS: Final = {"gelu": "GELU", "relu": "ReLU"}
_TICKS: Final = (0.5, 0.8, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50)
_RING: Final = {"color": "black", "marker": "o", "markerfacecolor": "none", "markersize": 11, "linestyle": "none"}
_FAINT: Final = 0.25
_COLOURS: Final = 64  # number of colours in the PNG file, which make the file a third as large
_PANELS: Final[Mapping[str, Sequence[str]]] = {
    "Blocks of two layers": ("layers",),
    "Blocks of shapes that were drawn at random": ("wide",),
    "Training steps of MLPs; narrow ones by width x hidden layers, with a point for each number of rows": (
        "steps",
        "narrow",
    ),
}
"""For each title of a panel, the suites that the panel shows."""


def digest() -> str:
    """A digest of the result rows that the picture shows."""
    rows = [rows_of(suite) for suites in _PANELS.values() for suite in suites]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def write(file: Path = FILE) -> Path:
    """Draws the picture; returns its file."""
    from PIL import Image, PngImagePlugin

    (figure, canvas), facts = _figure(), PngImagePlugin.PngInfo()
    _draw(figure)
    canvas.draw()
    facts.add_text(DIGEST, digest())
    file.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(_COLOURS)
    picture.save(file, optimize=True, pnginfo=facts)
    return file


def write_losses(file: Path = RESULTS / "plots" / "torch_losses.png") -> list[Path]:
    """Draws the losses of that row of the suite `torch` with the most losses; returns no file if there is no row."""
    row = max(rows_of("torch"), key=lambda row: max(map(len, row["losses"].values()), default=0), default=None)
    if row is None:
        return []
    figure, _ = _figure(figsize=(9, 4))
    axes = figure.subplots()
    for name, losses in row["losses"].items():
        axes.plot(losses, label=name, linewidth=1)
    axes.set(title=row["case"], xlabel="step", ylabel="loss before the step's update")
    axes.legend()
    figure.savefig(file)
    return [file]


def write_growth(file: Path = GROWTH) -> list[Path]:
    """Draws the times of the suite `growth`, a panel for each quantity that grows; without rows it writes no file."""
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows_of("growth"):
        for name, us in row["us"].items():
            told = label(name) if is_peer(name) else "lt_runtime"
            told = row["case"].split(" ", 2)[2] if row["quantity"] == LAYERS else told
            lines.setdefault(row["quantity"], {}).setdefault(told, []).append((row["size"], us))
    if not lines:
        return []
    figure, _ = _figure(figsize=(12, 4))
    for axes, (quantity, of_panel) in zip(figure.subplots(1, len(lines), squeeze=False)[0], lines.items(), strict=True):
        for told, points in of_panel.items():
            axes.loglog(*zip(*points, strict=True), marker="o", label=told)
        axes.set(xlabel=quantity, ylabel="µs")
        axes.legend()
    figure.savefig(file)
    return [file]


def _figure(**options: Any) -> tuple[Any, Any]:
    """An empty figure, and the canvas that turns it into pixels without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", dpi=100, **options)
    return figure, FigureCanvasAgg(figure)


def _draw(figure: Any) -> None:
    """A panel for each kind of task, with a line for each shape."""
    panels = {title: lines for title, suites in _PANELS.items() if (lines := _by_shape(suites))}
    heights = [len(lines) + 1 for lines in panels.values()]
    figure.set_size_inches(9, 1.5 + 0.21 * sum(heights))
    every = figure.subplots(len(panels), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (title, lines) in zip(every, panels.items(), strict=True):
        for place, some in enumerate(lines.values()):
            for each in some:
                _point(axes, each, place)
        axes.set_yticks(range(len(lines)), list(lines), fontsize=8)
        axes.set_ylim(len(lines) - 0.4, -0.6)  # reversed, so that the first shape is at the top
        axes.set_title(title, fontsize=10, loc="left")
        axes.axvline(1, color="black", linewidth=1)
        axes.grid(alpha=0.25)
    ratios = [1.0, *(each.ratio for lines in panels.values() for some in lines.values() for each in some)]
    low, high = min(ratios) / 1.05, max(ratios) * 1.05
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    every[-1].set_xscale("log")
    every[-1].set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    every[-1].set_xticks([], minor=True)
    every[-1].set_xlim(low, high)
    every[-1].set_xlabel("time of the fastest peer / time of lt_runtime (right of the line lt_runtime is faster)")
    every[0].legend(handles=_legend(), fontsize=8, loc="lower right")
    figure.suptitle(f"Speed-up over the fastest peer, {result('layers')['machine']['gpu']}", fontsize=11)


def _by_shape(suites: Sequence[str]) -> dict[str, list[Comparison]]:
    """Groups the comparisons of `suites` by the label of their line in the plot.

    Leaves out steps that a script calls one by one, and cases of an activation that has no marker in the plot.
    """
    lines: dict[str, list[Comparison]] = {}
    for each in itertools.chain.from_iterable(map(comparisons, suites)):
        if not each.what.endswith(", called") and each.row["activation"] in _ACTIVATIONS:
            lines.setdefault(_line(each), []).append(each)
    return lines


def _line(each: Comparison) -> str:
    """Label of a case's line: the case without type and activation; only width or stratum if a line has many cases."""
    words = {each.row["type"].upper(), _ACTIVATIONS[each.row["activation"]]}
    shape = [word for word in each.what.split() if word not in words]
    shorter = {"narrow": f"narrow {shape[0]}", "wide": each.row.get("stratum", "")}
    return shorter.get(each.suite, " ".join(shape))


def _point(axes: Any, each: Comparison, place: float) -> None:
    colour, marker = _KINDS[each.row["type"]]
    face = colour if each.row["activation"] == "gelu" else "none"
    faint = each.row["stale"] or missing_peers(each.suite, each.row)
    style = {"color": colour, "markerfacecolor": face, "alpha": _FAINT if faint else 1.0}
    axes.plot(each.ratio, place, marker, markersize=5.5, **style)
    if each.ratio < 1:
        axes.plot(each.ratio, place, **_RING)


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D

    made = []
    for kind, (colour, marker) in _KINDS.items():
        for activation, told in _ACTIVATIONS.items():
            face = colour if activation == "gelu" else "white"
            style = {"color": colour, "marker": marker, "markerfacecolor": face, "linestyle": "none"}
            made.append(Line2D([], [], label=f"{kind.upper()} {told}", **style))
    grey = {"color": "grey", "marker": "o", "linestyle": "none", "alpha": _FAINT}
    made.append(Line2D([], [], label="faint: of older code, or a peer is missing", **grey))
    return [*made, Line2D([], [], label="the peer is faster", **_RING)]
