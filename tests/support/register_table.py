"""The committed table of the kernels' registers, with the digest of each family at the time of its measurement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.kernel_usage import ARCHITECTURES, Usage

USAGE_PROPERTY: Final = "usage"
"""Name of the property of a test's report under which a `Usage` is stored, as a tuple."""
TABLE: Final = Path(__file__).parents[2] / "benchmarks" / "results" / "registers.md"


@dataclass(frozen=True)
class Record:
    """Contents of the table.

    Attributes:
        usages: the usage of every kernel on every architecture; `parameters` is not recorded, and 0.
        digests: of each source.
        compiler: the exact build.
    """

    usages: tuple[Usage, ...]
    digests: Mapping[str, str]
    compiler: str

    def of(self, source: str) -> list[Usage]:
        """Returns the usages of one source's variants."""
        return [usage for usage in self.usages if _source_of(usage) == source]

    def with_family(self, source: str, found: Sequence[Usage], digest: str, compiler: str) -> Record:
        """Returns a copy of the record in which one source's variants are replaced."""
        others = [usage for usage in self.usages if _source_of(usage) != source]
        return Record((*others, *found), {**self.digests, source: digest}, compiler)

    def document(self) -> str:
        """Formats the table as text, which `read` parses."""
        variants = len({usage.variant for usage in self.usages})
        return (
            "# Registers, spills and shared memory\n\n"
            f"Written by `python -m tests.compile_matrix` with {self.compiler}: "
            f"{variants} variants of {len(self.digests)} files.\n\n"
            "## The most registers a thread of any variant takes\n\n"
            f"{summary(self.usages)}\n"
            "## What was compiled\n\n"
            "A file whose digest is still the same is not compiled again.\n\n"
            f"{markdown(['file', 'digest'], sorted(self.digests.items()))}\n"
            "## Every variant\n\n"
            "Registers a thread; the most bytes of shared memory a block, on any architecture.\n\n"
            f"{details(self.usages)}"
        )


def _source_of(usage: Usage) -> str:
    return usage.variant.partition("-")[0]


def read(text: str) -> Record:
    """Parses a table's text; returns an empty record if there is none."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    found = tuple(usage for row in rows if len(row) == len(_details_heading()) for usage in _usages(row))
    digests = {row[0]: row[1] for row in rows if len(row) == 2 and row[0].endswith(".cu")}
    return Record(found, digests, text.partition(" with ")[2].partition(": ")[0])


def _usages(row: Sequence[str]) -> Iterator[Usage]:
    kernel, variant, *registers, shared = row
    if not shared.isdigit():  # the table's heading line has no number
        return
    for architecture, count in zip(ARCHITECTURES, registers, strict=True):
        yield Usage(variant, kernel, architecture, int(count), 0, 0, int(shared), 0, double=False)


def summary(found: Iterable[Usage]) -> str:
    """Formats the most registers of any variant, by kernel and architecture; bold if any variant spills."""
    most: dict[tuple[str, str], int] = {}
    spilled = set()
    for usage in found:
        place = usage.kernel, usage.architecture
        most[place] = max(most.get(place, 0), usage.registers)
        if usage.spills:
            spilled.add(place)
    kernels = sorted({kernel for kernel, _ in most})

    def cell(kernel: str, architecture: str) -> str:
        place = kernel, architecture
        return f"**{most[place]}**" if place in spilled else str(most.get(place, "-"))

    return markdown(
        ["kernel", *ARCHITECTURES], [[name, *(cell(name, each) for each in ARCHITECTURES)] for name in kernels]
    )


def _details_heading() -> list[str]:
    return ["kernel", "variant", *ARCHITECTURES, "shared"]


def details(found: Iterable[Usage]) -> str:
    """Formats a line for each kernel of each variant: registers by architecture, and the most shared memory of any."""
    rows: dict[tuple[str, str], dict[str, Usage]] = {}
    for usage in found:
        rows.setdefault((usage.kernel, usage.variant), {})[usage.architecture] = usage
    return markdown(
        _details_heading(),
        [
            [
                kernel,
                variant,
                *(str(by_architecture[each].registers) for each in ARCHITECTURES),
                str(max(usage.shared for usage in by_architecture.values())),
            ]
            for (kernel, variant), by_architecture in sorted(rows.items())
        ],
    )


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are padded, so that its source is readable too."""
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    lines = [heading, ["-" * width for width in widths], *rows]
    return "".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |\n"
        for line in lines
    )
