"""Every kernel variant compiles for every architecture without spills, and its parameter struct equals that of ctypes.

Apart from a sample, a variant that has passed is not compiled again before something that decides the outcome changes.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from datetime import date
from pathlib import Path

import pytest

from lt_runtime.gpu import compiler
from lt_runtime.kernels.epilogue import ACTIVATION_NAMES
from lt_runtime.kernels.kernel import SCALAR
from lt_runtime.kernels.losses import TALLY
from lt_runtime.kernels.tiling import OCTET, THREADS, tile
from lt_runtime.paths import kernel_sources
from tests import compile_matrix
from tests.compile_matrix import (
    _FROM_TWIN,
    SOURCES,
    STRUCTS,
    VARIANTS,
    architectures_to_compile,
    compiled,
    digest_of,
    recorded,
    variants_of,
)
from tests.host_kernels.build import COMPILER, SHIM
from tests.support import kernel_digest, kernel_usage
from tests.support.kernel_digest import included, without_comments
from tests.support.kernel_families import ENTRIES
from tests.support.kernel_usage import ARCHITECTURES, Usage, Variant, compile_to_ptx, everywhere, faults, usages
from tests.support.register_table import USAGE_PROPERTY, Record, read

FULL = os.environ.get("LT_COMPILE_ALL") == "1"
PARTS = [
    (source, first, min(first + 16, len(variants_of(source))))
    for source in SOURCES
    for first in range(0, len(variants_of(source)), 16)
]
"""Groups of the sources' variants, which are distributed over several processes."""


record_of_all = functools.cache(recorded)


@functools.cache
def wanted(source: str) -> tuple[str, ...]:
    """The architectures that a source is compiled for in this run."""
    return architectures_to_compile(source, record_of_all(), full=FULL)


def test_every_source_is_among_the_variants() -> None:
    files = {file.name for file in kernel_sources().glob("*.cu")}
    assert set(SOURCES) == {each.source for each in ENTRIES.values()} == files


def test_every_type_and_activation_is_among_the_variants() -> None:
    values = {value for variant in VARIANTS for _, value in variant.macros}
    assert set(SCALAR.values()) | set(ACTIVATION_NAMES.values()) <= values


def test_no_variant_is_compiled_twice() -> None:
    assert len(set(VARIANTS)) == len(VARIANTS) == len(set(map(str, VARIANTS)))
    parts = [variant for source, first, end in PARTS for variant in variants_of(source)[first:end]]
    assert sorted(map(str, parts)) == sorted(map(str, VARIANTS))


@pytest.mark.parametrize(("source", "first", "end"), PARTS)
def test_registers_suffice(source: str, first: int, end: int, record_property: Callable[[str, object], None]) -> None:
    architectures = wanted(source)
    if not architectures:
        count = len(variants_of(source))
        pytest.skip(f"{source}: all its {count} variants have passed; LT_COMPILE_ALL=1 compiles them")
    variants = variants_of(source)[first:end]
    found = compiled(variants, architectures)
    for usage in found:
        record_property(USAGE_PROPERTY, astuple(usage))
    assert faults(variants, architectures, STRUCTS[source], found) == []


@pytest.mark.parametrize("source", SOURCES)
def test_a_sample_takes_what_the_table_says(source: str) -> None:
    """Compiles one variant of a quarter of the sources: other sources each day, and another variant each time.

    The table of registers must match the installed compiler even if the digest of the sources is unchanged.
    """
    record, variants = record_of_all(), variants_of(source)
    if wanted(source):
        pytest.skip(f"all variants of {source} are compiled")
    turn, days_left = divmod(date.today().toordinal() + SOURCES.index(source), 4)
    if days_left:
        pytest.skip("compiled every fourth day")
    found = usages(variants[turn % len(variants)], ARCHITECTURES[turn % len(ARCHITECTURES)])
    assert found
    assert registers(found).items() <= registers(record.of(source)).items()


def registers(found: Sequence[Usage]) -> dict[tuple[str, str, str], int]:
    return {(usage.variant, usage.kernel, usage.architecture): usage.registers for usage in found}


@pytest.mark.parametrize("saved", ["1", "2", "3"])
def test_a_pass_in_place_reads_through_no_cache_of_constants(saved: str) -> None:
    in_place = {"SAVED": saved, "DZ": "1", "ACTIVATION": ACTIVATION_NAMES["relu"], "ALIGNED": "1"}
    found = [each for each in variants_of("epilogue_bwd.cu") if in_place.items() <= set(each.macros)]
    _, code = compile_to_ptx(found[0], "sm_90")
    assert "ld.global" in code
    assert ".nc." not in code


FAULTS = {
    "stack": "float t[64]; for (int i = 0; i < 64; ++i) t[in[i] & 63] = x[i]; x[0] = t[in[0] & 63];",
    "FP64": "x[0] = static_cast<float>(sqrt(static_cast<double>(x[0])));",
    "spills": """float t[300];
        for (int i = 0; i < 300; ++i) t[i] = x[i];
        __syncthreads();
        for (int i = 0; i < 300; ++i) x[i] = t[299 - i];""",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = f'extern "C" __global__ void faulty(const int* in, float* x) {{ {FAULTS[fault]} }}\n'
    (tmp_path / "faulty.cu").write_text(code)
    monkeypatch.setattr(kernel_usage, "kernel_sources", lambda: tmp_path)
    ends = ARCHITECTURES[0], ARCHITECTURES[-1]
    assert all(fault in " ".join(usage.faults) for usage in everywhere([Variant("faulty.cu")], ends))


def test_kernels_that_are_missing_unknown_or_of_another_struct_are_seen() -> None:
    variant, structs = Variant("tally.cu"), {"tally": TALLY.params}
    size = ctypes.sizeof(TALLY.params)
    right = Usage("tally.cu", "tally", "sm_75", 10, spills=0, stack=0, shared=64, parameters=size, double=False)

    def said(*found: Usage) -> str:
        return " ".join(faults([variant], ["sm_75"], structs, found))

    assert said(right) == ""
    assert said() == "tally of tally.cu for sm_75 is missing"
    assert said(right, replace(right, kernel="other")) == "other of tally.cu is not known to the runtime"
    assert said(replace(right, parameters=8)) == f"tally of tally.cu takes 8 bytes; its struct in Python has {size}"
    assert said(replace(right, spills=4)) == "tally of tally.cu for sm_75 spills registers"


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the kernels' sources, whose digests the tests compute."""
    copy = shutil.copytree(kernel_sources(), tmp_path / "cuda_src")
    monkeypatch.setattr(kernel_digest, "kernel_sources", lambda: copy)
    return copy


@functools.cache
def all_passed() -> Record:
    """A record that says that all kernel families have passed with the present sources."""
    return Record((), {source: digest_of(source) for source in SOURCES}, "")


def changed_by(change: Callable[[], object]) -> set[str]:
    """The kernel families whose variants must be compiled again after a change, if all had passed before."""
    record = all_passed()
    change()
    return {source for source in SOURCES if architectures_to_compile(source, record, full=False)}


@pytest.mark.parametrize(
    ("header", "families"),
    [
        ("narrow.cuh", {"narrow_k.cu", "narrow_m.cu", "narrow_n.cu"}),
        ("transpose.cuh", {"epilogue_bwd.cu"}),  # this header is included through another header
        ("stream_rows.cuh", {"cross_entropy.cu"}),
        ("resize.cu", {"resize.cu"}),
    ],
)
def test_a_change_is_compiled_in_the_families_that_include_it(sources: Path, header: str, families: set[str]) -> None:
    file = sources / header
    # The change is to replace the file's last "0", which is not in a comment, by "1".
    before, _, after = file.read_text().rpartition("0")
    assert changed_by(lambda: file.write_text(f"{before}1{after}")) == families


def test_every_header_that_the_compiler_reads_is_in_the_digest() -> None:
    """Compares the headers in the digest with the list of includes that the host compiler prints."""
    for source in SOURCES:
        options = [f"-D{name}={value}" for name, value in variants_of(source)[0].macros]
        paths = ["-I", str(SHIM), "-I", str(kernel_sources()), "-isystem", compiler.runtime_headers()]
        command = [COMPILER, "-std=c++17", "-MM", "-x", "c++", *options, *paths, str(kernel_sources() / source)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        read_by_it = {Path(file).name for file in done.stdout.split() if Path(file).suffix in (".cu", ".cuh")}
        assert {source} <= read_by_it <= {file.name for file in included(source)}


def test_prose_is_not_compiled_again(sources: Path) -> None:
    file = sources / "vector.cuh"
    prose = "// Another.\n\n/* Of several\n   lines. */\n"
    assert changed_by(lambda: file.write_text(prose + file.read_text().replace("\n", "  // so\n"))) == set()


def test_comments_go_and_literals_stay() -> None:
    assert (
        without_comments('a = "//b\\"/*c*/";  // d "e"\n\n  f /* g\nh */ + \'"\';') == 'a = "//b\\"/*c*/";\nf + \'"\';'
    )
    assert without_comments("x//y\\\nz\nw") == "x\nw", "a comment goes on after a backslash"
    assert without_comments("int/**/i") == "int i"


@pytest.mark.parametrize(
    ("module", "name", "value", "families"),
    [
        (compiler, "_FLUSHED", frozenset({"elementwise_loss.cu", "cross_entropy.cu"}), {"elementwise_loss.cu"}),
        (compile_matrix, "STRUCTS", STRUCTS | {"optimizer.cu": {"optimizer": TALLY.params}}, {"optimizer.cu"}),
        (compile_matrix, "VARIANTS", VARIANTS[1:], {VARIANTS[0].source}),
        (compile_matrix, "ARCHITECTURES", ("sm_90",), set(SOURCES)),
        (kernel_digest, "compiler_build", lambda: ("13.6",), set(SOURCES)),
        (kernel_digest, "judging_code", lambda: "another", set(SOURCES)),
    ],
)
def test_what_else_decides_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, value: object, families: set[str]
) -> None:
    assert changed_by(lambda: monkeypatch.setattr(module, name, value)) == families


def test_another_toolkit_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in compiler._TOOLKIT_HEADERS:
        (tmp_path / name).write_text("// another\n")
    monkeypatch.setattr(kernel_digest.compiler, "_TOOLKIT_HEADERS", compiler._TOOLKIT_HEADERS)
    assert changed_by(lambda: monkeypatch.setattr(compiler, "runtime_headers", lambda: str(tmp_path))) == set(SOURCES)


def test_a_full_run_leaves_out_nothing() -> None:
    assert all(architectures_to_compile(source, all_passed(), full=True) == ARCHITECTURES for source in SOURCES)
    twin = set(ARCHITECTURES) - set(architectures_to_compile("elementwise_loss.cu", Record((), {}, ""), full=False))
    assert twin == {"sm_89"}
    usages = [each for each in recorded().usages if not each.variant.startswith(_FROM_TWIN)]
    registers = {each: [u.registers for u in usages if u.architecture == each] for each in ARCHITECTURES}
    assert max(abs(x - y) for x, y in zip(registers["sm_89"], registers["sm_86"], strict=True)) <= 2


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Sets up a table of two kernel families, which the command compiles with a fake compiler."""
    monkeypatch.setattr(compile_matrix, "SOURCES", ["elementwise_loss.cu", "tally.cu"])
    monkeypatch.setattr(compile_matrix, "TABLE", tmp_path / "registers.md")
    monkeypatch.setattr(compile_matrix, "everywhere", compiled_with(spills=0))
    return tmp_path / "registers.md"


def compiled_with(spills: int) -> Callable[..., list[Usage]]:
    """Makes a function that stands in for the compiler and reports the given number of spills."""

    def everywhere(variants: Sequence[Variant], architectures: Sequence[str]) -> list[Usage]:
        plain = Usage("", "", "", 10, spills=spills, stack=0, shared=64, parameters=0, double=False)
        return [
            replace(plain, variant=str(each), kernel=kernel, architecture=name, parameters=ctypes.sizeof(struct))
            for each, name in itertools.product(variants, architectures)
            for kernel, struct in STRUCTS[each.source].items()
        ]

    return everywhere


def test_the_command_compiles_what_has_changed(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compile_matrix.main([]) == 0
    assert "compiling 2 of 2 families: elementwise_loss.cu, tally.cu\n" in capsys.readouterr().out
    first = table.read_text()
    assert compile_matrix.main([]) == 0
    assert "compiling 0 of 2 families" in capsys.readouterr().out
    assert table.read_text() == first
    assert compile_matrix.main(["--full"]) == 0
    assert "compiling 2 of 2 families" in capsys.readouterr().out
    monkeypatch.setattr(compile_matrix, "VARIANTS", [each for each in VARIANTS if str(each) != "tally.cu-float"])
    assert compile_matrix.main([]) == 0
    assert "compiling 1 of 2 families: tally.cu\n" in capsys.readouterr().out
    assert len(read(table.read_text()).usages) == len(read(first).usages) - len(ARCHITECTURES)


def test_a_command_that_finds_faults_fails_and_records_nothing(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_matrix, "everywhere", compiled_with(spills=4))
    assert compile_matrix.main([]) == 1
    said = capsys.readouterr().out
    assert "elementwise_loss of elementwise_loss.cu-float-SquaredError-0 for sm_75 spills registers\n" in said
    assert "**10**" in said
    assert not table.exists()


def _some() -> list[Usage]:
    usage = Usage("a.cu-float", "a", "", 10, spills=0, stack=0, shared=64, parameters=8, double=False)
    plain = [replace(usage, architecture=each) for each in ARCHITECTURES]
    spilling = [replace(each, variant="a.cu-__half", registers=255, spills=16) for each in plain[:1]]
    return [*plain, *spilling, *(replace(each, variant="a.cu-__half", registers=9) for each in plain[1:])]


def test_the_table_has_a_row_for_each_variant_and_is_read_back() -> None:
    passed = Record(tuple(replace(usage, spills=0) for usage in _some()), {"a.cu": "0123"}, "NVRTC")
    text = passed.document()
    half, single = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[-2:]]
    assert half == ["a", "a.cu-__half", "255", *["9"] * 6, "64"]
    assert single[-1] == "64"
    assert read(text).document() == text
    assert (read(text).digests, read(text).compiler) == (passed.digests, passed.compiler)
    assert read("") == Record((), {}, "")


@pytest.mark.parametrize("shape", [(1, 1), (1, 10**6), (10**6, 1), (7, 300), (300, 7), (65536, 8), (3, 1025)])
def test_tiles_fill_a_block_and_no_more(shape: tuple[int, int]) -> None:
    rows, cols = shape
    x, y = tile(rows, cols)
    assert x * y <= THREADS
    assert x & (x - 1) == y & (y - 1) == 0, "powers of two"
    assert (x - 1) * OCTET < 2 * cols, "no more than twice the threads that the columns need"
    assert y < 2 * rows or y == 1
