"""Files replaced in one step: their modes, and temporary files left by processes that died while writing."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lt_runtime import files
from lt_runtime.files import TEMPORARY, replace_file, replacing


def temporaries(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.endswith(TEMPORARY)]


def test_a_half_written_file_is_never_seen(tmp_path: Path) -> None:
    path = tmp_path / "a"
    replace_file(path, b"old")
    with replacing(path) as file:
        file.write(b"ne")
        file.flush()
        assert path.read_bytes() == b"old"
        file.write(b"w")
    assert path.read_bytes() == b"new"
    assert [*tmp_path.iterdir()] == [path]


def interrupted(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt


def test_an_error_while_writing_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    replace_file(path, b"old")
    with pytest.raises(KeyboardInterrupt):
        interrupted(path)
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_modes(tmp_path: Path, umask: int) -> None:
    code = (
        "import os, sys; from pathlib import Path; from lt_runtime.files import replace_file;"
        f"os.umask({umask}); replace_file(Path(sys.argv[1]), b'new')"
    )
    for name, mode in (("new", None), ("old", 0o646)):
        path = tmp_path / name
        if mode is not None:
            path.write_bytes(b"old")
            path.chmod(mode)
        subprocess.run([sys.executable, "-c", code, path], check=True, timeout=120)
        expected = 0o666 & ~umask if mode is None else mode
        assert (stat.S_IMODE(path.stat().st_mode), path.read_bytes()) == (expected, b"new")


def test_the_new_content_of_a_private_file_is_never_public(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch(0o600)
    with replacing(path) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_only_regular_files_are_replaced(tmp_path: Path, make: object) -> None:
    path = tmp_path / "a"
    assert callable(make)
    make(path)
    before = path.stat()
    with pytest.raises(OSError, match="it is no regular file"):
        replace_file(path, b"new")
    assert path.stat().st_ino == before.st_ino
    assert [*tmp_path.iterdir()] == [path]


def test_only_temporary_files_of_dead_writers_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    left = [tmp_path / f"a.{digits}{TEMPORARY}" for digits in ("00000000", "89abcdef")]
    names = ("b.00000000", "a.0000000", "a.000000000", "a.0000000g", "a.b.00000000", "aa.00000000", ".a.00000000")
    others = [tmp_path / f"{name}{TEMPORARY}" for name in names]
    others += [tmp_path / "a.00000000", tmp_path / f"a.00000000{TEMPORARY}.tmp"]
    for file in (*left, *others):
        file.write_bytes(b"half")
    link, fifo = (tmp_path / f"a.{digits}{TEMPORARY}" for digits in ("11111111", "22222222"))
    link.symlink_to(others[0])
    os.mkfifo(fifo)  # opening a FIFO for reading would block until there is a writer
    replace_file(path, b"new")
    assert {*tmp_path.iterdir()} == {path, link, fifo, *others}


def test_a_name_is_not_read_as_a_pattern(tmp_path: Path) -> None:
    other = tmp_path / f"ab.00000000{TEMPORARY}"
    other.write_bytes(b"half")
    replace_file(tmp_path / "a.", b"new")
    replace_file(tmp_path / "[a]b", b"new")
    assert other.exists()


def test_a_file_that_is_being_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with replacing(path) as outer:
        outer.write(b"outer")
        writing = temporaries(tmp_path)
        replace_file(path, b"inner")
        assert temporaries(tmp_path) == writing
        assert path.read_bytes() == b"inner"
    assert path.read_bytes() == b"outer"
    assert [*tmp_path.iterdir()] == [path]


DIES = """
import os, signal, sys
from pathlib import Path
from lt_runtime.files import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_a_process_that_writes_keeps_its_file_until_it_dies(tmp_path: Path) -> None:
    path = tmp_path / "a"
    command = [sys.executable, "-c", DIES, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        writing = temporaries(tmp_path)
        replace_file(path, b"first")
        assert temporaries(tmp_path) == writing
        assert len(writing) == 1
        process.kill()
    replace_file(path, b"second")
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == b"second"


@pytest.mark.parametrize("lost", ["removed", "locked"])
def test_a_temporary_file_that_another_process_removes_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    path, others, flock = tmp_path / "a", [], fcntl.flock

    def late(handle: int, operation: int) -> None:
        if not others:  # another process locks and removes the file first
            taken = tmp_path / temporaries(tmp_path)[0]
            others.append(taken)
            other = os.open(taken, os.O_RDONLY)
            flock(other, operation)
            taken.unlink()
            if lost == "removed":
                os.close(other)
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    replace_file(path, b"new")
    assert len(others) == 1
    assert path.read_bytes() == b"new"
    assert [*tmp_path.iterdir()] == [path]


def test_without_locks_no_temporary_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    path, left = tmp_path / "a", tmp_path / f"a.00000000{TEMPORARY}"
    left.write_bytes(b"half")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert {*tmp_path.iterdir()} == {path, left}


def test_only_part_of_a_crowded_directory_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        (tmp_path / f"a.{number:08x}{TEMPORARY}").touch()
    monkeypatch.setattr(files, "_MOST_SEARCHED", 30)
    replace_file(tmp_path / "a", b"new")
    assert len(temporaries(tmp_path)) == 20
