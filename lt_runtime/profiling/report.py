"""A profile's report as data, and its forms: tables, CSV, JSON, a drawing, and a trace of the profile's events."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lt_runtime.errors import ArgumentError, MissingLibraryError
from lt_runtime.files import parse_json, read_regular, replace_file, replacing
from lt_runtime.profiling.cupti.records import Activity
from lt_runtime.profiling.layers import Kernel, Layer, Totals, label_of
from lt_runtime.profiling.timer import RANGES
from lt_runtime.profiling.work import COPY
from lt_runtime.store.keys import from_json
from lt_runtime.tables import rendered, table

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA: Final = 1
_SHOWN_KERNELS: Final = 25
_LEAST_SHOWN_US: Final = 0.05
"""The printed table leaves out a row for time outside of layers if it has no kernels and takes less than this many
microseconds a step.
"""
_SHOWN_NAME: Final = 72
_CATEGORIES: Final = {
    "memcpy": "gpu_memcpy", "memset": "gpu_memset", "call": "cuda_runtime", "synchronization": "cuda_runtime",
}  # fmt: skip
"""Maps the package's names of kinds of activities to those of PyTorch's profiler Kineto, where they differ."""
_COLOURS: Final = {
    "forward": "#3b75af", "backward": "#c85200", "loss": "#7f7f7f", "optimizer": "#5b8c5a", "input": "#b8a000",
    "": "#9c9c9c",
}  # fmt: skip
_MOST_BARS: Final = 40


@dataclass(frozen=True)
class Report:
    """The result of a profile.

    Attributes:
        device: the profiled device, such as "cuda:0 (NVIDIA H200)" or "the host".
        timed_steps: the number of steps behind `layers`. traced_steps: the number of steps behind `kernels`.
        ceilings: highest rates of this GPU, measured: FLOP/s by type, and bytes/s as "copy".
        notes: sentences that name the missing parts of the report, with reasons.
    """

    device: str = ""
    timed_steps: int = 0
    traced_steps: int = 0
    layers: Sequence[Layer] = ()
    kernels: Sequence[Kernel] = ()
    totals: Totals = field(default_factory=Totals)
    ceilings: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def save(self, file: Path) -> None:
        """Writes the report as JSON."""
        content = {"schema": SCHEMA, **asdict(self)}
        replace_file(file, json.dumps(content, indent=1).encode() + b"\n")

    def to_csv(self, directory: Path) -> None:
        """Writes `layers.csv` and `kernels.csv`."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, kind, entries in (("layers", Layer, self.layers), ("kernels", Kernel, self.kernels)):
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, [each.name for each in fields(kind)])
            writer.writeheader()
            writer.writerows(map(asdict, entries))
            replace_file(directory / f"{name}.csv", text.getvalue().encode())

    def lines(self) -> Iterator[str | Table]:
        """The report as tables and lines of text."""
        if self.layers:
            yield self._layer_table()
        if self.kernels:
            yield self._kernel_table()
        yield from self._sentences()

    def __str__(self) -> str:
        return "\n".join(map(rendered, self.lines()))

    def _layer_table(self) -> Table:
        whole, on_gpu = self.totals.step_us, any(layer.us != layer.host_us for layer in self.layers)
        headings = ["layer", "", "µs", "±", "share", "host µs", "MB", "TFLOP/s", "GB/s", "bound", "reached"]
        headings += ["kernels", "kernel µs", "strategy"]
        lines = []
        for layer in self.layers:
            if not layer.name and not layer.kernels and max(layer.us, layer.host_us) < _LEAST_SHOWN_US:
                continue
            cells = [layer.label, layer.phase, f"{layer.us:.1f}", f"{layer.spread_us:.1f}"]
            cells += [f"{layer.us / whole:.1%}" if whole else "", f"{layer.host_us:.1f}" if on_gpu else ""]
            cells += [f"{layer.bytes / 1e6:.2f}" if layer.bytes else "", _rate(layer.tflops) if layer.flops else ""]
            cells += [_rate(layer.gbytes) if layer.bytes else "", layer.bound]
            cells.append(f"{layer.fraction:.0%}" if layer.bound else "")
            cells += [f"{layer.kernels:g}", f"{layer.kernel_us:.1f}"] if self.kernels else ["", ""]
            lines.append([*cells, layer.strategy])
        title = f"Layers: {self.timed_steps} steps on {self.device}"
        return table(title, headings, lines, texts={"layer", "", "bound", "strategy"})

    def _kernel_table(self) -> Table:
        headings = ["share", "µs a step", "count", "mean", "median", "min", "max", "std", "layer", "", "kernel"]
        lines = []
        for each in self.kernels[:_SHOWN_KERNELS]:
            times = (each.total_us, each.count, each.mean_us, each.median_us, each.min_us, each.max_us, each.std_us)
            name = f"{short(each.name)}{' (copies that the plan chose)' if each.is_planned_copy else ''}"
            numbers = [f"{each.share:.1%}", *(f"{value:.2f}" for value in times)]
            lines.append([*numbers, label_of(each.layer, each.phase), each.phase, name])
        rest = self.kernels[_SHOWN_KERNELS:]
        if rest:
            share, total = sum(each.share for each in rest), sum(each.total_us for each in rest)
            lines.append([f"{share:.1%}", f"{total:.2f}", *[""] * 8, f"{len(rest)} more kernels"])
        return table(f"Kernels: {self.traced_steps} steps", headings, lines, texts={"layer", "", "kernel"})

    def _sentences(self) -> Iterator[str]:
        totals = self.totals
        if totals.phase_us:
            parts = [f"{phase or 'rest'} {us:.1f}" for phase, us in totals.phase_us.items()]
            yield f"A step takes {totals.step_us:.1f} µs: {', '.join(parts)}. The host spends {totals.host_us:.1f} µs."
        if self.kernels:
            beside = totals.kernel_us - totals.busy_us
            yield (
                f"Kernels take {totals.kernel_us:.1f} µs of a step, {beside:.1f} µs of it beside others; "
                f"{totals.unattributed_us:.1f} µs are in no range. While traced, the GPU paused {totals.gaps:.1f} "
                f"times, for {totals.gap_us:.1f} µs. Synchronisations: {totals.synchronizations:.2g}, allocations: "
                f"{totals.allocations:.2g}."
            )
        if not self.layers and not self.kernels:
            yield "Nothing was profiled."
        yield from (f"Note: {note}" for note in self.notes)


def load(file: Path) -> Report:
    """Reads a file that `Report.save` wrote.

    Raises:
        ArgumentError: the file is not a report, or has an unsupported schema version.
        OSError: the file cannot be read.
    """
    try:
        content = parse_json(read_regular(file, 1 << 24))  # in the JSON a kernel takes about 400 bytes
        if not isinstance(content, dict) or "schema" not in content:
            raise ValueError("it does not say its version")
        if content["schema"] == SCHEMA:
            report = from_json(Report, {name: each for name, each in content.items() if name != "schema"})
            whole = asdict(report)
            for figures in (*whole["layers"], *whole["kernels"], whole["totals"]):
                if any(isinstance(each, (int, float)) and each < 0 for each in figures.values()):
                    raise ValueError(f"a figure is negative: {figures}")
            return report
    except ValueError as error:
        raise ArgumentError(f"{file} is no profile as prof.save writes it ({error})") from None
    raise ArgumentError(f"{file} is a profile of schema {content['schema']!r:.80}; this version reads {SCHEMA}")


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def short(name: str) -> str:
    """A kernel's name for a table: the middle of a long name is left out."""
    half = _SHOWN_NAME // 2
    return name if len(name) <= _SHOWN_NAME else f"{name[:half]} … {name[-half + 3 :]}"


def save_trace(file: Path, activities: Sequence[Activity], device: str) -> None:
    """Writes a trace in Kineto's form, which Perfetto and HTA open; its times are relative to its first event."""
    content = {"schemaVersion": 1, "deviceProperties": [{"name": device}], "traceEvents": [*trace_events(activities)]}
    replace_file(file, json.dumps(content).encode())


def trace_events(activities: Sequence[Activity]) -> Iterator[dict[str, Any]]:
    """Events in Chrome's trace format, with times in µs.

    These are complete events (X), flows from calls to the work that they started (s, f), and names of threads (M).
    """
    base = min((each.start_ns for each in activities), default=0)
    started = {each.correlation for each in activities if each.device >= 0 and each.correlation}
    for device, stream in dict.fromkeys((each.device, each.stream) for each in activities if each.device >= 0):
        name = {"name": "ranges, by events" if stream == RANGES else f"stream {stream}"}
        yield {"ph": "M", "name": "thread_name", "pid": device, "tid": stream, "args": name}
    for each in activities:
        is_on_host, start = each.device < 0, round((each.start_ns - base) / 1e3, 3)
        place = {"pid": os.getpid(), "tid": each.thread} if is_on_host else {"pid": each.device, "tid": each.stream}
        args: dict[str, Any] = {"range": " > ".join(each.range)}
        if not each.kind.endswith("user_annotation"):
            args |= {"correlation": each.correlation, "bytes": each.size, "graph id": each.graph}
            args |= {} if is_on_host else {"device": each.device, "stream": each.stream, "graph node id": each.node}
        event = {"ph": "X", "cat": _CATEGORIES.get(each.kind, each.kind), "name": each.name or each.kind, **place}
        yield {**event, "ts": start, "dur": round(max(each.us, 0.0), 3), "args": args}
        if each.correlation in started:
            ends = {"ph": "s"} if is_on_host else {"ph": "f", "bp": "e"}
            yield {**ends, "cat": "ac2g", "name": "ac2g", "id": each.correlation, **place, "ts": start}


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
    """Draws a report's roofline and layers to a file, in the image format that the file's suffix names.

    Raises:
        ArgumentError: the file's suffix names no format that matplotlib writes.
        MissingLibraryError: matplotlib is not installed.
    """
    kind = check_format(file)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    longest = sorted(report.layers, key=lambda each: -each.us)[:_MOST_BARS]
    # reversed order: matplotlib draws the first bar at the bottom
    layers = [each for each in report.layers if each in longest and each.us > 0][::-1]
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
    """Draws FLOP/s over FLOPs per byte of each layer with matrix products, and the measured ceilings as lines above."""
    points = [(each.flops / each.bytes, each.tflops, each) for each in layers if each.flops]
    for place, (intensity, tflops, layer) in enumerate(sorted(points, key=lambda point: point[1])):
        axes.scatter(intensity, tflops, color=_COLOURS[layer.phase], zorder=3)
        line = {"arrowstyle": "-", "color": _COLOURS[layer.phase], "linewidth": 0.7, "alpha": 0.6}
        at = {"xytext": (1.03, (place + 0.5) / len(points)), "textcoords": "axes fraction"}
        label = f"{layer.label} {layer.phase}".strip()
        axes.annotate(label, (intensity, tflops), **at, fontsize=8, va="center", arrowprops=line)
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
