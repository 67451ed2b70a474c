"""What of the suites of host time and cold starts needs no GPU: turns, profiles, cases, resuming, rows of processes."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import cold, host, report, resumable
from benchmarks.host_cases import ADAMW, HOST, train_step_sizes
from benchmarks.host_timing import HostTurn, profile
from benchmarks.report import Row
from benchmarks.timing import Timing

ROOT = Path(__file__).parents[2]


class Clock:
    """Stands in for the wall clock and for a GPU that a call keeps busy for longer than the host."""

    def __init__(self) -> None:
        self.now, self.busy_until = 0.0, 0.0

    def call(self) -> None:
        assert not gc.isenabled()
        self.busy_until = max(self.busy_until, self.now) + 3e-6
        self.now += 2e-6

    def synchronize(self) -> None:
        self.now = max(self.now, self.busy_until)


def test_a_turn_is_the_host_s_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    turn = HostTurn(clock.call, 10, clock.synchronize)
    assert [turn(), turn()] == pytest.approx([2.0, 2.0])
    assert turn.until_done == pytest.approx([3.0, 3.0])
    assert gc.isenabled()


def slow() -> int:
    return sum(range(1000))


def test_a_profile_names_what_takes_time() -> None:
    waits: list[None] = []
    text = profile(slow, 5, 3, lambda: waits.append(None))
    assert text.startswith("15 calls\n")
    assert "(slow)" in text
    assert len(waits) == 3


def test_cases_have_names_of_their_own_and_leave_room_in_the_queue() -> None:
    assert len({case.name for case in HOST}) == len(HOST)
    assert all(case.calls >= 10 and case.calls * case.launches <= 1000 for case in HOST)


def test_targets_are_those_that_were_set() -> None:
    targets = {case.kind: dict(case.target.ratio) for case in HOST if case.target}
    assert targets == {
        "linear_fwd": {"torch_eager": 1.4, "nvmath": 3.5},
        "linear": {"torch_eager": 3.0},
        "adamw": {"torch_eager": 20.0},
    }
    assert (len(ADAMW.shapes), ADAMW.size) == (148, 124_439_808)
    assert train_step_sizes().dims == (784, 512, 512, 10)


def measured(name: str) -> Row:
    return Row(name, {"lt": Timing(1.0, 0.0)}, "lt")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "machine", lambda: {"gpu": "a GPU"})
    monkeypatch.setenv("GIT_COMMIT", "abc")


def asked(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    resumable.arguments_of(parser, Path("default.json"), 7)
    return parser.parse_args(options)


@pytest.mark.usefixtures("machine")
def test_a_run_goes_on_where_one_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, done = tmp_path / "suite.json", list[str]()

    def measure(name: str) -> Row:
        done.append(name)
        if done.count(name) == 1 and name == "two":
            raise ValueError("not this time")
        return measured(name)

    measures = {name: lambda name=name: measure(name) for name in ("one", "two", "three")}
    resumable.run(measures, asked("--out", str(file)), tmp_path / "other.json")
    assert [row["case"] for row in json.loads(file.read_text())["rows"]] == ["one", "three"]
    assert "two: ValueError: not this time" in capsys.readouterr().err
    resumable.run(measures, asked("--out", str(file), "--resume"), tmp_path / "other.json")
    assert [row["case"] for row in json.loads(file.read_text())["rows"]] == ["one", "two", "three"]
    assert done == ["one", "two", "three", "two"]
    assert not (tmp_path / "other.json").exists()


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("options", "rows", "is_written"),
    [
        ((), ["one", "two"], True),
        (("--only", "TW"), ["two"], False),
        (("--only", "tw", "--resume"), ["two"], True),
        (("--minutes", "-1"), [], False),
    ],
)
def test_what_is_measured_and_written(
    tmp_path: Path, options: tuple[str, ...], rows: list[str], is_written: bool
) -> None:
    measures = {name: lambda name=name: measured(name) for name in ("one", "two")}
    file = tmp_path / "suite.json"
    assert [*resumable.run(measures, asked(*options), file)] == rows
    assert file.exists() is is_written


@pytest.mark.usefixtures("machine")
def test_a_peer_that_is_missing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import host_builders

    monkeypatch.setattr(host_builders, "synchronize", lambda: None)

    def missing() -> Any:
        raise ImportError("No module named 'peer'\nat all")

    calls, left_out = host_builders.build({"lt": lambda: slow, "peer": missing, "broken": lambda: missing})
    assert calls == {"lt": slow}
    assert left_out == dict.fromkeys(("peer", "broken"), "ImportError: No module named 'peer'")


def test_every_kind_of_case_has_contenders() -> None:
    from benchmarks import host_builders

    assert set(host_builders._KINDS) == {case.kind for case in HOST}


def printed(first: float, loads_driver: bool = False) -> dict[str, Any]:
    us = {"import": 1000.0, "names": 500.0, "operands": 200.0, "first": first, "second": 10.0}
    return {"us": us, "loads_driver": loads_driver}


def test_a_row_of_first_calls() -> None:
    row = cold.row_of_firsts("linear", [(printed(900.0), printed(90.0)), (printed(1100.0), printed(110.0))]).as_json()
    assert row["us"] == {"lt": 100.0, "lt_empty_cache": 1000.0, "lt_second": 10.0}
    assert row["before_us"] == {"import": 1000.0, "operands": 200.0}
    assert row["processes"] == 4


@pytest.mark.parametrize(
    ("limit", "loads_driver", "verdict"),
    [(200.0, False, "met: 1 ms of 200"), (0.5, False, "MISSED: 1 ms of 0"), (200.0, True, "MISSED: 1 ms of 200, and")],
)
def test_the_import_s_verdict(monkeypatch: pytest.MonkeyPatch, limit: float, loads_driver: bool, verdict: str) -> None:
    monkeypatch.setattr(cold, "_IMPORT_MS", limit)
    row = cold.row_of_imports([printed(1.0), printed(1.0, loads_driver)]).as_json()
    assert row["us"] == {"lt": 1000.0, "lt_all_names": 1500.0}
    assert verdict in cold.import_verdict({cold.IMPORT: row})
    assert cold.import_verdict({}).endswith("not measured")


def test_a_process_that_imports_loads_no_driver(tmp_path: Path) -> None:
    found = cold.child("import", str(tmp_path))
    assert set(found["us"]) == {"import", "names"}
    assert not found["loads_driver"]


@pytest.mark.parametrize("suite", [host, cold], ids=["host", "cold"])
def test_without_a_gpu_a_suite_says_so(monkeypatch: pytest.MonkeyPatch, suite: Any) -> None:
    monkeypatch.setattr(suite, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        suite.main([])


def test_reading_the_cases_loads_no_gpu_library() -> None:
    code = "import sys, benchmarks.host, benchmarks.cold; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"cupy", "torch", "nvmath"}.isdisjoint(done.stdout.split())


def test_a_suite_with_a_bar_saves_after_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = object()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Stream=lambda **_: stream)))
    monkeypatch.setitem(sys.modules, "benchmarks.graphs", SimpleNamespace(release=lambda: None))
    rows: resumable.Rows = {}
    saved: list[list[str]] = []

    def job(name: str, given: object) -> dict[str, Any]:
        assert given is stream
        return {"case": name}

    jobs = {name: partial(job, name) for name in ("first", "second")}
    resumable.run_with_bar(jobs, rows, 1.0, lambda: saved.append([*rows]))
    assert saved == [["first"], ["first", "second"]]
    resumable.run_with_bar({"third": partial(job, "third")}, rows, -1.0, lambda: saved.append([]))
    assert "third" not in rows, "time was up"
