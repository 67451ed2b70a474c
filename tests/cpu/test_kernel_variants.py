"""Every kernel variant compiles for every architecture into registers alone, and takes the struct that ctypes has."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from lt_runtime.kernels.blocks import SCALAR
from lt_runtime.kernels.epilogue import ACTIVATION_NAMES
from lt_runtime.kernels.tiling import OCTET, THREADS, tile
from lt_runtime.paths import kernel_sources
from tests import compile_matrix
from tests.compile_matrix import (
    ARCHITECTURES,
    USAGE_PROPERTY,
    VARIANTS,
    Usage,
    Variant,
    details,
    document,
    everywhere,
    over,
    sampled,
    summary,
)
from tests.support import kernel_families

ENTRIES: dict[str, dict[str, type[ctypes.Structure]]] = {}
"""Kernels of a source, with the structs that they take."""
for _entry in kernel_families.ENTRIES.values():
    ENTRIES.setdefault(_entry.source, {})[_entry.name] = _entry.params


def test_every_source_is_among_the_variants() -> None:
    files = {file.name for file in kernel_sources().glob("*.cu")}
    assert {variant.source for variant in VARIANTS} == set(ENTRIES) == files


def test_every_type_and_activation_is_among_the_variants() -> None:
    values = {value for variant in VARIANTS for _, value in variant.macros}
    assert set(SCALAR.values()) | set(ACTIVATION_NAMES.values()) <= values


def test_no_variant_is_compiled_twice() -> None:
    assert len(set(VARIANTS)) == len(VARIANTS) == len(set(map(str, VARIANTS)))


@pytest.mark.parametrize("variant", [each for each in VARIANTS if sampled(each)], ids=str)
def test_registers_suffice(variant: Variant, record_property: Callable[[str, object], None]) -> None:
    kernels_of_it, architectures = ENTRIES[variant.source], sampled(variant)
    found = everywhere([variant], architectures)
    for usage in found:
        record_property(USAGE_PROPERTY, astuple(usage))
    compiled = [(usage.architecture, usage.kernel) for usage in found]
    assert sorted(compiled) == sorted(itertools.product(architectures, kernels_of_it))
    assert [fault for usage in found for fault in usage.faults] == []
    sizes = {entry: ctypes.sizeof(params) for entry, params in kernels_of_it.items()}
    assert {usage.kernel: usage.parameters for usage in found} == sizes, "the struct that ctypes has"


@pytest.mark.parametrize("saved", ["1", "2", "3"])
def test_a_pass_in_place_reads_through_no_cache_of_constants(saved: str) -> None:
    in_place = {"SAVED": saved, "DZ": "1", "ACTIVATION": ACTIVATION_NAMES["relu"], "ALIGNED": "1"}
    found = [each for each in VARIANTS if each.source == "epilogue_bwd.cu" and in_place.items() <= set(each.macros)]
    _, code = compile_matrix._compile(found[0], compile_matrix.MAIN)
    assert "ld.global" in code
    assert ".nc." not in code


def test_every_source_meets_every_architecture() -> None:
    met = {(variant.source, each) for variant in VARIANTS for each in sampled(variant)}
    assert met == set(itertools.product(ENTRIES, ARCHITECTURES))


def test_a_command_that_finds_faults_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_matrix, "everywhere", lambda _: _usages())
    assert compile_matrix.main(tmp_path / "registers.md") == 1
    assert "a of a.cu-__half for sm_75 spills registers\n" in capsys.readouterr().out
    monkeypatch.setattr(compile_matrix, "everywhere", lambda _: _usages()[: len(ARCHITECTURES)])
    assert compile_matrix.main(tmp_path / "registers.md") == 0
    assert "sm_120" in (tmp_path / "registers.md").read_text()


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
    monkeypatch.setattr(compile_matrix, "kernel_sources", lambda: tmp_path)
    assert all(fault in " ".join(usage.faults) for usage in everywhere([Variant("faulty.cu")]))


def test_over_is_every_combination() -> None:
    names = [str(variant) for variant in over("a.cu", SCALAR=["float", "__half"], DROPOUT="01")]
    assert names == ["a.cu-float-0", "a.cu-float-1", "a.cu-__half-0", "a.cu-__half-1"]
    assert over("a.cu") == [Variant("a.cu")]


def _usages() -> list[Usage]:
    usage = Usage("a.cu-float", "a", "", 10, spills=0, stack=0, shared=64, parameters=8, double=False)
    plain = [replace(usage, architecture=each) for each in ARCHITECTURES]
    spilling = [replace(each, variant="a.cu-__half", registers=255, spills=16) for each in plain[:1]]
    return [*plain, *spilling, *(replace(each, variant="a.cu-__half", registers=9) for each in plain[1:])]


def test_the_summary_has_the_most_registers_and_marks_spills() -> None:
    heading, _, row = summary(_usages()).splitlines()
    assert [cell.strip() for cell in heading.split("|")[1:-1]] == ["kernel", *ARCHITECTURES]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["a", "**255**", *["10"] * (len(ARCHITECTURES) - 1)]


def test_the_details_have_a_row_for_each_variant() -> None:
    _, _, half, single = details(_usages()).splitlines()
    assert [cell.strip() for cell in half.split("|")[1:-1]] == ["a", "a.cu-__half", "255", *["9"] * 6, "16", "64"]
    assert [cell.strip() for cell in single.split("|")[1:-1]][-2:] == ["0", "64"]
    assert details(_usages()) in document(_usages())


@pytest.mark.parametrize("shape", [(1, 1), (1, 10**6), (10**6, 1), (7, 300), (300, 7), (65536, 8), (3, 1025)])
def test_tiles_fill_a_block_and_no_more(shape: tuple[int, int]) -> None:
    rows, cols = shape
    x, y = tile(rows, cols)
    assert x * y <= THREADS
    assert x & (x - 1) == y & (y - 1) == 0, "powers of two"
    assert (x - 1) * OCTET < 2 * cols, "no more than twice the threads that the columns need"
    assert y < 2 * rows or y == 1
