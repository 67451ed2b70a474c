"""Every row of the table of planted faults fits the file that it is about, and the tests that it names are there."""

import ast
import functools
import subprocess
import sys
from collections import Counter

import pytest

from tests.mutants.fault import ROOT, Fault, StaleFaultError
from tests.mutants.table import FAULTS
from tests.mutants.trial import Copy, Verdict, own_environment, verdict_on


@functools.cache
def text_of(path: str) -> str:
    return (ROOT / path).read_text()


def test_names_are_unique() -> None:
    twice = [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1]
    assert not twice


@pytest.mark.parametrize("path", sorted({fault.path for fault in FAULTS}))
def test_rows_fit_their_file(path: str) -> None:
    for fault in FAULTS:
        if fault.path == path:
            planted = fault.planted(text_of(path))
            if path.endswith(".py"):
                ast.parse(planted)


def test_the_tests_that_must_see_a_fault_are_there() -> None:
    named = sorted({test for fault in FAULTS for test in fault.tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-p", "no:cacheprovider", *named]
    collected = subprocess.run(command, cwd=ROOT, env=own_environment(), capture_output=True, text=True, check=False)
    assert collected.returncode == 0, [line for line in collected.stdout.splitlines() if line.startswith("ERROR")]


@pytest.mark.parametrize(("old", "new"), [("gone", "new"), ("twice", "new"), ("once", "once")])
def test_a_row_that_does_not_fit_is_an_error(old: str, new: str) -> None:
    with pytest.raises(StaleFaultError):
        Fault("", "a.py", old, new, ()).planted("once twice twice")


TESTS = """
import time

from lt_runtime.schedules import DECAYS


def test_right():
    assert DECAYS[0] == "constant"


def test_blind():
    pass


def test_endless():
    while DECAYS[0] != "constant":
        time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy of the tree with tests of its own."""
    directory = tmp_path_factory.mktemp("copy")
    (directory / "built").mkdir()
    made = Copy(directory / "tree", directory / "built")
    (directory / "tree" / "tests" / "test_own.py").write_text(TESTS)
    return made


def own_fault(*tests: str, hangs: bool = False) -> Fault:
    ids = tuple(f"tests/test_own.py::test_{test}" for test in tests)
    return Fault("", "lt_runtime/schedules.py", '["constant", "linear"', '["else", "linear"', ids, hangs)


def test_a_fault_is_killed_or_survives(copy: Copy) -> None:
    assert copy.try_out(own_fault("blind", "right")).verdict is Verdict.KILLED
    unchanged = copy.passes(["tests/test_own.py::test_right"], 0)
    assert unchanged.verdict is Verdict.SURVIVED, unchanged.output
    assert copy.try_out(own_fault("blind")).verdict is Verdict.SURVIVED


def test_tests_that_cannot_run_kill_nothing(copy: Copy) -> None:
    assert copy.try_out(own_fault("absent")).verdict is Verdict.BROKEN


@pytest.mark.parametrize(("hangs", "verdict"), [(False, Verdict.TIMED_OUT), (True, Verdict.KILLED)])
def test_tests_that_never_end(copy: Copy, hangs: bool, verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "limit_s", 3.0)
    assert copy.try_out(own_fault("endless", hangs=hangs)).verdict is verdict


def test_a_kernel_that_does_not_compile_kills_nothing() -> None:
    assert verdict_on(own_fault("right"), 1, "E  tests.host_kernels.build.BuildError: g++") is Verdict.BROKEN
    assert verdict_on(own_fault("right"), 1, "E  AssertionError") is Verdict.KILLED
