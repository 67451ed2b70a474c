"""The plan cache's store in one process: what it finds, when it looks again, what it bars and merges."""

from __future__ import annotations

import json
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from lt_runtime.errors import ArgumentError
from lt_runtime.paths import CACHE_VARIABLE
from lt_runtime.store import plan_store as store_module
from lt_runtime.store.document import Document
from lt_runtime.store.entries import LayerEntry, ProductEntry
from lt_runtime.store.plan_store import PlanStore, plan_store
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
