"""What of the steps' suite needs no GPU: cases, what rows come to, resuming, and the names of contenders."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks import report, steps, suite
from benchmarks.__main__ import options_of
from benchmarks.layers import Tuned, presets
from benchmarks.report import Row
from benchmarks.splits import chain_of
from benchmarks.steps import CASES, PREFETCH, SOAK, StepCase, StepContender, covered, with_fastest, without_any
from benchmarks.timing import Timing
from lt_runtime.problem import BackwardProblem

BY_NAME = {case.name: case for case in CASES}


def test_the_cases_are_the_presets_with_their_losses() -> None:
    assert list(BY_NAME) == ["mnist TF32", "mnist BF16", "gpt2-mlp-x2 BF16", "dlrm-top BF16", "llama-width BF16"]
    for case in CASES:
        shape = presets()["mlps"][case.preset]
        assert (case.rows, list(case.dims), case.activation) == (shape["rows"], shape["dims"], shape["activation"])
        assert case.loss == ("cross_entropy" if case.preset == "mnist" else "mse")
        assert 8 <= case.replays <= 200


def test_sizes_of_a_case() -> None:
    case = StepCase("test", "bf16", 4, (3, 5, 2), "relu", "mse", 1.0)
    assert case.parameters == 3 * 5 + 5 + 5 * 2 + 2
    assert case.flops == 4 * (4 * 3 * 5 + 6 * 5 * 2), "the first layer has no dx"
    assert (case.dtype, case.ways) == ("bfloat16", ("autocast", "bf16"))
    assert BY_NAME["mnist TF32"].ways == (None,)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_tuner_is_given_what_a_step_asks_for(case: StepCase) -> None:
    backward = [each for each in chain_of(case).problems if isinstance(each, BackwardProblem)]
    assert [each.dx is None for each in backward][-1], "the inputs need no gradient"
    assert {each.compute.value for each in chain_of(case).problems} == {case.compute}


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
    monkeypatch.setattr(steps, "timed", lambda *_: "graph")
    monkeypatch.setattr(steps, "timed_calls", lambda *_: "call")
    contender = StepContender(print, print, 0.0, {})
    names = "lt", "lt_untuned", "torch_graph_bf16", "torch_max_autotune_bf16"
    loop = contender._replace(turn=lambda: 5.0)
    turns = steps._turns(dict.fromkeys(names, contender) | {"jax": loop}, 1, None)
    called = "lt_call", "torch_graph_call_bf16", "jax_call"
    assert turns == dict.fromkeys(names, "graph") | {"jax": loop.turn} | dict.fromkeys(called, "call")


def test_each_turn_of_a_graph_is_on_another_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    contender = StepContender(lambda count: done.append(f"replay {count}"), lambda _: done.append("batch"), 0.0, {})
    monkeypatch.setattr(steps, "timed", lambda replay, count, stream, lead: (lead(), replay()))
    steps.graph_turn(contender, 16, None)
    assert done == ["batch", "replay 3", "replay 16"]


def test_our_memory_is_compared_with_the_least_of_pytorch() -> None:
    sizes = {"lt": 900, "lt_untuned": 0, "torch_graph_autocast": 2000, "torch_graph_bf16": 1000, "jax": 800}
    made = {name: StepContender(print, print, 0.0, {}, size) for name, size in sizes.items()}
    known = {name: size for name, size in sizes.items() if size}
    assert steps.memory_facts(made) == {"memory_bytes": known, "memory_ratio": 0.9}
    assert steps.memory_facts({"jax": made["jax"]}) == {"memory_bytes": {"jax": 800}}
    name = "memory of a step / PyTorch's"
    assert found([row("gpt2-mlp-x2 BF16") | {"memory_ratio": 0.9}], name).met is True
    assert found([row("gpt2-mlp-x2 BF16") | {"memory_ratio": 0.91}], name).met is False


def test_contenders_of_others() -> None:
    def of(name: str, *options: str) -> list[str]:
        setup: Any = SimpleNamespace(case=BY_NAME[name])
        return [made for made, _ in steps._peers(setup, arguments(*options))]

    both = "--torch-compile", "--max-autotune"
    assert of("mnist TF32") == ["torch_graph"]
    assert of("mnist TF32", *both) == ["torch_graph", "torch_compile", "torch_max_autotune"]
    assert of("mnist BF16") == ["torch_graph_autocast", "torch_graph_bf16"]
    compiled = ["torch_graph_autocast", "torch_graph_bf16", "torch_max_autotune_bf16"]
    assert of("mnist BF16", "--max-autotune") == compiled
    assert of("mnist TF32", "--jax") == ["torch_graph", "jax"]


def test_a_row_of_our_public_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `compare` runs it, on another version of the package: nothing inside the package is imported."""

    class Setup:
        def __init__(self, case: StepCase, stream: Any) -> None:
            self.x, self.target = "x", "target"

        def step(self) -> Any:
            return lambda x, target: np.float32(2.5)

        def calls(self, step: Any) -> Any:
            return lambda count: None

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(steps, "Setup", Setup)
    monkeypatch.setattr(steps, "tune", lambda case: Tuned(1.5, []))
    monkeypatch.setitem(sys.modules, "benchmarks.internals", None)
    (measure,) = [steps.SUITE.jobs(arguments("--ours", "--keep-plans", "--rounds", "3"))["mnist BF16"]]
    row = measure(contextlib_stream(stream)).as_json()
    assert set(row["us"]) == {"lt_call"}
    assert row["first_loss"] == {"lt_call": 2.5}
    assert row["tuning_s"] == 1.5


def contextlib_stream(stream: Any) -> Any:
    class Stream(contextlib.nullcontext[None]):
        synchronize = staticmethod(stream.synchronize)

    return Stream()


def row(name: str, **us: float) -> dict[str, Any]:
    timings = times(lt=10.0, **us)
    setting = {"nodes": {"lt": {"kernel": 14, "memset": 1}}, "unmeasured_problems": 0}
    return Row(name, timings, "lt", setting=setting).as_json()


def found(rows: list[dict[str, Any]], what: str) -> report.Finding:
    (only,) = (each for each in steps.findings(rows) if each.what.startswith(what))
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
    assert {each.met for each in steps.findings([])} == {None}


def test_tables() -> None:
    console = Console(width=250)
    rows = [row("mnist BF16", lt_untuned=11.0, torch_graph=12.5), {"case": SOAK, "us": {"lt_call": 1.0}}]
    with console.capture() as capture:
        console.print(steps.SUITE.lines([*rows, {"case": "mnist TF32", "us": {}, "error": "DriverError"}]))
    lines = [line.split() for line in capture.get().splitlines()]
    assert lines[1] == ["mnist", "BF16", "10.0", "0.10", "1.100", "1.250", "14"]
    assert lines[2] == [*SOAK.split(), "see", "below"]
    assert lines[3] == ["mnist", "TF32", "no", "result"]


def arguments(*given: str) -> argparse.Namespace:
    return options_of(["steps", *given])


def test_the_command_line_chooses_rows() -> None:
    assert list(steps.SUITE.jobs(arguments())) == list(BY_NAME)
    asked = arguments("--prefetch", "--soak", "10000")
    assert list(steps.SUITE.jobs(asked)) == [*BY_NAME, PREFETCH, SOAK] == list(steps.SUITE.order)
    chosen = suite.missing(steps.SUITE, arguments("--only", "MNIST.*bf16", "--soak", "9"), {})
    assert list(chosen) == ["mnist BF16", SOAK]
    assert list(suite.missing(steps.SUITE, arguments("--only", "^prefetch", "--prefetch"), {})) == [PREFETCH]


def test_only_what_is_missing_is_measured() -> None:
    rows = {each: row(each) for each in itertools.islice(BY_NAME, 3)}
    rows["mnist TF32"] = row("mnist TF32", torch_max_autotune=20.0)
    rows["mnist BF16"]["left_out"] = {"torch_max_autotune": "TimeoutError"}
    rows["gpt2-mlp-x2 BF16"]["error"] = "DriverError"
    rows[SOAK] = {"case": SOAK, "us": {"lt_call": 1.0}}
    rest = ["dlrm-top BF16", "llama-width BF16"]
    assert list(suite.missing(steps.SUITE, arguments("--soak", "9"), rows)) == ["gpt2-mlp-x2 BF16", *rest]
    del rows["mnist BF16"]["left_out"], rows["gpt2-mlp-x2 BF16"]["error"]
    missing = suite.missing(steps.SUITE, arguments("--soak", "9", "--max-autotune"), rows)
    assert list(missing) == ["mnist BF16", "gpt2-mlp-x2 BF16", *rest]


def test_the_time_in_which_any_kernel_runs() -> None:
    assert covered([]) == 0
    assert covered([(0, 2), (1, 3), (1, 2), (5, 6), (6, 8)]) == 6
