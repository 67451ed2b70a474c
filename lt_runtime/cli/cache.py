"""The command `cache`: shows, checks, exports, merges and prunes the files of measured plans.

Only `merge` and `prune --yes` change the cache; a damaged file is not renamed by the others.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

from lt_runtime import cublaslt
from lt_runtime.cli import cache_report
from lt_runtime.cli.output import show
from lt_runtime.cublaslt.library import version_text
from lt_runtime.errors import ArgumentError, LtError
from lt_runtime.files import TEMPORARY, replace_file
from lt_runtime.store.document import Document, UnusableError
from lt_runtime.store.entries import entry_of
from lt_runtime.store.fingerprint import Fingerprint, machine
from lt_runtime.store.keys import Json, parse_key, to_json
from lt_runtime.store.plan_store import PlanStore, plans_directory
from lt_runtime.tuner.report import describe

_ABANDONED_SECONDS: Final = 3600.0
"""Age from which an unfinished file counts as left behind by a dead process."""


def run(arguments: argparse.Namespace) -> int:
    """Carries out one action and prints the result, for people or as one JSON object.

    Returns:
        The exit status: 0, or 1 if `verify` found damage or a merge could not be written.
    """
    act, lines = _ACTIONS[arguments.action]
    result = act(arguments)
    return show(result, lines(result), as_json=arguments.json)


class CacheFile(NamedTuple):
    """A file of the cache: its content, if it can be read, and a fault of the file as a whole."""

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
    return [_look(path, is_own=True) for path in _matching_names("*.json")]


def _set_aside() -> list[Path]:
    """Unusable files that the package has renamed."""
    return [path for kind in ("damaged", "foreign", "schema") for path in _matching_names(f"*.json.{kind}-*")]


def _matching_names(pattern: str) -> list[Path]:
    """The files of the cache whose names match a pattern, sorted; none if there is no cache yet.

    Raises:
        ArgumentError: the directory cannot be read, which `Path.glob` would ignore.
    """
    directory = plans_directory()
    try:
        return [path for path in sorted(directory.iterdir()) if fnmatchcase(path.name, pattern)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ArgumentError(f"{directory} cannot be read ({error.strerror})") from None


def _differences(known: Iterable[Fingerprint], theirs: Fingerprint) -> list[str] | None:
    """The differences between a fingerprint and the most similar known one; None if none is known."""
    return min((each.differences(theirs) for each in known), key=len, default=None)


def _list(_: argparse.Namespace) -> Json:
    files, aside = [_summary(file) for file in _files()], [path.name for path in _set_aside()]
    return {"ok": True, "directory": str(plans_directory()), "files": files, "set_aside": aside}


def _summary(file: CacheFile) -> Json:
    summary = {"name": file.path.name, "fault": file.fault}
    if file.document is None:
        return summary | dict.fromkeys(("fingerprint", "products", "layers", "fits", "differs"))
    theirs = file.document.fingerprint
    differs = _differences(machine(), theirs)
    known = {"fits": None if differs is None else not differs, "differs": differs}
    return summary | {"fingerprint": asdict(theirs)} | file.document.counts | known


def _show(arguments: argparse.Namespace) -> Json:
    documents = [(file.path.name, file.document) for file in _files() if file.document is not None]
    entries = [{"file": name} | found for name, each in documents for found in _matching(each, arguments.pattern)]
    if not entries:
        raise ArgumentError(f"nothing in {plans_directory()} matches {arguments.pattern!r}")
    return {"ok": True, "entries": entries}


def _matching(document: Document, pattern: str) -> Iterator[Json]:
    """The entries whose key, or whose problem's short name, has a part that matches the pattern."""
    for key in sorted(document.raw):
        try:
            problem = describe(parse_key(key))
        except ValueError:
            problem = "of unknown form"
        if not any(fnmatchcase(text, f"*{pattern}*") for text in (key, problem)):
            continue
        entry = document.get(key)
        if entry is not None:
            yield {"problem": problem, "key": key, "entry": to_json(entry)}


def _verify(_: argparse.Namespace) -> Json:
    files = [_verdict(file) for file in _files()]
    return {"ok": all(file["ok"] for file in files), "files": files}


def _verdict(file: CacheFile) -> Json:
    """Everything that is wrong with a file. One of another version is not damaged, and its entries cannot be read."""
    faults = [] if file.fault is None else [file.fault]
    for key, entry in file.document.raw.items() if file.document is not None else ():
        try:
            entry_of(entry)
            parse_key(key)
        except ValueError as error:
            faults.append(f"the entry {key} is damaged ({error})")
    return {"name": file.path.name, "ok": not faults or file.is_of_another_version, "faults": faults}


def _merge(arguments: argparse.Namespace) -> Json:
    """Every file is read and compared before any is merged."""
    documents = [(path, _read(path)) for path in arguments.files]
    merged = []
    for (path, document), store in zip(documents, [_store_for(*each) for each in documents], strict=True):
        changed, saved = store.merge(document)
        names = {"file": str(path), "into": str(store.path)}
        merged.append(names | {"changed": changed, "saved": saved})
    return {"ok": all(file["saved"] for file in merged), "merged": merged}


def _store_for(path: Path, document: Document) -> PlanStore:
    """The store of this machine, or of an equal one that the cache knows already, to which a file's entries belong."""
    theirs = document.fingerprint
    differences = _differences([*machine(), *(file.document.fingerprint for file in _files() if file.document)], theirs)
    if differences is None:
        raise ArgumentError(f"there is neither a GPU here nor a file in {plans_directory()} to compare {path} with")
    if differences:
        raise ArgumentError(f"{path} was measured elsewhere ({', '.join(differences)})")
    return PlanStore(plans_directory() / theirs.file_name, theirs)


def _export(arguments: argparse.Namespace) -> Json:
    path, target = _source(arguments.file), arguments.target
    document = _read(path, is_own=True)
    if target.exists():
        raise ArgumentError(f"{target} exists already")
    try:
        replace_file(target, document.render())
    except OSError as error:
        raise ArgumentError(f"{target} cannot be written ({error.strerror})") from None
    return {"ok": True, "file": str(path), "target": str(target)} | document.counts


def _source(name: str | None) -> Path:
    """The cache's file of that name, or this machine's file if no name is given.

    Raises:
        ArgumentError: there is no such file, or this machine has GPUs of several kinds, or none.
    """
    if name is not None:
        path = plans_directory() / name
        if not path.is_file():
            raise ArgumentError(f"--file is {name}, but {path} does not exist; see `cache list`")
        return path
    if len(ours := machine()) != 1:
        found = "GPUs of several kinds" if ours else "no usable GPU"
        raise ArgumentError(f"{found} here: name a file of the cache with --file, see `cache list`")
    path = plans_directory() / ours[0].file_name
    if not path.is_file():
        raise ArgumentError(f"nothing has been measured on this machine yet: {path} does not exist")
    return path


def _prune(arguments: argparse.Namespace) -> Json:
    useless = list(_useless())
    for path, _ in useless if arguments.yes else ():
        try:
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
        except OSError as error:
            raise ArgumentError(f"{path} cannot be removed ({error.strerror})") from None
    files = [{"name": path.name, "reason": reason} for path, reason in useless]
    return {"ok": True, "directory": str(plans_directory()), "removed": arguments.yes, "files": files}


def _useless() -> Iterator[tuple[Path, str]]:
    """Files that this installation will never read again, each with the reason."""
    yield from ((path, "set aside") for path in _set_aside())
    for path in _matching_names(f"*.json.*{TEMPORARY}"):
        if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
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


_Action = tuple[Callable[[argparse.Namespace], Json], Callable[[Json], Iterator[Any]]]
_ACTIONS: Final[dict[str, _Action]] = {
    "list": (_list, cache_report.list_lines),
    "show": (_show, cache_report.entry_lines),
    "verify": (_verify, cache_report.verdict_lines),
    "merge": (_merge, cache_report.merged_lines),
    "export": (_export, cache_report.exported_lines),
    "prune": (_prune, cache_report.pruned_lines),
}
