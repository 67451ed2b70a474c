"""The plan cache's store if its file is damaged, of another machine or version, or cannot be written."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import pytest

from lt_runtime.store import plan_store as store_module
from lt_runtime.store.document import Document
from lt_runtime.store.entries import ProductEntry
from lt_runtime.store.keys import SCHEMA
from lt_runtime.store.plan_store import PlanStore
from tests.support.plan_entries import H200, KEY, LAYER, OTHER, beside, product, product_key


@contextmanager
def one_warning(pattern: str) -> Iterator[None]:
    """Fails unless the block causes exactly one warning."""
    with pytest.warns(UserWarning, match=pattern) as caught:
        yield
    assert [str(each.message) for each in caught] == [str(caught[0].message)]


CURRENT = f'"schema": {SCHEMA}'.encode()
CONTENTS: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
    "truncated": (lambda content: content[: len(content) // 2], "is damaged", "damaged"),
    "empty": (lambda _: b"", "is damaged", "damaged"),
    "garbage": (lambda _: bytes(range(256)) * 16, "is damaged", "damaged"),
    "an entry": (lambda content: content.replace(b'"us": 52.5', b'"us": 52.4'), "the digest does not fit", "damaged"),
    "foreign": (lambda content: content.replace(b"580.95.05", b"570.10.01"), "driver 570.10.01 instead of", "foreign"),
    "older": (lambda content: content.replace(CURRENT, b'"schema": 0'), "version 0", "schema-0"),
    "newer": (lambda content: content.replace(CURRENT, b'"schema": 7'), "version 7", "schema-7"),
}
UNUSABLE = pytest.mark.parametrize(("change", "message", "kind"), CONTENTS.values(), ids=CONTENTS)


@UNUSABLE
@pytest.mark.usefixtures("filled")
def test_a_file_that_cannot_be_used_is_kept_and_costs_one_warning(
    path: Path, change: Callable[[bytes], bytes], message: str, kind: str
) -> None:
    content = change(path.read_bytes())
    path.write_bytes(content)
    store = PlanStore(path, H200)
    with one_warning(message):
        assert store.product(KEY) is None
        assert store.product(OTHER) is None
    assert path.with_name(f"{path.name}.{kind}-1").read_bytes() == content
    assert beside(path) == {f".{kind}-1"}
    assert store.put({OTHER: product()})
    assert PlanStore(path, H200).product(OTHER) == store.product(OTHER) is not None
    path.write_bytes(content)
    with one_warning(message):
        assert PlanStore(path, H200).put({OTHER: product()}), "found while writing"
    assert beside(path) == {f".{kind}-1", f".{kind}-2"}


@UNUSABLE
@pytest.mark.usefixtures("filled")
def test_a_file_that_cannot_be_used_nor_set_aside_stays_as_it_is(
    path: Path, change: Callable[[bytes], bytes], message: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = change(path.read_bytes())
    path.write_bytes(content)
    store, entry = PlanStore(path, H200), product()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing(errno.EROFS))
        with one_warning(message):
            assert store.product(KEY) is None
            assert store.product(KEY) is None
            assert not store.put({KEY: entry})
            assert store.product(KEY) == entry
        assert path.read_bytes() == content
    with one_warning(message):
        assert store.put({OTHER: product()}), "as soon as it is possible"
    assert path.with_name(f"{path.name}.{kind}-1").read_bytes() == content
    assert PlanStore(path, H200).product(KEY) == entry


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("where", "name", "number", "message"),
    [
        (os, "fsync", errno.ENOSPC, "No space left on device"),
        (os, "fsync", errno.EIO, "Input/output error"),
        (Path, "replace", errno.EACCES, "Permission denied"),
        (Path, "mkdir", errno.EROFS, "Read-only file system"),
        (filelock.FileLock, "acquire", errno.EDQUOT, ""),
    ],
)
def test_where_nothing_can_be_written_memory_works_at_the_cost_of_one_warning(
    where: Any, name: str, number: int, message: str, path: Path, filled: ProductEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, content = PlanStore(path, H200), path.read_bytes()
    entries = {OTHER: product()}
    with monkeypatch.context() as patch:
        patch.setattr(where, name, failing(number))
        with one_warning(f"cannot be written; plans are kept in memory alone.*{message}"):
            for key, entry in entries.items():
                assert not store.put({key: entry})
                assert store.product(key) == entry
        assert store.product(KEY) == filled
        assert path.read_bytes() == content
        assert beside(path) == set(), "nothing half written is left"
    assert store.put({LAYER: product()}), "as soon as it is possible, all is written"
    assert PlanStore(path, H200).product(OTHER) == entries[OTHER]


@contextmanager
def as_ordinary_user() -> Iterator[Path]:
    """A directory to which permissions apply: if this process is root, it becomes another user."""
    directory = Path(tempfile.mkdtemp())
    user = os.geteuid() or 65534
    os.chown(directory, user, -1)
    before = os.geteuid()
    os.seteuid(user)
    try:
        yield directory
    finally:
        os.seteuid(before)
        shutil.rmtree(directory)


@pytest.mark.parametrize(
    ("entered", "mode", "is_read", "message"),
    [
        ("directory", 0o500, True, "kept in memory alone.*Permission denied"),
        ("directory", 0, False, "kept in memory alone"),
        ("file", 0, False, "cannot be read .*Permission denied"),
    ],
)
def test_permissions_that_are_missing(entered: str, mode: int, is_read: bool, message: str) -> None:
    with as_ordinary_user() as directory:
        path, entry = directory / "plans" / H200.file_name, product()
        PlanStore(path, H200).put({KEY: entry})
        path.with_name(f"{path.name}.lock").unlink()
        content, denied = path.read_bytes(), path.parent if entered == "directory" else path
        before = denied.stat().st_mode
        denied.chmod(mode)
        store = PlanStore(path, H200)
        with one_warning(message):
            assert store.product(KEY) == (entry if is_read else None)
            assert not store.put({OTHER: product()})
            assert not store.put({LAYER: product()})
        assert store.product(OTHER) is not None
        denied.chmod(before)
        assert path.read_bytes() == content


def test_a_lock_that_is_never_free_is_waited_for_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_LOCK_SECONDS", 0.2)
    store, entries = PlanStore(path, H200), {product_key(index): product() for index in range(20)}
    path.parent.mkdir(parents=True)
    with filelock.FileLock(f"{path}.lock"):
        start = time.perf_counter()
        with one_warning("kept in memory alone.*lock"):
            assert not any(store.put({key: entry}) for key, entry in entries.items())
        assert time.perf_counter() - start < 2
        assert all(store.product(key) == entry for key, entry in entries.items())
        assert not path.exists()
    assert store.put()
    assert len(Document.read(path).raw) == 20
