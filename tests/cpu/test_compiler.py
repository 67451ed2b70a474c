"""Compiling kernels, keeping them, and what happens where either cannot be done. NVRTC needs no GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda import pathfinder

from lt_runtime.errors import CompileError, GpuError, MissingLibraryError
from lt_runtime.gpu import compiler
from lt_runtime.gpu.compiler import Macros
from lt_runtime.paths import CACHE_VARIABLE, cache_directory, kernel_sources

ROOT = Path(__file__).parents[2]


def dropout_macros(kind: str) -> Macros:
    return ("SCALAR", kind), ("ALIGNED", "1"), ("BLOCKS", "1")


DROPOUT = ("dropout.cu", dropout_macros("float"), "sm_90")


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory, and nothing remembered of any other before or afterwards."""
    cached = (compiler._open_cache, compiler._included_files, compiler.runtime_headers)
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
    compile_for_real = compiler._compile

    def counting(source: str, code: str, options: Any) -> bytes:
        calls.append(source)
        return compile_for_real(source, code, options)

    monkeypatch.setattr(compiler, "_compile", counting)
    return calls


def forget_this_process() -> None:
    compiler._open_cache.cache_clear()


def test_a_kernel_is_compiled_once_for_all_processes(monkeypatch: pytest.MonkeyPatch, fresh_cache: Path) -> None:
    first = compiler.compile_kernel(*DROPOUT)
    assert first.startswith(b"\x7fELF")
    forget_this_process()

    def must_not_run(*_: Any) -> bytes:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "_compile", must_not_run)
    assert compiler.compile_kernel(*DROPOUT) == first
    assert cache_directory() == fresh_cache


def test_the_cache_lies_where_the_variable_says(fresh_cache: Path) -> None:
    cubin = compiler.compile_kernel(*DROPOUT)
    kept = [file.read_bytes() for file in fresh_cache.rglob("*") if file.is_file()]
    assert cubin in kept


def test_without_the_variable_it_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "lt_runtime"
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert cache_directory() == tmp_path / "lt_runtime"


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


@pytest.mark.parametrize("edited", ["dropout.cu", "philox.cuh"])
def test_an_edited_source_or_header_is_compiled_anew(
    edited: str, compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources = tmp_path / "cuda_src"
    shutil.copytree(kernel_sources(), sources)
    monkeypatch.setattr(compiler, "kernel_sources", lambda: sources)
    first = compiler.compile_kernel(*DROPOUT)
    text = (sources / edited).read_text()
    for old, new in (("0xD2511F53ull", "0xD2511F55ull"), ("out.store(x)", "out.store(Octet{})")):
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
    class Full(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler, "_open_cache", Full)
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
        if b"--ftz=true" in compiler._options(file.name, (), "sm_90").as_bytes("nvrtc")
    }
    assert flushing == {"cross_entropy.cu"}


def test_an_architecture_that_does_not_exist() -> None:
    with pytest.raises(CompileError, match=r"dropout\.cu"):
        compiler.compile_kernel("dropout.cu", dropout_macros("float"), "sm_12345")


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
