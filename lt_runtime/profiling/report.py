"""A profile's report as data, and as tables, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lt_runtime.errors import ArgumentError
from lt_runtime.files import replace_file
from lt_runtime.profiling.layers import Kernel, Layer, Totals, label_of
from lt_runtime.tables import rendered, table

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA: Final = 1
_SHOWN_KERNELS: Final = 25
_LEAST_SHOWN_US: Final = 0.05
"""The table leaves out rows for time outside of layers that is shorter than this."""
_SHOWN_NAME: Final = 72


@dataclass(frozen=True)
class Report:
    """The result of a profile.

    Attributes:
        device: such as "cuda:0 (NVIDIA H200)" or "the host".
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
        content = json.loads(file.read_bytes())
        schema = content.pop("schema")
        if schema != SCHEMA:
            raise ArgumentError(f"{file} is a profile of schema {schema}; this version reads {SCHEMA}")
        content["layers"] = [Layer(**each) for each in content["layers"]]
        content["kernels"] = [Kernel(**each) for each in content["kernels"]]
        content["totals"] = Totals(**content["totals"])
        return Report(**content)
    except ArgumentError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{file} is no profile as prof.save writes it ({type(error).__name__}: {error})") from None


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def short(name: str) -> str:
    """A kernel's name for a table: the middle of a long name is left out."""
    half = _SHOWN_NAME // 2
    return name if len(name) <= _SHOWN_NAME else f"{name[:half]} … {name[-half + 3 :]}"
