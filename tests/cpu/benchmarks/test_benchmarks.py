"""What of the benchmarks needs no GPU: statistics, the order of turns, cases and their bytes, results and tables."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks import clocks, kernels, report, suite, timing
from benchmarks.__main__ import SUITES, main, options_of
from benchmarks.copies import Ceiling
from benchmarks.report import Row, Target
from benchmarks.timing import Measured, Timing, buffer_sets, repetitions, summarise, take_turns
from lt_runtime.gpu.compiler import compile_cubin

ROOT = Path(__file__).parents[3]
COMPILED = (b"-arch=sm_90", b"--std=c++17")


def test_a_figure_is_the_median_and_the_distance_of_the_quartiles() -> None:
    assert summarise([5.0]) == Timing(5.0, 0.0)
    assert summarise([1.0, 2.0, 3.0, 4.0, 100.0]) == Timing(3.0, 2.0)
    assert summarise([2.0, 1.0]) == Timing(1.5, 0.5)


def test_contenders_take_turns_in_alternating_order() -> None:
    order: list[str] = []

    def turn(name: str) -> float:
        order.append(name)
        return float(len(order))

    turns = {name: lambda name=name: turn(name) for name in "abc"}
    timings = take_turns(turns, rounds=3)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert rounds == ["abc", "cba", "abc", "cba", "abc"]
    assert timings["b"] == summarise([8.0, 11.0, 14.0]), "rounds that warm up do not count"
    assert timings["a"] == summarise([7.0, 12.0, 13.0])


def test_by_the_wall_clock_only_what_grows_with_the_replays_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated machine: a replay takes 600 µs, queuing it 50 µs of the host's, and waiting 300 µs at the end."""
    clock, busy = [0.0], [0.0]

    def replay() -> str:
        clock[0] += 50e-6
        busy[0] = max(busy[0], clock[0]) + 600e-6
        return "done"

    def wait(given: str) -> None:
        assert given == "done"
        clock[0] = max(clock[0], busy[0]) + 300e-6

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    turn = timing.timed_by_host(replay, 4, wait)
    before = clock[0]
    assert turn() == pytest.approx(150.0)
    assert clock[0] - before > 20e-3, "long enough for the clock"


def test_a_long_run_takes_two_seconds_and_tells_the_gpu_s_state(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[int] = []

    def timed(replay: Any, repetitions: int, stream: Any, lead: Any) -> Any:
        return lambda: (lead(), replay(), 1234.5 + repetitions)[-1]

    monkeypatch.setattr(timing, "timed", timed)
    monkeypatch.setattr(timing.clocks, "during", lambda work, seconds: (work(), {"watts": seconds}))
    assert timing.sustained(queued.append, 1000.0, None, 4) == {"us": 3234.5, "watts": 1.0}
    assert queued == [1, 500]


def test_contenders_bring_their_own_capture_and_clock() -> None:
    def capture(run: Any, repetitions: int, sets: int, stream: Any) -> Any:
        return lambda: run(repetitions, sets)

    def timed(replay: Any, repetitions: int, stream: Any) -> Any:
        return lambda: float(replay()) / repetitions

    def refused() -> Any:
        raise RuntimeError("no GPU")

    good = timing.Contender(lambda repetitions, sets: 10 * repetitions + sets, capture, timed)
    given: list[tuple[str, int, Timing]] = []
    measured = timing.measure(
        {"good": lambda: good, "bad": refused},
        sets=2,
        repetitions=4,
        rounds=3,
        stream=None,
        then=lambda name, replay, took: given.append((name, replay(), took)),
    )
    assert measured == ({"good": Timing(10.5, 0.0)}, {"bad": "RuntimeError: no GPU"})
    assert given == [("good", 42, Timing(10.5, 0.0))]


class NvidiaSmi:
    """Stands for the process."""

    def __init__(self, answer: str | Exception) -> None:
        self.answer, self.commands = answer, list[list[str]]()

    def __call__(self, command: list[str], **_: Any) -> Any:
        self.commands.append(command)
        if isinstance(self.answer, Exception):
            raise self.answer
        return SimpleNamespace(stdout=self.answer)


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ("1755, 689.32, 54\n", {"sm_mhz": 1755.0, "watts": 689.32, "celsius": 54.0}),
        ("1755, [N/A], 54\n", {}),
        ("No devices were found\n", {}),
        (FileNotFoundError("nvidia-smi"), {}),
        (subprocess.TimeoutExpired("nvidia-smi", 10.0), {}),
        (subprocess.CalledProcessError(9, "nvidia-smi"), {}),
    ],
)
def test_the_gpu_s_state(answer: Any, state: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    smi, device = NvidiaSmi(answer), SimpleNamespace(pci_bus_id="0000:18:00.0")
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device)))
    monkeypatch.setattr(subprocess, "run", smi)
    assert clocks.gpu_state() == state
    assert clocks.during(lambda: "done", 0.0) == ("done", state)
    assert {command[1] for command in smi.commands} == {"--id=0000:18:00.0"}


@given(st.integers(1, 1 << 36), st.integers(1, 1 << 28))
def test_what_repetitions_go_round_exceeds_the_cache(size: int, cache: int) -> None:
    sets = buffer_sets(size, cache)
    assert 2 <= sets <= 200
    assert sets * size >= 4 * cache or sets == 200
    assert sets == 2 or (sets - 1) * size < 4 * cache


@given(st.integers(1, 1 << 36), st.integers(1, 200))
def test_a_replay_is_long_enough_and_every_set_is_used_as_often(size: int, sets: int) -> None:
    count = repetitions(size, sets)
    assert count % sets == 0
    assert count < 200 + sets
    assert count >= 200 or count * max(size / 4.8e6, 1.5) >= 2000


def test_bytes_are_those_counted_by_hand() -> None:
    elements = 8192 * 3072
    assert kernels.epilogue_backward(8192, 3072).bytes == kernels.epilogue_backward(8192, 3072, 0.1).bytes
    assert kernels.epilogue_backward(8192, 3072).bytes == 6 * elements
    assert kernels.epilogue_forward(8192, 3072, 0.1).bytes == 4 * elements
    assert kernels.dropout("bfloat16", 8192, 8192).bytes == 2 * 4 * 2**26
    assert kernels.dropout("float32", 8192, 8192).bytes == 2 * 8 * 2**26
    assert kernels.cross_entropy(8192, 50304).bytes == 4 * 8192 * 50304
    for dtype in ("float32", "bfloat16"):
        assert kernels.adamw_step("three", ((3,),), dtype).bytes == 3 * 28
    assert kernels.adamw_step("three", ((3,),), "bfloat16", 1.0).bytes == 3 * 30
    assert kernels.inference(2, 5, 3).bytes == 2 * (2 * 3 + 5 * 3 + 5 + 2 * 5)
    assert kernels.adamw_step("three", ((3,),), "float32", 1.0).bytes == 3 * 32


def test_models_have_as_many_parameters_as_they_say() -> None:
    sizes = {case.name: case.bytes for case in kernels.CASES if case.name.startswith("AdamW")}
    assert sizes == {
        "AdamW FP32, GPT-2 124M, 148 tensors": 28 * 124_439_808,
        "AdamW BF16 + FP32 master, clipped, GPT-2 124M, 148 tensors": 30 * 124_439_808,
        "AdamW FP32, 124 M parameters, one tensor": 28 * 124_439_808,
        "AdamW BF16 + FP32 master, clipped, 124 M parameters, one tensor": 30 * 124_439_808,
        "AdamW FP32, 12 k parameters, 6 tensors": 28 * 12_480,
    }


@pytest.mark.parametrize("name", SUITES)
def test_rows_have_names_of_their_own_that_are_those_of_the_kept_results(name: str) -> None:
    order = import_module(f"benchmarks.{name}").SUITE.order
    assert len(set(order)) == len(order)
    assert {*suite.kept_rows(report.RESULTS / f"{name}.json")} <= set(order)


def test_lists_of_numbers_take_one_line_of_a_file(tmp_path: Path) -> None:
    content = {"a": [1, 2.5, "three  [4]", None], "b": [{"c": [[1, 2], []]}], "d": []}
    report.write_json(tmp_path / "some.json", content)
    text = (tmp_path / "some.json").read_text()
    assert json.loads(text) == content
    assert '"a": [1, 2.5, "three  [4]", null],' in text
    assert "[1, 2]," in text


ROW = Row(
    "a case",
    {"lt": Timing(10.0, 0.5), "torch": Timing(15.0, 1.0)},
    "lt",
    bytes=36_000_000,
    copy_gb_s=4000.0,
    target=Target(0.85, {"torch": 1.5}),
    setting={"repetitions": 20},
)


def test_fractions_and_ratios() -> None:
    assert ROW.fraction_of_copy == pytest.approx(0.9)
    assert ROW.ratio == {"torch": 1.5}
    assert ROW.fraction_of_peak is None


def test_least_times() -> None:
    """36 MB at 4 TB/s, and 2 GFLOP at 500 TFLOP/s, of 10 µs."""
    both = replace(ROW, flops=2_000_000_000, peak_tflops=500.0)
    assert both.floors == pytest.approx({"copy": 9.0, "peak": 4.0})
    assert both.fraction_of_peak == pytest.approx(0.4)
    assert replace(both, copy_gb_s=None).floors == pytest.approx({"peak": 4.0})
    unmeasured = replace(both, timings={"torch": Timing(5.0, 0.0)})
    assert (unmeasured.fraction_of_copy, unmeasured.fraction_of_peak) == (None, None)
    elsewhere = replace(both, peak_tflops=None)
    assert (elsewhere.floors, elsewhere.fraction_of_peak) == (ROW.floors, None)
    json_row = both.as_json()
    assert (json_row["flops"], json_row["fraction_of_peak"]) == (2_000_000_000, 0.4)
    assert json_row["floors_us"] == {"copy": 9.0, "peak": 4.0}


@pytest.mark.parametrize(
    ("change", "met"),
    [
        ({}, True),
        ({"target": Target(0.91)}, False),
        ({"target": Target(0.85, {"torch": 1.51})}, False),
        ({"target": Target(ratio={"torch": 1.5})}, True),
        ({"target": Target()}, None),
        ({"copy_gb_s": None}, None),
        ({"timings": {"lt": Timing(1.0, 0.0)}}, None),
        ({"timings": {"torch": Timing(1.0, 0.0)}}, None),
        ({"timings": {}}, None),
    ],
)
def test_a_target_is_met_missed_or_not_measured(change: dict[str, Any], met: bool | None) -> None:
    assert replace(ROW, **change).met is met


def test_a_row_as_json() -> None:
    assert ROW.as_json() == {
        "case": "a case",
        "us": {"lt": 10.0, "torch": 15.0},
        "spread": {"lt": 0.5, "torch": 1.0},
        "repetitions": 20,
        "bytes": 36_000_000,
        "floors_us": {"copy": 9.0},
        "fraction_of_copy": 0.9,
        "ratio": {"torch": 1.5},
        "target": {"fraction_of_copy": 0.85, "ratio": {"torch": 1.5}},
        "met": True,
    }


def test_a_row_has_only_what_it_has() -> None:
    host = Row("host time", {"lt": Timing(7.123456, 0.0)}, "lt", left_out={"torch": "No module named 'torch'"})
    assert host.as_json() == {
        "case": "host time",
        "us": {"lt": 7.1235},
        "spread": {"lt": 0.0},
        "left_out": {"torch": "No module named 'torch'"},
    }


def test_a_result_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "machine", lambda: {"gpu": "a GPU"})
    monkeypatch.setenv("GIT_COMMIT", "abc")
    report.write(tmp_path / "new" / "suite.json", [ROW.as_json()], copy_gb_s=4000.0)
    written = json.loads((tmp_path / "new" / "suite.json").read_text())
    assert written == {"machine": {"gpu": "a GPU"}, "commit": "abc", "copy_gb_s": 4000.0, "rows": [ROW.as_json()]}


def test_the_commit_is_git_s_where_none_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    monkeypatch.chdir(tmp_path)
    assert report.commit() == "unknown"
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "inside").mkdir()
    assert re.fullmatch("[0-9a-f]{40}", report.commit())
    assert report.commit(tmp_path) == report.commit()
    assert report.commit(tmp_path / "inside") == "unknown"


@pytest.mark.parametrize("file", sorted(report.RESULTS.glob("*.json")), ids=lambda file: file.name)
def test_results_that_are_kept_have_the_common_form(file: Path) -> None:
    kept = json.loads(file.read_text())
    assert {"machine", "commit", "rows"} <= set(kept)
    assert {"gpu", "cublaslt", "cupy", "torch", "python"} <= set(kept["machine"])
    for row in kept["rows"]:
        assert set(row["us"]) == set(row["spread"])
        assert all(value > 0 for value in row["us"].values())


def printed(*rows: Row) -> str:
    console = Console(width=150)
    with console.capture() as capture:
        console.print(report.table(rows))
    return capture.get()


def test_a_table() -> None:
    lines = [line.split() for line in printed(ROW).splitlines()]
    assert lines[1][:8] == ["a", "case", "lt", "10.00", "0.50", "90.0", "%", "met:"]
    assert lines[2] == ["torch", "15.00", "1.00", "1.50"]
    assert lines[3] == ["(least", "by", "copy)", "9.00"]
    lines = [line.split() for line in printed(replace(ROW, flops=2_000_000_000, peak_tflops=500.0)).splitlines()]
    assert lines[1][5:9] == ["90.0", "%", "40.0", "%"]
    assert lines[4] == ["(least", "by", "peak)", "4.00"]


def test_a_table_says_what_was_missed_or_left_out() -> None:
    assert "MISSED: ≥ 95.0 % of copy" in printed(replace(ROW, target=Target(0.95)))
    left_out = replace(ROW, timings={"lt": ROW.timings["lt"]}, left_out={"torch": "ImportError: [no] module"})
    assert "not measured: ≥ 85.0 % of copy, torch ≥ 1.5×" in printed(left_out)
    assert "ImportError: [no] module" in printed(left_out)
    assert "left out" in printed(replace(ROW, timings={}, left_out={"lt": "GpuError: none"}))


def test_reading_the_cases_loads_no_gpu_library() -> None:
    modules = ", ".join(f"benchmarks.{name}" for name in (*SUITES, "compare", "readme", "priors"))
    code = f"import sys, {modules}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"cupy", "jax", "torch", "nvmath", "matplotlib"}.isdisjoint(done.stdout.split())


@pytest.mark.parametrize("name", SUITES)
def test_without_a_gpu_a_suite_says_so(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(suite, "has_gpu", lambda: False)
    with pytest.raises(SystemExit, match=f"the suite {name} needs an NVIDIA GPU"):
        main([name])


def test_options_are_those_of_a_suite_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert options_of(["layers", "steps", "--max-autotune", "--dtype", "bf16"]).dtype == "bf16"
    with pytest.raises(SystemExit):
        options_of(["host", "--soak", "9"])
    assert "--soak is an option of steps" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        options_of(["nothing-of-the-kind"])


def test_a_kernel_s_fraction_is_of_the_copy_of_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []

    def copies(stream: Any) -> Ceiling:
        measured.append(stream)
        return Ceiling("fast", 4000.0, {"fast": Timing(1.0, 0.0), "slow": Timing(2.0, 0.0)})

    monkeypatch.setattr(kernels, "measure_copies", copies)
    monkeypatch.setattr(timing, "cache_size", lambda: 50 << 20)
    monkeypatch.setattr(timing, "measure", lambda *_: Measured({"lt": Timing(1e3, 0.0)}, {"torch": "none"}))
    case = replace(kernels.CASES[0], builders=lambda sets: {})
    monkeypatch.setattr(kernels, "CASES", [case])
    jobs = kernels.SUITE.jobs(options_of(["kernels", "--rounds", "3"]))
    row, copy = jobs[case.name]("stream"), jobs[kernels.COPY]("stream")
    assert row.fraction_of_copy == pytest.approx(case.bytes / 1e6 / 4000)
    assert measured == ["stream"], "once in a run"
    assert kernels.SUITE.facts([row.as_json(), copy.as_json()]) == {"copy_gb_s": 4000.0, "copy": "fast"}


def test_torch_compile_takes_part_only_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[set[str]] = []

    def measure(builders: dict[str, Any], *_: Any) -> Measured:
        given.append({*builders})
        return Measured({"lt": Timing(1.0, 0.0)}, {})

    monkeypatch.setattr(timing, "cache_size", lambda: 50 << 20)
    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(kernels, "measure_copies", lambda _: Ceiling("fast", 4000.0, {}))
    case = replace(kernels.CASES[0], builders=lambda sets: dict.fromkeys(("lt", "torch", "torch_compile"), print))
    monkeypatch.setattr(kernels, "CASES", [case])
    for options in ((), ("--torch-compile",), ("--torch-compile", "--ours")):
        jobs = kernels.SUITE.jobs(options_of(["kernels", "--rounds", "3", *options]))
        jobs[case.name](None)
    assert given == [{"lt", "torch"}, {"lt", "torch", "torch_compile"}, {"lt"}]


class Graph:
    """Stands in for a CUDA graph."""

    def __init__(self) -> None:
        self.launches = 0

    def upload(self, stream: Any) -> None: ...

    def launch(self, stream: Any) -> None:
        self.launches += 1


class Stream(contextlib.nullcontext[None]):
    """Stands in for a CuPy stream that can be captured."""

    ptr = 7

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.is_capturing = Graph(), False

    def begin_capture(self) -> None:
        self.is_capturing = True

    def end_capture(self) -> Graph:
        self.is_capturing = False
        return self.graph

    def synchronize(self) -> None: ...


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    monkeypatch.setattr(timing, "synchronize", lambda: None)
    return Stream()


def test_a_capture_goes_round_the_buffer_sets_and_keeps_the_last_results(stream: Stream) -> None:
    calls: list[tuple[int, int, bool]] = []
    results: list[weakref.ref[Any]] = []

    class Result: ...

    def run(number: int, handle: int) -> object:
        calls.append((number, handle, stream.is_capturing))
        result = Result()
        results.append(weakref.ref(result))
        return result

    replay = timing.capture(run, 4, 2, stream)
    assert [number for number, _, is_captured in calls if not is_captured] == [0, 1], "to warm up"
    assert [number for number, _, is_captured in calls if is_captured] == [0, 1, 0, 1]
    assert {handle for _, handle, _ in calls} == {7}
    gc.collect()
    assert [each() is not None for each in results] == [False] * 4 + [True] * 2
    replay()
    assert stream.graph.launches == 1


def test_a_capture_that_fails_is_ended(stream: Stream) -> None:
    def run(number: int, _: int) -> None:
        if stream.is_capturing:
            raise ValueError(number)

    with pytest.raises(ValueError, match="0"):
        timing.capture(run, 1, 1, stream)
    assert not stream.is_capturing


def test_every_copy_compiles() -> None:
    from benchmarks.copies import NAMES, SOURCE

    instances = [f"template __global__ void {name}(const uint4*, uint4*, long long);" for name in NAMES.values()]
    cubin = compile_cubin("copy", "\n".join([SOURCE, *instances]).encode(), COMPILED)
    assert all(b"_Z4copyILi%dELb%dEE" % name in cubin for name in NAMES)


def test_the_random_numbers_compile() -> None:
    from benchmarks.buffers import DRAW

    code = f'extern "C" __global__ void draw(unsigned long long seed, long long i, float* out) {{{DRAW} *out = value;}}'
    assert compile_cubin("draw", code.encode(), COMPILED)
