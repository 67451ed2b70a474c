"""The commands `profile`, `compare` and `check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lt_runtime.cli import compare, profile
from lt_runtime.profiling.capture.check import CaptureReport, Fault
from lt_runtime.profiling.layers import Kernel, Layer
from lt_runtime.profiling.report import Report
from tests.cpu.cli.conftest import Cli

ROOT = Path(__file__).parents[3]
SCRIPT = """
import os, sys
import lt_runtime as lt

print("runs with", sys.argv[1:], __name__)
for number in range(8):
    with lt.range("step"), lt.range("work"):
        pass
    if number == 5 and sys.argv[1:] == ["raise"]:
        raise RuntimeError("in the script")
    if number == 5 and sys.argv[1:] == ["exit"]:
        sys.exit(7)
    if number == 5 and sys.argv[1:] == ["die"]:
        os._exit(3)
    if number == 5 and sys.argv[1:] == ["kill"]:
        os.kill(os.getpid(), 9)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def profiled(script: Path, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lt_runtime", "profile", "--device", "cpu", *options, str(script), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True, check=False)


def test_a_script_is_profiled(script: Path) -> None:
    names = ("--steps", "2:6", "--json", "r.json", "--csv", "tables", "--trace", "t.json", "--plot", "p.png")
    done = profiled(script, "--its", "own", options=names)
    assert done.returncode == 0, done.stderr
    assert "runs with ['--its', 'own'] __main__" in done.stdout
    assert "Layers: 2 steps on the host" in done.stdout
    written = script.parent
    assert json.loads((written / "r.json").read_text())["timed_steps"] == 2
    assert (written / "tables" / "layers.csv").read_text().startswith("name,phase")
    assert json.loads((written / "t.json").read_text())["traceEvents"]
    assert (written / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_script_that_ends_early_is_reported_and_keeps_its_status(script: Path) -> None:
    for how, status in (("raise", 1), ("exit", 7)):
        done = profiled(script, how, options=("--steps", "1:20"))
        assert done.returncode == status
        assert "Layers: 5 steps on the host" in done.stdout
        assert ('script.py", line 10, in <module>' in done.stderr) is (how == "raise")
        assert ("RuntimeError: in the script" in done.stderr) is (how == "raise")
        assert "runpy" not in done.stderr
    for how, status, ended in (("die", 3, "at once, with status 3"), ("kill", 137, "by signal 9 (Killed)")):
        done = profiled(script, how)
        assert done.returncode == status
        assert done.stderr == f"lt_runtime profile: the script was ended {ended}, and left no report\n"


def test_an_interrupted_script_is_reported(tmp_path: Path) -> None:
    """Ctrl-C reaches both processes; a script without a folder of its own in `sys.path` finds its modules, too."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "module.py").touch()
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal, sys, time
import lt_runtime as lt
import module

for number in range(50):
    with lt.range("step"):
        pass
os.killpg(0, signal.SIGINT)
time.sleep(10)
""")
    command = [sys.executable, "-m", "lt_runtime", "profile", "--device", "cpu", "--json", "r.json", str(script)]
    path = os.pathsep.join([str(tmp_path / "elsewhere"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    options: dict[str, Any] = {"start_new_session": True, "capture_output": True, "text": True, "check": False}
    done = subprocess.run(command, cwd=tmp_path, env=environment, **options)
    assert (done.returncode, "Layers: " in done.stdout) == (130, True), done.stderr
    assert json.loads((tmp_path / "r.json").read_text())


def test_commands_for_nsight(script: Path, cli: Cli) -> None:
    options = ["--print-nsys", "--print-ncu", "--range", "forward/layer0", "--steps", "10:20"]
    nsys, stats, ncu, note = cli("profile", *options, script, "--epochs", "3").out.splitlines()
    for line in (nsys, ncu):
        assert f"profile --steps 10:20 {script} --epochs 3" in line
    recorded = "--capture-range=cudaProfilerApi --capture-range-end=stop"
    assert nsys.startswith(f"nsys profile -t cuda,nvtx,cublas {recorded} -o")
    assert "--report cuda_gpu_kern_sum,nvtx_gpu_proj_sum" in stats
    assert ncu.startswith("ncu --set full")
    assert "--steps 10:20 --device cuda:1 " in cli("profile", "--print-nsys", "--device", "cuda:1", script).out
    # An unescaped slash in a name would begin the name of an inner range.
    assert r"'lt_runtime@forward\/layer0/'" in ncu
    assert "graph=False" in note


def test_a_profile_without_a_step_says_why(script: Path) -> None:
    ended = "the code ended after 8 steps, before step 100"
    for text, said in ((SCRIPT, ended), ("print('ran')", "the code had no step: a call of lt.TrainStep, or a block")):
        script.write_text(text)
        done = profiled(script, options=("--steps", "100:120") if said == ended else ())
        assert done.returncode == 1
        assert said in done.stdout
        assert "Nothing was profiled." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            (["profile", f"--steps={steps}", __file__], f"--steps: '{steps}' are no steps; accepted are two numbers")
            for steps in ("5", "5:", ":5", "5:5", "-1:5", "")
        ),
        (["profile", "--steps=a:b", __file__], "--steps: 'a' is no integer"),
        # Outputs that cannot be written are refused before the script runs.
        (["profile", "--plot", "/nowhere/a.png", __file__], "--plot is /nowhere/a.png, but /nowhere is no directory"),
        (["profile", "--plot", "a.xyz", __file__], "a.xyz; accepted suffixes are "),
        (["profile", "--json", ".", __file__], "--json is ., which cannot be written"),
        (["profile", "--trace", "/proc/a.json", __file__], "--trace is /proc/a.json, which cannot be written"),
        (["profile", "--csv", __file__, __file__], "test_cli_profile.py: File exists"),
        (["profile", "nowhere.py"], "SCRIPT is nowhere.py, which is no file"),
        (["check", "nowhere.py"], "SCRIPT is nowhere.py, which is no file"),
        (["warmup", "--recorded", "none.jsonl"], "none.jsonl, which does not exist; a script that runs with"),
        (["compare", "a.json", "b.json"], "a.json: No such file or directory"),
        (["profile", "--range", "loss", __file__], "--range is for --print-ncu"),
    ],
)
def test_refused_arguments(arguments: list[str], message: str, cli: Cli) -> None:
    status, _, error = cli(*arguments)
    assert status == (2 if message.startswith("--steps") else 1)
    assert message in error


def test_outputs_have_files_of_their_own(script: Path, cli: Cli) -> None:
    report = script.parent / "r.json"
    for options, other in ((("--json", script), "SCRIPT"), (("--json", report, "--trace", report), "--json")):
        status, _, error = cli("profile", *options, script)
        assert (status, f"{options[-1]}, which is the file of {other} too" in error) == (1, True), error
    assert script.read_text() == SCRIPT


def kernel(name: str, us: float, *, std: float = 0.0, layer: str = "fc", share: float = 0.1) -> Kernel:
    return Kernel(name, layer, "forward", share, 1.0, us, us, us, us, us, std)


def report(*kernels: Kernel, us: float = 50.0) -> Report:
    return Report("a GPU", 10, 10, [Layer("fc", "forward", 1, us, 1.0, 1.0)], kernels)


def test_changes_are_told_from_noise(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    before = report(
        kernel("kept", 10), kernel("gone", 5), kernel("slow", 10), kernel("fast", 10), kernel("noisy", 10, std=5)
    )
    after = report(
        kernel("kept", 10.1), kernel("transpose_new", 7), kernel("slow", 12), kernel("fast", 8),
        kernel("noisy", 12, std=5), kernel("kept", 10, layer="other"), us=52.0,
    )  # fmt: skip
    before.save(tmp_path / "a.json")
    after.save(tmp_path / "b.json")
    files = tmp_path / "a.json", tmp_path / "b.json"
    shown: dict[str, Any] = json.loads(cli("compare", "--json", *files).out)
    assert {(each["name"], each["layer"]): each["verdict"] for each in shown["changes"]} == {
        ("kept", "fc"): "same", ("gone", "fc"): "vanished", ("slow", "fc"): "slower", ("fast", "fc"): "faster",
        ("noisy", "fc"): "same", ("transpose_new", "fc"): "appeared", ("kept", "other"): "appeared",
    }  # fmt: skip
    text = cli("compare", *files).out
    assert "transpose_new" in text
    assert "2 kernels took as long as before." in text
    assert shown["shares"]["transposes"] == [0, 0.1]
    (layer,) = shown["layers"]
    assert [layer[key] for key in ("layer", "phase", "verdict", "before_us", "after_us")] == [
        "fc", "forward", "slower", 50.0, 52.0,
    ]  # fmt: skip


HOSTILE: dict[str, tuple[tuple[str, str] | Callable[[Path], object], str]] = {
    "text for a number": (('"us": 50.0', '"us": "50"'), "us is '50'"),
    "a number for text": (('"name": "fc"', '"name": null'), "name is None"),
    "a list for a number": (('"timed_steps": 10', '"timed_steps": [10]'), "timed_steps is [10]"),
    "a number that is too large": (('"us": 50.0', '"us": 1e308'), "us is 1e+308"),
    "infinity": (('"us": 50.0', '"us": 1e999'), "us is inf"),
    "a negative time": (
        ('"us": 50.0', '"us": -1'),
        "'us': -1",
    ),
    "a negative number of steps": (('"timed_steps": 10', '"timed_steps": -128'), "timed_steps is -128"),
    "NaN": (('"us": 50.0', '"us": NaN'), "NaN is no number of JSON"),
    "a name twice": (('"us": 50.0', '"us": 1, "us": 2'), "an object has one name twice"),
    "deep nesting": (('"us": 50.0', '"us": ' + "[" * 100_000), "nested too deeply"),
    "half of a character": (('"name": "fc"', '"name": "\\ud800"'), "surrogates not allowed"),
    "a long version": (('"schema": 1', '"schema": "' + "a" * 1_000_000 + '"'), "is a profile of schema 'aaa"),
    "UTF-16": (lambda path: path.write_text(path.read_text(), encoding="utf-16"), "can't decode byte 0xff"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "it is no regular file"),
    "a device": (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "it is no regular file"),
    "a hole of 3 GB": (lambda path: os.truncate(path, 3 << 30), "it has more than 16777216 bytes"),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_damaged_profile_is_refused(tmp_path: Path, cli: Cli, change: Any, message: str) -> None:
    good, bad = tmp_path / "a.json", tmp_path / "b.json"
    report().save(good)
    report().save(bad)
    if callable(change):
        change(bad)
    else:
        assert change[0] in bad.read_text()
        bad.write_text(bad.read_text().replace(*change))
    status, _, error = cli("compare", good, bad)
    assert (status, error.count("\n")) == (1, 1)
    assert message in error
    assert len(error) < 1000


def test_names_from_a_file_are_short_and_printable(tmp_path: Path, cli: Cli) -> None:
    report(kernel("\x1b[2J" + "x" * 1_000_000, 10)).save(tmp_path / "a.json")
    text = cli("compare", *[tmp_path / "a.json"] * 2).out + cli("compare", tmp_path / "a.json", "\x1b[2J").err
    report(kernel("\x1b[2J" + "y" * 1_000_000, 20, layer="\x9b")).save(tmp_path / "b.json")
    text += cli("compare", tmp_path / "a.json", tmp_path / "b.json").out
    assert text.replace("\n", "").isprintable()
    assert len(text) < 10_000


def test_families_of_kernels() -> None:
    planned = replace(kernel("resize", 1), is_planned_copy=True)
    names = {
        "cupy_copy__float": "copies", "void transpose_kernel<float>": "transposes", "memcpy DtoD": "copies",
        "generate_seed_pseudo": "seed kernels", "cupy_power__float": "pow", "vectorized_pow": "pow", "gemm": "",
    }  # fmt: skip
    assert {name: compare.family_of(kernel(name, 1)) for name in names} == names
    assert compare.family_of(planned) == "copies that a plan chose"


def test_a_script_s_function_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    def check_capture(function: Callable[[], list[str]]) -> CaptureReport:
        return CaptureReport(tuple(map(Fault, function())), 1, ())

    monkeypatch.setattr(profile, "check_capture", check_capture)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "script.py"
    path.write_text("def step(): return []\ndef other(): return ['an allocation in forward/fc']\n")
    monkeypatch.setattr(profile, "device_count", lambda: 0)
    assert "a capture needs a GPU" in cli("check", path).err, "before the script runs"
    monkeypatch.setattr(profile, "device_count", lambda: 1)
    assert cli("check", path).status == 0
    found = cli("check", "--function", "step", "--function", "other", path)
    assert found.status == 1
    assert "an allocation in forward/fc" in found.out.partition("other: ")[2]
    missing = cli("check", "--function", "none", path)
    assert missing.status == 1
    assert "defines no function none(); --function names the one to check" in missing.err
    path.write_text("import sys; sys.exit(4)")
    assert cli("check", path).status == 4
