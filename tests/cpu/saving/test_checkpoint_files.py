"""A save replaces a checkpoint's file as a whole or not at all, even if it is killed, and keeps mode and links."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import CheckpointError, DTypeError, FileError, LtError, MissingFileError
from lt_runtime.saving import checkpoint_file
from tests.support.training_runs import assert_same, run_of, state, train

KILLS = 20
"""The number of saves that are killed; 100 for a longer test."""


@pytest.fixture
def mask() -> int:
    """Returns the mode (permissions) that a new file gets."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_places_that_are_none(tmp_path: Path) -> None:
    run = run_of()
    with pytest.raises(FileNotFoundError) as raised:
        lt.load_checkpoint(tmp_path / "none", *run)
    assert type(raised.value) is MissingFileError
    assert (raised.value.errno, raised.value.filename) == (errno.ENOENT, str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError) as raised:
        lt.save_checkpoint(tmp_path / "none" / "run", *run)
    assert isinstance(raised.value, LtError)
    with pytest.raises(FileError, match="File name too long"):
        lt.save_checkpoint(tmp_path / ("n" * 300), *run)
    assert not [*tmp_path.iterdir()]


def test_the_file_and_then_its_directory_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flushed = tmp_path / "run", []

    def record(handle: int) -> None:
        flushed.append((os.fstat(handle).st_ino, path.exists()))

    monkeypatch.setattr(os, "fsync", record)
    lt.save_checkpoint(path, *run_of())
    assert flushed == [(path.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_every_array_is_aligned_to_its_type(tmp_path: Path) -> None:
    path = tmp_path / "run"
    model = lt.MLP([3, 5, 1], dtype="float16", device="cpu")  # arrays with an odd number of two-byte elements
    lt.save_checkpoint(path, model, lt.AdamW(model.parameters()))
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    described = json.loads(content[8 : 8 + length])
    described.pop("__metadata__")
    sizes = {"F16": 2, "F32": 4, "U32": 4}
    assert {each["dtype"] for each in described.values()} == sizes.keys()
    for name, each in described.items():
        assert each["data_offsets"][0] % sizes[each["dtype"]] == 0, name


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(CheckpointError, match=r"run would need a header of [0-9]+ bytes; at most 4194304 are accepted"):
        checkpoint_file.write(path, {}, "x" * (4 << 20))
    layer = lt.Linear(2, 1, device="cpu")
    layer.bias = lt.Parameter(np.zeros(1), np.zeros(1))
    with pytest.raises(DTypeError, match=r"run is not written: model/bias is float64; files take float32"):
        lt.save(path, model=layer)
    assert not path.exists()


FULL = """
import resource, sys
import lt_runtime as lt
from lt_runtime.errors import LtError
model = lt.MLP([6, 400, 3], seed=1, device="cpu")
run = model, lt.AdamW(model.parameters())
lt.save_checkpoint(sys.argv[1], *run)
run[1].steps += 1
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    lt.save_checkpoint(sys.argv[1], *run)
except OSError as error:
    print(type(error).__name__, isinstance(error, LtError), error.errno, error.filename == sys.argv[1])
run[1].steps += 1
lt.load_checkpoint(sys.argv[1], *run)
print(int(run[1].steps[0]))
"""


@pytest.mark.parametrize("limit", [0, 1000, 30_000])
def test_a_disk_without_room_leaves_the_older_file(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "run"
    command = [sys.executable, "-c", FULL, path, str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.splitlines(), done.stderr) == ([f"FileError True {errno.EFBIG} True", "0"], "")
    assert [*tmp_path.iterdir()] == [path]


def test_what_a_link_leads_to_is_replaced(tmp_path: Path, mask: int) -> None:
    run, names = run_of(), ("latest", "again")
    (tmp_path / "data").mkdir()
    target = tmp_path / "data" / "run"
    (tmp_path / "latest").symlink_to(Path("data", "run"))
    (tmp_path / "again").symlink_to(tmp_path / "latest")
    lt.save_checkpoint(tmp_path / "again", *run)  # a save to a path where no file exists
    assert mode_of(target) == mask
    target.chmod(0o440)  # a save replaces a read-only file all the same
    train(run, range(1))
    expected = state(run)
    lt.save_checkpoint(tmp_path / "latest", *run)
    assert all((tmp_path / name).is_symlink() for name in names)
    assert (mode_of(target), [*target.parent.iterdir()]) == (0o440, [target])
    train(run, range(1, 2))
    lt.load_checkpoint(tmp_path / "again", *run)
    assert_same(state(run), expected)
    assert {path.name for path in tmp_path.iterdir()} == {"data", *names}


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import lt_runtime as lt

def run_of():
    model = lt.MLP([64, 800, 10], device="cpu")
    return model, lt.AdamW(model.parameters(), lr=1e-2)

def set_to(run, step):
    run[1].steps[...] = step
    for parameter in run[0].parameters():
        parameter.data[...] = float(step)

def save_for_ever(run, step, told):
    while True:
        step += 1
        set_to(run, step)
        lt.save_checkpoint(path, *run)
        os.write(told, step.to_bytes(8, "little"))

path, kills = Path(sys.argv[1]), int(sys.argv[2])
run, step, instants = run_of(), 0, random.Random(7)
set_to(run, 0)
lt.save_checkpoint(path, *run)
for _ in range(kills):
    told, tells = os.pipe()
    victim = os.fork()
    if not victim:
        save_for_ever(run, step, tells)
    os.close(tells)
    os.read(told, 8)
    time.sleep(0.05 * instants.random())
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    said = b"" .join(iter(lambda: os.read(told, 8), b""))
    os.close(told)
    acknowledged = int.from_bytes(said[-8:], "little") if said else step + 1
    lt.load_checkpoint(path, *run)
    step = int(run[1].steps[0])
    whole = all((each.data == float(step)).all() for each in run[0].parameters())
    left = len([*path.parent.iterdir()]) - 1
    print(step - acknowledged, whole, left)
lt.save_checkpoint(path, *run)
"""


def test_a_killed_save_leaves_the_old_state_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    command = [sys.executable, "-W", "error", "-c", KILLED, path, str(KILLS)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # forking is unsafe in a process with threads
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
    found = [line.split() for line in done.stdout.splitlines()]
    assert len(found) == KILLS
    assert {(ahead, whole) for ahead, whole, _ in found} <= {("0", "True"), ("1", "True")}
    assert {left for *_, left in found} == {"0", "1"}, "no save was interrupted, or what one left stayed"
    assert [*tmp_path.iterdir()] == [path]
