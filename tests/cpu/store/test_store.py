"""The plan cache's store in one process and in several: look-ups, re-reading of a changed file, bars, merging."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from lt_runtime.paths import CACHE_VARIABLE
from lt_runtime.store import document
from lt_runtime.store.document import Document, UnusableError
from lt_runtime.store.entries import ProductEntry
from lt_runtime.store.keys import SCHEMA
from lt_runtime.store.plan_store import PlanStore, plan_store
from tests.support.machine import HasGpus
from tests.support.plan_entries import H200, KEY, LATER, LAYER, OTHER, beside, layer, product, product_key


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


def test_a_file_is_read_once_and_again_only_if_it_has_changed(path: Path, filled: ProductEntry) -> None:
    store = PlanStore(path, H200)
    assert store.product(KEY) == filled
    content, times = path.read_bytes(), path.stat()
    path.write_bytes(b"x" * len(content))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for key in (KEY, OTHER, KEY, OTHER, LAYER):  # reading the changed file at this point would cause a warning
        assert store.product(key) == (filled if key == KEY else None)
    path.write_bytes(content)
    PlanStore(path, H200).put({OTHER: product()})
    assert store.product(OTHER) is not None


def test_a_barred_entry_is_barred_for_all_until_there_is_a_better_one(path: Path, filled: ProductEntry) -> None:
    store, other = PlanStore(path, H200), PlanStore(path, H200)
    assert other.product(KEY) == filled
    store.bar(KEY, filled, "known to be wrong")
    assert store.product(KEY) is PlanStore(path, H200).product(KEY) is None
    assert Document.read(path).get(KEY) == replace(filled, barred="known to be wrong")
    better = product(rejected=(), when=LATER)
    other.put({KEY: better})
    for each in (store, other, PlanStore(path, H200)):
        found = each.product(KEY)
        assert found is not None
        assert (found.algorithm, found.rejected[0].algorithm) == (better.algorithm, filled.algorithm)


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
    assert len(Document.read(path).raw) == 80


def test_a_file_from_an_equal_machine_is_merged(path: Path, filled: ProductEntry, tmp_path: Path) -> None:
    other, better = tmp_path / "other.json", product(when=LATER)
    PlanStore(path, H200).bar(KEY, filled, "wrong")
    PlanStore(other, H200).put({KEY: better, OTHER: product()}, {LAYER: layer()})
    store = PlanStore(path, H200)
    assert store.merge(Document.read(other)) == (3, True)
    assert PlanStore(path, H200).layer(LAYER) is not None
    for each in (store, PlanStore(path, H200)):
        assert each.product(KEY) is each.product(OTHER) is None, "nobody has verified it here"
        assert each.has_unproven
        found = each.unproven(KEY)
        assert found is not None
        assert replace(found, rejected=better.rejected) == replace(better, algorithm=b"")
    assert store.merge(Document.read(other)) == (0, True)


@pytest.mark.parametrize("algorithm", [b"!" * 64, b"~" * 64, b"\0" * 64])
def test_what_a_machine_gave_away_does_not_replace_its_own(path: Path, tmp_path: Path, algorithm: bytes) -> None:
    store, entry, copy = PlanStore(path, H200), product(algorithm=algorithm), tmp_path / "copy.json"
    store.put({KEY: entry})
    copy.write_bytes(path.read_bytes())
    assert store.merge(Document.read(copy)) == (0, True)
    assert store.product(KEY) == entry
    assert not store.has_unproven


def test_plans_of_another_machine_are_not_merged(path: Path) -> None:
    other = Document(replace(H200, gpu="NVIDIA H100", driver="1"))
    with pytest.raises(UnusableError, match="gpu NVIDIA H100 instead of NVIDIA H200, driver 1 instead of 580"):
        PlanStore(path, H200).merge(other)
    assert not path.exists()


def test_the_store_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpus: HasGpus) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    has_gpus(H200, H200)
    first, second = plan_store(0), plan_store(1)
    assert first is second
    assert first.path == tmp_path / "plans" / H200.file_name
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    assert plan_store(0) is not first


def test_a_file_of_an_older_version_costs_one_line_and_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpus: HasGpus
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    has_gpus(H200)
    older = tmp_path / "plans" / f"{H200.file_name.rpartition('-')[0]}-01234567.json"
    older.parent.mkdir()
    older.write_text(f'{{\n"schema": {SCHEMA - 1},\n"products": {{}}\n}}\n')
    content = older.read_bytes()
    with pytest.warns(UserWarning, match="is of another version of lt_runtime: it stays and is not used"):
        store = plan_store(0)
    assert plan_store(0) is store, "without another warning, which would be an error"
    assert store.product(KEY) is None
    assert store.put({KEY: product()})
    assert older.read_bytes() == content


def test_an_entry_of_a_file_is_made_once_and_only_when_it_is_asked_for(path: Path) -> None:
    keys = [product_key(index) for index in range(1, 100)]
    PlanStore(path, H200).put({key: product() for key in keys})
    with mock.patch.object(document, "entry_of", wraps=document.entry_of) as made:
        store = PlanStore(path, H200)
        assert store.product(keys[0]) is store.product(keys[0])
        assert store.product(keys[1]) is not None
        assert made.call_count == 2


def test_nothing_of_all_this_warns_without_need(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = PlanStore(path, H200)
        store.put({KEY: product()})
        path.unlink()
        assert store.product(OTHER) is None
        assert store.put({OTHER: product()})
    assert set(Document.read(path).raw) == {KEY, OTHER}


ROOT = Path(__file__).parents[3]
PROCESSES, ENTRIES = 8, 100

WRITERS = """
import os, sys
from pathlib import Path
from lt_runtime.store.plan_store import PlanStore
from tests.support.plan_entries import H200, product

path, processes, entries, batch = Path(sys.argv[1]), *map(int, sys.argv[2:])
writers = []
for number in range(processes):
    writers.append(os.fork())
    if not writers[-1]:
        store = PlanStore(path, H200)
        for start in range(0, entries, batch):
            assert store.put({f"{number}.{index}": product() for index in range(start, start + batch)})
        os._exit(0)
sys.exit(any(os.waitpid(writer, 0)[1] for writer in writers))
"""


def test_eight_processes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plans" / H200.file_name
    command = [sys.executable, "-W", "error", "-c", WRITERS, *map(str, (path, PROCESSES, ENTRIES, 10))]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    document = Document.read(path)
    wanted = {f"{number}.{index}" for number in range(PROCESSES) for index in range(ENTRIES)}
    assert set(document.raw) == wanted
    assert {file.name for file in path.parent.iterdir()} <= {path.name, f"{path.name}.lock"}
