"""Fingerprints: their contents, and how a change of the contents changes the file's name."""

from __future__ import annotations

import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest

from lt_runtime.errors import MissingLibraryError
from lt_runtime.gpu.devices import DeviceInfo
from lt_runtime.paths import kernel_sources
from lt_runtime.store import document as module
from lt_runtime.store.document import Fingerprint
from tests.support.plan_entries import H200


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the machine by a fake one with two equal GPUs."""
    monkeypatch.setattr(module, "device_info", lambda ordinal: DeviceInfo(ordinal, "NVIDIA H200", 90, 132, 150 << 30))
    monkeypatch.setattr(module.cublaslt, "get_version", lambda: 130100)
    monkeypatch.setattr(module, "driver_version", lambda: "580.95.05")
    monkeypatch.setattr(module, "kernels_digest", lambda: "0123456789abcdef")


@pytest.mark.usefixtures("machine")
def test_equal_gpus_have_the_same() -> None:
    assert module.fingerprint(0) == module.fingerprint(1) == H200


@pytest.mark.parametrize("field", [field.name for field in fields(Fingerprint)])
def test_everything_in_it_and_the_format_give_another_file(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, name = getattr(H200, field), H200.file_name
    assert replace(H200, **{field: value + type(value)(1)}).file_name != name
    monkeypatch.setattr(module, "SCHEMA", module.SCHEMA + 1)
    assert H200.file_name != name


@pytest.mark.parametrize(
    ("gpu", "start"),
    [
        ("NVIDIA H200", "nvidia-h200-sm90-132-cublaslt130100-"),
        ("Tesla T4/(x) ", "tesla-t4-x-sm90-132-"),
        ("NVIDIA H200 MIG 1g.18gb", "nvidia-h200-mig-1g-18gb-sm90-"),
        ("../../evil", "evil-sm90-"),
    ],
)
def test_the_name_of_a_file_says_what_it_is_for(gpu: str, start: str) -> None:
    name = replace(H200, gpu=gpu).file_name
    assert name.startswith(start)
    assert len(name) == len(name.split("cublaslt130100-")[0]) + len("cublaslt130100-01234567.json")


def test_in_what_two_differ() -> None:
    assert H200.differences(H200) == []
    other = replace(H200, driver="570.86", cublaslt=130200)
    assert H200.differences(other) == ["cublaslt 130200 instead of 130100", "driver 570.86 instead of 580.95.05"]


def test_an_edited_kernel_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "cuda_src"
    shutil.copytree(kernel_sources(), sources)
    digest = module.kernels_digest.__wrapped__
    before = digest()
    monkeypatch.setattr(module, "kernel_sources", lambda: sources)
    assert digest() == before
    assert len(before) == 16
    for name in ("philox.cuh", "dropout.cu"):
        with (sources / name).open("a") as file:
            file.write("\n")
        after = digest()
        assert after != before
        before = after


def test_a_driver_that_tells_only_what_cuda_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    version = module.driver_version.__wrapped__
    monkeypatch.setattr(module, "kernel_driver_version", lambda: "580.95.05")
    assert version() == "580.95.05"
    monkeypatch.setattr(module, "kernel_driver_version", lambda: None)
    monkeypatch.setattr(module, "call", lambda name: 13010)
    assert version() == "CUDA 13.1"


@pytest.mark.usefixtures("machine")
def test_a_machine_has_each_fingerprint_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise MissingLibraryError("no cuBLASLt")

    look = module.machine.__wrapped__
    for count, expected in ((2, (H200,)), (0, ())):
        monkeypatch.setattr(module, "device_count", lambda count=count: count)
        assert look() == expected
    monkeypatch.setattr(module, "device_count", lambda: 1)
    monkeypatch.setattr(module.cublaslt, "get_version", missing)
    assert look() == (), "a machine without cuBLASLt has none"
