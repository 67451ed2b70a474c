"""Draws what the kept results show: how much faster than the fastest peer, the roofline, and the host's time of a call.

Each picture holds a digest of the rows that it was drawn from. Colours are Okabe's and Ito's, which colour-blind people
can tell apart; nothing is told by colour alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.fastest import Comparison, comparisons, label, result, rows_of
from benchmarks.layers import Block
from benchmarks.report import RESULTS, Json

FOLDER: Final = RESULTS / "plots"
DIGEST: Final = "Source"
"""The name under which a picture holds the digest."""

_BLUE: Final = "#0072B2"
_ORANGE: Final = "#E69F00"
_GREY: Final = "#767676"
_COLOURS: Final = 64
_KINDS: Final = {"bf16": (_BLUE, "o"), "tf32": (_ORANGE, "s")}
_ACTIVATIONS: Final = {"gelu": "GELU", "relu": "ReLU"}
_TICKS: Final = (0.5, 0.8, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50)


def digest(suites: Sequence[str]) -> str:
    """A digest of the rows of some suites."""
    text = json.dumps([rows_of(suite) for suite in suites], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write() -> list[Path]:
    """Draws all pictures; returns their files."""
    return [_write(FOLDER / f"{name}.png", *how) for name, how in PLOTS.items()]


def _write(file: Path, suites: Sequence[str], draw: Callable[[Any], None]) -> Path:
    """A picture of few colours, which makes it a third as large."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image, PngImagePlugin

    figure, facts = Figure(layout="constrained", dpi=100), PngImagePlugin.PngInfo()
    canvas = FigureCanvasAgg(figure)
    draw(figure)
    canvas.draw()
    facts.add_text(DIGEST, digest(suites))
    file.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(_COLOURS)
    picture.save(file, optimize=True, pnginfo=facts)
    return file


# How much faster than the fastest peer.


def _speedup(figure: Any) -> None:
    """A line for each shape, and a panel for each kind of task."""
    panels = {title: _by_shape(suites) for title, suites in _PANELS.items()}
    panels = {title: lines for title, lines in panels.items() if lines}
    heights = [len(lines) + 1 for lines in panels.values()]
    figure.set_size_inches(9, 1.5 + 0.21 * sum(heights))
    upper, *others = figure.subplots(len(panels), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (title, lines) in zip((upper, *others), panels.items(), strict=True):
        names = list(lines)
        for place, name in enumerate(names):
            for each in lines[name]:
                _point(axes, each, place)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_ylim(len(names) - 0.4, -0.6)  # the first shape at the top
        axes.set_title(title, fontsize=10, loc="left")
        axes.axvline(1, color="black", linewidth=1)
        axes.grid(alpha=0.25)
    lower = (upper, *others)[-1]
    _ratio_axis(lower, [each.ratio for lines in panels.values() for some in lines.values() for each in some])
    lower.set_xlabel("time of the fastest peer / time of lt_runtime (right of the line lt_runtime is faster)")
    upper.legend(handles=_legend(), fontsize=8, loc="lower right")
    figure.suptitle(f"Speed-up over the fastest peer, {_gpu('layers')}", fontsize=11)


_PANELS: Final[Mapping[str, Sequence[str]]] = {
    "Blocks of two layers": ("layers",),
    "The same of shapes drawn by a seed": ("wide",),
    "Training steps of MLPs; narrow ones by width x hidden layers, with a point for each number of rows": (
        "steps",
        "narrow",
    ),
}
"""The suites by the title of their panel."""


def _by_shape(suites: Sequence[str]) -> dict[str, list[Comparison]]:
    """The comparisons of some suites, but those of calls, by the name of their line in the picture."""
    lines: dict[str, list[Comparison]] = {}
    for each in itertools.chain.from_iterable(map(comparisons, suites)):
        if not each.what.endswith(", called"):
            lines.setdefault(_line(each), []).append(each)
    return lines


def _line(each: Comparison) -> str:
    """The case without type and activation; less of it where a line has many cases."""
    words = {each.row["type"].upper(), _ACTIVATIONS[each.row["activation"]]}
    shape = [word for word in each.what.split() if word not in words]
    shorter = {"narrow": f"narrow {shape[0]}", "wide": each.row.get("stratum", "")}
    return shorter.get(each.suite, " ".join(shape))


def _point(axes: Any, each: Comparison, place: float) -> None:
    colour, marker = _KINDS[each.row["type"]]
    face = colour if each.row["activation"] == "gelu" else "none"
    axes.plot(each.ratio, place, marker, color=colour, markerfacecolor=face, markersize=5.5)
    if each.ratio < 1:
        axes.plot(each.ratio, place, "o", color="black", markerfacecolor="none", markersize=11)


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D

    made = []
    for kind, (colour, marker) in _KINDS.items():
        for activation, told in _ACTIVATIONS.items():
            face = colour if activation == "gelu" else "white"
            style = {"color": colour, "marker": marker, "markerfacecolor": face, "linestyle": "none"}
            made.append(Line2D([], [], label=f"{kind.upper()} {told}", **style))
    ring = {"color": "black", "marker": "o", "markerfacecolor": "none", "markersize": 11, "linestyle": "none"}
    return [*made, Line2D([], [], label="the peer is faster", **ring)]


def _ratio_axis(axes: Any, ratios: Sequence[float]) -> None:
    """A logarithmic axis with plain numbers, which reaches a little beyond the ratios and 1."""
    low, high = min((1.0, *ratios)) / 1.05, max((1.0, *ratios)) * 1.05
    axes.set_xscale("log")
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(low, high)


def _gpu(suite: str) -> str:
    return str(result(suite)["machine"]["gpu"])


# The roofline.


def _roofline(figure: Any) -> None:
    """Blocks of two layers between the copy's bandwidth and the most that any contender has reached."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure.set_size_inches(8, 5)
    axes, rows = figure.subplots(), rows_of("layers")
    intensities = [block.flops / block.bytes for block in map(_block, rows)]
    low, high = min(intensities) / 1.5, max(intensities) * 1.5
    bandwidth = result("kernels")["copy_gb_s"] / 1e3  # TB/s, so that with FLOP/byte it makes TFLOP/s
    for kind, (colour, marker) in _KINDS.items():
        some = [row for row in rows if row["type"] == kind]
        rates = {name: [_rate(row, name) for row in some] for name in ("lt", "torch_graph")}
        places = [block.flops / block.bytes for block in map(_block, some)]
        most = max(_rate(row, name) for row in some for name in row["us"])
        axes.plot([most / bandwidth, high], [most, most], "--", color=colour, linewidth=1.2)
        axes.text(
            high, most, f"most of any contender, {kind.upper()}: {most:.0f} ", ha="right", va="bottom", fontsize=8
        )
        axes.plot(places, rates["torch_graph"], "x", color=_GREY, markersize=5, alpha=0.8)
        axes.plot(places, rates["lt"], marker, color=colour, markersize=5, label=f"lt_runtime, {kind.upper()}")
    axes.plot([], [], "x", color=_GREY, label="PyTorch in a graph, the same blocks")
    axes.plot([low, high], [low * bandwidth, high * bandwidth], color="black", linewidth=1.2)
    axes.text(3.5, 3 * bandwidth, f"copy: {bandwidth:.2f} TB/s", ha="left", va="top", fontsize=8)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(None, 1300))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("FLOP per byte of the fewest that the block moves")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"Blocks of two layers, forward and backward, {_gpu('layers')}", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="lower right")


def _block(row: Json) -> Block:
    return Block("", *row["layer"], row["type"], row["activation"])


def _rate(row: Json, contender: str) -> float:
    """TFLOP/s."""
    return _block(row).flops / row["us"][contender] / 1e6


# The host's time of a call.


def _host(figure: Any) -> None:
    """A pair of bars for each call."""
    found = list(comparisons("host"))
    figure.set_size_inches(9, 1.6 + 0.42 * len(found))
    axes = figure.subplots()
    for place, each in enumerate(found):
        axes.barh(place - 0.2, each.ours, 0.38, color=_BLUE)
        axes.barh(place + 0.2, each.theirs, 0.38, color=_ORANGE, hatch="//", edgecolor="white")
        verdict = f"{each.ratio:.2f}×" if each.ratio >= 1 else f"{each.ratio:.2f}×, the peer is faster"
        axes.text(each.ours * 1.04, place - 0.2, f"{each.ours:.1f}", va="center", fontsize=7)
        told = f"{each.theirs:.1f} {label(each.peer)} ({verdict})"
        axes.text(each.theirs * 1.04, place + 0.2, told, va="center", fontsize=7)
    axes.set_yticks(range(len(found)), [each.what for each in found], fontsize=7)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set(xscale="log", xlim=(1, 8 * max(each.theirs for each in found)))
    ticks = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_xticks([], minor=True)
    axes.set_xlabel("host's time of a call, µs")
    figure.suptitle(f"lt_runtime (plain) and the fastest peer (hatched), {_gpu('host')}", fontsize=11)
    axes.grid(axis="x", alpha=0.25)


PLOTS: Final[Mapping[str, tuple[Sequence[str], Callable[[Any], None]]]] = {
    "speedup": (("layers", "wide", "steps", "narrow"), _speedup),
    "roofline": (("layers",), _roofline),
    "host": (("host",), _host),
}
"""By name of the file: the suites that a picture is drawn from, and what draws it."""
