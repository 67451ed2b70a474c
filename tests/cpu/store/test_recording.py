"""Problems that a script meets, written down and read again."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lt_runtime.errors import ArgumentError
from lt_runtime.store.keys import Problem, parse_key, problem_key
from lt_runtime.store.recording import RECORD_VARIABLE, read_recorded, record
from tests.support.plan_entries import layer_key, product_key
from tests.support.strategies import problems

PROBLEMS = [parse_key(key) for key in (layer_key(64), product_key(64), layer_key(128))]


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


def test_nothing_is_written_unless_asked(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RECORD_VARIABLE)
    record(PROBLEMS[0])
    monkeypatch.setenv(RECORD_VARIABLE, "")
    record(PROBLEMS[0])
    assert not file.exists()


def test_another_file_gets_them_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(PROBLEMS[0])
    other = file.with_name("other.jsonl")
    monkeypatch.setenv(RECORD_VARIABLE, str(other))
    record(PROBLEMS[0])
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


def test_a_file_that_cannot_be_written_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECORD_VARIABLE, str(tmp_path / "missing" / "met.jsonl"))
    with pytest.warns(UserWarning, match=r"LT_RUNTIME_RECORD is .* cannot be written \(No such file or directory\)"):
        record(PROBLEMS[0])
    for problem in PROBLEMS:  # a second warning would be an error
        record(problem)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(problems, min_size=1, max_size=3))
def test_any_problem_comes_back(tmp_path: Path, met: list[Problem]) -> None:
    path = tmp_path / "met.jsonl"
    path.write_text("".join(json.dumps({"problem": problem_key(each)}) + "\n" for each in met))
    assert read_recorded(path) == list(dict.fromkeys(met))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", 'line 3 is .*; accepted are lines such as {"problem": KEY}'),
        ("[1]", "line 3 is"),
        ('{"key": 1}', "line 3 is"),
        ('{"problem": 1}', "line 3"),
        ('{"problem": "Product(8192)"}', "line 3 is .*'Product.8192.' is not the key of a problem"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "met.jsonl"
    path.write_text(f"# heading\n\n{line}\n")
    with pytest.raises(ArgumentError, match=message):
        read_recorded(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"met\.jsonl cannot be read \(No such file or directory\)"):
        read_recorded(tmp_path / "met.jsonl")


def test_a_file_of_another_version_costs_one_line_and_is_left_alone(file: Path) -> None:
    file.write_text('# lt_runtime: problems of schema 1, for `lt_runtime warmup --recorded`\n{"problem": "old"}\n')
    content = file.read_text()
    with pytest.raises(ArgumentError, match=r"met\.jsonl cannot be used \(it was recorded by another version"):
        read_recorded(file)
    with pytest.warns(UserWarning, match=r"met\.jsonl, which cannot be written \(it was recorded by another version"):
        record(PROBLEMS[0])
    for problem in PROBLEMS:  # a second warning would be an error
        record(problem)
    assert file.read_text() == content
