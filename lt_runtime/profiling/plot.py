"""Draws a report: the roofline, and each layer's time beside its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lt_runtime.errors import ArgumentError, MissingLibraryError
from lt_runtime.files import replacing
from lt_runtime.profiling.ceilings import COPY
from lt_runtime.profiling.layers import Layer
from lt_runtime.profiling.report import Report

_COLOURS: Final = {
    "forward": "#3b75af", "backward": "#c85200", "loss": "#7f7f7f", "optimizer": "#5b8c5a", "input": "#b8a000",
    "": "#9c9c9c",
}  # fmt: skip
_MOST_BARS: Final = 40


def check_format(file: Path) -> str:
    """The image format that a file's suffix names; PNG if there is no suffix.

    Raises:
        ArgumentError: matplotlib cannot write the format.
        MissingLibraryError: matplotlib is not installed.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise MissingLibraryError("a plot needs matplotlib: pip install 'lt_runtime[plot]'") from error
    kind, known = file.suffix.removeprefix(".").lower() or "png", FigureCanvasBase.get_supported_filetypes()
    if kind not in known:
        raise ArgumentError(f"the plot's file is {file}; accepted suffixes are {', '.join(sorted(known))}")
    return kind


def plot(report: Report, file: Path) -> None:
    """Writes the drawing in the format of the file's suffix.

    Raises:
        ArgumentError: the suffix is of no known format.
        MissingLibraryError: matplotlib is not installed.
    """
    kind = check_format(file)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    longest = sorted(report.layers, key=lambda each: -each.us)[:_MOST_BARS]
    layers = [each for each in report.layers if each in longest and each.us > 0][::-1]  # matplotlib draws bars upwards
    figure = Figure(figsize=(15, max(5.0, 2.5 + 0.3 * len(layers))), layout="constrained")
    FigureCanvasAgg(figure)
    times, moved, roof = figure.subplots(1, 3, width_ratios=(3, 2, 4))
    _bars(times, layers, [each.us for each in layers], "time of a step, µs")
    _bars(moved, layers, [each.bytes / 1e6 for each in layers], "bytes moved, MB")
    moved.set_yticklabels([])
    _roofline(roof, [each for each in layers if each.bytes], report.ceilings)
    figure.suptitle(f"{report.device}: {report.totals.step_us:.0f} µs a step")
    with replacing(file) as out:
        figure.savefig(out, format=kind, dpi=110)


def _bars(axes: Any, layers: Sequence[Layer], values: Sequence[float], label: str) -> None:
    places = range(len(layers))
    axes.barh(places, values, color=[_COLOURS[each.phase] for each in layers])
    axes.set_yticks(places, [f"{each.label} {each.phase}".strip() for each in layers])
    axes.set_xlabel(label)
    axes.margins(y=0.01)
    axes.grid(axis="x", alpha=0.3)


def _roofline(axes: Any, layers: Sequence[Layer], ceilings: Mapping[str, float]) -> None:
    """FLOP/s over FLOPs per byte of the layers with matrix products, below the measured ceilings."""
    points = [(each.flops / each.bytes, each.tflops, each) for each in layers if each.flops]
    for place, (intensity, tflops, layer) in enumerate(sorted(points, key=lambda point: point[1])):
        axes.scatter(intensity, tflops, color=_COLOURS[layer.phase], zorder=3)
        line = {"arrowstyle": "-", "color": _COLOURS[layer.phase], "linewidth": 0.7, "alpha": 0.6}
        at = {"xytext": (1.03, (place + 0.5) / len(points)), "textcoords": "axes fraction"}
        axes.annotate(
            f"{layer.label} {layer.phase}".strip(), (intensity, tflops), **at, fontsize=8, va="center", arrowprops=line
        )
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="TFLOP/s")
    axes.grid(which="both", alpha=0.2)
    axes.minorticks_off()
    rates = {kind: rate for kind, rate in ceilings.items() if kind != COPY}
    if COPY in ceilings and rates and points:
        low, high = min(x for x, *_ in points) / 10, max(x for x, *_ in points) * 10
        for kind, flops in rates.items():
            corners = sorted({low, min(max(flops / ceilings[COPY], low), high), high})
            axes.plot(corners, [min(flops, x * ceilings[COPY]) / 1e12 for x in corners], label=kind, linewidth=1)
        axes.set_ylim(min(y for _, y, _ in points) / 10, 2e-12 * max(rates.values()))
        axes.legend(title="ceilings, measured", loc="lower right")
