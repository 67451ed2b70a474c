"""The suites host and cold without a GPU: turns, profiles, contenders that are left out, rows of processes."""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cold, host
from benchmarks.__main__ import options_of
from benchmarks.processes import MODELS
from benchmarks.timing import HostTurn, profile


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


def test_turns_leave_room_in_the_driver_s_queue() -> None:
    assert all(case.calls >= 10 and case.calls * case.launches <= 1000 for case in host.CASES)


def test_targets_are_those_that_were_set() -> None:
    targets = {case.name.partition(" GELU")[0]: dict(case.target.ratio) for case in host.CASES if case.target}
    assert targets == {
        "linear_fwd": {"torch_eager": 1.4, "nvmath": 3.5},
        "linear_fwd + linear_bwd": {"torch_eager": 3.0},
        "AdamW FP32, GPT-2 124M, 148 tensors": {"torch_eager": 20.0},
    }


def asked(*options: str) -> argparse.Namespace:
    return options_of(["host", "--rounds", "3", *options])


def test_who_cannot_be_built_or_called_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "synchronize", lambda: None)

    def missing() -> Any:
        raise ImportError("No module named 'peer'\nat all")

    builders = {"lt": lambda: slow, "lt_plan": lambda: slow, "peer": missing, "broken": lambda: missing}
    case = host.HostCase("a case", lambda: builders, 4)
    row = host.measure(case, asked())
    assert set(row.timings) == set(row.setting["until_done_us"]) == {"lt", "lt_plan"}
    assert row.left_out == dict.fromkeys(("peer", "broken"), "ImportError: No module named 'peer'")
    assert set(host.measure(case, asked("--ours")).timings) == {"lt"}


def printed(first: float, loads_driver: bool = False) -> dict[str, Any]:
    us = {"import": 1000.0, "names": 500.0, "operands": 200.0, "first": first, "second": 10.0}
    return {"us": us, "loads_driver": loads_driver}


def test_a_row_of_first_calls() -> None:
    row = cold.row_of_firsts("linear", [(printed(900.0), printed(90.0)), (printed(1100.0), printed(110.0))]).as_json()
    assert row["us"] == {"lt": 100.0, "lt_empty_cache": 1000.0, "lt_second": 10.0}
    assert row["before_us"] == {"import": 1000.0, "operands": 200.0}
    assert row["processes"] == 4


def test_when_measuring_has_paid_for_itself() -> None:
    model = next(iter(MODELS))

    def trained(first: float, step: float) -> dict[str, Any]:
        found = printed(first)
        found["us"]["step"] = step
        return found

    row = cold.row_of_measuring(model, [(trained(3e6, 40.0), trained(1e6, 50.0))] * 2).as_json()
    assert row["us"] == {"lt": 3e6, "lt_untuned": 1e6}
    assert (row["step_us"], row["untuned_step_us"], row["pays_after_steps"]) == (40.0, 50.0, 200_000)
    values = {each.what: each.value for each in cold.findings([row]) if model in each.what}
    assert [*values.values()] == [3.0, 200_000]
    never = cold.row_of_measuring(model, [(trained(3e6, 50.0), trained(1e6, 50.0))]).as_json()
    assert never["pays_after_steps"] is None


@pytest.mark.parametrize(
    ("us", "loads_driver", "met"), [(1.0, False, [True, True]), (3e5, False, [False, True]), (1.0, True, [True, False])]
)
def test_the_import_s_verdict(us: float, loads_driver: bool, met: list[bool]) -> None:
    found = printed(1.0, loads_driver)
    found["us"]["import"] = us
    row = cold.row_of_imports([found, found]).as_json()
    assert row["us"] == {"lt": us, "lt_all_names": us + 500.0}
    assert [each.met for each in cold.findings([row])[:2]] == met
    assert {each.met for each in cold.findings([])} == {None}


@pytest.mark.parametrize("tunes", [False, True])
def test_only_processes_that_are_to_measure_do(monkeypatch: pytest.MonkeyPatch, tunes: bool) -> None:
    """Whatever the process that starts them has been told."""
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(cold, "last_line", lambda command, environment: seen.append(environment))
    for value in ("off", "first-use"):
        monkeypatch.setenv("LT_RUNTIME_TUNE", value)
        cold.child(["trained"], "a folder", tunes=tunes)
    assert [each.get("LT_RUNTIME_TUNE") for each in seen] == [None if tunes else "off"] * 2


def test_a_process_that_imports_loads_no_driver(tmp_path: Path) -> None:
    found = cold.child(["import"], str(tmp_path))
    assert set(found["us"]) == {"import", "names"}
    assert not found["loads_driver"]
