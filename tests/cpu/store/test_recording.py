"""Records of the problems that a script runs, written to a file and read again."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lt_runtime.environment import RECORD_VARIABLE
from lt_runtime.errors import ArgumentError
from lt_runtime.layout import packed
from lt_runtime.problem import Spec
from lt_runtime.store import recording
from lt_runtime.store.keys import parse_key, problem_key, to_json
from lt_runtime.store.recording import read_recorded, record
from tests.support.plan_entries import layer_key, product_key

_ADDEND = json.dumps(to_json(Spec(packed(63, 3072))))
WRONG_ADDEND = json.dumps({"problem": f'{layer_key(64)[:-2]}, "addend": {_ADDEND}}}}}'})
WRONG_SHAPE = json.dumps({"problem": layer_key(64).replace('"rows": 64', '"rows": 63', 1)})
WRONG_ALIGNMENT = json.dumps({"problem": layer_key(64).replace('"alignment": 256', '"alignment": 3', 1)})
PROBLEMS = [parse_key(key) for key in (layer_key(64), product_key(64), layer_key(128))]


@pytest.fixture(autouse=True)
def a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resets `lt_runtime.store.recording`: no problem is recorded, and no file is marked as unwritable."""
    for name in ("_recorded", "_complained"):
        monkeypatch.setattr(recording, name, set())


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RECORD_VARIABLE, str(tmp_path / "met.jsonl"))
    return tmp_path / "met.jsonl"


def test_each_problem_is_written_once(file: Path) -> None:
    for problem in (*PROBLEMS, *PROBLEMS):
        record(problem)
    heading, *lines = file.read_text().splitlines()
    assert heading.startswith("# lt_runtime")
    assert [json.loads(line) for line in lines] == [{"problem": problem_key(problem)} for problem in PROBLEMS]
    assert read_recorded(file) == PROBLEMS


def test_each_file_that_is_named_gets_them_and_no_other(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = file.with_name("other.jsonl")
    for name in ("", str(file), str(other)):
        monkeypatch.setenv(RECORD_VARIABLE, name)
        record(PROBLEMS[0])
    monkeypatch.delenv(RECORD_VARIABLE)
    record(PROBLEMS[1])
    assert {*file.parent.iterdir()} == {file, other}
    assert read_recorded(file) == read_recorded(other) == PROBLEMS[:1]


def _record_many(path: str, first: int) -> None:
    os.environ[RECORD_VARIABLE] = path
    for rows in range(first, first + 50):
        record(parse_key(product_key(rows)))


def test_processes_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "met.jsonl"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_record_many, args=(str(path), first)) for first in (1, 51, 26)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = {problem_key(problem) for problem in read_recorded(path)}
    assert found == {product_key(rows) for rows in range(1, 101)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{]", 'line 3 is .*; accepted are lines such as {"problem": KEY}'),
        ("[1]", "line 3 is"),
        ('{"key": 1}', "line 3 is"),
        ('{"problem": 1}', "line 3"),
        ('{"problem": "{Product}"}', "line 3 is .*'{Product}' is not the key of a problem"),
        ('{"problem": "\\ud800}"}', "line 3 is .*surrogates not allowed"),
        (json.dumps({"problem": layer_key(-128)}), "line 3 is .*rows is -128"),
        (json.dumps({"problem": layer_key(2**62)}), f"line 3 is .*rows is {2**62}"),
        (json.dumps({"problem": layer_key(2**40)}), "line 3 is .*more than any memory holds"),
        (WRONG_SHAPE, "line 3 is .*x has 63 elements along M, and other matrices 64"),
        (WRONG_ADDEND, "line 3 is .*addend has 63 elements along M, and other matrices 64"),
        (WRONG_ALIGNMENT, "line 3 is .*alignment is 3; accepted are the powers of two up to 256"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "met.jsonl"
    path.write_text(f"# heading\n\n{line}\n")
    with pytest.raises(ArgumentError, match=message):
        read_recorded(path)


@pytest.mark.parametrize("schema", ["1", "9" * 5000])
def test_a_file_of_another_version_costs_one_line_and_is_left_alone(file: Path, schema: str) -> None:
    file.write_text(f'# lt_runtime: problems of schema {schema}, for `lt_runtime warmup`\n{{"problem": "old"}}\n')
    content = file.read_text()
    with pytest.raises(ArgumentError, match=r"met\.jsonl cannot be used \(it was recorded by another version"):
        read_recorded(file)
    if schema == "1":  # the heading is longer than the limit of what is read
        with pytest.warns(UserWarning, match=r"met\.jsonl, which cannot be written \(it was recorded by another"):
            record(PROBLEMS[0])
        for problem in PROBLEMS:  # warnings are errors here, so that a second one would fail the test
            record(problem)
    assert file.read_text() == content


LINES = [json.dumps({"problem": problem_key(problem)}) for problem in PROBLEMS]


@pytest.fixture
def disk_of(file: Path) -> Iterator[Any]:
    """Limits the size of files: the system then takes a part of what is written, or refuses it, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("more", [-1, 0, 1, 13, 100])
def test_a_full_disk_costs_one_warning_and_leaves_no_half_line(file: Path, disk_of: Any, more: int) -> None:
    record(PROBLEMS[0])
    content = file.read_bytes()
    disk_of(len(content) + more)
    with pytest.warns(UserWarning, match=r"met\.jsonl, which cannot be written \((File too large|No space left)"):
        record(PROBLEMS[1])
    record(PROBLEMS[2])  # warnings are errors here, so that a second one would fail the test
    assert file.read_bytes() == content


@pytest.mark.parametrize("length", [1, 12, 13, 14, 100, len(LINES[1]) - 1])
def test_a_half_line_of_a_killed_writer_is_skipped_with_a_note(file: Path, length: int) -> None:
    record(PROBLEMS[0])
    with file.open("a") as writer:
        writer.write(LINES[1][:length])
    with pytest.warns(UserWarning, match=r"met\.jsonl: line 3 is cut off and skipped"):
        assert read_recorded(file) == PROBLEMS[:1]
    record(PROBLEMS[2])
    with pytest.warns(UserWarning, match="line 3 is cut off and skipped"):
        assert read_recorded(file) == [PROBLEMS[0], PROBLEMS[2]]


@pytest.mark.parametrize(("count", "shown"), [(3, "1, 2, 3 is"), (4, r"1, 2, 3, \.\.\. is")])
def test_at_most_three_cut_off_lines_are_shown(file: Path, count: int, shown: str) -> None:
    file.write_text(f"{LINES[1][:20]}\n" * count)
    with pytest.warns(UserWarning, match=f"line {shown} cut off and skipped"):
        assert read_recorded(file) == []


def test_a_whole_line_without_an_end_is_read(file: Path) -> None:
    file.write_text(f"{LINES[0]}\n{LINES[1]}")
    assert read_recorded(file) == PROBLEMS[:2]
    record(PROBLEMS[2])
    assert read_recorded(file) == PROBLEMS


@pytest.mark.parametrize("length", [1, 30, 38, 39])
def test_a_half_heading_is_none_of_another_version(file: Path, length: int) -> None:
    record(PROBLEMS[0])
    file.write_bytes(file.read_bytes()[:length])
    record(PROBLEMS[1])
    assert read_recorded(file) == PROBLEMS[1:2]


def test_two_writers_wait_for_each_other(file: Path) -> None:
    file.touch()
    with file.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.warns(UserWarning, match="cannot be written .another process has it locked"):
            record(PROBLEMS[0])
    record(PROBLEMS[1])
    assert read_recorded(file) == PROBLEMS[1:2]


def test_a_child_that_was_forked_during_a_write_does_not_keep_the_lock(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A duplicated file handle, like that of a forked child, shares the lock of the original handle."""
    write, copies = os.write, list[int]()

    def forking(handle: int, text: bytes) -> int:
        copies.append(os.dup(handle))
        return write(handle, text)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", forking)
        record(PROBLEMS[0])
    record(PROBLEMS[1])  # warnings are errors here, so that one would fail the test
    os.close(copies[0])
    assert read_recorded(file) == PROBLEMS[:2]


def test_a_file_system_without_locks_is_written_all_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    record(PROBLEMS[0])
    assert read_recorded(file) == PROBLEMS[:1]


def damage(path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "missing":
        return
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        lines = {"brackets": "[" * 100_000, "digits": "9" * 100_000, "long": LINES[0] + " " * 20_000, "nul": "\0" * 9}
        path.write_text(lines[kind] + "\n")


@pytest.mark.parametrize(
    "kind", ["missing", "fifo", "device", "directory", "huge", "brackets", "digits", "long", "nul"]
)
def test_what_is_no_recording_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    damage(tmp_path / "met.jsonl", kind)
    with pytest.raises(ArgumentError, match=r"met\.jsonl") as caught:
        read_recorded(tmp_path / "met.jsonl")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "nowhere"])
def test_a_file_that_cannot_be_written_costs_a_warning(file: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "nowhere":
        monkeypatch.setenv(RECORD_VARIABLE, str(file / "missing" / "met.jsonl"))
    else:
        damage(file, kind)
    with pytest.warns(UserWarning, match=r"LT_RUNTIME_RECORD is .*met\.jsonl, which cannot be written \("):
        record(PROBLEMS[0])
    for problem in PROBLEMS:  # warnings are errors here, so that a second one would fail the test
        record(problem)
