"""Library handles, and the logger, whose settings hold for the whole process: its tests start new processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from lt_runtime import cublaslt
from lt_runtime.errors import ArgumentError, CublasLtError
from tests.support.cublaslt_recorder import Recorder, creates, succeeds

STAND_INS = {"cublasLtCreate": creates(0x7000), "cublasLtDestroy": succeeds}


def run(tmp_path: Path, script: str) -> str:
    """Runs a script in a new process, and returns its output."""
    prelude = "import gc, os, sys, threading\nfrom lt_runtime import cublaslt as lt\n"
    prelude += "def log_something(): lt.MatmulPreference().close()\n"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUBLASLT_LOG")}
    command = [sys.executable, "-c", prelude + textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_callback_gets_every_message(tmp_path: Path) -> None:
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


def test_the_callback_may_raise_and_is_removed_at_exit(tmp_path: Path) -> None:
    """The library must not call the callback after the interpreter has ended, because that would crash."""
    script = """
        sys.unraisablehook = lambda problem: print("unraisable", problem.exc_value)
        def fail(*message): raise ValueError("no")
        lt.logger_set_callback(fail)
        del fail
        lt.logger_set_mask(16)
        log_something()
        print("done")
    """
    assert {"unraisable no", "done"} <= set(run(tmp_path, script).splitlines())


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


def test_refused_arguments_of_the_logger(tmp_path: Path) -> None:
    with pytest.raises(CublasLtError, match="cublasLtLoggerOpenFile returned CUBLAS_STATUS_INVALID_VALUE"):
        cublaslt.logger_open_file(tmp_path / "no" / "such" / "directory")
    for level in (-1, 6):
        with pytest.raises(ArgumentError, match=f"level is {level}; accepted: 0 \\(off\\) to 5"):
            cublaslt.logger_set_level(level)
    for mask in (-1, 32):
        with pytest.raises(ArgumentError, match=f"mask is {mask}; accepted: 0 \\(off\\) to 31"):
            cublaslt.logger_set_mask(mask)


def test_a_handle_is_destroyed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder.install(monkeypatch, STAND_INS)
    with cublaslt.Handle() as handle:
        assert handle.handle == next(iter(recorder.created))
        handle.close()
    assert recorder.created == recorder.destroyed
    assert recorder.destroyed.total() == 1
    with pytest.raises(ArgumentError, match="this Handle is closed"):
        _ = handle.handle


def test_a_handle_that_is_left_open_is_never_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroying a handle synchronises the device, which must not happen during garbage collection."""
    recorder = Recorder.install(monkeypatch, STAND_INS)
    handle = cublaslt.Handle()
    with pytest.warns(ResourceWarning, match="a cuBLASLt Handle was never closed"):
        handle.__del__()
    assert not recorder.destroyed
    handle.close()


def test_each_device_has_one_handle(monkeypatch: pytest.MonkeyPatch) -> None:
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
    Recorder.install(monkeypatch, {"cublasLtCreate": lambda _: int(cublaslt.Status.NOT_INITIALIZED)})
    message = r"cublasLtCreate returned CUBLAS_STATUS_NOT_INITIALIZED \(1\): the library was not initialized"
    for make in (cublaslt.Handle, lambda: cublaslt.handle(0)):
        with pytest.raises(CublasLtError, match=message):
            make()
