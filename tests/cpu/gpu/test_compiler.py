"""Compiling kernels, keeping them, and what happens where either cannot be done. NVRTC needs no GPU."""

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

from lt_runtime.errors import CompileError, GpuError, MissingLibraryError
from lt_runtime.gpu import compiler, kernel_cache
from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.kernel_cache import KernelCache
from lt_runtime.paths import CACHE_VARIABLE, cache_directory, kernel_sources
from tests.compile_matrix import VARIANTS

ROOT = Path(__file__).parents[3]


def dropout_macros(kind: str) -> Macros:
    return ("SCALAR", kind), ("ALIGNED", "1"), ("BLOCKS", "1")


DROPOUT = ("dropout.cu", dropout_macros("float"), "sm_90")


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory, and nothing remembered of any other before or afterwards."""
    cached = (compiler._included_files, compiler.runtime_headers)
    monkeypatch.setattr(compiler, "_warned", set())
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    for function in cached:
        function.cache_clear()
    yield tmp_path / "cache"
    for function in cached:
        function.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources that the compiler has been called for."""
    calls: list[str] = []
    compile_for_real = compiler.compile_cubin

    def counting(name: str, code: bytes, options: Sequence[bytes]) -> bytes:
        calls.append(name)
        return compile_for_real(name, code, options)

    monkeypatch.setattr(compiler, "compile_cubin", counting)
    return calls


ANOTHER_PROCESS = f"""
import hashlib
import sys
from pathlib import Path

from lt_runtime.gpu.compiler import compile_kernel

print(hashlib.sha256(compile_kernel(*{DROPOUT!r})).hexdigest())
print("libnvrtc" in Path("/proc/self/maps").read_text(), *sys.modules)
"""


def test_what_another_process_has_compiled_is_found_without_the_compiler(fresh_cache: Path) -> None:
    outputs = [
        subprocess.run([sys.executable, "-c", ANOTHER_PROCESS], cwd=ROOT, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    (first, first_loads), (second, second_loads) = (done.stdout.splitlines() for done in outputs)
    assert first == second
    assert first_loads.startswith("True ")
    assert second_loads.startswith("False ")
    assert {"cuda.bindings.nvrtc", "cuda.core"}.isdisjoint(second_loads.split())
    assert len(list(fresh_cache.rglob("*.kernel"))) == 1


def test_the_cache_lies_where_the_variable_says(fresh_cache: Path) -> None:
    cubin = compiler.compile_kernel(*DROPOUT)
    (kept,) = [file.read_bytes() for file in fresh_cache.rglob("*") if file.is_file()]
    assert kept.endswith(cubin)


def test_without_the_variable_it_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "lt_runtime"
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert cache_directory() == tmp_path / "lt_runtime"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "lt_runtime"


def test_definitions_and_architecture_tell_kernels_apart(compiled: list[str]) -> None:
    variants = [
        DROPOUT,
        ("dropout.cu", dropout_macros("__half"), "sm_90"),
        ("dropout.cu", dropout_macros("float"), "sm_80"),
    ]
    assert len({compiler.compile_kernel(*variant) for variant in variants}) == 3
    assert len(compiled) == 3
    for variant in variants:
        compiler.compile_kernel(*variant)
    assert len(compiled) == 3


@pytest.fixture
def toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of the CUDA runtime's headers a copy of those that are part of a kernel's key, and none else."""
    headers = tmp_path / "include"
    headers.mkdir()
    for name in compiler._TOOLKIT_HEADERS:
        shutil.copy(Path(compiler.runtime_headers()) / name, headers)
    monkeypatch.setattr(compiler, "runtime_headers", lambda: str(headers))
    return headers


@pytest.mark.parametrize("source", sorted(file.name for file in kernel_sources().glob("*.cu")))
def test_no_other_header_of_the_toolkit_is_included(source: str, toolkit: Path) -> None:
    variant = next(each for each in VARIANTS if each.source == source)
    assert compiler.compile_kernel(source, variant.macros, "sm_90")


@pytest.mark.parametrize("edited", compiler._TOOLKIT_HEADERS)
def test_with_another_header_of_the_toolkit_it_is_compiled_anew(
    edited: str, compiled: list[str], toolkit: Path
) -> None:
    compiler.compile_kernel(*DROPOUT)
    with (toolkit / edited).open("a") as file:
        file.write("// edited\n")
    compiler._included_files.cache_clear()
    compiler.compile_kernel(*DROPOUT)
    assert len(compiled) == 2


@pytest.mark.parametrize("change", ["content", "time", "size"])
def test_another_compiler_compiles_anew(
    change: str, compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "libnvrtc.so.13"
    library.write_bytes(b"one build")
    monkeypatch.setattr(compiler, "nvrtc_libraries", lambda: iter([library]))
    compiler.compile_kernel(*DROPOUT)
    compiler.compile_kernel(*DROPOUT)
    assert len(compiled) == 1
    status = library.stat()
    if change != "time":
        library.write_bytes(b"new build" if change == "content" else b"one build, patched")
    os.utime(library, ns=(status.st_atime_ns, status.st_mtime_ns + (change == "time")))
    compiler.compile_kernel(*DROPOUT)
    assert len(compiled) == 2


def test_what_is_expected_to_be_loaded_is_what_is_loaded() -> None:
    code = "from lt_runtime.gpu import compiler; print(*(library.resolve() for library in compiler.nvrtc_libraries()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    expected, loaded = done.stdout.split()
    assert expected == loaded


def test_nothing_is_expected_where_the_compiler_is_loaded() -> None:
    (loaded,) = list(compiler.nvrtc_libraries())[-1:]
    assert list(compiler.nvrtc_libraries()) == [loaded]


@pytest.mark.parametrize("found_via", ["CUDA_PATH", "system-ctk-root", None])
def test_nothing_is_expected_where_the_loader_searches_the_system(
    found_via: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = found_via and pathfinder.LocatedHeaderDir(compiler.runtime_headers(), found_via)
    monkeypatch.setattr(pathfinder, "locate_nvidia_header_directory", lambda name: header)
    assert compiler._expected_nvrtc() is None


@pytest.mark.parametrize("edited", ["dropout.cu", "philox.cuh"])
def test_an_edited_source_or_header_is_compiled_anew(
    edited: str, compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources = tmp_path / "cuda_src"
    shutil.copytree(kernel_sources(), sources)
    monkeypatch.setattr(compiler, "kernel_sources", lambda: sources)
    first = compiler.compile_kernel(*DROPOUT)
    text = (sources / edited).read_text()
    for old, new in (("0xD2511F53ull", "0xD2511F55ull"), ("out.store(x, ", "out.store(Octet{}, ")):
        text = text.replace(old, new)
    (sources / edited).write_text(text)
    compiler._included_files.cache_clear()
    assert compiler.compile_kernel(*DROPOUT) != first
    assert len(compiled) == 2


def test_a_cache_that_cannot_be_made_costs_one_warning(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = (compiler.compile_kernel(*DROPOUT) for _ in range(2))
    assert first == second
    assert len(compiled) == 2
    (warning,) = caught
    assert "compiled anew in each process: cannot write to" in str(warning.message)
    assert str(tmp_path / "file" / "cache") in str(warning.message)


def test_a_cache_that_cannot_be_written_to_costs_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(KernelCache, "put", full)
    with pytest.warns(UserWarning, match="compiled anew .* No space left on device"):
        assert compiler.compile_kernel(*DROPOUT).startswith(b"\x7fELF")


def test_a_compile_error_carries_the_log(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError, match=r"NVRTC could not compile dropout\.cu") as caught:
        compiler.compile_kernel("dropout.cu", dropout_macros("quadruple"), "sm_90")
    assert caught.value.kernel == "dropout.cu"
    assert 'identifier "quadruple" is undefined' in caught.value.log
    assert caught.value.log in str(caught.value)
    assert isinstance(caught.value, GpuError)
    assert compiler.compile_kernel(*DROPOUT).startswith(b"\x7fELF"), "a failure must not be remembered"


def test_dead_code_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "kernel_sources", lambda: tmp_path)
    (tmp_path / "dead.cu").write_text('static __device__ int f() { return 1; }\nextern "C" __global__ void k() {}\n')
    with pytest.raises(CompileError, match=r"dead\.cu\(1\).*never referenced"):
        compiler.compile_kernel("dead.cu", (), "sm_90")


def test_subnormal_numbers_are_flushed_where_that_is_said_and_nowhere_else() -> None:
    flushing = {
        file.name
        for file in kernel_sources().glob("*.cu")
        if b"--ftz=true" in compiler._options(file.name, (), "sm_90")
    }
    assert flushing == {"cross_entropy.cu"}


def test_an_architecture_that_does_not_exist() -> None:
    with pytest.raises(CompileError, match=r"dropout\.cu"):
        compiler.compile_kernel("dropout.cu", dropout_macros("float"), "sm_12345")


def test_kernels_longest_not_used_make_room(fresh_cache: Path) -> None:
    size = len(kernel_cache._head("a", b"") + b"0123456789")
    cache = KernelCache(fresh_cache, limit=2 * size + 5)
    for age, key in enumerate("abc", start=1):
        cache.put(key, b"0123456789")
        os.utime(fresh_cache / f"{key}.kernel", ns=(0, age)) if key != "c" else None
        cache.get("a")
    assert [cache.get(key) is not None for key in "abc"] == [True, False, True]
    (fresh_cache / "notes.txt").write_text("whatever else is there stays" * 2)
    (fresh_cache / "old.cubin").write_bytes(b"of an earlier version")
    cache.put("d", b"0" * (2 * size))
    assert [file.name for file in fresh_cache.iterdir()] == ["notes.txt"]


def test_a_directory_that_may_not_be_written_is_read(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    cache = KernelCache(fresh_cache)
    cache.put("a", b"cubin")
    monkeypatch.setattr(kernel_cache.os, "utime", refused)
    assert cache.get("a") == b"cubin"


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


def test_a_missing_compiler_is_told() -> None:
    # In a process of its own: this one may have loaded the compiler already.
    done = subprocess.run([sys.executable, "-c", WITHOUT_NVRTC], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "NVRTC is not installed: pip install 'lt_runtime[cuda13]'\n"


def test_missing_headers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
    with pytest.raises(MissingLibraryError, match=r"headers are not installed: pip install 'lt_runtime\[cuda13\]'"):
        compiler.compile_kernel(*DROPOUT)
