"""How `tests.sanitize` reads the reports of compute-sanitizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import sanitize
from tests.sanitize import ALONE, FAULTY, ROOT, TOOLS, WITH_PRODUCTS, Verdict, command, line, read, selection

CLEAN = """\
========= COMPUTE-SANITIZER
========= ERROR SUMMARY: 0 errors
"""
OUT_OF_BOUNDS = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at faulty_kernel+0x60
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0x7f0000000000 is out of bounds
=========     and is 67107840 bytes after the nearest allocation at 0x7effc0000000 of size 1024 bytes
=========
========= Invalid __global__ read of size 16 bytes
=========     at epilogue_bwd+0x1230 in epilogue_bwd.cu:12
=========     by thread (31,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at cross_entropy+0xd0
=========     and Read access at cross_entropy+0x110 [12 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
NO_RACE = """\
========= COMPUTE-SANITIZER
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""
UNINITIALISED = """\
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void cupy_copy<float, int>(float const*, int)+0x70
=========     by thread (31,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at 0x100 in /home/someone/kernels/sum.cu:30:sum_gpu(const int *, int *)
=========
========= ERROR SUMMARY: 2 errors
"""
NO_PLACE = """\
========= Internal Sanitizer Error: something else
========= ERROR SUMMARY: 1 error
"""


@pytest.mark.parametrize(
    ("output", "errors", "places", "ours", "clean"),
    [
        (CLEAN, 0, {}, 0, True),
        (NO_RACE, 0, {}, 0, True),
        (OUT_OF_BOUNDS, 2, {FAULTY: 1, "epilogue_bwd": 1}, 1, False),
        (RACE, 1, {"cross_entropy": 2}, 2, False),
        (UNINITIALISED, 2, {"cupy_copy": 1, "sum_gpu": 1}, 0, True),
        (NO_PLACE, 1, {}, 0, False),
        ("it never started\n", None, {}, 0, False),
    ],
)
def test_a_report(output: str, errors: int | None, places: dict[str, int], ours: int, clean: bool) -> None:
    verdict = read("memcheck", 0, output)
    assert (verdict.errors, dict(verdict.places), verdict.ours, verdict.clean) == (errors, places, ours, clean)


def test_tests_that_fail_are_not_clean() -> None:
    verdict = read("memcheck", 1, CLEAN)
    assert not verdict.clean
    assert "FAILED" in line("memcheck", verdict)
    assert "clean" in line("memcheck", read("memcheck", 0, CLEAN))
    assert "FAILED" in line("memcheck", None)


@pytest.mark.parametrize("tool", TOOLS)
def test_the_tests_and_the_faults_are_there(tool: str, tmp_path: Path) -> None:
    assert all((ROOT / argument).is_file() for argument in selection(tool) if argument.endswith(".py"))
    assert set(ALONE) | set(WITH_PRODUCTS) < {file.stem.removeprefix("test_") for file in ROOT.glob("tests/gpu/*.py")}
    from tests.support.faulty_kernels import BODIES

    assert set(BODIES) == set(TOOLS)
    only = [argument for argument in command(tool, tmp_path / "log") if argument.startswith("kns=")]
    assert ("kns=epilogue_bwd" in only) == (tool != "initcheck")


def test_a_tool_that_does_not_find_its_fault_is_not_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def supervise(tool: str, arguments: list[str], *_: object) -> tuple[Verdict, str]:
        asked.append(arguments[1])
        return read(tool, 0, CLEAN), ""

    monkeypatch.setattr(sanitize, "supervise", supervise)
    assert sanitize.examine("memcheck", [], 1, tmp_path) == (None, "")
    assert asked == ["tests.support.faulty_kernels"]


def test_without_the_toolkit_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sanitize, "SANITIZER", str(tmp_path / "compute-sanitizer"))
    with pytest.raises(SystemExit, match="not installed"):
        sanitize.main([])
