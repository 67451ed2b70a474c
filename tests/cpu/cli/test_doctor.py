"""The doctor: what it concludes, how its probes read a machine, and that looking changes nothing."""

import functools
import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cuda.bindings import driver as cuda_driver

from lt_runtime.cli import doctor, main, output, probes
from lt_runtime.cli.probes import CacheDirectory, Driver, Library
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


def diagnose(driver=DRIVER, gpus=(H200,), libraries=LIBRARIES, cache=CACHE) -> list[doctor.Finding]:
    return list(doctor.diagnose(driver, gpus, libraries, cache))


def reported(driver=None, gpus=(), libraries=LIBRARIES, cache=CACHE, findings=()) -> doctor.Report:
    variables = {"LT_RUNTIME_TUNE": None}
    return doctor.Report("0.1.0", "3.11", "Linux", driver, gpus, libraries, cache, variables, findings)


def test_nothing_is_found_where_nothing_is_missing():
    assert diagnose() == []


def test_a_machine_without_a_gpu_needs_no_cuda():
    assert diagnose(driver=None, gpus=(), libraries=without(*doctor.CUDA_REQUIREMENTS)) == []


def test_a_driver_that_shows_no_gpu_needs_no_cuda():
    assert diagnose(gpus=(), libraries=without(*doctor.CUDA_REQUIREMENTS)) == []


def test_a_gpu_needs_the_cuda_libraries_and_one_command_brings_all_that_miss():
    (finding,) = diagnose(libraries=without("cuBLASLt", "CuPy"))
    assert finding.needed
    assert finding.mend == f"{sys.executable} -m pip install 'nvidia-cublas>=13,<14' 'cupy-cuda13x>=14'"
    assert "cuBLASLt" in finding.what
    assert "NVRTC" not in finding.what


@pytest.mark.parametrize(
    ("driver", "told"),
    [
        (Driver(problem="no libcuda.so.1"), "libcuda"),
        (replace(DRIVER, problem="cuInit returned CUDA_ERROR_UNKNOWN"), "CUDA_ERROR_UNKNOWN"),
        (Driver("550.54.15", (12, 4)), "12.4"),
    ],
)
def test_a_driver_that_cannot_be_used_is_told(driver: Driver, told: str):
    (finding,) = diagnose(driver=driver)
    assert finding.needed
    assert told in finding.what
    assert "580" in finding.mend


def test_only_gpus_that_are_too_old():
    pascal = replace(H200, capability=61)
    assert diagnose(gpus=(pascal, H200)) == []
    (finding,) = diagnose(gpus=(pascal,))
    assert finding.needed
    assert "7.5" in finding.what


def test_a_cache_that_cannot_be_written_costs_time_only():
    (finding,) = diagnose(cache=replace(CACHE, writable=False))
    assert not finding.needed
    assert "LT_RUNTIME_CACHE_DIR" in finding.mend


def test_a_package_of_the_core_is_needed_everywhere():
    (finding,) = diagnose(driver=None, gpus=(), libraries=without("numpy"))
    assert finding.needed
    assert finding.mend.endswith("pip install numpy")


@pytest.mark.parametrize("package", doctor.PACKAGES)
def test_nothing_is_ready_without_a_required_package(package: str):
    libraries = without(package)
    findings = tuple(diagnose(driver=None, gpus=(), libraries=libraries))
    report = reported(libraries=libraries, findings=findings)
    assert not report.ok
    shown = "\n".join(doctor.report_lines(report))
    assert f"missing  {package}: not installed" in shown
    assert "Ready:" not in shown


@pytest.mark.parametrize("gpus", [(), (H200,)])
def test_a_cublaslt_that_was_named_and_cannot_be_used(monkeypatch: pytest.MonkeyPatch, gpus: tuple[DeviceInfo, ...]):
    monkeypatch.setenv("LT_RUNTIME_CUBLASLT", "/opt/old.so")
    (finding,) = diagnose(gpus=gpus, libraries=without("cuBLASLt"))
    assert finding.needed
    assert finding.what == "LT_RUNTIME_CUBLASLT is /opt/old.so: not installed"
    assert finding.mend == "unset LT_RUNTIME_CUBLASLT"
    assert diagnose(gpus=gpus) == []


def test_a_cublaslt_that_was_named_is_the_one_that_is_shown(tmp_path: Path):
    library = tmp_path / "libcublasLt.so"
    source = tmp_path / "version.c"
    source.write_text("unsigned long long cublasLtGetVersion(void) { return 130203; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    code = "from lt_runtime.cli import probes; print(*probes.cublaslt())"
    environment = os.environ | {"LT_RUNTIME_CUBLASLT": str(library)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"13.2.3 {library}\n"


def test_a_cache_directory_that_nothing_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LT_RUNTIME_CACHE_DIR", raising=False)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    cache = probes.cache_directory()
    assert cache.path is None
    assert diagnose(cache=cache) == []  # the missing package is a finding of its own
    report = reported(cache=cache)
    assert any(line.startswith("Cache: unknown, ") for line in doctor.report_lines(report))


def test_a_cache_directory_that_cannot_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setenv("LT_RUNTIME_CACHE_DIR", str(tmp_path / "loop"))
    cache = probes.cache_directory()
    assert not cache.writable
    (finding,) = diagnose(cache=cache)
    assert str(tmp_path / "loop") in finding.what


def test_a_package_of_which_only_the_metadata_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "remains-1.0.dist-info").mkdir()
    (tmp_path / "remains-1.0.dist-info" / "METADATA").write_text("Name: remains\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    look = functools.partial(probes.package, "remains")
    assert probes.library("remains", look) == Library("remains", problem="not installed")
    (tmp_path / "remains.py").touch()
    importlib.invalidate_caches()
    assert probes.library("remains", look) == Library("remains", "1.0", f"{tmp_path}")


def test_this_machine_is_described_alike_in_both_forms(capsys: pytest.CaptureFixture[str]):
    status = main(["doctor", "--json"])
    seen = json.loads(capsys.readouterr().out)
    assert status == (0 if seen["ok"] else 1)
    assert {library["name"] for library in seen["libraries"]} == set(NAMES)
    assert main(["doctor"]) == status
    shown = capsys.readouterr().out
    assert all(library["version"] in shown for library in seen["libraries"] if library["version"])
    assert shown.startswith(f"lt_runtime {seen['version']}, Python {seen['python']}")


def test_all_variables_are_shown_and_what_has_no_meaning_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in ("LT_RUNTIME_CACHE_DIR", "LT_RUNTIME_CUBLASLT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LT_RUNTIME_RECORD", "yes")
    monkeypatch.setenv("LT_RUNTIME_TUNE", "off")
    main(["doctor"])
    shown = capsys.readouterr().out
    assert re.findall(r"^(LT_RUNTIME_\w+) +(\S.*)$", shown, re.MULTILINE) == [
        ("LT_RUNTIME_CACHE_DIR", "(not set)"), ("LT_RUNTIME_CUBLASLT", "(not set)"),
        ("LT_RUNTIME_RECORD", "yes"), ("LT_RUNTIME_TUNE", "off"),
    ]  # fmt: skip
    assert "optional  LT_RUNTIME_RECORD is 'yes'; accepted are names of files" in shown


def test_a_report_with_everything_in_it_can_be_shown(capsys: pytest.CaptureFixture[str]):
    libraries = (*without("CuPy"), Library("broken", problem="ImportError: [odd] text"))
    findings = tuple(diagnose(libraries=libraries))
    report = reported(driver=DRIVER, gpus=(H200,), libraries=libraries, findings=findings)
    assert not report.ok
    assert output.show({"ok": report.ok}, doctor.report_lines(report), as_json=False) == 1
    shown = capsys.readouterr().out
    for part in ("580.95.05", "CUDA up to 13.0", "NVIDIA H200", "9.0", "150.0 GiB", "[odd] text", "cupy-cuda13x>=14"):
        assert part in shown


def test_looking_writes_nothing(tmp_path: Path):
    here = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "LT_RUNTIME_CACHE_DIR"} | here
    code = "from lt_runtime.cli import main; main(['doctor', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["cache"]["path"] == str(tmp_path / "cache" / "lt_runtime")
    written = [path.name for path in tmp_path.iterdir()]
    assert [name for name in written if name != ".nv"] == []  # that is the driver's own, where there is one


def test_a_broken_library_is_reported_not_raised(tmp_path: Path, monkeypatch):
    (tmp_path / "cupy.py").write_text("raise ImportError('libcublas.so.13: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert probes.library("CuPy", probes.cupy) == Library(
        "CuPy", problem="RuntimeError: ImportError: libcublas.so.13: cannot open"
    )


def test_a_missing_package_is_reported():
    look = functools.partial(probes.package, "no-such-distribution")
    assert probes.library("missing", look) == Library("missing", problem="not installed")


def test_a_library_of_another_cuda_is_not_accepted(monkeypatch):
    monkeypatch.setattr("lt_runtime.cublaslt.get_version", lambda: 120803)
    assert "12.8.3 is not of CUDA 13" in str(probes.library("cuBLASLt", probes.cublaslt).problem)


def nvidia_gpu(directory: Path, vendor: str = "0x10de", device_class: str = "0x030200") -> Path:
    """A directory of PCI devices like the kernel's, with one device."""
    device = directory / "0000:01:00.0"
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{device_class}\n")
    return directory


def test_no_driver(monkeypatch, tmp_path: Path):
    def cu_init(_flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(cuda_driver, "cuInit", cu_init)
    assert probes.driver(tmp_path) is None
    assert probes.driver(nvidia_gpu(tmp_path)) == Driver(problem="no libcuda.so.1")


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        ("CUDA_SUCCESS", None),
        ("CUDA_ERROR_NO_DEVICE", None),
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "cuInit returned CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    ],
)
def test_driver(monkeypatch, status: str, problem: str | None):
    monkeypatch.setattr(cuda_driver, "cuInit", lambda _: (getattr(cuda_driver.CUresult, status),))
    monkeypatch.setattr(cuda_driver, "cuDriverGetVersion", lambda: (cuda_driver.CUresult.CUDA_SUCCESS, 13010))
    monkeypatch.setattr(devices, "kernel_driver_version", lambda: "590.1")
    assert probes.driver() == Driver("590.1", (13, 1), problem)


def test_gpus(monkeypatch):
    monkeypatch.setattr(devices, "device_count", lambda: 1)
    monkeypatch.setattr(devices, "device_info", lambda ordinal: replace(H200, ordinal=ordinal))
    assert probes.gpus() == (H200,)


def test_gpus_where_one_is_broken(monkeypatch):
    def broken(ordinal: int) -> DeviceInfo:
        raise DriverError("cuDeviceGetName", 46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "busy or unavailable")

    monkeypatch.setattr(devices, "device_count", lambda: 1)
    monkeypatch.setattr(devices, "device_info", broken)
    assert probes.gpus() == ()


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


@pytest.mark.parametrize(
    ("vendor", "device_class", "found"),
    [("0x10de", "0x030200", True), ("0x10de", "0x040300", False), ("0x8086", "0x030000", False)],
)
def test_nvidia_gpu_on_pci(tmp_path: Path, vendor: str, device_class: str, found: bool):
    assert probes.nvidia_gpu_on_pci(nvidia_gpu(tmp_path, vendor, device_class)) == found


def test_cache_directory(tmp_path: Path, monkeypatch):
    cache = tmp_path / "not" / "yet"
    monkeypatch.setenv("LT_RUNTIME_CACHE_DIR", str(cache))
    assert probes.cache_directory() == CacheDirectory(str(cache), writable=True)
    assert list(tmp_path.iterdir()) == []
    cache.mkdir(parents=True)
    (cache / "kernel.cubin").write_bytes(bytes(100))
    assert probes.cache_directory().size == 100
    monkeypatch.setenv("LT_RUNTIME_CACHE_DIR", str(cache / "kernel.cubin"))
    assert not probes.cache_directory().writable
