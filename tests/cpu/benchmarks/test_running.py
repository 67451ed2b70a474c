"""Running benchmark suites: options, result files, resuming, plan caches. Needs no GPU."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import cold, digests, report, runner, timing
from benchmarks.__main__ import SUITES, main, options_of
from benchmarks.report import Finding, Row
from benchmarks.suite import Suite, plan_cache
from benchmarks.timing import Timing
from lt_runtime.paths import cache_directory

ROOT = Path(__file__).parents[3]
STREAM = object()


@pytest.mark.parametrize("name", SUITES)
def test_without_a_gpu_a_suite_says_so(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(runner, "has_gpu", lambda: False)
    with pytest.raises(SystemExit, match=f"the suite {name} needs an NVIDIA GPU"):
        main([name])


@pytest.mark.parametrize("name", SUITES)
def test_rows_have_different_names_which_are_those_of_the_kept_results(name: str) -> None:
    order = import_module(f"benchmarks.{name}").SUITE.order
    assert len(set(order)) == len(order)
    assert {*runner.kept_rows(report.RESULTS / f"{name}.json")} <= set(order)


def test_every_suite_is_listed_without_loading_a_gpu_library() -> None:
    code = "import sys; from benchmarks.__main__ import main; main(['--list']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *lines, modules = done.stdout.splitlines()
    assert len(lines) == len(SUITES)
    assert {"cupy", "jax", "torch", "matplotlib"}.isdisjoint(name.split(".")[0] for name in modules.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["host", "--prefetch"], "--prefetch is an option of steps"),
        (["hosts"], "name a suite of kernels.*, not hosts"),
        ([], "name a suite"),
        (["steps", "--only", "["], r"--only: invalid pattern value: '\['"),
        (["torch", "--contenders", "("], r"--contenders: invalid pattern value: '\('"),
        (["steps", "--part", "1/2"], "--part needs --resume"),
        (["steps", "--resume", "--part", "3/2"], "invalid part value: '3/2'"),
    ],
)
def test_wrong_commands(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(arguments)
    assert re.search(message, capsys.readouterr().err)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pretends a machine with a GPU; no test runs anything on it."""
    fake = SimpleNamespace(cuda=SimpleNamespace(Stream=lambda **_: STREAM))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(runner, "has_gpu", lambda: True)
    monkeypatch.setattr(runner, "release", lambda: None)
    monkeypatch.setattr(report, "machine", lambda: {"gpu": "a GPU"})
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("GIT_COMMIT", "abc")


def measured(name: str) -> Row:
    return Row(name, {"lt": Timing(1.0, 0.0)})


def suite_of(*names: str, **jobs: Any) -> Suite:
    made = {name: jobs.get(name, lambda stream, name=name: measured(name)) for name in names}
    return Suite(
        rounds=3,
        order=[*names],
        jobs=lambda _: made,
        findings=lambda rows: [Finding("rows", len(rows), 1)],
        facts=lambda rows: {"first": rows[0]["case"]},
    )


def asked(*options: str) -> argparse.Namespace:
    return options_of(["layers", *options])


def test_a_run_continues_and_its_file_is_whole_after_errors_and_interruptions(
    machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, done = tmp_path / "some.json", list[str]()

    def two(stream: Any) -> Row:
        assert stream is STREAM
        done.append("two")
        if len(done) == 1:
            raise ValueError("[not] this time")
        return measured("two")

    def interrupted(stream: Any) -> Row:
        raise KeyboardInterrupt

    cut_off = suite_of("one", "two", "three", "four", two=two, three=interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.run("some", cut_off, asked("--out", str(tmp_path)))
    rows = json.loads(file.read_text())["rows"]
    assert [row["case"] for row in rows] == ["one", "two"]
    assert rows[1]["error"] == "ValueError: [not] this time"
    assert "two: ValueError: [not] this time" in capsys.readouterr().err

    monkeypatch.setenv("GIT_COMMIT", "later")
    runner.run("some", suite_of("one", "two", "three", two=two), asked("--out", str(tmp_path), "--resume"))
    written = json.loads(file.read_text())
    assert done == ["two", "two"]
    assert (written["machine"], written["commit"], written["first"]) == ({"gpu": "a GPU"}, "later", "one")
    assert written["summary"][0]["value"] == 3
    assert [(row["case"], row.get("commit")) for row in written["rows"]] == [
        *(("one", "abc"), ("two", "later"), ("three", "later"))
    ]
    assert all(row["when"].endswith("Z") for row in written["rows"])


def test_a_resumed_run_measures_stale_rows_anew_on_the_same_gpu(
    machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed, both = asked("--out", str(tmp_path), "--resume"), suite_of("one", "two")
    first = runner.run("some", both, asked("--out", str(tmp_path)))
    monkeypatch.setattr(digests, "digest", lambda *_: "later")
    one = runner.run("some", both, asked("--out", str(tmp_path), "--resume", "--only", "one"))
    assert [each["digest"] for each in one.values()] == ["later", first["two"]["digest"]]
    summary = json.loads((tmp_path / "some.json").read_text())["summary"]
    assert summary[0]["value"] == 1, "figures are over current rows"
    assert {each["digest"] for each in runner.run("some", both, resumed).values()} == {"later"}
    file, asked_for = tmp_path / "some.json", asked("--out", str(tmp_path), "--resume", "--jax")
    written = json.loads(file.read_text())
    for row, peers in zip(written["rows"], ({"torch": 2.0}, {"torch": 2.0, "jax": 3.0}), strict=True):
        row["us"] |= peers
    file.write_text(json.dumps(written))
    assert [{*each["us"]} for each in runner.run("some", both, asked_for).values()] == [{"lt"}, {"lt", "torch", "jax"}]
    monkeypatch.setattr(report, "machine", lambda: {"gpu": "another GPU"})
    with pytest.raises(SystemExit, match="rows of another GPU, a GPU: name another folder"):
        runner.run("some", both, resumed)


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
def test_a_part_of_a_suite_is_not_kept(machine: None, options: tuple[str, ...], rows: Any, is_written: bool) -> None:
    assert [*runner.run("some", suite_of("one", "two"), asked(*options))] == rows
    assert (report.RESULTS / "some.json").exists() is is_written


def test_rows_without_compiled_contenders_do_not_replace_rows_that_have_them() -> None:
    assert runner.file_of("torch", options_of(["torch", "--no-compile"])) is None


def test_seconds_are_kept_and_tell_how_long_the_next_run_takes(
    machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(stream: Any) -> Row:
        with timing.stopwatch("jax"):
            clock[0] += 20.0
        return measured("two")

    clock = [0.0]
    monkeypatch.setattr(timing.time, "monotonic", lambda: clock[0])
    both = suite_of("one", "two", "three", two=slow)
    run = runner.run("some", both, asked("--out", str(tmp_path), "--only", "one|two"))
    assert [row["seconds"] for row in run.values()] == [{"whole": 0.0}, {"whole": 20.0, "jax": 20.0}]
    assert ["two", "20.0", "jax", "20.0"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    monkeypatch.setattr(runner, "has_gpu", lambda: False)
    for stale in (False, True):
        monkeypatch.setattr(digests, "digest", lambda *_, stale=stale: "later" if stale else run["one"]["digest"])
        runner.run("some", both, asked("--out", str(tmp_path), "--resume", "--dry-run"))
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert lines[0][:5] == f"some: {3 if stale else 1} cases, 1 of".split()
        assert lines[-1] == ["all", "20" if stale else "0"]


def test_processes_share_a_suite_and_rows_of_other_runs_are_merged(machine: None, tmp_path: Path) -> None:
    three, kept = suite_of("one", "two", "three"), report.RESULTS / "some.json"

    def second(stream: Any) -> Row:
        runner.run("some", three, asked("--resume", "--part", "2/2"))
        return measured("three")

    runner.run("some", suite_of("one", "two", "three", three=second), asked("--resume", "--part", "1/2"))
    assert [row["case"] for row in json.loads(kept.read_text())["rows"]] == ["one", "two", "three"]
    runner.run("some", three, asked("--out", str(tmp_path), "--only", "tw"))
    content = json.loads((tmp_path / "some.json").read_text())
    content["rows"][0] |= {"when": "2999-01-01T00:00:00Z", "us": {"lt": 9.0}}
    (tmp_path / "some.json").write_text(json.dumps({**content, "commit": "theirs"}))
    assert [runner.merge("some", three, tmp_path, "now") for _ in range(2)] == [1, 0]
    merged = json.loads(kept.read_text())
    assert merged["commit"] == "theirs"
    assert [row["us"]["lt"] for row in merged["rows"]] == [1.0, 9.0, 1.0]
    content["rows"][0]["when"] = "2999-01-02T00:00:00Z"
    (tmp_path / "some.json").write_text(json.dumps(content | {"machine": {"gpu": "another"}}))
    with pytest.raises(SystemExit, match=r"rows of another, and .* of a GPU: rows of two GPUs are not merged"):
        runner.merge("some", three, tmp_path, "now")


def test_merging_keeps_a_fact_that_no_row_has(machine: None, tmp_path: Path) -> None:
    """The bandwidth of a copy is a fact of the kernels' file, on which the page's tables rely."""
    suite, case = import_module("benchmarks.kernels").SUITE, import_module("benchmarks.kernels").CASES[0].name
    row = {"case": case, "us": {"lt": 1.0}, "spread": {"lt": 0.0}, "when": report.now()}
    report.write(report.RESULTS / "kernels.json", [], copy_gb_s=4000.0, summary=["of earlier rows"])
    report.write(tmp_path / "kernels.json", [row])
    assert runner.merge("kernels", suite, tmp_path, "now") == 1
    merged = json.loads((report.RESULTS / "kernels.json").read_text())
    assert merged.keys() == {"machine", "commit", "when", "copy_gb_s", "rows"}
    assert merged["copy_gb_s"] == 4000.0


def test_a_row_without_contenders_is_resumed_with_all_of_them(machine: None) -> None:
    made = list[str]()

    def one(stream: Any) -> Row:
        made.append("one")
        return measured("one")

    for number, options in enumerate((("--contenders", "graph"), ("--contenders", "graph"), (), (), ("--no-compile",))):
        runner.run("some", suite_of("one", one=one), options_of(["torch", "--resume", *options]))
        assert len(made) == (1, 1, 2, 2, 2)[number]


def test_another_plan_cache_shares_only_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LT_RUNTIME_CACHE_DIR", str(tmp_path))
    with plan_cache() as directory:
        assert cache_directory() == directory != tmp_path
        (cache_directory() / "kernels" / "a kernel").touch()
        (cache_directory() / "a plan").touch()
    assert cache_directory() == tmp_path
    assert [file.name for file in tmp_path.rglob("*")] == ["kernels", "a kernel"]
    with plan_cache(keep=True) as directory:
        assert directory == tmp_path


@pytest.mark.parametrize("tunes", [False, True])
def test_cold_processes_start_with_empty_caches(tunes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(cold, "last_line", lambda command, environment: seen.append(environment))
    monkeypatch.setenv("LT_RUNTIME_TUNE", "first-use")
    cold.child(["trained"], str(tmp_path), tunes=tunes)
    assert seen[0].get("LT_RUNTIME_TUNE") == (None if tunes else "off")
    assert (seen[0]["LT_RUNTIME_CACHE_DIR"], seen[0]["CUPY_CACHE_DIR"]) == (str(tmp_path), f"{tmp_path}/cupy")


def test_a_process_that_imports_loads_no_driver(tmp_path: Path) -> None:
    found = cold.child(["import"], str(tmp_path))
    row = cold.row_of_imports([found, found]).as_json()
    assert 0 < row["us"]["lt"] < row["us"]["lt_all_names"]
    assert not row["loads_driver"]


def test_a_cold_row_says_when_measuring_has_paid() -> None:
    def trained(first: float, step: float) -> dict[str, Any]:
        return {"us": {"first": first, "step": step}}

    model = next(iter(cold.MODELS))
    row = cold.row_of_measuring(model, [(trained(3e6, 40.0), trained(1e6, 50.0))] * 2).as_json()
    assert (row["us"], row["pays_after_steps"]) == ({"lt": 3e6, "lt_untuned": 1e6}, 200_000)
    assert cold.row_of_measuring(model, [(trained(2.0, 5.0), trained(1.0, 5.0))]).setting["pays_after_steps"] is None
