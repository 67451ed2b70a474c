"""Handles, and the logger, whose settings hold for a whole process: what uses the real one runs in its own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from lt_runtime import cublaslt
from lt_runtime.cublaslt import logger
from lt_runtime.errors import ArgumentError, CublasLtError
from tests.support.cublaslt_recorder import Recorder, creates, succeeds

ADDRESS = 0x7000
STAND_INS = {"cublasLtCreate": creates(ADDRESS), "cublasLtDestroy": succeeds}


def run(tmp_path: Path, script: str) -> str:
    """What a script prints in a process of its own."""
    prelude = "import gc, os, sys, threading\nfrom lt_runtime import cublaslt as lt\n"
    prelude += "def log_something(): lt.MatmulPreference().close()\n"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUBLASLT_LOG")}
    command = [sys.executable, "-c", prelude + textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_callback_hears_what_is_logged(tmp_path: Path) -> None:
    script = """
        seen = []
        lt.logger_set_callback(lambda *message: seen.append(message))
        lt.logger_set_level(5)
        log_something()
        gc.collect()
        thread = threading.Thread(target=log_something)
        thread.start(); thread.join()
        lt.logger_set_callback(lambda *message: seen.append("other"))
        log_something()
        lt.logger_set_callback(None)
        log_something()
        lt.logger_set_level(0)
        for message in seen: print("seen", message)
    """
    seen = [line for line in run(tmp_path, script).splitlines() if line.startswith("seen")]
    created = [line for line in seen if "'cublasLtMatmulPreferenceCreate'" in line]
    assert len(created) == 2
    assert created[0].startswith("seen (5, 'cublasLtMatmulPreferenceCreate', 'matmulPref=")
    assert seen.count("seen other") >= 2


def test_the_callback_may_raise_and_outlive_its_setter(tmp_path: Path) -> None:
    """Left set at the end of the process: the library must not call into an interpreter that has gone."""
    script = """
        sys.unraisablehook = lambda problem: print("unraisable", problem.exc_value)
        def fail(*message): raise ValueError("no")
        lt.logger_set_callback(fail)
        del fail
        lt.logger_set_mask(16)
        log_something()
        print("done")
    """
    printed = run(tmp_path, script).splitlines()
    assert "unraisable no" in printed
    assert "done" in printed


def test_files(tmp_path: Path) -> None:
    script = """
        path = os.path.join(sys.argv[1], "opened.txt")
        lt.logger_set_level(5)
        lt.logger_open_file(path)
        log_something()
        with open(os.path.join(sys.argv[1], "handed.txt"), "w") as file:
            lt.logger_open_file(f"/dev/fd/{file.fileno()}")
        log_something()
        lt.logger_force_disable()
        lt.logger_set_level(5)
        log_something()
    """
    run(tmp_path, script)
    for name in ("opened.txt", "handed.txt"):
        assert (tmp_path / name).read_text().count("[cublasLtMatmulPreferenceCreate]") == 1


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(CublasLtError, match="cublasLtLoggerOpenFile returned CUBLAS_STATUS_INVALID_VALUE"):
        cublaslt.logger_open_file(tmp_path / "no" / "such" / "directory")


@pytest.mark.parametrize("level", [-1, 6])
def test_levels(level: int) -> None:
    with pytest.raises(ArgumentError, match=f"level is {level}; accepted: 0 \\(off\\) to 5"):
        cublaslt.logger_set_level(level)


@pytest.mark.parametrize("mask", [-1, 32])
def test_masks(mask: int) -> None:
    with pytest.raises(ArgumentError, match=f"mask is {mask}; accepted: 0 \\(off\\) to 31"):
        cublaslt.logger_set_mask(mask)


def test_a_callback_that_the_library_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    Recorder.install(monkeypatch, {"cublasLtLoggerSetCallback": lambda _: 14})
    with pytest.raises(CublasLtError, match="cublasLtLoggerSetCallback returned CUBLAS_STATUS_INTERNAL_ERROR"):
        cublaslt.logger_set_callback(print)
    assert logger._callback is None


def test_handles_are_destroyed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder.install(monkeypatch, STAND_INS)
    with cublaslt.Handle() as handle:
        assert handle.value == next(iter(recorder.created))
        handle.close()
        handle.close()
    assert recorder.created == recorder.destroyed
    assert recorder.destroyed.total() == 1
    with pytest.raises(ArgumentError, match="this Handle is closed"):
        _ = handle.value


def test_a_handle_that_is_left_open_is_never_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroying one synchronises the device, which the garbage collector must not do."""
    recorder = Recorder.install(monkeypatch, STAND_INS)
    handle = cublaslt.Handle()
    with pytest.warns(ResourceWarning, match="a cuBLASLt Handle was never closed"):
        handle.__del__()
    handle.close()
    del handle
    gc.collect()
    assert recorder.destroyed.total() == 1


def test_one_handle_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder.install(monkeypatch, STAND_INS)
    made: list[int] = []
    threads = [threading.Thread(target=lambda: made.append(cublaslt.handle(0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 1
    assert cublaslt.handle(1) not in made
    assert recorder.calls == ["cublasLtCreate"] * 2


def test_without_a_gpu_a_handle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(_: Any) -> int:
        return int(cublaslt.Status.NOT_INITIALIZED)

    Recorder.install(monkeypatch, {"cublasLtCreate": create})
    message = r"cublasLtCreate returned CUBLAS_STATUS_NOT_INITIALIZED \(1\): the library was not initialized"
    with pytest.raises(CublasLtError, match=message):
        cublaslt.Handle()
    with pytest.raises(CublasLtError, match=message):
        cublaslt.handle(0)
