"""Every mutant's text occurs in its file, and its tests exist; the commands that run mutants give right verdicts."""

import ast
import functools
import subprocess
import sys
from collections import Counter

import pytest

from tests.mutants import FAULTS
from tests.mutants.fault import Fault, StaleFaultError
from tests.mutants.trial import ROOT, Copy, Verdict, own_environment, verdict_on
from tests.mutate import Mutant, covering_tests, kernel_mutants_of, kernel_tests, mutants_of


@functools.cache
def text_of(path: str) -> str:
    return (ROOT / path).read_text()


def test_names_are_unique() -> None:
    twice = [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1]
    assert not twice


@pytest.mark.parametrize("path", sorted({fault.path for fault in FAULTS}))
def test_faults_fit_their_file(path: str) -> None:
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
def test_a_fault_that_does_not_fit_is_an_error(old: str, new: str) -> None:
    with pytest.raises(StaleFaultError):
        Fault("", "a.py", old, new, ()).planted("once twice twice")


TESTS = """
from lt_runtime.schedules import DECAYS


def test_right():
    assert DECAYS[0] == "constant"


def test_blind():
    pass


def test_endless():
    while DECAYS[0] != "constant":
        pass
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy of the tree with an additional test file."""
    directory = tmp_path_factory.mktemp("copy")
    made = Copy(directory / "tree", built=directory / "built")
    (directory / "tree" / "tests" / "test_own.py").write_text(TESTS)
    return made


@pytest.mark.parametrize(
    ("tests", "seconds", "verdict"),
    [
        (("blind", "right"), 60, Verdict.KILLED),
        (("blind",), 60, Verdict.SURVIVED),
        (("endless",), 1, Verdict.TIMED_OUT),
    ],
)
def test_verdicts(copy: Copy, tests: tuple[str, ...], seconds: int, verdict: Verdict) -> None:
    path = "lt_runtime/schedules.py"
    text = text_of(path) + '\nDECAYS = ("else",)\n'
    found, output = copy.try_out(path, text, [f"tests/test_own.py::test_{test}" for test in tests], seconds)
    assert found is verdict, output
    assert (copy.root / path).read_text() == text_of(path)


@pytest.mark.parametrize(
    ("status", "output", "verdict"),
    [
        (1, "E  AssertionError", Verdict.KILLED),
        (1, "E  tests.host_kernels.build.BuildError: g++", Verdict.BROKEN),
        (4, "ERROR: not found: test_own.py::test_absent", Verdict.BROKEN),
        (Verdict.LEFT_OUT, "", Verdict.LEFT_OUT),
    ],
)
def test_tests_that_cannot_run_kill_nothing(status: int | Verdict, output: str, verdict: Verdict) -> None:
    assert verdict_on(status, output) is verdict


def test_changes_of_a_file_are_each_one_change_that_parses() -> None:
    text = "def f(a: int = 1) -> int:\n    if a < 2 and not a:\n        print(a)\n    return a + 1\n"
    found = [mutant.name.partition(": ")[2] for mutant in mutants_of("a.py", text)]
    assert found == [
        *("1 -> (2)", "1 -> (0)", "a < 2 and not a -> (not (a < 2 and (not a)))"),
        *("a < 2 and not a -> (a < 2 or not a)", "a < 2 -> (a <= 2)", "2 -> (3)", "2 -> (1)", "not a -> bool(a)"),
        *("print(a) -> pass", "return a + 1 -> return None", "a + 1 -> (a - 1)", "1 -> (2)", "1 -> (0)"),
    ]
    for mutant in mutants_of("a.py", text):
        ast.parse(mutant.text)
        assert mutant.text != text


def test_tests_that_cover_its_line_run_for_a_mutant_and_those_of_its_room_first() -> None:
    mutant, far, near, own = Mutant("", "room/x.py", range(3, 5), ""), "far", "tests/cpu/room/near", "tests/cpu/test_x"
    recorded = {"seconds": {far: 20.0, near: 8.0, own: 15.0, "other": 0.1}}
    assert covering_tests(mutant, {**recorded, "lines": {"room/x.py": {"4": [0, 1, 2], "5": [3]}}}) == [own, near]
    at_import = Mutant("", "room/x.py", range(3, 5), "", is_in_function=False)
    assert covering_tests(at_import, {**recorded, "lines": {"room/x.py": {"4": [], "5": [3]}}}) == [own, near, "other"]
    assert covering_tests(mutant, {**recorded, "lines": {"room/x.py": {"5": [3]}}}) == []


def test_a_kernel_is_changed_in_code_alone_and_tried_by_the_tests_of_its_includers() -> None:
    text = '#include "a.cuh"\n// 1 + 1\nint x = f<2>(y + 3); // 4\n'
    names = [each.name.partition(" in ")[0] for each in kernel_mutants_of("a.cu", text)]
    assert names == ["a.cu:3:10: 2 -> 3", "a.cu:3:15: + -> -", "a.cu:3:17: 3 -> 4"]
    found = kernel_tests(ROOT, "cuda_src/mlp_sums.cuh")
    assert found == ["tests/host_kernels/test_mlp.py"]
