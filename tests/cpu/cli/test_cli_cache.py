"""The commands of the plan cache: their output as text and as JSON, their changes, their refusals."""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lt_runtime import cublaslt
from lt_runtime.cli import main
from lt_runtime.errors import MissingLibraryError
from lt_runtime.paths import CACHE_VARIABLE
from lt_runtime.store.document import Document
from lt_runtime.store.entries import ProductEntry
from lt_runtime.store.fingerprint import Fingerprint
from lt_runtime.store.keys import SCHEMA
from lt_runtime.store.plan_store import PlanStore
from tests.support.machine import HasGpus
from tests.support.plan_entries import H200, LATER, layer, layer_key, product, product_key

H100 = replace(H200, gpu="NVIDIA H100 [PCIe]", multiprocessors=114)
OTHER_DRIVER = replace(H200, driver="570.86.15")
PRODUCT, LAYER = product_key(8192), layer_key(8192)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of an empty cache."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


@pytest.fixture(autouse=True)
def here(has_gpus: HasGpus, monkeypatch: pytest.MonkeyPatch) -> HasGpus:
    """Says which GPUs this machine has, which has none before that. H200's cuBLASLt is installed."""
    monkeypatch.setattr(cublaslt, "get_version", lambda: H200.cublaslt)
    return has_gpus


def fill(plans: Path, fingerprint: Fingerprint = H200) -> Path:
    path = plans / fingerprint.file_name
    PlanStore(path, fingerprint).put({PRODUCT: product()}, {LAYER: layer()})
    return path


def damage_entry(path: Path) -> None:
    data = json.loads(path.read_bytes())
    data["entries"][PRODUCT]["us"] = 1.0
    path.write_text(json.dumps(data))


def run(*arguments: str) -> int:
    return main(["cache", *arguments])


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    capsys.readouterr()
    assert run(*arguments, "--json") == status
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command refuses."""
    capsys.readouterr()
    assert run(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("lt_runtime cache: ")
    assert captured.err.count("\n") == 1
    return captured.err


def names(plans: Path) -> set[str]:
    return {file.name for file in plans.iterdir() if file.suffix != ".lock"}


def test_an_empty_cache(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    assert "None yet" in capsys.readouterr().out
    assert as_json(capsys, "list") == {"ok": True, "directory": str(plans), "files": [], "set_aside": []}
    assert as_json(capsys, "verify") == {"ok": True, "files": []}
    assert as_json(capsys, "prune")["files"] == []
    assert f"nothing in {plans} matches 'gelu'" in refused(capsys, "show", "gelu")
    assert not plans.exists()


@pytest.mark.parametrize(
    "arguments", [("list",), ("show", "gelu"), ("verify",), ("verify", "--json"), ("prune",), ("prune", "--yes")]
)
@pytest.mark.parametrize("kind", ["file", "loop", "forbidden"])
def test_a_cache_that_cannot_be_read(
    plans: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    arguments: tuple[str, ...],
) -> None:
    plans.parent.mkdir()
    if kind == "file":
        plans.touch()
    elif kind == "loop":
        plans.symlink_to(plans)
    else:
        plans.mkdir()

        def refuse(path: Path) -> None:  # as the system does, except to root
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

        monkeypatch.setattr(Path, "iterdir", refuse)
    reasons = {"file": "Not a directory", "loop": "Too many levels of symbolic links", "forbidden": "Permission denied"}
    assert refused(capsys, *arguments) == f"lt_runtime cache: {plans} cannot be read ({reasons[kind]})\n"


def test_list_says_what_fits(plans: Path, here: HasGpus, capsys: pytest.CaptureFixture[str]) -> None:
    for fingerprint in (H200, H100, OTHER_DRIVER):
        fill(plans, fingerprint)
    found = {each["name"]: each for each in as_json(capsys, "list")["files"]}
    assert {each["fits"] for each in found.values()} == {None}
    assert found[H100.file_name]["fingerprint"] == asdict(H100)
    assert (found[H200.file_name]["products"], found[H200.file_name]["layers"]) == (1, 1)
    here(H200)
    found = {each["name"]: each for each in as_json(capsys, "list")["files"]}
    assert [found[each.file_name]["fits"] for each in (H200, H100, OTHER_DRIVER)] == [True, False, False]
    assert found[OTHER_DRIVER.file_name]["differs"] == ["driver 570.86.15 instead of 580.95.05"]
    here(H100, OTHER_DRIVER)
    found = {each["name"]: each for each in as_json(capsys, "list")["files"]}
    assert [found[each.file_name]["fits"] for each in (H200, H100, OTHER_DRIVER)] == [False, True, True]


def test_list_for_people(plans: Path, here: HasGpus, capsys: pytest.CaptureFixture[str]) -> None:
    fill(plans)
    fill(plans, H100)
    (plans / "broken.json").write_text("{")
    (plans / f"{H200.file_name}.damaged-1").touch()
    assert run("list") == 0
    text = capsys.readouterr().out
    assert text.count("unknown: no GPU here") == 2
    assert "is damaged" in text
    assert f"Set aside, not used: {H200.file_name}.damaged-1" in text
    here(H200)
    assert run("list") == 0
    text = capsys.readouterr().out
    assert H200.file_name in text
    assert "yes" in text
    assert "no: gpu NVIDIA H100 [PCIe] instead of NVIDIA H200" in text


def test_show_finds_by_key_and_by_short_name(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = fill(plans)
    PlanStore(path, H200).put({product_key(64): product()})
    both = {"matmul 8192x3072x768 bfloat16 none", "forward 8192x3072x768 bfloat16 gelu"}
    for pattern, problems in {
        "8192x3072x768": both,
        "matmul*768": {"matmul 8192x3072x768 bfloat16 none", "matmul 64x3072x768 bfloat16 none"},
        "bfloat16 gelu": {"forward 8192x3072x768 bfloat16 gelu"},
        'Problem*"rows": 8192': both,
        LAYER: {"forward 8192x3072x768 bfloat16 gelu"},
    }.items():
        found = as_json(capsys, "show", pattern)["entries"]
        assert {each["problem"] for each in found} == problems
    (found,) = as_json(capsys, "show", "gelu")["entries"]
    assert (found["file"], found["key"]) == (path.name, LAYER)
    assert found["entry"]["strategy"] == dict(layer().strategy)
    assert found["entry"]["us"] == 110.0


def test_show_for_people(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PlanStore(plans / H200.file_name, H200).put({PRODUCT: product(barred="known to be wrong")}, {LAYER: layer()})
    assert run("show", "8192") == 0
    text = capsys.readouterr().out
    for line in (
        "algorithm id 66, tile 128x128, split-K 1",
        "time      52.50 µs, spread 0.25 µs; best of 14 measured, 1.14 times as fast as untuned",
        "rejected  id 21: slow: 3.1 times the best",
        "barred    known to be wrong",
        "strategy  gelu_aux_bias, keeps preactivation",
        "slower    none, keeps preactivation: 121.00 µs",
        "rejected  gelu_bias: not supported",
        "measured  2026-01-31T12:00:00Z",
        f"key       {PRODUCT}",
        f"key       {LAYER}",
    ):
        assert f"  {line}\n" in text


def test_show_says_what_is_damaged(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage_entry(fill(plans))
    (found,) = as_json(capsys, "show", "matmul")["entries"]
    assert found["fault"] == "its digest does not fit"
    assert run("show", "matmul") == 0
    assert "damaged   its digest does not fit" in capsys.readouterr().out


def test_verify_finds_sound_files_and_files_of_another_version(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = fill(plans)
    assert run("verify") == 0
    text = capsys.readouterr().out
    assert f"{path.name}: sound" in text
    assert "Nothing is damaged." in text
    path.write_bytes(path.read_bytes().replace(f'"schema": {SCHEMA}'.encode(), b'"schema": 99'))
    (found,) = as_json(capsys, "verify")["files"]
    assert (found["ok"], found["faults"]) == (True, [f"is of version 99 of the format, not {SCHEMA}"])


@pytest.mark.parametrize("damage", ["entry", "truncated", "renamed", "key"])
def test_verify_finds_damage_and_changes_nothing(plans: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, message = fill(plans), ""
    if damage == "entry":
        damage_entry(path)
        message = f"the entry {PRODUCT} is damaged (its digest does not fit)"
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-20])
        message = "is damaged"
    elif damage == "renamed":
        path = path.rename(path.with_name("mine.json"))
        message = f"is never read: its name should be {H200.file_name}"
    else:
        PlanStore(path, H200).put({"Matmul(8192)": product()})
        message = "'Matmul(8192)' is not the key of a problem"
    content = path.read_bytes()
    (found,) = as_json(capsys, "verify", status=1)["files"]
    assert (found["name"], found["ok"]) == (path.name, False)
    (fault,) = found["faults"]
    assert message in fault
    assert run("verify") == 1
    assert message in capsys.readouterr().out
    assert path.read_bytes() == content
    assert names(plans) == {path.name}


def test_a_cache_carried_to_an_equal_machine(
    tmp_path: Path, here: HasGpus, monkeypatch: pytest.MonkeyPatch, plans: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here(H200)
    fill(plans)
    exported = tmp_path / "exported.json"
    done = as_json(capsys, "export", str(exported))
    assert (done["target"], done["products"], done["layers"]) == (str(exported), 1, 1)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "other"))
    (done,) = as_json(capsys, "merge", str(exported))["merged"]
    target = tmp_path / "other" / "plans" / H200.file_name
    assert (done["into"], done["changed"], done["damaged"], done["saved"]) == (str(target), 2, {}, True)
    assert (plans / H200.file_name).read_bytes() == exported.read_bytes()
    theirs, ours = Document.read(exported), Document.read(target)
    entry = theirs.get(PRODUCT)
    assert isinstance(entry, ProductEntry)
    assert ours.get(PRODUCT) == replace(entry, algorithm=b"")  # it is to be rebuilt
    assert ours.get(LAYER) == theirs.get(LAYER)
    assert run("merge", str(exported), str(exported)) == 0
    assert capsys.readouterr().out.count("0 entries new or better") == 2


def test_merging_without_a_gpu_goes_by_what_the_cache_has(
    tmp_path: Path, plans: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    PlanStore(other, H200).put({PRODUCT: product(when=LATER)})
    message = refused(capsys, "merge", str(other))
    assert f"neither a GPU here nor a file in {plans} to compare {other} with" in message
    path = fill(plans)
    assert run("merge", str(other)) == 0
    found = Document.read(path).get(PRODUCT)
    assert found is not None
    assert found.when == LATER


def test_what_merge_refuses_changes_nothing(
    tmp_path: Path, here: HasGpus, plans: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here(H200)
    fill(plans, H100)
    good, foreign, missing = tmp_path / "good.json", tmp_path / "foreign.json", tmp_path / "missing.json"
    PlanStore(good, H200).put({PRODUCT: product()})
    PlanStore(foreign, OTHER_DRIVER).put({PRODUCT: product()})
    before = names(plans)
    message = refused(capsys, "merge", str(good), str(foreign))
    assert f"{foreign} was measured elsewhere (driver 570.86.15 instead of 580.95.05)" in message
    assert f"{missing} cannot be read (No such file or directory)" in refused(capsys, "merge", str(good), str(missing))
    foreign.write_text("[]")
    assert f"{foreign} is damaged" in refused(capsys, "merge", str(good), str(foreign))
    assert names(plans) == before


def test_a_merge_that_cannot_be_written_fails(
    tmp_path: Path, here: HasGpus, plans: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here(H200)
    other = fill(tmp_path)
    plans.mkdir(parents=True)
    (plans / f"{H200.file_name}.lock").mkdir()
    with pytest.warns(UserWarning, match="cannot be written"):
        assert run("merge", str(other)) == 1


def test_what_export_refuses(tmp_path: Path, here: HasGpus, plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "exported.json"
    assert "no usable GPU here: name a file" in refused(capsys, "export", str(target))
    here(H200)
    assert "nothing has been measured on this machine yet" in refused(capsys, "export", str(target))
    here(H200, H100)
    assert "GPUs of several kinds here" in refused(capsys, "export", str(target))
    assert "--file is x.json, but" in refused(capsys, "export", str(target), "--file", "x.json")
    path = fill(plans)
    inside = tmp_path / "missing" / "exported.json"
    message = refused(capsys, "export", str(inside), "--file", path.name)
    assert f"{inside} cannot be written (No such file or directory)" in message
    target.write_text("precious")
    assert f"{target} exists already" in refused(capsys, "export", str(target), "--file", path.name)
    assert target.read_text() == "precious"
    path.write_text("{")
    assert f"{path} is damaged" in refused(capsys, "export", str(tmp_path / "new.json"), "--file", path.name)
    assert not (tmp_path / "new.json").exists()


def test_damaged_entries_are_left_out(
    tmp_path: Path, here: HasGpus, plans: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here(H200)
    other, target = fill(tmp_path), tmp_path / "exported.json"
    damage_entry(other)
    left_out = f"left out: {PRODUCT} (its digest does not fit)"
    assert run("merge", str(other)) == 0
    text = capsys.readouterr().out
    assert "1 entries new or better" in text
    assert left_out in text
    path = fill(plans)
    damage_entry(path)
    assert run("export", str(target), "--file", path.name) == 0
    text = capsys.readouterr().out
    assert "0 products and 1 layers" in text
    assert left_out in text
    assert Document.read(target).damaged() == {}


def test_prune_removes_what_is_useless_and_only_when_told(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = {fill(plans).name, fill(plans, OTHER_DRIVER).name, "broken.json", f"{H200.file_name}.1234.tmp"}
    (plans / "broken.json").write_text("{")
    (plans / f"{H200.file_name}.1234.tmp").touch()
    useless = {
        fill(plans, replace(H200, cublaslt=130000)).name: "of cuBLASLt 13.0.0; 13.1.0 is installed",
        "old.json": f"is of version 0 of the format, not {SCHEMA}",
        f"{H200.file_name}.damaged-1": "set aside",
        f"{H200.file_name}.foreign-2": "set aside",
        f"{H200.file_name}.schema-0-1": "set aside",
        f"{H200.file_name}.5678.tmp": "never finished",
    }
    for name in useless.keys() - names(plans):
        (plans / name).write_text('{"schema": 0}')
    os.utime(plans / f"{H200.file_name}.5678.tmp", (time.time() - 7200,) * 2)
    done = as_json(capsys, "prune")
    assert {each["name"]: each["reason"] for each in done["files"]} == useless
    assert done["removed"] is False
    assert run("prune") == 0
    assert "Pass --yes to do it." in capsys.readouterr().out
    assert names(plans) == kept | set(useless)
    assert run("prune", "--yes") == 0
    assert capsys.readouterr().out.startswith(f"Removed from {plans}:\n")
    assert names(plans) == kept
    assert run("prune", "--yes") == 0
    assert "Nothing to remove" in capsys.readouterr().out


def test_prune_without_cublaslt_keeps_files_of_every_version(plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise MissingLibraryError("no cuBLASLt")

    monkeypatch.setattr(cublaslt, "get_version", missing)
    name = fill(plans, replace(H200, cublaslt=130000)).name
    assert run("prune", "--yes") == 0
    assert names(plans) == {name}


def test_what_cannot_be_removed_is_told(
    plans: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(plans)
    (plans / f"{H200.file_name}.damaged-1").touch()

    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", fail)
    assert "damaged-1 cannot be removed (Permission denied)" in refused(capsys, "prune", "--yes")
