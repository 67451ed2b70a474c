"""Two result files of a suite: which times have changed, and which differ no more than two runs do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.agreement import BETWEEN_RUNS, pairs


def row(case: str, spread: float = 0.0, **us: float) -> dict[str, Any]:
    return {"case": case, "us": us, "spread": dict.fromkeys(us, spread)}


def test_a_time_has_changed_when_the_intervals_are_apart() -> None:
    between = BETWEEN_RUNS["kernels"]
    reached = 100.0 * (1 + between / 2) / (1 - between / 2)
    for spread, us, agrees in [(0.0, reached - 0.01, True), (0.0, reached + 0.01, False), (1.0, reached + 0.9, True)]:
        (pair,) = pairs("kernels", [row("a", spread, lt=100.0)], [row("a", spread, lt=us)])
        assert pair.agrees is agrees
        (pair,) = pairs("kernels", [row("a", spread, lt=us)], [row("a", spread, lt=100.0)])
        assert pair.agrees is agrees, "faster or slower"
    assert pairs("host", [row("a", lt=100.0)], [row("a", lt=110.0)])[0].agrees, "runs of this suite differ by more"


def test_only_times_that_both_files_hold_are_compared() -> None:
    old = [row("a", lt=10.0, torch=20.0), row("b", lt=1.0), row("failed")]
    new = [row("c", lt=1.0), row("a", lt=12.0, torch=10.0, jax=3.0), row("failed", lt=2.0)]
    assert [(pair.name, pair.ratio) for pair in pairs("steps", old, new)] == [("a: torch", 0.5), ("a: lt", 1.2)]


def written(folder: Path, *rows: dict[str, Any]) -> str:
    folder.mkdir()
    file = folder / "steps.json"
    file.write_text(json.dumps({"commit": folder.name, "rows": rows}))
    return str(file)


def test_the_command_tells_a_change_from_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [row(str(number), 0.1, lt=100.0 + number) for number in range(20)]
    old = written(tmp_path / "old", *cases)
    new = written(tmp_path / "new", *cases[1:], row("0", 0.1, lt=110.0))
    with pytest.raises(SystemExit) as status:
        main(["compare", old, new])
    assert status.value.code == 0, "19 of 20 agree"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.startswith(" 0: lt")] == [
        ["0:", "lt", "100.00", "110.00", "1.100", "7.45"]
    ]
    assert any("agree within their stated spread" in line and "0.950" in line for line in lines)
    with pytest.raises(SystemExit) as status:
        main(["compare", old, written(tmp_path / "other", cases[1], row("0", 0.1, lt=90.0))])
    assert status.value.code == 1
    with pytest.raises(SystemExit, match="no time in common"):
        main(["compare", old, written(tmp_path / "empty", row("20", lt=1.0))])
