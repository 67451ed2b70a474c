"""The commands of the plan cache: output as text and as JSON, what they change, and what they refuse."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lt_runtime import cublaslt
from lt_runtime.errors import MissingLibraryError
from lt_runtime.paths import CACHE_VARIABLE
from lt_runtime.store.document import Document, Fingerprint
from lt_runtime.store.entries import ProductEntry
from lt_runtime.store.keys import SCHEMA
from lt_runtime.store.plan_store import PlanStore
from tests.cpu.cli.conftest import Cli
from tests.support.machine import HasGpus
from tests.support.plan_entries import H200, LATER, layer, layer_key, product, product_key

H100 = replace(H200, gpu="NVIDIA H100 [PCIe]", multiprocessors=114)
OTHER_DRIVER = replace(H200, driver="570.86.15")
PRODUCT, LAYER = product_key(8192), layer_key(8192)


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of the plan cache's directory, which is empty."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


@pytest.fixture(autouse=True)
def here(has_gpus: HasGpus, monkeypatch: pytest.MonkeyPatch) -> HasGpus:
    """Function that sets the pretended machine's GPUs, none at first.

    The machine has the cuBLASLt version of an H200 machine.
    """
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


@pytest.fixture
def shown(cli: Cli) -> Callable[..., str]:
    """Runs a command, and returns its output."""

    def run(*arguments: object, status: int = 0) -> str:
        done = cli("cache", *arguments)
        assert done.status == status
        return done.out

    return run


@pytest.fixture
def as_json(shown: Callable[..., str]) -> Callable[..., Any]:
    """Runs a command, and returns the object that it prints."""
    return lambda *arguments, status=0: json.loads(shown(*arguments, "--json", status=status))


@pytest.fixture
def refused(cli: Cli) -> Callable[..., str]:
    """Runs a command that must fail, and returns its one-line error."""

    def run(*arguments: object) -> str:
        status, out, err = cli("cache", *arguments)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert err.startswith("lt_runtime cache: ")
        return err

    return run


def raising(error: Exception) -> Callable[..., None]:
    """Returns a function that raises an error."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def names(plans: Path) -> set[str]:
    return {file.name for file in plans.iterdir() if file.suffix != ".lock"}


def test_an_empty_cache(plans: Path, shown: Any, as_json: Any, refused: Any) -> None:
    assert "None yet" in shown("list")
    assert as_json("list") == {"ok": True, "directory": str(plans), "files": [], "set_aside": []}
    assert as_json("verify") == {"ok": True, "files": []}
    assert as_json("prune")["files"] == []
    assert f"nothing in {plans} matches 'gelu'" in refused("show", "gelu")
    assert not plans.exists()


@pytest.mark.parametrize("arguments", ["list", "show gelu", "verify --json", "prune --yes"])
@pytest.mark.parametrize(
    ("kind", "reason"), [("file", "Not a directory"), ("loop", "Too many levels of symbolic links"), ("forbidden", "P")]
)
def test_a_cache_that_cannot_be_read(
    plans: Path, refused: Any, monkeypatch: pytest.MonkeyPatch, kind: str, reason: str, arguments: str
) -> None:
    plans.parent.mkdir()
    if kind == "file":
        plans.touch()
    elif kind == "loop":
        plans.symlink_to(plans)
    else:  # the system refuses access, except to root
        monkeypatch.setattr(Path, "iterdir", raising(PermissionError(errno.EACCES, "Permission denied")))
    assert refused(*arguments.split()).startswith(f"lt_runtime cache: {plans} cannot be read ({reason}")


def test_list_says_what_fits(plans: Path, here: HasGpus, shown: Any, as_json: Any) -> None:
    machines = (H200, H100, OTHER_DRIVER)
    for fingerprint in machines:
        fill(plans, fingerprint)
    for gpus, fits in (((), [None] * 3), ((H200,), [True, False, False]), ((H100, OTHER_DRIVER), [False, True, True])):
        here(*gpus)
        found = {each["name"]: each for each in as_json("list")["files"]}
        assert [found[each.file_name]["fits"] for each in machines] == fits
        assert found[H100.file_name]["fingerprint"] == asdict(H100)
        assert (found[H200.file_name]["products"], found[H200.file_name]["layers"]) == (1, 1)
        if gpus == (H200,):
            assert found[OTHER_DRIVER.file_name]["differs"] == ["driver 570.86.15 instead of 580.95.05"]
    (plans / "broken.json").write_text("{")
    (plans / f"{H200.file_name}.damaged-1").touch()
    here()
    text = shown("list")
    assert text.count("unknown: no GPU here") == 3
    assert "is damaged" in text
    assert f"Set aside, not used: {H200.file_name}.damaged-1" in text
    here(H200)
    text = shown("list")
    for part in (H200.file_name, "yes", "no: gpu NVIDIA H100 [PCIe] instead of NVIDIA H200"):
        assert part in text


def test_show_finds_by_key_and_by_short_name(plans: Path, as_json: Any) -> None:
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
        assert {each["problem"] for each in as_json("show", pattern)["entries"]} == problems
    (found,) = as_json("show", "gelu")["entries"]
    assert (found["file"], found["key"]) == (path.name, LAYER)
    assert (found["entry"]["strategy"], found["entry"]["us"]) == (dict(layer().strategy), 110.0)


def test_show_for_people(plans: Path, shown: Any) -> None:
    PlanStore(plans / H200.file_name, H200).put({PRODUCT: product(barred="known to be wrong")}, {LAYER: layer()})
    text = shown("show", "8192")
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


@pytest.mark.parametrize(
    ("change", "ok", "message"),
    [
        ("none", True, ""),
        ("schema", True, f"is of version 99 of the format, not {SCHEMA}"),
        ("entry", False, f"is damaged (the digest does not fit of the entry {PRODUCT[:100]}"),
        ("truncated", False, "is damaged"),
        ("renamed", False, f"is never read: its name should be {H200.file_name}"),
        ("key", False, "'Matmul(8192)' is not the key of a problem"),
    ],
)
def test_verify_finds_damage_and_changes_nothing(
    plans: Path, change: str, message: str, shown: Any, as_json: Any, *, ok: bool
) -> None:
    path = fill(plans)
    if change == "schema":
        path.write_bytes(path.read_bytes().replace(f'"schema": {SCHEMA}'.encode(), b'"schema": 99'))
    elif change == "entry":
        damage_entry(path)
    elif change == "truncated":
        path.write_bytes(path.read_bytes()[:-20])
    elif change == "renamed":
        path = path.rename(path.with_name("mine.json"))
    elif change == "key":
        PlanStore(path, H200).put({"Matmul(8192)": product()})
    content = path.read_bytes()
    (found,) = as_json("verify", status=not ok)["files"]
    assert (found["name"], found["ok"], len(found["faults"])) == (path.name, ok, change != "none")
    assert message in "".join(found["faults"])
    text = shown("verify", status=not ok)
    assert text.startswith(f"{path.name}:{' sound' if change == 'none' else ''}\n")
    assert message in text
    assert text.endswith("Nothing is damaged.\n") is ok
    assert (path.read_bytes(), names(plans)) == (content, {path.name})


def test_a_cache_carried_to_an_equal_machine(
    tmp_path: Path, here: HasGpus, monkeypatch: pytest.MonkeyPatch, plans: Path, shown: Any, as_json: Any
) -> None:
    here(H200)
    fill(plans)
    exported = tmp_path / "exported.json"
    done = as_json("export", exported)
    assert (done["target"], done["products"], done["layers"]) == (str(exported), 1, 1)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "other"))
    (done,) = as_json("merge", exported)["merged"]
    target = tmp_path / "other" / "plans" / H200.file_name
    assert (done["into"], done["changed"], done["saved"]) == (str(target), 2, True)
    assert (plans / H200.file_name).read_bytes() == exported.read_bytes()
    theirs, ours = Document.read(exported), Document.read(target)
    entry = theirs.get(PRODUCT)
    assert isinstance(entry, ProductEntry)
    # A merged entry has no algorithm bytes: the plan is rebuilt from the configuration.
    assert ours.get(PRODUCT) == replace(entry, algorithm=b"")
    assert ours.get(LAYER) == theirs.get(LAYER)
    assert shown("merge", exported, exported).count("0 entries new or better") == 2


def test_merging_without_a_gpu_goes_by_what_the_cache_has(
    tmp_path: Path, plans: Path, shown: Any, refused: Any
) -> None:
    other = tmp_path / "other.json"
    PlanStore(other, H200).put({PRODUCT: product(when=LATER)})
    assert f"neither a GPU here nor a file in {plans} to compare {other} with" in refused("merge", other)
    path = plans / H200.file_name
    PlanStore(path, H200).put({LAYER: layer()})
    shown("merge", other)
    found = Document.read(path).get(PRODUCT)
    assert found is not None
    assert found.when == LATER


def test_what_merge_refuses_changes_nothing(tmp_path: Path, here: HasGpus, plans: Path, refused: Any) -> None:
    here(H200)
    fill(plans, H100)
    good, foreign, missing = tmp_path / "good.json", tmp_path / "foreign.json", tmp_path / "missing.json"
    PlanStore(good, H200).put({PRODUCT: product()})
    PlanStore(foreign, OTHER_DRIVER).put({PRODUCT: product()})
    before, differs = names(plans), "(driver 570.86.15 instead of 580.95.05)"
    assert f"{foreign} was measured elsewhere {differs}" in refused("merge", good, foreign)
    assert f"{missing} cannot be read (No such file or directory)" in refused("merge", good, missing)
    foreign.write_text("[]")
    assert f"{foreign} is damaged" in refused("merge", good, foreign)
    assert names(plans) == before


def test_a_merge_that_cannot_be_written_fails(tmp_path: Path, here: HasGpus, plans: Path, shown: Any) -> None:
    here(H200)
    (plans / f"{H200.file_name}.lock").mkdir(parents=True)
    with pytest.warns(UserWarning, match="cannot be written"):
        shown("merge", fill(tmp_path), status=1)


def test_what_export_refuses(tmp_path: Path, here: HasGpus, plans: Path, refused: Any) -> None:
    target, inside, new = tmp_path / "exported.json", tmp_path / "missing" / "exported.json", tmp_path / "new.json"
    assert "no usable GPU here: name a file" in refused("export", target)
    here(H200)
    assert "nothing has been measured on this machine yet" in refused("export", target)
    here(H200, H100)
    assert "GPUs of several kinds here" in refused("export", target)
    assert "--file is x.json, but" in refused("export", target, "--file", "x.json")
    assert "it must be the name of a file in" in refused("export", target, "--file", "../x.json")
    path = fill(plans)
    message = refused("export", inside, "--file", path.name)
    assert f"{inside} cannot be written (No such file or directory)" in message
    new.symlink_to("nowhere")
    assert f"{new} exists already" in refused("export", new, "--file", path.name)
    new.unlink()
    target.write_text("precious")
    assert f"{target} exists already" in refused("export", target, "--file", path.name)
    assert target.read_text() == "precious"
    damage_entry(path)
    assert f"{path} is damaged" in refused("export", new, "--file", path.name)
    assert not new.exists()


def test_prune_removes_what_is_useless_and_only_when_told(plans: Path, shown: Any, as_json: Any) -> None:
    kept = {fill(plans).name, fill(plans, OTHER_DRIVER).name, "broken.json", f"{H200.file_name}.1234.tmp"}
    kept.add(f"{H200.file_name}.link.tmp")
    (plans / f"{H200.file_name}.link.tmp").symlink_to("nowhere")
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
    done = as_json("prune")
    assert {each["name"]: each["reason"] for each in done["files"]} == useless
    assert done["removed"] is False
    assert "Pass --yes to do it." in shown("prune")
    assert names(plans) == kept | set(useless)
    assert shown("prune", "--yes").startswith(f"Removed from {plans}:\n")
    assert names(plans) == kept
    assert "Nothing to remove" in shown("prune", "--yes")


def test_prune_without_cublaslt_keeps_files_of_every_version(
    plans: Path, shown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublaslt, "get_version", raising(MissingLibraryError("no cuBLASLt")))
    name = fill(plans, replace(H200, cublaslt=130000)).name
    shown("prune", "--yes")
    assert names(plans) == {name}


def test_what_cannot_be_removed_is_told(plans: Path, monkeypatch: pytest.MonkeyPatch, refused: Any) -> None:
    fill(plans)
    (plans / f"{H200.file_name}.damaged-1").touch()
    monkeypatch.setattr(Path, "unlink", raising(PermissionError(13, "Permission denied")))
    assert "damaged-1 cannot be removed (Permission denied)" in refused("prune", "--yes")
