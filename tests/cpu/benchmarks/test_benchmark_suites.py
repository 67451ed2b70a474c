"""How suites are run, without a GPU: what is measured and written, resuming, plan caches of their own."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import report, suite
from benchmarks.__main__ import SUITES, options_of
from benchmarks.report import Finding, Row
from benchmarks.suite import Suite, plan_cache
from benchmarks.timing import Timing
from lt_runtime.paths import cache_directory

STREAM = object()


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with a GPU on which nothing runs."""
    fake = SimpleNamespace(cuda=SimpleNamespace(Stream=lambda **_: STREAM))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(suite, "has_gpu", lambda: True)
    monkeypatch.setattr(suite, "release", lambda: None)
    monkeypatch.setattr(suite, "gpu_state", dict)
    monkeypatch.setattr(report, "machine", lambda: {"gpu": "a GPU"})
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("GIT_COMMIT", "abc")


def measured(name: str, **us: float) -> Row:
    return Row(name, {each: Timing(value, 0.0) for each, value in ({"lt": 1.0} | us).items()})


def suite_of(*names: str, **jobs: Any) -> Suite:
    made = {name: jobs.get(name, lambda stream, name=name: measured(name)) for name in names}
    return Suite(
        rounds=3,
        order=[*names],
        jobs=lambda _: made,
        findings=lambda rows: [Finding("rows", len(rows), 1)],
        facts=lambda rows: {"first": rows[0]["case"]},
        optional={"torch_max_autotune": ["two"], "jax": ["two", "three"]},
    )


def asked(*options: str) -> argparse.Namespace:
    return options_of(["layers", *options])


def cases(file: Path) -> list[str]:
    return [row["case"] for row in json.loads(file.read_text())["rows"]]


def test_a_run_goes_on_where_one_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, done = tmp_path / "some.json", list[str]()

    def job(name: str) -> Any:
        def measure(stream: Any) -> Row:
            assert stream is STREAM
            done.append(name)
            if done.count(name) == 1 and name == "two":
                raise ValueError("[not] this time")
            return measured(name)

        return measure

    names = ("one", "two", "three")
    some = suite_of(*names, **{name: job(name) for name in names})
    suite.run("some", some, asked("--out", str(tmp_path)))
    assert cases(file) == ["one", "two", "three"]
    failed = {"case": "two", "us": {}, "spread": {}, "error": "ValueError: [not] this time"}
    assert json.loads(file.read_text())["rows"][1] == failed
    assert "two: ValueError: [not] this time" in capsys.readouterr().err
    suite.run("some", some, asked("--out", str(tmp_path), "--resume"))
    written = json.loads(file.read_text())
    assert written["rows"][1]["us"] == {"lt": 1.0}
    assert (written["first"], written["summary"][0]["value"]) == ("one", 3)
    assert done == ["one", "two", "three", "two"]


@pytest.mark.parametrize(
    ("options", "rows", "is_written"),
    [
        ((), ["one", "two"], True),
        (("--only", "TW"), ["two"], False),
        (("--only", "tw", "--resume"), ["two"], True),
        (("--dtype", "bf16"), ["one", "two"], False),
        (("--ours",), ["one", "two"], False),
        (("--minutes", "-1"), [], False),
    ],
)
def test_what_is_measured_and_written(options: tuple[str, ...], rows: list[str], is_written: bool) -> None:
    assert [*suite.run("some", suite_of("one", "two"), asked(*options))] == rows
    assert (report.RESULTS / "some.json").exists() is is_written


def test_a_suite_of_other_processes_has_no_context_of_its_own(tmp_path: Path) -> None:
    given: list[Any] = []

    def job(stream: Any) -> Row:
        given.append(stream)
        return measured("one")

    suite.run("some", replace(suite_of("one", one=job), has_context=False), asked("--out", str(tmp_path)))
    assert given == [None]
    assert [name for name in SUITES if not import_module(f"benchmarks.{name}").SUITE.has_context] == ["cold"]


def test_a_row_holds_the_gpu_s_state_before_and_after(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    states = iter(({"watts": 80.0}, {"watts": 600.0}))
    monkeypatch.setattr(suite, "gpu_state", lambda: next(states))
    rows = suite.run("some", suite_of("one"), asked("--out", str(tmp_path)))
    assert rows["one"]["gpu"] == {"before": {"watts": 80.0}, "after": {"watts": 600.0}}


def test_the_file_is_whole_after_a_row_that_took_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(suite, "_SAVE_AFTER_S", 0.0)
    file, seen = tmp_path / "some.json", list[list[str]]()

    def last(_: Any) -> Row:
        seen.append(cases(file))
        return measured("three")

    suite.run("some", suite_of("one", "two", "three", three=last), asked("--out", str(tmp_path)))
    assert seen == [["one", "two"]]
    assert [each.name for each in tmp_path.iterdir()] == ["some.json"]


def test_a_run_that_is_interrupted_leaves_its_rows(tmp_path: Path) -> None:
    def interrupted(_: Any) -> Row:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        suite.run("some", suite_of("one", "two", two=interrupted), asked("--out", str(tmp_path)))
    assert cases(tmp_path / "some.json") == ["one"]


def test_rows_are_written_in_the_order_of_the_suite_and_name_their_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    some = suite_of("first", "second")
    for commit, only in (("old", "second"), ("new", "first")):
        monkeypatch.setenv("GIT_COMMIT", commit)
        suite.run("some", some, asked("--only", only, "--resume", "--out", str(tmp_path)))
    kept = suite.kept_rows(tmp_path / "some.json")
    assert {name: row["commit"] for name, row in kept.items()} == {"first": "new", "second": "old"}
    assert [*kept] == ["first", "second"]
    assert suite.kept_rows(tmp_path / "none.json") == {}


@pytest.mark.parametrize(
    ("kept", "wanted", "done"),
    [
        (None, [], False),
        ({"us": {"lt": 1.0}}, [], True),
        ({"us": {"lt": 1.0}}, ["jax"], False),
        ({"us": {"lt": 1.0, "jax": 1.0}}, ["jax"], True),
        ({"us": {"lt": 1.0, "jax": 1.0}}, ["jax", "torch_max_autotune"], False),
        ({"us": {"lt": 1.0}, "left_out": {"jax": "ModuleNotFoundError"}}, ["jax"], True),
        ({"us": {}, "error": "DriverError"}, [], False),
        ({"us": {"lt": 1.0}, "error": "DriverError"}, [], False),
    ],
)
def test_a_row_is_resumed_until_it_holds_all(kept: Any, wanted: list[str], done: bool) -> None:
    assert suite.is_done(kept, wanted) is done


def test_only_what_is_missing_is_measured() -> None:
    rows = {name: measured(name).as_json() for name in ("one", "two")}
    some = suite_of("one", "two", "three")
    assert [*suite.missing(some, asked(), rows)] == ["three"]
    assert [*suite.missing(some, asked("--max-autotune"), rows)] == ["two", "three"]
    rows["two"] = measured("two", torch_max_autotune=2.0).as_json()
    assert [*suite.missing(some, asked("--max-autotune"), rows)] == ["three"]
    assert [*suite.missing(some, asked("--max-autotune", "--jax"), rows)] == ["two", "three"]


def test_a_fresh_plan_cache_shares_only_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LT_RUNTIME_CACHE_DIR", str(tmp_path))
    (tmp_path / "plans").mkdir()
    with plan_cache() as directory:
        assert cache_directory() == directory != tmp_path
        assert [each.name for each in directory.iterdir()] == ["kernels"]
        (cache_directory() / "kernels" / "a kernel").touch()
    assert cache_directory() == tmp_path
    assert (tmp_path / "kernels" / "a kernel").exists()
    assert not directory.exists()


def test_a_plan_cache_in_a_given_folder_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LT_RUNTIME_CACHE_DIR", str(tmp_path / "before"))
    (tmp_path / "given").mkdir()
    for _ in range(2):
        with plan_cache(str(tmp_path / "given")):
            (cache_directory() / "a plan").touch()
    assert (tmp_path / "given" / "a plan").exists()
    with plan_cache(keep=True) as directory:
        assert directory == cache_directory() == tmp_path / "before"
    assert os.environ["LT_RUNTIME_CACHE_DIR"] == str(tmp_path / "before")
