"""The command line in its own processes: whatever happens, a user sees one line and an exit status, no traceback."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lt_runtime.paths import CACHE_VARIABLE
from lt_runtime.store.plan_store import PlanStore
from tests.support.plan_entries import H200, layer, layer_key, product, product_key

ROOT = Path(__file__).parents[3]
SECONDS = 60  # time limit of a process, in seconds


def start(
    cache: Path,
    *arguments: str,
    options: Sequence[str] = (),
    path: Sequence[Path] = (),
    stdout: Any = subprocess.PIPE,
    **variables: str,
) -> subprocess.Popen[str]:
    """Starts the command line in the directory `cache`, with `path` before all other directories of packages."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LT_RUNTIME")}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))), "OPENBLAS_NUM_THREADS": "1"}
    environment |= {CACHE_VARIABLE: str(cache), "PYTHONUNBUFFERED": ""} | variables
    command = [sys.executable, *options, "-m", "lt_runtime", *arguments]
    pipes: dict[str, Any] = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
    # Resets SIGINT, which processes started from a shell's background job inherit as ignored.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=cache, env=environment, preexec_fn=heed, **pipes)


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert "Traceback" not in err, err
    assert "Exception ignored" not in err, err
    return process.returncode, out, err


def one_line(text: str) -> str:
    assert text.count("\n") == 1, text
    assert len(text) < 1000
    return text


def fill(cache: Path) -> None:
    entries = {product_key(8192): product()}, {layer_key(8192): layer()}
    assert PlanStore(cache / "plans" / H200.file_name, H200).put(*entries)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("demo --device cpu --epochs 1000000 --json directory", "--json is directory, which cannot be written"),
        ("demo --device cpu --epochs 1000000 --json fifo", "--json is fifo, which cannot be written (it is no regular"),
        ("warmup --mlp 8,8 --rows 8 --device tpu", ""),  # the message depends on which GPUs the machine has
        ("warmup --recorded fifo", "fifo cannot be read (it is no regular file)"),
    ],
)
def test_what_is_refused(tmp_path: Path, arguments: str, message: str) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    status, _, err = end(start(tmp_path, *arguments.split()))
    assert message in one_line(err)
    assert err.startswith(f"lt_runtime {arguments.split()[0]}: ")
    assert status == 1


def test_a_warning_is_one_line_too(tmp_path: Path) -> None:
    (tmp_path / "met.jsonl").write_text('{"problem": "MatmulProblem(')
    status, _, err = end(start(tmp_path, "warmup", "--recorded", "met.jsonl"))
    warning, error = err.splitlines()
    assert warning == "lt_runtime warmup: met.jsonl: line 1 is cut off and skipped"
    assert error.startswith("lt_runtime warmup: there is nothing to tune")
    assert status == 1


def test_an_interrupt_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")
    status, out, err = end(start(tmp_path, "warmup", "--mlp", "8,8", "--rows", "8", path=[tmp_path]))
    assert (status, out, err) == (130, "", "lt_runtime warmup: interrupted\n")


def test_an_interrupt_while_it_works(tmp_path: Path) -> None:
    arguments = ("demo", "--device", "cpu", "--epochs", "1000000", "--json", "result")
    process = start(tmp_path, *arguments, PYTHONUNBUFFERED="1")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("No GPU in use")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    status, out, err = end(process)
    assert (out, err) == ("", "lt_runtime demo: interrupted\n")
    # A shell reports an exit with 130 and an end by SIGINT both as 130. Python ends by SIGINT itself if the interrupt
    # comes while Python runs code that was compiled from a string.
    assert status in (130, -signal.SIGINT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", ["--help", "cache show 8192"])
def test_a_reader_that_has_seen_enough(tmp_path: Path, arguments: str) -> None:
    fill(tmp_path)
    read, write = os.pipe()
    os.close(read)
    process = start(tmp_path, *arguments.split(), stdout=write)
    os.close(write)
    status, _, err = end(process)
    assert (status, err) == (141, "")


def test_a_full_disk_under_the_output(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        status, _, err = end(start(tmp_path, "cache", "list", stdout=full))
    assert (status, err) == (1, "lt_runtime cache: No space left on device\n")


def test_a_terminal_without_unicode(tmp_path: Path) -> None:
    fill(tmp_path)
    # With an ASCII terminal, tables have lines of ASCII characters.
    for command, shown in (("show 8192", " \\xb5s, spread"), ("list", "-----")):
        status, out, err = end(start(tmp_path, "cache", *command.split(), PYTHONIOENCODING="ascii", LC_ALL="C"))
        assert (status, err) == (0, "")
        assert shown in out


def packages_without(directory: Path, *missing: str) -> Path:
    """Fills a directory with links to all installed packages except the missing ones."""
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for found in Path(place).iterdir():
            if found.name.partition("-")[0] not in missing and not (directory / found.name).exists():
                (directory / found.name).symlink_to(found)
    return directory


def test_without_packages_the_doctor_works_and_other_commands_name_it(tmp_path: Path) -> None:
    status, out, err = end(start(tmp_path, "doctor", options=["-S"]))
    assert (status, err) == (1, "")
    assert out.endswith("Not ready: see what is missing above.\n")
    for package in ("numpy", "ml_dtypes", "safetensors", "cuda-bindings", "nvtx", "rich", "platformdirs"):
        assert f"{package}: not installed" in out
    status, _, err = end(start(tmp_path, "cache", "list", options=["-S"]))
    assert status == 1
    assert "`python -m lt_runtime doctor` says what is missing" in one_line(err)


def test_the_doctor_where_some_packages_are_missing(tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    # Runs all probes of `doctor` except CuPy's, because importing CuPy takes long.
    packages = packages_without(tmp_path / "packages", "cupy", "rich", "platformdirs", "safetensors")
    status, out, err = end(start(tmp_path, "doctor", "--json", options=["-S"], path=[packages], **{CACHE_VARIABLE: ""}))
    report = json.loads(out)
    assert (status, err, report["ok"]) == (1, "", False)
    problems = {library["name"]: library["problem"] for library in report["libraries"] if library["problem"]}
    assert {problems[package] for package in ("rich", "platformdirs", "safetensors")} == {"not installed"}
    assert "numpy" not in problems
