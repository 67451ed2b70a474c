"""The output of the cache commands for people, made from the data that `--json` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lt_runtime.store.records import Json
from lt_runtime.tuner.report import algorithm_in_words, strategy_in_words


def show_list(data: Json, console: Console) -> None:
    """Prints what `cache list` found."""
    _print(console, f"Plans in {data['directory']}")
    if not data["files"]:
        _print(console, "None yet: nothing has been measured, or nothing kept.")
        return
    right = [Column(heading, justify="right") for heading in ("Products", "Layers")]
    table = Table(Column("File", overflow="fold"), "Driver", *right, Column("Fits this machine", ratio=1), box=SIMPLE)
    for file in data["files"]:
        known = file["fingerprint"] is not None
        cells = (file["fingerprint"]["driver"], str(file["products"]), str(file["layers"])) if known else ("", "", "")
        table.add_row(*map(escape, (file["name"], *cells, _fit(file))))
    console.print(table)
    if data["set_aside"]:
        _print(console, f"Set aside, not used: {', '.join(data['set_aside'])}")


def _fit(file: Json) -> str:
    if file["fault"] is not None:
        return str(file["fault"])
    if file["fits"] is None:
        return "unknown: no GPU here"
    return "yes" if file["fits"] else f"no: {', '.join(file['differs'])}"


def show_entries(data: Json, console: Console) -> None:
    """Prints what `cache show` found."""
    for found in data["entries"]:
        console.print(f"[bold]{escape(found['problem'])}[/]", highlight=False, soft_wrap=True)
        facts = [("damaged", found["fault"])] if "fault" in found else _facts(found["entry"])
        for name, text in (*facts, ("file", found["file"]), ("key", found["key"])):
            _print(console, f"  {name:<10}{text}")


def _facts(entry: Json) -> Iterator[tuple[str, str]]:
    """Names and values of one entry's lines."""
    if "algorithm" in entry:
        yield "algorithm", algorithm_in_words(entry["config"])
        gain = f"{entry['first_us'] / entry['us']:.2f} times as fast as the heuristic's first" if entry["us"] else ""
        yield "time", f"{entry['us']:.2f} µs, spread {entry['spread']:.2f} µs; best of {entry['candidates']}, {gain}"
    else:
        yield "strategy", strategy_in_words(entry["strategy"])
        yield "time", f"{entry['us']:.2f} µs"
        for other in entry["alternatives"]:
            yield "slower", f"{other['us']:.2f} µs ({strategy_in_words(other['strategy'])})"
    yield "measured", f"{entry['when']}, effort {entry['effort']}"
    for each in entry["rejected"]:
        what = strategy_in_words(each["strategy"]) if "strategy" in each else algorithm_in_words(each["config"])
        yield "rejected", f"{each['reason']} ({what})"
    if entry["barred"] is not None:
        yield "barred", entry["barred"]


def show_verdict(data: Json, console: Console) -> None:
    """Prints what `cache verify` found."""
    for file in data["files"]:
        _print(console, f"{file['name']}:{'' if file['faults'] else ' sound'}")
        for fault in file["faults"]:
            _print(console, f"  {fault}")
    verdict = "[green]Nothing is damaged.[/]" if data["ok"] else "[red]Damaged:[/] see above; it will not be used."
    console.print(verdict, highlight=False, soft_wrap=True)


def show_merged(data: Json, console: Console) -> None:
    """Prints what `cache merge` did."""
    for each in data["merged"]:
        _print(console, f"{each['file']}: {each['changed']} entries new or better, merged into {each['into']}")
        _print_left_out(each["damaged"], console)


def show_exported(data: Json, console: Console) -> None:
    """Prints what `cache export` wrote."""
    _print(console, f"{data['target']}: {data['products']} products and {data['layers']} layers from {data['file']}")
    _print_left_out(data["damaged"], console)


def show_pruned(data: Json, console: Console) -> None:
    """Prints what `cache prune` removed or would remove."""
    if not data["files"]:
        _print(console, f"Nothing to remove in {data['directory']}.")
        return
    _print(console, f"{'Removed from' if data['removed'] else 'To be removed from'} {data['directory']}:")
    for file in data["files"]:
        _print(console, f"  {file['name']} ({file['reason']})")
    if not data["removed"]:
        _print(console, "Pass --yes to do it.")


def _print_left_out(damaged: Mapping[str, str], console: Console) -> None:
    for key, fault in damaged.items():
        _print(console, f"  left out: {key} ({fault})")


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
