"""The plan cache's store in one process: what it finds, what it refuses, and what it does where it cannot write."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import pytest

from lt_runtime.errors import ArgumentError
from lt_runtime.paths import CACHE_VARIABLE
from lt_runtime.planning import store as store_module
from lt_runtime.planning.document import Document
from lt_runtime.planning.entries import LayerEntry, ProductEntry
from lt_runtime.planning.store import PlanStore, plan_store
from tests.plan_entries import H200, LATER, layer, layer_key, product, product_key

KEY, OTHER = product_key(64), product_key(128)
LAYER = layer_key(64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plans" / H200.file_name


@pytest.fixture
def filled(path: Path) -> ProductEntry:
    """The file holds this entry under KEY."""
    entry = product()
    assert PlanStore(path, H200).put({KEY: entry})
    return entry


@contextmanager
def one_warning(pattern: str) -> Iterator[None]:
    """Exactly one warning comes of what is done inside."""
    with pytest.warns(UserWarning, match=pattern) as caught:
        yield
    assert [str(each.message) for each in caught] == [str(caught[0].message)]


def beside(path: Path) -> set[str]:
    """What follows the file's name in the names of those beside it, the lock left out."""
    return {file.name.removeprefix(path.name) for file in path.parent.iterdir()} - {"", ".lock"}


def test_an_empty_cache_knows_nothing_and_looking_makes_nothing(path: Path) -> None:
    store = PlanStore(path, H200)
    assert store.product(KEY) is None
    assert store.layer(LAYER) is None
    assert not path.parent.exists()


def test_what_is_put_is_found_by_this_and_by_others(path: Path) -> None:
    store, entry, split = PlanStore(path, H200), product(), layer()
    assert store.put({KEY: entry}, {LAYER: split})
    for each in (store, PlanStore(path, H200)):
        assert each.product(KEY) == entry
        assert each.layer(LAYER) == split
        assert each.product(LAYER) is None
        assert each.layer(KEY) is None
    assert beside(path) == set()


def test_others_see_what_is_put_later(path: Path) -> None:
    early, entry, better = PlanStore(path, H200), product(), product(when=LATER)
    assert early.product(KEY) is None
    PlanStore(path, H200).put({KEY: entry})
    assert early.product(KEY) == entry
    PlanStore(path, H200).put({KEY: better, OTHER: product()})
    assert early.product(KEY) == entry, "what is known is not looked for again"
    assert early.product(OTHER) is not None
    assert early.product(KEY) == better


def test_writers_keep_what_others_wrote(path: Path) -> None:
    first, second = PlanStore(path, H200), PlanStore(path, H200)
    for index in range(4):
        assert (first, second)[index % 2].put({product_key(index): product()})
    assert all(PlanStore(path, H200).product(product_key(index)) for index in range(4))


def test_a_file_is_read_once_and_again_only_if_it_has_changed(
    path: Path, filled: ProductEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    read = Document.read

    def counting(path: Path) -> Document:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(Document, "read", counting)
    store = PlanStore(path, H200)
    for key in (KEY, OTHER, KEY, OTHER, LAYER):
        store.product(key)
    assert reads == [path]
    PlanStore(path, H200).put({OTHER: product()})
    reads.clear()
    assert store.product(KEY) == filled
    assert reads == []
    assert store.product(OTHER) is not None
    assert reads == [path]


def test_a_deeper_search_is_not_forgotten(path: Path) -> None:
    store, deep = PlanStore(path, H200), product(effort="deep")
    store.put({KEY: deep})
    store.put({KEY: product(when=LATER)})
    assert store.product(KEY) == PlanStore(path, H200).product(KEY) == deep


def test_an_entry_that_is_refused_is_barred_for_all(path: Path, filled: ProductEntry) -> None:
    asked: list[tuple[str, ProductEntry]] = []

    def refuse(key: str, entry: ProductEntry) -> str:
        asked.append((key, entry))
        return "known to be wrong"

    store = PlanStore(path, H200)
    assert store.product(KEY, lambda key, entry: None) == filled
    assert store.product(KEY, refuse) is None
    assert asked == [(KEY, filled)]
    assert store.product(KEY) is None
    assert PlanStore(path, H200).product(KEY, refuse) is None
    assert len(asked) == 1, "what is barred is not asked about again"
    stored = Document.read(path).products.get(KEY)
    assert stored == replace(filled, barred="known to be wrong")
    better = product(rejected=())
    PlanStore(path, H200).put({KEY: better})
    found = store.product(KEY)
    assert found is not None
    assert (found.algorithm, found.rejected[0].algorithm) == (better.algorithm, filled.algorithm)


def test_a_layer_is_validated_too(path: Path) -> None:
    store = PlanStore(path, H200)
    store.put(layers={LAYER: layer()})
    seen: list[LayerEntry] = []

    def refuse(_: str, entry: LayerEntry) -> str:
        seen.append(entry)
        return "unknown strategy"

    assert store.layer(LAYER, refuse) is None
    assert len(seen) == 1


def test_a_validation_may_wait_for_another_thread(path: Path, filled: ProductEntry) -> None:
    store = PlanStore(path, H200)

    def validate(key: str, _: ProductEntry) -> str | None:
        other = threading.Thread(target=store.product, args=(key,), daemon=True)
        other.start()
        other.join(timeout=10)
        return "the other thread waits" if other.is_alive() else None

    assert store.product(KEY, validate) == filled


CONTENTS: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
    "truncated": (lambda content: content[: len(content) // 2], "is damaged", "damaged"),
    "empty": (lambda _: b"", "is damaged", "damaged"),
    "garbage": (lambda _: bytes(range(256)) * 16, "is damaged", "damaged"),
    "foreign": (lambda content: content.replace(b"580.95.05", b"570.10.01"), "driver 570.10.01 instead of", "foreign"),
    "older": (lambda content: content.replace(b'"schema": 1', b'"schema": 0'), "version 0", "schema-0"),
    "newer": (lambda content: content.replace(b'"schema": 1', b'"schema": 7'), "version 7", "schema-7"),
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


def test_damaged_entries_are_set_aside_and_the_rest_is_used(path: Path) -> None:
    good, split = product(), layer()
    PlanStore(path, H200).put({KEY: good, OTHER: product()}, {LAYER: split})
    data = json.loads(path.read_bytes())
    data["products"][OTHER]["algorithm"] = "00" * 64
    path.write_text(json.dumps(data))
    content = path.read_bytes()
    store = PlanStore(path, H200)
    assert store.product(KEY) == good
    with one_warning("has 1 damaged entries"):
        assert store.product(OTHER) is None
    assert store.product(OTHER) is None
    assert beside(path) == {".damaged-1"}
    assert path.with_name(f"{path.name}.damaged-1").read_bytes() == content
    for each in (store, PlanStore(path, H200)):
        assert each.product(KEY) == good
        assert each.layer(LAYER) == split
        assert each.product(OTHER) is None
    assert store.put({OTHER: product()})


def test_two_that_find_the_same_damage_keep_one_copy(path: Path, filled: ProductEntry) -> None:
    data = json.loads(path.read_bytes())
    data["products"][OTHER] = {}
    path.write_text(json.dumps(data))
    stores = PlanStore(path, H200), PlanStore(path, H200)
    for store in stores:
        assert store.product(KEY) == filled
    for store in stores:
        with one_warning("damaged entries"):
            assert store.product(OTHER) is None
    assert beside(path) == {".damaged-1"}


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
    """A directory of a user whom permissions bind, as they do not root."""
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


def test_a_directory_that_is_read_only() -> None:
    with as_ordinary_user() as directory:
        path, entry = directory / H200.file_name, product()
        PlanStore(path, H200).put({KEY: entry})
        path.with_name(f"{path.name}.lock").unlink()
        directory.chmod(0o500)
        store = PlanStore(path, H200)
        assert store.product(KEY) == entry
        with one_warning("kept in memory alone.*Permission denied"):
            assert not store.put({OTHER: product()})
            assert not store.put({LAYER: product()})
        assert store.product(OTHER) is not None
        directory.chmod(0o700)


def test_a_damaged_file_in_a_directory_that_is_read_only() -> None:
    with as_ordinary_user() as directory:
        path = directory / H200.file_name
        path.write_text("{")
        directory.chmod(0o500)
        store = PlanStore(path, H200)
        with one_warning("is damaged .* and is not used .*Permission denied"):
            assert store.product(KEY) is None
            assert store.product(OTHER) is None
        directory.chmod(0o700)


def test_a_file_that_may_not_be_read_is_not_written_either() -> None:
    with as_ordinary_user() as directory:
        path = directory / H200.file_name
        PlanStore(path, H200).put({KEY: product()})
        content = path.read_bytes()
        path.chmod(0)
        store = PlanStore(path, H200)
        with one_warning("cannot be read .*Permission denied"):
            assert store.product(KEY) is None
            assert not store.put({OTHER: product()})
        assert store.product(OTHER) is not None
        path.chmod(0o600)
        assert path.read_bytes() == content


def test_a_directory_that_may_not_be_entered() -> None:
    with as_ordinary_user() as directory:
        inner = directory / "plans"
        inner.mkdir(mode=0)
        store, entry = PlanStore(inner / H200.file_name, H200), product()
        assert store.product(KEY) is None
        with one_warning("kept in memory alone"):
            assert not store.put({KEY: entry})
        assert store.product(KEY) == entry


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "plans").touch()
    store, entry = PlanStore(tmp_path / "plans" / H200.file_name, H200), product()
    assert store.product(KEY) is None
    with one_warning("kept in memory alone"):
        assert not store.put({KEY: entry})
    assert store.product(KEY) == entry


def test_a_lock_that_is_never_free_is_waited_for_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_LOCK_SECONDS", 0.2)
    store, entries = PlanStore(path, H200), {product_key(index): product() for index in range(20)}
    path.parent.mkdir()
    with filelock.FileLock(f"{path}.lock"):
        start = time.perf_counter()
        with one_warning("kept in memory alone.*lock"):
            assert not any(store.put({key: entry}) for key, entry in entries.items())
        assert time.perf_counter() - start < 2
        assert all(store.product(key) == entry for key, entry in entries.items())
        assert not path.exists()
    assert store.put()
    assert len(Document.read(path).products.raw) == 20


def test_threads_share_a_store(path: Path) -> None:
    store = PlanStore(path, H200)
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for index in range(10):
                key = product_key(100 * number + index)
                assert store.put({key: product()})
                assert store.product(key) is not None
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert len(Document.read(path).products.raw) == 80


def test_a_file_from_an_equal_machine_is_merged(path: Path, filled: ProductEntry, tmp_path: Path) -> None:
    other, better = tmp_path / "other.json", product(when=LATER)
    PlanStore(other, H200).put({KEY: better, OTHER: product()}, {LAYER: layer()})
    store = PlanStore(path, H200)
    merged = store.merge(other)
    assert (merged.changed, merged.damaged, merged.saved) == (3, {}, True)
    assert store.product(KEY) == better != filled
    assert PlanStore(path, H200).layer(LAYER) is not None
    assert store.merge(other).changed == 0


def test_merging_leaves_out_what_is_damaged(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    PlanStore(other, H200).put({KEY: product(), OTHER: product()})
    data = json.loads(other.read_bytes())
    data["products"][KEY]["us"] = 1.0
    other.write_text(json.dumps(data))
    content = other.read_bytes()
    merged = PlanStore(path, H200).merge(other)
    assert (merged.changed, list(merged.damaged), merged.saved) == (1, [KEY], True)
    assert other.read_bytes() == content
    assert beside(path) == set()


def test_what_cannot_be_merged(path: Path, tmp_path: Path) -> None:
    store, other = PlanStore(path, H200), tmp_path / "other.json"
    with pytest.raises(ArgumentError, match=r"other\.json cannot be read"):
        store.merge(other)
    other.write_text("[")
    with pytest.raises(ArgumentError, match=r"other\.json is damaged"):
        store.merge(other)
    PlanStore(tmp_path / "h100.json", replace(H200, gpu="NVIDIA H100", driver="1")).put({KEY: product()})
    with pytest.raises(ArgumentError, match="gpu NVIDIA H100 instead of NVIDIA H200, driver 1 instead of 580"):
        store.merge(tmp_path / "h100.json")
    assert not path.exists()


def test_the_store_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(store_module, "fingerprint", lambda device: H200)
    first, second = plan_store(0), plan_store(1)
    assert first is second
    assert first.path == tmp_path / "plans" / H200.file_name
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    assert plan_store(0) is not first


def test_a_thousand_entries_are_found_fast(path: Path) -> None:
    keys = [product_key(index) for index in range(1000)]
    PlanStore(path, H200).put({key: product() for key in keys})
    store = PlanStore(path, H200)
    start = time.perf_counter()
    assert all(store.product(key) for key in keys)
    first = time.perf_counter() - start
    start = time.perf_counter()
    assert all(store.product(key) for key in keys)
    assert not any(store.product(key + "x") for key in keys)
    again = time.perf_counter() - start
    assert first < 1.0, "under 1 ms each, the file's reading included"
    assert again < 0.1


def test_nothing_of_all_this_warns_without_need(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = PlanStore(path, H200)
        store.put({KEY: product()})
        path.unlink()
        assert store.product(OTHER) is None
        assert store.put({OTHER: product()})
    assert set(Document.read(path).products.raw) == {KEY, OTHER}
