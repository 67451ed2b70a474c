"""The plan cache from the command line: looked into, checked, carried to equal machines, cleared of what is useless."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from lt_runtime.cli import cache_files, cache_report
from lt_runtime.cli.cache_files import CacheFile
from lt_runtime.errors import ArgumentError
from lt_runtime.files import replace_file
from lt_runtime.store.document import Document, Section, UnusableError
from lt_runtime.store.keys import parse_key
from lt_runtime.store.plan_store import PlanStore, plans_directory
from lt_runtime.store.records import Json, to_json
from lt_runtime.tuner.names import describe


def run(arguments: argparse.Namespace) -> int:
    """Does what was asked and prints what came of it, for people or as one JSON object.

    Returns:
        The exit status: 0, or 1 if something is not as it should be.
    """
    act, show = _ACTIONS[arguments.action]
    result = act(arguments)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result, Console())
    return 0 if result["ok"] else 1


def _list(_: argparse.Namespace) -> Json:
    aside = [path.name for path in cache_files.set_aside()]
    return {
        "ok": True,
        "directory": str(plans_directory()),
        "files": [_summary(file) for file in cache_files.every_file()],
        "set_aside": aside,
    }


def _summary(file: CacheFile) -> Json:
    document, ours = file.document, cache_files.machine()
    differs = None
    if document is not None and ours:
        differs = cache_files.nearest(ours, document.fingerprint).differences(document.fingerprint)
    return {
        "name": file.path.name,
        "fault": file.fault,
        "fingerprint": None if document is None else asdict(document.fingerprint),
        "products": None if document is None else len(document.products.raw),
        "layers": None if document is None else len(document.layers.raw),
        "fits": None if differs is None else not differs,
        "differs": differs,
    }


def _show(arguments: argparse.Namespace) -> Json:
    pattern = arguments.pattern
    documents = [(file.path.name, file.document) for file in cache_files.every_file() if file.document is not None]
    entries = [
        {"file": name} | entry
        for name, document in documents
        for section in (document.products, document.layers)
        for entry in _matching(section, pattern)
    ]
    if not entries:
        raise ArgumentError(f"nothing in {plans_directory()} matches {pattern!r}")
    return {"ok": True, "entries": entries}


def _matching(section: Section[Any], pattern: str) -> Iterator[Json]:
    """The entries whose key, or the short name of whose problem, has a part that fits the pattern."""
    for key in sorted(section.raw):
        problem = _short_name(key)
        if any(fnmatchcase(text, f"*{pattern}*") for text in (key, problem)):
            yield {"problem": problem, "key": key} | _content(section, key)


def _content(section: Section[Any], key: str) -> Json:
    try:
        return {"entry": to_json(section.get(key))}
    except ValueError as error:
        return {"fault": str(error)}


def _short_name(key: str) -> str:
    try:
        return describe(parse_key(key))
    except ValueError:
        return "of unknown form"


def _verify(_: argparse.Namespace) -> Json:
    files = [_verdict(file) for file in cache_files.every_file()]
    return {"ok": all(file["ok"] for file in files), "files": files}


def _verdict(file: CacheFile) -> Json:
    """What is wrong with a file; one of another version is not damaged, nor can it be looked into."""
    faults = list(file.faults())
    return {"name": file.path.name, "ok": not faults or file.is_of_another_version, "faults": faults}


def _merge(arguments: argparse.Namespace) -> Json:
    stores = [(path, _store_for(path)) for path in arguments.files]
    merged = [(path, store, store.merge(path)) for path, store in stores]
    return {
        "ok": all(done.saved for _, _, done in merged),
        "merged": [{"file": str(path), "into": str(store.path)} | to_json(done) for path, store, done in merged],
    }


def _store_for(path: Path) -> PlanStore:
    """Where a file's entries belong: to this machine's, or to those of an equal one that the cache has already."""
    theirs = _read(path).fingerprint
    cached = [file.document.fingerprint for file in cache_files.every_file() if file.document is not None]
    known = [*cache_files.machine(), *cached]
    if not known:
        raise ArgumentError(f"there is neither a GPU here nor a file in {plans_directory()} to compare {path} with")
    differences = cache_files.nearest(known, theirs).differences(theirs)
    if differences:
        raise ArgumentError(f"{path} was measured elsewhere ({', '.join(differences)})")
    return PlanStore(plans_directory() / theirs.file_name, theirs)


def _read(path: Path) -> Document:
    try:
        return Document.read(path)
    except UnusableError as error:
        raise ArgumentError(f"{path} {error}") from None
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read ({error.strerror})") from None


def _export(arguments: argparse.Namespace) -> Json:
    path, target = cache_files.source(arguments.file), arguments.target
    document = _read(path)
    damaged = document.drop_damaged()
    if target.exists():
        raise ArgumentError(f"{target} exists already")
    try:
        replace_file(target, document.render())
    except OSError as error:
        raise ArgumentError(f"{target} cannot be written ({error.strerror})") from None
    counts = {"products": len(document.products.raw), "layers": len(document.layers.raw)}
    return {"ok": True, "file": str(path), "target": str(target), **counts, "damaged": damaged}


def _prune(arguments: argparse.Namespace) -> Json:
    files = list(cache_files.removable())
    if arguments.yes:
        for path, _ in files:
            _remove(path)
    return {
        "ok": True,
        "directory": str(plans_directory()),
        "removed": arguments.yes,
        "files": [{"name": path.name, "reason": reason} for path, reason in files],
    }


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
        path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    except OSError as error:
        raise ArgumentError(f"{path} cannot be removed ({error.strerror})") from None


_Action = tuple[Callable[[argparse.Namespace], Json], Callable[[Json, Console], None]]
_ACTIONS: Final[dict[str, _Action]] = {
    "list": (_list, cache_report.show_list),
    "show": (_show, cache_report.show_entries),
    "verify": (_verify, cache_report.show_verdict),
    "merge": (_merge, cache_report.show_merged),
    "export": (_export, cache_report.show_exported),
    "prune": (_prune, cache_report.show_pruned),
}
