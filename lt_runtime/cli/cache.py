"""The command `cache`: shows, checks, exports, merges and prunes the files of measured plans.

Only `merge` and `prune --yes` change the cache; all other actions leave even a damaged file in place.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from rich.text import Text

from lt_runtime import cublaslt
from lt_runtime.cli.output import show
from lt_runtime.cublaslt.library import version_text
from lt_runtime.errors import ArgumentError, LtError
from lt_runtime.files import TEMPORARY, replace_file
from lt_runtime.store.document import Document, Fingerprint, UnusableError, machine
from lt_runtime.store.entries import Entry, LayerEntry, ProductEntry
from lt_runtime.store.keys import Json, parse_key, to_json
from lt_runtime.store.plan_store import PlanStore, plans_directory
from lt_runtime.tables import Line, table
from lt_runtime.tuner.report import choice_in_words, describe, rejection_in_words, time_in_words

_ABANDONED_SECONDS: Final = 3600.0
"""Age from which a temporary file counts as left behind by a dead process."""
_SET_ASIDE: Final = "*.json.damaged-*", "*.json.foreign-*", "*.json.schema-*"
"""Patterns of the names under which the package sets unusable files aside."""
_Result: TypeAlias = tuple[Json, list[Line]]
"""The result of an action: the object that `--json` prints, and lines and tables for people."""


def run(arguments: argparse.Namespace) -> int:
    """Carries out one action of the command `cache` and prints the result, as text or as one JSON object.

    Returns:
        The exit status: 0, or 1 if `verify` found damage or a merge could not be written.
    """
    actions = {"list": _list, "show": _show, "verify": _verify, "merge": _merge, "export": _export, "prune": _prune}
    result, lines = actions[arguments.action](arguments)
    return show(result, lines, as_json=arguments.json)


class CacheFile(NamedTuple):
    """A file of the plan cache: its content, if it can be read, or the fault for which it cannot be used."""

    path: Path
    document: Document | None
    fault: str | None
    is_of_another_version: bool = False


def _look(path: Path, *, is_own: bool = False) -> CacheFile:
    try:
        document = Document.read(path, is_own=is_own)
    except UnusableError as error:
        return CacheFile(path, None, str(error), error.kind != "damaged")
    except OSError as error:
        return CacheFile(path, None, f"cannot be read ({error.strerror or error})")
    expected = document.fingerprint.file_name
    return CacheFile(path, document, None if path.name == expected else f"is never read: its name should be {expected}")


def _read(path: Path, *, is_own: bool = False) -> Document:
    file = _look(path, is_own=is_own)
    if file.document is None:
        raise ArgumentError(f"{path} {file.fault}")
    return file.document


def _files() -> list[CacheFile]:
    return [_look(path, is_own=True) for path in _paths("*.json")]


def _paths(*patterns: str) -> list[Path]:
    """The files of the cache whose names match a pattern, sorted; none if there is no cache yet.

    Raises:
        ArgumentError: the directory cannot be read, which `Path.glob` would ignore.
    """
    directory = plans_directory()
    try:
        paths = sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ArgumentError(f"{directory} cannot be read ({error.strerror})") from None
    return [path for path in paths if any(fnmatchcase(path.name, pattern) for pattern in patterns)]


def _differences(known: Iterable[Fingerprint], theirs: Fingerprint) -> list[str] | None:
    """The differences between a fingerprint and the most similar known one; None if no fingerprint is known."""
    return min((each.differences(theirs) for each in known), key=len, default=None)


def _list(_: argparse.Namespace) -> _Result:
    files, cells, lines = list[Json](), list[list[str]](), list[Line]([f"Plans in {plans_directory()}"])
    for path, document, fault, _is_other in _files():
        theirs = document.fingerprint if document else None
        counts = document.counts if document else dict.fromkeys(("products", "layers"))
        differs = _differences(machine(), theirs) if theirs else None
        fits = None if differs is None else not differs
        known = {"fingerprint": theirs and asdict(theirs), **counts, "fits": fits, "differs": differs}
        files.append({"name": path.name, "fault": fault, **known})
        fit = "yes" if fits else f"no: {', '.join(differs)}" if differs else "unknown: no GPU here"
        numbers = ["" if count is None else str(count) for count in counts.values()]
        cells.append([path.name, theirs.driver if theirs else "", *numbers, fault or fit])
    aside = [path.name for path in _paths(*_SET_ASIDE)]
    if cells:
        headings = ["File", "Driver", "Products", "Layers", "Fits this machine"]
        lines.append(table(None, headings, cells, texts={"File", "Driver", "Fits this machine"}))
        if aside:
            lines.append(f"Set aside, not used: {', '.join(aside)}")
    else:
        lines.append("None yet: nothing has been measured, or nothing kept.")
    return {"ok": True, "directory": str(plans_directory()), "files": files, "set_aside": aside}, lines


def _show(arguments: argparse.Namespace) -> _Result:
    """Action `show`: the entries in whose key or short problem name the pattern is found."""
    entries, lines = list[Json](), list[Line]()
    for path, document in [(file.path, file.document) for file in _files() if file.document]:
        for key in sorted(document.raw):
            try:
                problem = describe(parse_key(key))
            except ValueError:
                problem = "of unknown form"
            is_met = any(fnmatchcase(text, f"*{arguments.pattern}*") for text in (key, problem))
            if not is_met or (entry := document.get(key)) is None:
                continue
            entries.append({"file": path.name, "problem": problem, "key": key, "entry": to_json(entry)})
            lines.append(Text(problem, "bold"))
            lines += [f"  {name:<10}{text}" for name, text in (*_facts(entry), ("file", path.name), ("key", key))]
    if not entries:
        raise ArgumentError(f"nothing in {plans_directory()} matches {arguments.pattern!r}")
    return {"ok": True, "entries": entries}, lines


def _facts(entry: Entry) -> Iterator[tuple[str, str]]:
    """Yields the lines that `show` prints for an entry: a name and a value each."""
    yield "algorithm" if isinstance(entry, ProductEntry) else "strategy", choice_in_words(entry)
    if entry.barred is None and not entry.is_usable:
        yield "merged", "to be verified before its first use"
    yield "time", time_in_words(entry)
    for other in entry.alternatives if isinstance(entry, LayerEntry) else ():
        yield "slower", f"{choice_in_words(other)}: {other.us:.2f} µs"
    yield "measured", entry.when
    yield from (("rejected", rejection_in_words(each)) for each in entry.rejected)
    if entry.barred is not None:
        yield "barred", entry.barred


def _verify(_: argparse.Namespace) -> _Result:
    """Action `verify`: all faults of the cache's files.

    A file of another version counts as undamaged, and is not read.
    """
    files, lines = list[Json](), list[Line]()
    for file in _files():
        faults = [] if file.fault is None else [file.fault]
        if file.document is not None:
            faults.extend(file.document.faults())
        files.append({"name": file.path.name, "ok": not faults or file.is_of_another_version, "faults": faults})
        lines += [f"{file.path.name}:{'' if faults else ' sound'}", *(f"  {fault}" for fault in faults)]
    ok = all(file["ok"] for file in files)
    damaged = Text.assemble(("Damaged or not trusted:", "red"), " see above; it will not be used.")
    return {"ok": ok, "files": files}, [*lines, Text("Nothing is damaged.", "green") if ok else damaged]


def _merge(arguments: argparse.Namespace) -> _Result:
    """Action `merge`: merges files into the cache, after all files have been read and compared with its machines."""
    documents = [(path, _read(path)) for path in arguments.files]
    merged, lines = list[Json](), list[Line]()
    for (path, document), store in zip(documents, [_store_for(*each) for each in documents], strict=True):
        changed, saved = store.merge(document)
        names = {"file": str(path), "into": str(store.path)}
        merged.append(names | {"changed": changed, "saved": saved})
        lines.append(f"{path}: {changed} entries new or better, merged into {store.path}")
    return {"ok": all(file["saved"] for file in merged), "merged": merged}, lines


def _store_for(path: Path, document: Document) -> PlanStore:
    """Returns the plan store that a file is merged into: the one with the file's fingerprint.

    Raises:
        ArgumentError: the file was measured on a machine that differs from this one and from all in the cache; there is
            no machine to compare it with; or the file is damaged.
    """
    theirs = document.fingerprint
    differences = _differences([*machine(), *(file.document.fingerprint for file in _files() if file.document)], theirs)
    if differences is None:
        raise ArgumentError(f"there is neither a GPU here nor a file in {plans_directory()} to compare {path} with")
    if differences:
        raise ArgumentError(f"{path} was measured elsewhere ({', '.join(differences)})")
    if fault := next(document.faults(), None):
        raise ArgumentError(f"{path} is damaged ({fault})")
    return PlanStore(plans_directory() / theirs.file_name, theirs)


def _export(arguments: argparse.Namespace) -> _Result:
    """Action `export`: copies the cache's file of a given name, or this machine's file if no name is given."""
    ours, name, target = machine(), arguments.file, arguments.target
    if not name and len(ours) != 1:
        found = "GPUs of several kinds" if ours else "no usable GPU"
        raise ArgumentError(f"{found} here: name a file of the cache with --file, see `cache list`")
    path = plans_directory() / (name or ours[0].file_name)
    if name and Path(name).name != name:
        raise ArgumentError(f"--file is {name}; it must be the name of a file in {plans_directory()}")
    if name and not path.is_file():
        raise ArgumentError(f"--file is {name}, but {path} does not exist; see `cache list`")
    if not path.is_file():
        raise ArgumentError(f"nothing has been measured on this machine yet: {path} does not exist")
    document = _read(path, is_own=True)
    if os.path.lexists(target):
        raise ArgumentError(f"{target} exists already")
    try:
        replace_file(target, document.render())
    except OSError as error:
        raise ArgumentError(f"{target} cannot be written ({error.strerror})") from None
    counts = document.counts
    line = f"{target}: {counts['products']} products and {counts['layers']} layers from {path}"
    return {"ok": True, "file": str(path), "target": str(target), **counts}, [line]


def _prune(arguments: argparse.Namespace) -> _Result:
    directory, useless = plans_directory(), list(_useless())
    for path, _ in useless if arguments.yes else ():
        try:
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
        except OSError as error:
            raise ArgumentError(f"{path} cannot be removed ({error.strerror})") from None
    files = [{"name": path.name, "reason": reason} for path, reason in useless]
    title = "Removed from" if arguments.yes else "To be removed from"
    lines: list[Line] = [f"{title} {directory}:", *(f"  {path.name} ({reason})" for path, reason in useless)]
    if not useless:
        lines = [f"Nothing to remove in {directory}."]
    elif not arguments.yes:
        lines.append("Pass --yes to do it.")
    return {"ok": True, "directory": str(directory), "removed": arguments.yes, "files": files}, lines


def _useless() -> Iterator[tuple[Path, str]]:
    """Yields the cache's files that this installation will never read again, each with the reason."""
    yield from ((path, "set aside") for path in _paths(*_SET_ASIDE))
    for path in _paths(f"*.json.*{TEMPORARY}"):
        with contextlib.suppress(FileNotFoundError):  # the file's writer has renamed it meanwhile
            if time.time() - path.lstat().st_mtime > _ABANDONED_SECONDS:
                yield path, "never finished"
    installed: int | None = None
    with contextlib.suppress(LtError):
        installed = cublaslt.get_version()
    for file in _files():
        version = file.document.fingerprint.cublaslt if file.document else None
        if file.is_of_another_version:
            yield file.path, str(file.fault)
        elif version is not None and installed is not None and version != installed:
            yield file.path, f"of cuBLASLt {version_text(version)}; {version_text(installed)} is installed"
