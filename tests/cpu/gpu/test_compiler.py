"""Kernels are compiled by NVRTC and found in the cache again; failures of both. Needs no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cuda import pathfinder

from lt_runtime.errors import CompileError, MissingLibraryError
from lt_runtime.gpu import compiler
from lt_runtime.gpu.compiler import KernelCache
from lt_runtime.paths import CACHE_VARIABLE, cache_directory, kernel_sources
from tests.compile_matrix import VARIANTS

ROOT = Path(__file__).parents[3]
DROPOUT: Any = ("dropout.cu", (("SCALAR", "float"), ("ALIGNED", "1"), ("BLOCKS", "1")), "sm_90")
CACHED = (compiler._included_files, compiler.runtime_headers)


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory; no headers or warnings are remembered from before, or afterwards."""
    monkeypatch.setattr(compiler, "_warned", set())
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    for function in CACHED:
        function.cache_clear()
    yield tmp_path / "cache"
    for function in CACHED:
        function.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The list of sources for which the compiler is called."""
    calls: list[str] = []

    def compile_cubin(name: str, code: bytes, options: Sequence[bytes]) -> bytes:
        calls.append(name)
        return b"code %d" % len(calls)

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    return calls


def run(code: str) -> str:
    """Runs code in a new process, which has not loaded the compiler yet, and returns its output."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout


ANOTHER_PROCESS = f"""
import hashlib
import sys
from pathlib import Path

from lt_runtime.gpu.compiler import compile_kernel

print(hashlib.sha256(compile_kernel(*{DROPOUT!r})).hexdigest())
print("libnvrtc" in Path("/proc/self/maps").read_text(), *sys.modules)
"""


def test_another_process_finds_a_kernel_without_loading_the_compiler(fresh_cache: Path) -> None:
    (first, first_loads), (second, second_loads) = (run(ANOTHER_PROCESS).splitlines() for _ in range(2))
    assert first == second
    assert first_loads.startswith("True ")
    assert second_loads.startswith("False ")
    assert {"cuda.bindings.nvrtc", "cuda.core"}.isdisjoint(second_loads.split())
    assert len(list(fresh_cache.rglob("*.kernel"))) == 1


def test_without_the_variable_the_cache_is_in_the_users_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "lt_runtime"
    monkeypatch.setenv(CACHE_VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "lt_runtime"


def test_definitions_and_architecture_tell_kernels_apart(compiled: list[str]) -> None:
    source, macros, architecture = DROPOUT
    variants = [DROPOUT, (source, macros[1:], architecture), (source, macros, "sm_80")]
    made = [compiler.compile_kernel(*variant) for variant in variants]
    assert len({*made}) == len(compiled) == 3
    assert [compiler.compile_kernel(*variant) for variant in variants] == made
    assert len(compiled) == 3


@pytest.fixture
def toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory with only those CUDA headers on which the cache keys of kernels depend."""
    headers = tmp_path / "include"
    headers.mkdir()
    for name in compiler._TOOLKIT_HEADERS:
        shutil.copy(Path(compiler.runtime_headers()) / name, headers)
    monkeypatch.setattr(compiler, "runtime_headers", lambda: str(headers))
    return headers


@pytest.mark.usefixtures("toolkit")
@pytest.mark.parametrize("source", sorted(file.name for file in kernel_sources().glob("*.cu")))
def test_no_other_header_of_the_toolkit_is_included(source: str) -> None:
    """Checks the syntax alone: generating code takes ten times as long, and includes nothing more."""
    variant = next(each for each in VARIANTS if each.source == source)
    options = [*compiler._options(source, variant.macros, "sm_90"), *compiler._include_paths()]
    code = (kernel_sources() / source).read_bytes()
    compiler.compile_cubin(source, code, [*options, b"--fdevice-syntax-only"])


def append(file: Path) -> None:
    with file.open("a") as opened:
        opened.write("// edited\n")


def rewrite(file: Path) -> None:
    """Changes a file's content, but neither its size nor its modification time."""
    status = file.stat()
    file.write_bytes(file.read_bytes()[::-1])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def touch(file: Path) -> None:
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("edited", "edit"),
    [
        *((f"cuda_src/{name}", append) for name in ("dropout.cu", "philox.cuh")),
        *((f"include/{name}", append) for name in compiler._TOOLKIT_HEADERS),
        *(("libnvrtc.so.13", edit) for edit in (append, rewrite, touch)),
    ],
)
def test_a_kernel_is_compiled_anew_after_a_change(
    edited: str, edit: Any, compiled: list[str], toolkit: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library, sources = tmp_path / "libnvrtc.so.13", tmp_path / "cuda_src"
    library.write_bytes(b"one build")
    shutil.copytree(kernel_sources(), sources)
    monkeypatch.setattr(compiler, "nvrtc_libraries", lambda: iter([library]))
    monkeypatch.setattr(compiler, "kernel_sources", lambda: sources)
    compiler.compile_kernel(*DROPOUT)
    compiler.compile_kernel(*DROPOUT)
    assert len(compiled) == 1
    edit(tmp_path / edited)
    compiler._included_files.cache_clear()
    compiler.compile_kernel(*DROPOUT)
    assert len(compiled) == 2


def test_the_expected_compiler_is_the_one_that_is_loaded() -> None:
    code = "from lt_runtime.gpu import compiler; print(*(file.resolve() for file in compiler.nvrtc_libraries()))"
    expected, loaded = run(code).split()
    assert expected == loaded


@pytest.mark.parametrize("found_via", ["CUDA_PATH", "system-ctk-root", None])
def test_a_compiler_outside_packages_is_known_only_once_it_is_loaded(
    found_via: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = found_via and pathfinder.LocatedHeaderDir(compiler.runtime_headers(), found_via)
    monkeypatch.setattr(pathfinder, "locate_nvidia_header_directory", lambda name: header)
    monkeypatch.setattr(compiler, "_is_loaded", lambda: False)
    assert len([*compiler.nvrtc_libraries()]) == 1


def test_a_cache_that_cannot_be_used_costs_one_warning(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [compiler.compile_kernel(*DROPOUT) for _ in range(2)] == [b"code 1", b"code 2"]
    (warning,) = caught
    assert "compiled anew in each process: cannot write to" in str(warning.message)
    assert str(tmp_path / "file" / "cache") in str(warning.message)
    assert warning.filename == __file__  # the warning points at the line that called the package


@pytest.mark.usefixtures("compiled")
def test_a_full_disk_costs_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(KernelCache, "put", full)
    with pytest.warns(UserWarning, match="compiled anew .* No space left on device"):
        assert compiler.compile_kernel(*DROPOUT) == b"code 1"


def test_a_compile_error_carries_the_log() -> None:
    source, macros, architecture = DROPOUT
    with pytest.raises(CompileError, match=r"NVRTC could not compile dropout\.cu") as caught:
        compiler.compile_kernel(source, (("SCALAR", "quadruple"), *macros[1:]), architecture)
    assert caught.value.kernel == "dropout.cu"
    assert 'identifier "quadruple" is undefined' in caught.value.log
    assert caught.value.log in str(caught.value)
    with pytest.raises(CompileError, match=r"dropout\.cu"):
        compiler.compile_kernel(source, macros, "sm_12345")
    assert compiler.compile_kernel(*DROPOUT).startswith(b"\x7fELF"), "a failure must not be remembered"


def test_dead_code_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "kernel_sources", lambda: tmp_path)
    (tmp_path / "dead.cu").write_text('static __device__ int f() { return 1; }\nextern "C" __global__ void k() {}\n')
    with pytest.raises(CompileError, match=r"dead\.cu\(1\).*never referenced"):
        compiler.compile_kernel("dead.cu", (), "sm_90")


WITHOUT_NVRTC = """
from cuda import pathfinder

load = pathfinder.load_nvidia_dynamic_lib

def without_nvrtc(name):
    if name == "nvrtc":
        raise pathfinder.DynamicLibNotFoundError(name)
    return load(name)

pathfinder.load_nvidia_dynamic_lib = without_nvrtc

from lt_runtime.errors import MissingLibraryError
from lt_runtime.gpu.compiler import compile_kernel

try:
    compile_kernel("dropout.cu", (("SCALAR", "float"),), "sm_90")
except MissingLibraryError as error:
    print(error)
"""


def test_a_missing_compiler_and_missing_headers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(WITHOUT_NVRTC) == "NVRTC is not installed: pip install 'lt_runtime[cuda13]'\n"
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
    with pytest.raises(MissingLibraryError, match=r"headers are not installed: pip install 'lt_runtime\[cuda13\]'"):
        compiler.compile_kernel(*DROPOUT)
