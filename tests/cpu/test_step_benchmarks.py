"""What of the steps' suite needs no GPU: cases, what rows come to, resuming, and the names of contenders."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from benchmarks import report, resumable, step_row, step_summary, steps, summary
from benchmarks.blocks import presets
from benchmarks.report import Row
from benchmarks.step_cases import StepCase, cases
from benchmarks.step_kernels import covered
from benchmarks.step_lt import Contender
from benchmarks.step_summary import PREFETCH, SOAK, with_fastest, without_any
from benchmarks.timing import Timing
from lt_runtime.problem import BackwardProblem, DType

ROOT = Path(__file__).parents[2]
BY_NAME = {case.name: case for case in cases()}


def test_the_cases_are_the_presets_with_their_losses() -> None:
    assert list(BY_NAME) == ["mnist TF32", "mnist BF16", "gpt2-mlp-x2 BF16", "dlrm-top BF16", "llama-width BF16"]
    for case in cases():
        shape = presets()["mlps"][case.preset]
        assert (case.rows, list(case.dims), case.activation) == (shape["rows"], shape["dims"], shape["activation"])
        assert case.loss == ("cross_entropy" if case.preset == "mnist" else "mse")
        assert 8 <= case.replays <= 200


def test_sizes_of_a_case() -> None:
    case = StepCase("test", "bf16", 4, (3, 5, 2), "relu", "mse", 1.0)
    assert case.parameters == 3 * 5 + 5 + 5 * 2 + 2
    assert case.flops == 4 * (4 * 3 * 5 + 6 * 5 * 2), "the first layer has no dx"
    assert (case.dtype, case.ways) == (DType.BFLOAT16, ("autocast", "bf16"))
    assert BY_NAME["mnist TF32"].ways == (None,)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_tuner_is_given_what_a_step_asks_for(case: StepCase) -> None:
    backward = [each for each in case.stack.problems() if isinstance(each, BackwardProblem)]
    assert [each.dx is None for each in backward][-1], "the inputs need no gradient"
    assert case.stack.compute is case.compute


def times(**us: float) -> dict[str, Timing]:
    return {name: Timing(value, 0.1) for name, value in us.items()}


def test_of_two_ways_the_faster_counts() -> None:
    given = times(lt=5.0, torch_graph_autocast=9.0, torch_graph_bf16=8.0, torch_graph_call_bf16=11.0, torch_compile=7.0)
    made = with_fastest(given)
    assert made == given | times(torch_graph=8.0, torch_graph_call=11.0)
    assert with_fastest(times(lt=5.0, torch_graph=6.0)) == times(lt=5.0, torch_graph=6.0)


def test_a_name_is_left_out_when_neither_way_was_measured() -> None:
    left_out = {"torch_graph_bf16": "a", "torch_compile_autocast": "b", "torch_compile_bf16": "c"}
    assert without_any(left_out, with_fastest(times(torch_graph_autocast=1.0))) == {"torch_compile": "c"}


def test_names_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_row, "timed_replays", lambda *_: "graph")
    monkeypatch.setattr(step_row, "timed_calls", lambda *_: "call")
    contender = Contender(print, print, 0.0, {})
    names = "lt", "lt_untuned", "torch_graph_bf16", "torch_max_autotune_bf16"
    turns = step_row._turns(dict.fromkeys(names, contender), 1, None)
    graphs, calls = dict.fromkeys(names, "graph"), dict.fromkeys(("lt_call", "torch_graph_call_bf16"), "call")
    assert turns == graphs | calls


def test_contenders_of_pytorch() -> None:
    def of(name: str, *compiled: str) -> list[str]:
        setup: Any = SimpleNamespace(case=BY_NAME[name])
        return [made for made, _ in step_row._torch(setup, compiled, 9.0)]

    assert of("mnist TF32") == ["torch_graph"]
    assert of("mnist TF32", "torch_compile", "torch_max_autotune") == [
        "torch_graph",
        "torch_compile",
        "torch_max_autotune",
    ]
    assert of("mnist BF16") == ["torch_graph_autocast", "torch_graph_bf16"]
    assert of("mnist BF16", "torch_max_autotune") == [
        "torch_graph_autocast",
        "torch_graph_bf16",
        "torch_max_autotune_bf16",
    ]


def test_who_cannot_be_built_is_left_out() -> None:
    contender = Contender(print, print, 0.0, {})

    def fail() -> Contender:
        raise TimeoutError("not done after 9 s\nand more")

    built = step_row._build(iter([("a", lambda: contender), ("b", fail)]))
    assert built == ({"a": contender}, {"b": "TimeoutError: not done after 9 s"})


def row(name: str, **us: float) -> dict[str, Any]:
    timings = times(lt=10.0, **us)
    setting = {"nodes": {"lt": {"kernel": 14, "memset": 1}}, "unmeasured_problems": 0}
    return Row(name, timings, "lt", setting=setting).as_json()


def found(rows: list[dict[str, Any]], what: str) -> summary.Finding:
    (only,) = (each for each in step_summary.findings(rows) if each.what.startswith(what))
    return only


@pytest.mark.parametrize(("us", "met"), [(16.0, True), (15.9, False)])
def test_a_case_is_judged_by_torch_compile(us: float, met: bool) -> None:
    rows = [row("mnist BF16", torch_max_autotune=us, torch_graph=12.0)]
    assert found(rows, "torch_max_autotune / lt, mnist BF16").met is met
    assert found(rows, "torch_graph / lt, mnist BF16").met is None, "told, and not judged"
    assert found(rows, "torch_max_autotune / lt, mnist TF32").as_json()["value"] is None


def test_what_a_graph_must_not_hold() -> None:
    rows = [row("mnist TF32"), row("mnist BF16")]
    assert found(rows, "nodes in a step that copy").met is True
    assert found(rows, "kernels in a step of mnist BF16").value == 14
    rows[1]["nodes"]["lt"] |= {"memcpy": 2, "mem_alloc": 1}
    worst = found(rows, "nodes in a step that copy")
    assert (worst.value, worst.met, worst.where) == (3.0, False, "mnist BF16")


def test_a_step_that_was_not_tuned_is_told() -> None:
    rows = [row("mnist TF32"), row("mnist BF16") | {"unmeasured_problems": 1}]
    assert found(rows, "problems in a step").where == "mnist BF16"
    assert found(rows, "problems in a step").met is False


def test_prefetch_and_soak() -> None:
    prefetch = Row(PREFETCH, times(gpu_batches=100.0, prefetch=102.9), "gpu_batches").as_json()
    soak = {"case": SOAK, "us": {"lt_call": 50.0}, "gained": {"gpu": 0, "pool": 512}, "replays": 10000}
    rows = [prefetch, soak | {"mean_loss": float("nan")}]
    assert found(rows, "prefetch / batches on the GPU").met is True
    assert found(rows, "bytes of memory (gpu) gained in 10000 replays").met is True
    assert found(rows, "bytes of memory (pool) gained in 10000 replays").met is False
    assert found(rows, "their mean loss is finite").met is False
    prefetch["us"]["prefetch"] = 103.1
    assert found([prefetch], "prefetch / batches on the GPU").met is False


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    assert {each.met for each in step_summary.findings([])} == {None}


def test_tables() -> None:
    console = Console(width=250)
    rows = [row("mnist BF16", lt_untuned=11.0, torch_graph=12.5), {"case": SOAK, "us": {"lt_call": 1.0}}]
    with console.capture() as capture:
        console.print(step_summary.rows_table([*rows, {"case": "mnist TF32", "us": {}, "error": "DriverError"}]))
    lines = [line.split() for line in capture.get().splitlines()]
    assert lines[1] == ["mnist", "BF16", "10.0", "0.10", "1.100", "1.250", "14"]
    assert lines[2] == [*SOAK.split(), "see", "below"]
    assert lines[3] == ["mnist", "TF32", "no", "result"]


def arguments(*given: str) -> argparse.Namespace:
    return steps.parser().parse_args(given)


def test_the_command_line_chooses_rows() -> None:
    assert list(steps.jobs(arguments())) == list(BY_NAME)
    everything = steps.jobs(arguments("--prefetch", "--soak", "10000"))
    assert list(everything) == [*BY_NAME, PREFETCH, SOAK]
    assert list(steps.jobs(arguments("--only", "MNIST.*bf16", "--soak", "9"))) == ["mnist BF16", SOAK]
    assert list(steps.jobs(arguments("--only", "^prefetch", "--prefetch"))) == [PREFETCH]


def test_only_what_is_missing_is_measured() -> None:
    rows = {each: row(each) for each in itertools.islice(BY_NAME, 3)}
    rows["mnist TF32"] = row("mnist TF32", torch_max_autotune=20.0)
    rows["mnist BF16"]["left_out"] = {"torch_max_autotune": "TimeoutError"}
    rows["gpt2-mlp-x2 BF16"]["error"] = "DriverError"
    rows[SOAK] = {"case": SOAK, "us": {"lt_call": 1.0}}
    asked = steps.jobs(arguments("--soak", "10000"))
    rest = ["dlrm-top BF16", "llama-width BF16"]
    assert steps.missing(asked, rows, max_autotune=False) == ["gpt2-mlp-x2 BF16", *rest]
    del rows["mnist BF16"]["left_out"], rows["gpt2-mlp-x2 BF16"]["error"]
    assert steps.missing(asked, rows, max_autotune=True) == ["mnist BF16", "gpt2-mlp-x2 BF16", *rest]


def test_a_run_that_is_cut_off_keeps_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "machine", lambda: {"gpu": "a GPU"})
    file = tmp_path / "steps.json"
    steps.save({name: row(name) for name in reversed(BY_NAME)}, file)
    assert list(resumable.kept_rows(file)) == list(BY_NAME), "in the order of the suite"
    assert {"what", "value", "target", "met", "rows"} <= set(json.loads(file.read_text())["summary"][0])


def test_a_row_that_fails_is_told_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: Any) -> Row:
        raise RuntimeError("[no] memory")

    made = steps._row("mnist BF16", fail, None)
    assert made == {"case": "mnist BF16", "us": {}, "spread": {}, "error": "RuntimeError: [no] memory"}
    assert "mnist BF16: RuntimeError: [no] memory" in capsys.readouterr().err


def test_without_a_gpu_the_suite_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        steps.main([])


def test_reading_the_cases_loads_no_gpu_library() -> None:
    code = "import sys, benchmarks.steps; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"cupy", "torch"}.isdisjoint(done.stdout.split())


def test_the_time_in_which_any_kernel_runs() -> None:
    assert covered([]) == 0
    assert covered([(0, 2), (1, 3), (1, 2), (5, 6), (6, 8)]) == 6
