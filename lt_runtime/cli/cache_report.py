"""Lines and tables of the cache commands, made from the data that `--json` prints."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from lt_runtime.store.entries import Entry, LayerEntry, ProductEntry, entry_of
from lt_runtime.store.keys import Json
from lt_runtime.tuner.report import choice_in_words, rejection_in_words, time_in_words


def list_lines(data: Json) -> Iterator[str | Table]:
    """The lines of `cache list`."""
    yield f"Plans in {data['directory']}"
    if not data["files"]:
        yield "None yet: nothing has been measured, or nothing kept."
        return
    right = [Column(heading, justify="right") for heading in ("Products", "Layers")]
    table = Table(Column("File", overflow="fold"), "Driver", *right, Column("Fits this machine", ratio=1), box=SIMPLE)
    for file in data["files"]:
        known = file["fingerprint"] is not None
        cells = (file["fingerprint"]["driver"], str(file["products"]), str(file["layers"])) if known else ("", "", "")
        table.add_row(*map(escape, (file["name"], *cells, _fit(file))))
    yield table
    if data["set_aside"]:
        yield f"Set aside, not used: {', '.join(data['set_aside'])}"


def _fit(file: Json) -> str:
    if file["fault"] is not None:
        return str(file["fault"])
    if file["fits"] is None:
        return "unknown: no GPU here"
    return "yes" if file["fits"] else f"no: {', '.join(file['differs'])}"


def entry_lines(data: Json) -> Iterator[str | Text]:
    """The lines of `cache show`."""
    for found in data["entries"]:
        yield Text(found["problem"], "bold")
        facts = _facts(entry_of(found["entry"]))
        yield from (f"  {name:<10}{text}" for name, text in (*facts, ("file", found["file"]), ("key", found["key"])))


def _facts(entry: Entry) -> Iterator[tuple[str, str]]:
    """Names and values of one entry's lines."""
    yield "algorithm" if isinstance(entry, ProductEntry) else "strategy", choice_in_words(entry)
    if isinstance(entry, ProductEntry) and entry.is_unproven:
        yield "merged", "to be verified before its first use"
    yield "time", time_in_words(entry)
    for other in entry.alternatives if isinstance(entry, LayerEntry) else ():
        yield "slower", f"{choice_in_words(other)}: {other.us:.2f} µs"
    yield "measured", entry.when
    yield from (("rejected", rejection_in_words(each)) for each in entry.rejected)
    if entry.barred is not None:
        yield "barred", entry.barred


def verdict_lines(data: Json) -> Iterator[str | Text]:
    """The lines of `cache verify`."""
    for file in data["files"]:
        yield f"{file['name']}:{'' if file['faults'] else ' sound'}"
        yield from (f"  {fault}" for fault in file["faults"])
    if data["ok"]:
        yield Text("Nothing is damaged.", "green")
    else:
        yield Text.assemble(("Damaged:", "red"), " see above; it will not be used.")


def merged_lines(data: Json) -> Iterator[str]:
    """The lines of `cache merge`."""
    for each in data["merged"]:
        yield f"{each['file']}: {each['changed']} entries new or better, merged into {each['into']}"


def exported_lines(data: Json) -> Iterator[str]:
    """The lines of `cache export`."""
    yield f"{data['target']}: {data['products']} products and {data['layers']} layers from {data['file']}"


def pruned_lines(data: Json) -> Iterator[str]:
    """The lines of `cache prune`, which removes the files or only lists them."""
    if not data["files"]:
        yield f"Nothing to remove in {data['directory']}."
        return
    yield f"{'Removed from' if data['removed'] else 'To be removed from'} {data['directory']}:"
    yield from (f"  {file['name']} ({file['reason']})" for file in data["files"])
    if not data["removed"]:
        yield "Pass --yes to do it."
