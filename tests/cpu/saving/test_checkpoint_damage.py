"""Loading damaged or forged checkpoints, or paths of other things, fails quickly, names the path, changes nothing."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import lt_runtime as lt
from lt_runtime.errors import CheckpointError
from lt_runtime.saving import checkpoint_file
from tests.support.numpy_cases import Array
from tests.support.training_runs import Run, assert_same, content_of, rewrite, run_of, state, train

TEXT, DIGEST = "lt_runtime", "lt_runtime.sha256"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def run(path: Path) -> Run:
    """Makes a few training steps with every array that a checkpoint may have, and saves the run at `path`."""
    made = run_of("float16", scaled=True, amsgrad=True, max_norm=1.0)
    train(made, range(2))
    lt.save_checkpoint(path, *made)
    return made


def forge(path: Path, change: Callable[[dict[str, Array]], object]) -> None:
    """Changes arrays of a checkpoint file, and writes the digest that matches the changed file."""
    arrays, metadata = content_of(path)
    change(arrays)
    checkpoint_file.write(path, arrays, metadata[TEXT])


def refused(path: Path, run: Run, message: str) -> str:
    """Checks that loading raises a printable, short message and changes nothing; returns the message."""
    before = state(run)
    with pytest.raises(CheckpointError, match=message) as raised:
        lt.load_checkpoint(path, *run)
    assert_same(state(run), before)
    said = str(raised.value)
    assert said.startswith(str(path))
    assert len(said.encode()) < 4000
    assert said.replace("\n", "").isprintable()
    return said


def test_a_flipped_bit_is_seen_wherever_it_is(path: Path) -> None:
    model = lt.MLP([2, 2], seed=3, device="cpu")
    run = model, lt.AdamW(model.parameters(), scaler=lt.GradScaler())
    lt.save_checkpoint(path, *run)
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 29):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        refused(path, run, "is damaged|was not written by|was saved with|has ")


@pytest.mark.parametrize("name", ["layer0.weight", "layer1.weight.master", "layer0.bias.m", "layer1.bias.v_max"])
def test_a_flipped_bit_of_a_tensor_is_called_damage(path: Path, run: Run, name: str) -> None:
    rewrite(path, lambda arrays, _: arrays[name].reshape(-1).view(np.uint8).__setitem__(2, 77))
    refused(path, run, "is damaged: its content does not have the digest")


def test_the_digest_stays_as_it_was_defined(path: Path, run: Run) -> None:
    arrays, metadata = content_of(path)
    described = [metadata[TEXT], *([name, str(arrays[name].dtype), [*arrays[name].shape]] for name in sorted(arrays))]
    content = json.dumps(described).encode() + b"".join(arrays[name].tobytes() for name in sorted(arrays))
    assert metadata == {TEXT: metadata[TEXT], DIGEST: hashlib.sha256(content).hexdigest()}


def test_another_tool_may_write_it_again(path: Path, run: Run) -> None:
    expected = state(run)
    rewrite(path, lambda *_: None)
    train(run, range(5, 7))
    lt.load_checkpoint(path, *run)
    assert_same(state(run), expected)


def test_a_file_without_a_digest_is_refused(path: Path, run: Run) -> None:
    arrays, metadata = content_of(path)
    safetensors.numpy.save_file(arrays, path, {TEXT: metadata[TEXT]})
    refused(path, run, "was not written by lt.save_checkpoint")


def test_a_damaged_name_of_the_digest_is_refused(path: Path, run: Run) -> None:
    path.write_bytes(path.read_bytes().replace(b"lt_runtime.sha256", b"lt_runtime.sha257"))
    refused(path, run, "was not written by lt.save_checkpoint")


STEPS = "0 to 4294967294"
SCALE = "1.1754943508222875e-38 to 3.4028234663852886e+38"
MOMENT = "0.0 to inf, or NaN"
OUTSIDE: list[tuple[str, Any, str]] = [
    *[("scaler.scale", value, SCALE) for value in (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 1e-40)],
    *[("scaler.growth_tracker", value, "0 to 2") for value in (-1, 3, 2**31 - 1, -(2**31))],
    *[(f"optimizer.{name}", 2**32 - 1, STEPS) for name in ("steps", "skipped_steps")],
    *[("layer0.weight.v", value, MOMENT) for value in (-1.0, -math.inf, -1e-45)],
    ("layer1.bias.v_max", -1.0, MOMENT),
    ("optimizer.grad_norm", -1.0, MOMENT),
]


@pytest.mark.parametrize(("name", "value", "accepted"), OUTSIDE)
def test_values_that_training_cannot_reach(path: Path, run: Run, name: str, value: Any, accepted: str) -> None:
    forge(path, lambda arrays: arrays[name].reshape(-1).__setitem__(-1, value))
    found = str(content_of(path)[0][name].dtype.type(value))
    refused(path, run, re.escape(f"cannot be used: {name} has the value {found}; accepted are {accepted}") + "$")


INSIDE: list[tuple[str, Any]] = [
    ("scaler.scale", 2.0**-126),
    ("scaler.scale", 3.4028234663852886e38),
    ("scaler.growth_tracker", 2),
    ("optimizer.steps", 2**32 - 2),
    *[("optimizer.grad_norm", value) for value in (math.nan, math.inf)],
    *[(f"layer0.weight.{name}", value) for name in ("m", "v", "v_max") for value in (math.nan, math.inf)],
    ("layer0.weight.m", -math.inf),
]


@pytest.mark.parametrize(("name", "value"), INSIDE)
def test_values_that_training_can_reach(path: Path, run: Run, name: str, value: Any) -> None:
    forge(path, lambda arrays: arrays[name].reshape(-1).__setitem__(-1, value))
    lt.load_checkpoint(path, *run)
    again = path.parent / "again"
    lt.save_checkpoint(again, *run)
    assert path.read_bytes() == again.read_bytes()
    found = content_of(again)[0][name].reshape(-1)[-1]
    np.testing.assert_equal(float(found), float(value))


@pytest.mark.parametrize(("value", "in_float16"), [(math.nan, math.nan), (-math.inf, -math.inf), (1e6, math.inf)])
def test_data_and_master_copies_go_together(path: Path, run: Run, value: float, in_float16: float) -> None:
    forge(path, lambda arrays: arrays["layer0.weight.master"].__setitem__((3, 2), value))
    copy = r"its master copy (nan|-inf|1e\+06|1000000.0)"
    refused(path, run, rf"cannot be used: layer0.weight.data has -?0\.\d+ at \(3, 2\), but {copy}")
    forge(path, lambda arrays: arrays["layer0.weight"].__setitem__((3, 2), in_float16))
    lt.load_checkpoint(path, *run)
    again = path.parent / "again"
    lt.save_checkpoint(again, *run)
    assert path.read_bytes() == again.read_bytes()
    np.testing.assert_equal(float(content_of(again)[0]["layer0.weight"][3, 2]), in_float16)
    np.testing.assert_equal(float(content_of(again)[0]["layer0.weight.master"][3, 2]), value)


def test_a_state_that_would_be_refused_is_not_saved(path: Path, run: Run) -> None:
    older, optimizer = path.read_bytes(), run[1]
    assert optimizer.scaler is not None
    optimizer.scaler.scale[...] = 0.0
    with pytest.raises(CheckpointError, match=r"run is not written: scaler.scale has the value 0.0; accepted are 1\."):
        lt.save_checkpoint(path, *run)
    assert path.read_bytes() == older
    assert [*path.parent.iterdir()] == [path]


DESCRIPTIONS: list[tuple[str, str]] = [
    *((text, "was not written by") for text in ("", "null", '"format"', "1", "{}", "[" * 500 + "]" * 500)),
    *((f'{{"format": {text}}}', f"has format {shown};") for text, shown in (("1.0", "1.0"), ("null", "None"))),
    ("[" * 100_000, "was not written by"),
    ('{"format":' * 100_000, "was not written by"),
    ('{"format": ' + "[" * 500 + "]" * 500 + "}", r"has format \[\[\["),
    ('{"format": ' + "9" * 400 + "}", "has format 9{100} … 9{100};"),
    ('{"format": ' + "9" * 5000 + "}", "was not written by"),
    ('{"format": 1e400}', "has format inf;"),
    ('{"format": NaN}', "was not written by"),
    ('{"format": true}', "has format True;"),
    ('{"format": "\\ud800"}', "was not written by"),
    ('{"format": 1, "\\ud800": 2}', "was not written by"),
    ('{"format": 1, "model": {}, "optimizer": {}, "\\ud800": 2}', "was not written by"),
    ('{"format": 1, "model": {}, "optimizer": {}, "a\\nb\\u001b[2J": 2}', r"\n  a\\nb\\x1b\[2J +2 +None\n"),
    ('{"format": 1, "model": {}, "optimizer": {}, "' + "n" * 100_000 + '": 2}', "\n  n{60}  2 +None"),
    (f'{{"format": 1, "model": {{}}, "optimizer": {json.dumps(dict.fromkeys(range(999), 1))}}}', "and 99[0-9] more\n"),
    ('{"format": 1, "model": 3, "optimizer": [], "scaler": "x"}', "was not written by"),
    ('{"format": 1, "model": {}, "optimizer": [], "scaler": "x"}', r"\n  optimizer +\[\] +{.*\n  scaler +'x' +None"),
    ('{"format": 1, "model": {"dims": {"a": [1]}}, "optimizer": 0}', r"\n  model.dims +\{'a': \[1\]\} +\[6, 12, 3\]\n"),
    ('{"format": 1, "model": {}}', "has no optimizer: lt.save_model wrote it; load it without an optimizer"),
]


@pytest.mark.parametrize(("text", "message"), DESCRIPTIONS, ids=range(len(DESCRIPTIONS)))
def test_descriptions_of_every_kind(path: Path, text: str, message: str) -> None:
    checkpoint_file.write(path, {}, text)
    refused(path, run_of(), message)


def with_header(header: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header


LIMIT = "its header would have [0-9]+ bytes; at most 4194304 are accepted"
NO_FILE = "is damaged or no safetensors file"
HEADERS: list[tuple[bytes, str]] = [
    (with_header(b"{}", 2**64 - 1), LIMIT),
    (with_header(b"{}", 99_000_000), LIMIT),
    (with_header(b"{}", (4 << 20) + 1), LIMIT),
    (with_header(b"{}", 4 << 20), NO_FILE),
    (with_header(b"[" * 100_000), NO_FILE),
    (with_header(b'{"__metadata__":' * 100_000), NO_FILE),
    (with_header(b'{"__metadata__": {"lt_runtime": "\\ud800"}}'), NO_FILE),
    (with_header(b'{"__metadata__": {"lt_runtime": "\xff"}}'), NO_FILE),
    (with_header(b'{"__metadata__": {"lt_runtime": 3}}'), NO_FILE),
    (with_header(b'{"w": {"dtype": "F32", "shape": [1' + b"0" * 400 + b'], "data_offsets": [0, 4]}}'), NO_FILE),
    (with_header(b"{}"), "was not written by lt.save_checkpoint"),
    (b"\x00" * 8, NO_FILE),
    (os.urandom(100_000), NO_FILE),
]


@pytest.mark.parametrize(("content", "message"), HEADERS, ids=range(len(HEADERS)))
def test_headers_of_every_kind(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    refused(path, run_of(), message)


def test_types_that_no_checkpoint_has(path: Path, run: Run) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"dtype": "F32"', b'"dtype": "F4" '))
    refused(path, run, NO_FILE)
    path.write_bytes(content)
    rewrite(path, lambda arrays, _: arrays.update({"layer1.bias": np.zeros(3, np.int8)}))
    refused(path, run, r"layer1.bias is I8 \(3,\); here it is float16 \(3,\)")


SHORTENED = """
import os, sys
import lt_runtime as lt
from lt_runtime.errors import CheckpointError
from lt_runtime.saving import checkpoint_file
model = lt.MLP([6, 40_000, 3], device="cpu")
run = model, lt.AdamW(model.parameters())
path = sys.argv[1]
lt.save_checkpoint(path, *run)
try:
    with checkpoint_file.reading(path) as file:
        os.truncate(path, 10_000)
        file.load(file.kinds)
except CheckpointError as error:
    print("refused")
"""


def test_a_file_that_another_process_shortens_ends_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHORTENED, tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused\n", "")


NO_FILES = """
import os, socket, sys
import lt_runtime as lt
from lt_runtime.errors import LtError
model = lt.MLP([2, 2], device="cpu")
run = model, lt.AdamW(model.parameters())
os.chdir(sys.argv[1])
os.mkfifo("fifo")
os.mkdir("directory")
os.symlink("loop", "loop")
server = socket.socket(socket.AF_UNIX)
server.bind("socket")
def refused(function, path):
    try:
        function(path, *run)
    except LtError as error:
        print(function.__name__, path, isinstance(error, (OSError, ValueError)))
for path in ("directory", "fifo", "loop", "socket"):
    refused(lt.load_checkpoint, path)
    refused(lt.save_checkpoint, path)
for path in ("/dev/zero", "/dev/tty"):  # only loaded: a faulty save might replace them
    refused(lt.load_checkpoint, path)
print(*sorted(os.listdir()))
"""


def test_what_is_no_regular_file_is_refused_at_once_and_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NO_FILES, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    names = ["directory", "fifo", "loop", "socket"]
    expected = [f"{how}_checkpoint {name} True" for name in names for how in ("load", "save")]
    expected += [f"load_checkpoint {place} True" for place in ("/dev/zero", "/dev/tty")]
    assert (done.stdout.splitlines(), done.stderr) == ([*expected, " ".join(names)], "")
    kinds = [stat.S_IFMT((tmp_path / name).lstat().st_mode) for name in names]
    assert kinds == [stat.S_IFDIR, stat.S_IFIFO, stat.S_IFLNK, stat.S_IFSOCK]
