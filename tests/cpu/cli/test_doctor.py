"""The command `doctor`: its findings, how it examines a machine, and that it changes nothing."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as cuda_driver

from lt_runtime.cli import doctor, main
from lt_runtime.cli.doctor import CacheDirectory, Driver, Library
from lt_runtime.errors import DriverError
from lt_runtime.gpu import devices
from lt_runtime.gpu.devices import DeviceInfo, kernel_driver_version

DRIVER = Driver("580.95.05", (13, 0))
H200 = DeviceInfo(0, "NVIDIA H200", 90, 132, 150 * 2**30)
CACHE = CacheDirectory("/cache", writable=True)
NAMES = (*doctor.CUDA_REQUIREMENTS, *doctor.PACKAGES)
LIBRARIES = tuple(Library(name, "13.0", f"/lib/{name}") for name in NAMES)


def without(*names: str) -> tuple[Library, ...]:
    return tuple(Library(lib.name, problem="not installed") if lib.name in names else lib for lib in LIBRARIES)


def raising(error: Exception):
    """Returns a function that raises an error."""

    def fail(_argument: int) -> None:
        raise error

    return fail


def machine(driver=DRIVER, gpus=(H200,), libraries=LIBRARIES, cache=CACHE) -> doctor.Machine:
    return doctor.Machine(driver, gpus, libraries, cache)


def diagnose(**probed: Any) -> list[doctor.Finding]:
    return list(doctor.diagnose(machine(**probed)))


def shown_of(**probed: Any) -> str:
    return "\n".join(doctor.report_lines(machine(**probed), diagnose(**probed)))


CUDA = tuple(doctor.CUDA_REQUIREMENTS)
PASCAL = replace(H200, capability=61)


@pytest.mark.parametrize(
    ("probed", "what", "mend", "needed"),
    [
        (
            {"libraries": without("cuBLASLt", "CuPy")},
            "cuBLASLt: not installed; CuPy: not installed",
            f"{sys.executable} -m pip install 'nvidia-cublas>=13,<14' 'cupy-cuda13x>=14'",
            True,
        ),
        ({"driver": Driver(problem="no libcuda.so.1")}, "libcuda", "580", True),
        ({"driver": replace(DRIVER, problem="cuInit returned CUDA_ERROR_UNKNOWN")}, "ERROR_UNKNOWN", "580", True),
        ({"driver": Driver("550.54.15", (12, 4))}, "12.4", "580", True),
        ({"gpus": (PASCAL,)}, "7.5", "Turing", True),
        ({"cache": replace(CACHE, writable=False)}, "/cache cannot be used", "LT_RUNTIME_CACHE_DIR", False),
        ({"libraries": without("CUPTI")}, "CUPTI: not installed", "nvidia-cuda-cupti", False),
        ({}, "", "", None),
        # On a machine without a GPU, CUDA libraries are not needed.
        ({"driver": None, "gpus": (), "libraries": without(*CUDA)}, "", "", None),
        ({"gpus": (), "libraries": without(*CUDA)}, "", "", None),  # a driver that reports no GPU
        ({"gpus": (PASCAL, H200)}, "", "", None),
    ],
)
def test_findings(probed: dict[str, Any], what: str, mend: str, *, needed: bool | None):
    findings = diagnose(**probed)
    assert [finding.needed for finding in findings] == ([] if needed is None else [needed])
    assert all(what in finding.what and mend in finding.mend for finding in findings)


@pytest.mark.parametrize(("gpu", "says"), [(H200, ", float8 products\n"), (PASCAL, ", no float8 products, which need")])
def test_whether_a_gpu_multiplies_float8_is_said(gpu: DeviceInfo, says: str) -> None:
    assert says in shown_of(gpus=(gpu,))


@pytest.mark.parametrize("package", doctor.PACKAGES)
def test_nothing_is_ready_without_a_required_package(package: str):
    shown = shown_of(driver=None, gpus=(), libraries=without(package))
    for part in (f"pip install {package}\n", f"missing  {package}: not installed", "\nNot ready: "):
        assert part in shown


@pytest.mark.parametrize("gpus", [(), (H200,)])
def test_an_unusable_cublaslt_of_the_environment(monkeypatch: pytest.MonkeyPatch, gpus: tuple[DeviceInfo, ...]):
    monkeypatch.setenv("LT_RUNTIME_CUBLASLT", "/opt/old.so")
    what, mend = "LT_RUNTIME_CUBLASLT is /opt/old.so: not installed", "unset LT_RUNTIME_CUBLASLT"
    assert diagnose(gpus=gpus, libraries=without("cuBLASLt")) == [doctor.Finding(what, "running on the GPU", mend)]
    assert diagnose(gpus=gpus) == []


def test_this_machine_is_described_alike_in_both_forms(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("LT_RUNTIME_CACHE_DIR", raising=False)
    monkeypatch.delenv("LT_RUNTIME_CUBLASLT", raising=False)
    monkeypatch.setenv("LT_RUNTIME_RECORD", "yes")
    monkeypatch.setenv("LT_RUNTIME_TUNE", "off")
    status = main(["doctor", "--json"])
    seen = json.loads(capsys.readouterr().out)
    assert status == (0 if seen["ok"] else 1)
    assert {library["name"] for library in seen["libraries"]} == {*NAMES, *doctor.FOR_GROUPS}
    assert main(["doctor"]) == status
    shown = capsys.readouterr().out
    assert shown.startswith(f"lt_runtime {seen['version']}, Python {seen['python']}")
    assert all(library["version"] in shown for library in seen["libraries"] if library["version"])
    assert dict(re.findall(r"^(LT_RUNTIME_\w+) +(\S.*)$", shown, re.MULTILINE)) == {
        name: value or "(not set)" for name, value in seen["variables"].items()
    }
    assert "optional  LT_RUNTIME_RECORD is 'yes'; accepted are names of files" in shown


def test_a_report_with_everything_in_it_can_be_shown():
    shown = shown_of(libraries=(*without("CuPy"), Library("broken", problem="ImportError: [odd] text")))
    for part in ("580.95.05", "CUDA up to 13.0", "NVIDIA H200", "9.0", "150.0 GiB", "[odd] text", "cupy-cuda13x>=14"):
        assert part in shown


def test_looking_writes_nothing(tmp_path: Path):
    here = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "LT_RUNTIME_CACHE_DIR"} | here
    code = "from lt_runtime.cli import main; main(['doctor', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["cache"]["path"] == str(tmp_path / "cache" / "lt_runtime")
    written = [path.name for path in tmp_path.iterdir()]
    assert [name for name in written if name != ".nv"] == []  # the NVIDIA driver, if installed, creates the folder .nv


def test_a_broken_library_is_reported_not_raised(tmp_path: Path, monkeypatch):
    (tmp_path / "cupy.py").write_text("raise ImportError('libcublas.so.13: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor.library("CuPy", doctor.cupy) == Library(
        "CuPy", problem="RuntimeError: ImportError: libcublas.so.13: cannot open"
    )


def test_a_library_of_another_cuda_is_not_accepted(monkeypatch):
    monkeypatch.setattr("lt_runtime.cublaslt.get_version", lambda: 120803)
    assert "12.8.3 is not of CUDA 13" in str(doctor.library("cuBLASLt", doctor.cublaslt).problem)


@pytest.mark.parametrize(
    ("vendor", "device_class", "found"),
    [("0x10de", "0x030200", True), ("0x10de", "0x040300", False), ("0x8086", "0x030000", False)],
)
def test_no_driver(monkeypatch, tmp_path: Path, vendor: str, device_class: str, *, found: bool):
    """A missing driver is reported only on machines with an NVIDIA display controller on the PCI bus."""
    monkeypatch.setattr(cuda_driver, "cuInit", raising(RuntimeError("Failed to dlopen libcuda.so.1")))
    assert doctor.driver_of(tmp_path) is None
    device = tmp_path / "0000:01:00.0"
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{device_class}\n")
    assert doctor.driver_of(tmp_path) == (Driver(problem="no libcuda.so.1") if found else None)


@pytest.mark.parametrize("status", ["CUDA_SUCCESS", "CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"])
def test_driver(monkeypatch, status: str):
    monkeypatch.setattr(cuda_driver, "cuInit", lambda _: (getattr(cuda_driver.CUresult, status),))
    monkeypatch.setattr(cuda_driver, "cuDriverGetVersion", lambda: (cuda_driver.CUresult.CUDA_SUCCESS, 13010))
    monkeypatch.setattr(devices, "kernel_driver_version", lambda: "590.1")
    assert doctor.driver_of() == Driver("590.1", (13, 1), f"cuInit returned {status}" if "MISMATCH" in status else None)


def test_gpus(monkeypatch):
    busy = DriverError("cuDeviceGetName", 46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "busy or unavailable")
    monkeypatch.setattr(devices, "device_count", lambda: 1)
    for info, found in ((lambda ordinal: replace(H200, ordinal=ordinal), (H200,)), (raising(busy), ())):
        monkeypatch.setattr(devices, "device_info", info)
        assert doctor.gpus() == found


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95  Release Build\n", "580.95"),
        ("", None),
    ],
)
def test_kernel_driver_version(tmp_path: Path, text: str, version: str | None):
    (tmp_path / "version").write_text(text)
    assert kernel_driver_version(tmp_path / "version") == version
    assert kernel_driver_version(tmp_path / "absent") is None


def test_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache = tmp_path / "not" / "yet"
    monkeypatch.setenv("LT_RUNTIME_CACHE_DIR", str(cache))
    assert doctor.cache_directory() == CacheDirectory(str(cache), writable=True)
    assert list(tmp_path.iterdir()) == []
    cache.mkdir(parents=True)
    (cache / "kernel.cubin").write_bytes(bytes(100))
    assert doctor.cache_directory().size == 100
    (cache / "loop").symlink_to("loop")
    for unusable in ("kernel.cubin", "loop"):
        monkeypatch.setenv("LT_RUNTIME_CACHE_DIR", str(cache / unusable))
        (finding,) = diagnose(cache=doctor.cache_directory())
        assert str(cache / unusable) in finding.what
    (cache / "plans").mkdir()
    cache.chmod(0o777)
    monkeypatch.setenv("LT_RUNTIME_CACHE_DIR", str(cache))
    (finding,) = diagnose(cache=doctor.cache_directory())
    assert finding.what.startswith(f"{cache} can be written by other users and is not used: `chmod go-w {cache}`")
    monkeypatch.delenv("LT_RUNTIME_CACHE_DIR")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    unknown = doctor.cache_directory()
    assert unknown.path is None
    assert diagnose(cache=unknown) == []  # a separate finding reports the missing package
    assert "\nCache: unknown, " in shown_of(cache=unknown)
