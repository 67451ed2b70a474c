"""`lt.tune`, `lt.explain` and `lt_runtime warmup` with a fake tuner, which records its arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.cli import main
from lt_runtime.errors import ArgumentError, DeviceError, DTypeError, PlanError
from lt_runtime.gpu import devices
from lt_runtime.ops import tuning as requests
from lt_runtime.problem import Activation, BackwardProblem, Compute, DType, ForwardProblem, MatmulProblem
from lt_runtime.store.keys import Problem, parse_key, problem_key
from lt_runtime.tuner import search
from lt_runtime.tuner.chain import LayerChain
from lt_runtime.tuner.report import Progress, Tuned, TuningReport, describe
from tests.support.plan_entries import layer_key, product_key

NONE, RELU, GELU = Activation(), Activation("relu"), Activation("gelu")
BF16, FP16, FP32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32


class Tuner:
    """A fake tuner that reports at once, for every problem, that the time falls from 100 µs to 80 µs.

    Attributes:
        given: for each group of problems that is tuned together, its problems, in the order of the calls.
        stops_at: index of the group at which tuning raises `stops_with`, by default as if the user pressed Ctrl-C.
    """

    def __init__(self) -> None:
        self.given: list[list[Problem]] = []
        self.devices: set[int] = set()
        self.stops_at: int | None = None
        self.stops_with: BaseException = KeyboardInterrupt()

    @property
    def problems(self) -> list[Problem]:
        return [problem for part in self.given for problem in part]

    def tune(
        self, chains: Iterable[LayerChain | MatmulProblem], device: int, *, progress: Progress | None = None
    ) -> Iterator[Tuned]:
        parts = [part for each in chains for part in self._parts(each)]
        self.devices.add(device)
        for number, part in enumerate(parts):
            if len(self.given) == self.stops_at:
                raise self.stops_with
            self.given.append(part)
            if progress is not None:
                progress(number + 1, len(parts), describe(part[0]))
            yield Tuned(tuple(part), 100.0, 80.0, "bias, keeps output", 12, ("wrong: 3 instead of 4",), 0.5)

    def _parts(self, given: LayerChain | MatmulProblem) -> list[list[Problem]]:
        if isinstance(given, MatmulProblem):
            return [[given]]
        return [[*given.cut(part).problems] for part in given.parts]


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Tuner:
    """Replaces the tuner by a fake one on a fake machine with two GPUs, the second of which is current."""
    made = Tuner()
    monkeypatch.setattr(search, "tune_chains", made.tune)
    for module in (requests, devices):
        monkeypatch.setattr(module, "device_count", lambda: 2)
    monkeypatch.setattr(requests, "current_device", lambda: 1)
    monkeypatch.setenv("COLUMNS", "200")
    return made


def warmup(*arguments: str) -> int:
    return main(["warmup", *arguments])


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    capsys.readouterr()
    assert warmup(*arguments, "--json") == status
    return json.loads(capsys.readouterr().out)


def same(found: Iterable[Problem], expected: Iterable[Problem]) -> bool:
    """Whether both lists hold the same problems, each once, in any order."""
    keys = [problem_key(problem) for problem in found]
    return len(keys) == len(set(keys)) and set(keys) == {problem_key(problem) for problem in expected}


def test_tune_takes_the_layers_of_an_mlp(tuner: Tuner) -> None:
    report = lt.tune([32, 48, 24, 10], 64, activation="gelu", dtype="bfloat16", dropout=0.1)
    expected = LayerChain.of_mlp(64, (32, 48, 24, 10), GELU, BF16, Compute.FLOAT32, dropout=True)
    assert same(tuner.problems, expected.problems)
    assert tuner.devices == {1}
    assert len(report) == len(tuner.given)
    assert [problem for each in report for problem in each.problems] == tuner.problems


def test_tune_takes_a_single_layer_with_all_its_gradients(tuner: Tuner) -> None:
    lt.tune(np.array([32, 48]), np.int64(64), output_activation="gelu", compute="tf32", device=0)  # type: ignore[arg-type]
    expected = LayerChain.of_mlp(64, (32, 48), NONE, FP32, Compute.TF32, output_activation=GELU, input_gradient=True)
    assert same(tuner.problems, expected.problems)
    assert tuner.devices == {0}
    tuner.given.clear()
    lt.tune([32, 48], 64, activation="gelu", compute="tf32", device=0)
    assert same(tuner.problems, expected.problems)
    tuner.given.clear()
    lt.tune([32, 48], 64, bias=False, input_gradient=False)
    assert same(tuner.problems, LayerChain.of_mlp(64, (32, 48), NONE, FP32, Compute.FLOAT32, bias=False).problems)


def test_tune_takes_options_by_layer(tuner: Tuner) -> None:
    options = {"activation": ["relu", "gelu", "tanh"], "dropout": (0.0, 0.5, 0.25), "bias": [True, False, True]}
    lt.tune([32, 48, 24, 10], 64, **options)  # type: ignore[arg-type]
    by_inputs = {(type(p), p.x.layout.cols): p for p in tuner.problems if not isinstance(p, MatmulProblem)}
    forwards = [by_inputs[ForwardProblem, k] for k in (32, 48, 24)]
    assert [each.activation.name for each in forwards] == ["relu", "gelu", "tanh"]
    assert [each.dropout for each in forwards] == [False, True, True]
    assert [each.bias for each in forwards] == [256, None, 256]
    first, middle, last = (by_inputs[BackwardProblem, k] for k in (32, 48, 24))
    assert (first.input_derivative, first.output_derivative.db) == (None, None)
    for backward, name, db, dropout in ((middle, "relu", 256, False), (last, "gelu", None, True)):
        below = backward.input_derivative
        assert (below.activation.name, below.db, below.dropout) == (name, db, dropout)
    assert (last.output_derivative.activation.name, last.output_derivative.db) == ("tanh", 256)
    lt.tune([32, 48], 64, activation=["gelu"], dropout=[0.5])
    (only,) = [each for each in tuner.problems if isinstance(each, ForwardProblem) and each.w.layout.rows == 48][1:]
    assert (only.activation.name, only.dropout) == ("gelu", True)


def test_tune_takes_problems(tuner: Tuner) -> None:
    problems = [parse_key(layer_key(64)), parse_key(product_key(64))]
    lt.tune(problems)
    lt.tune(problems[1])
    assert tuner.problems == [*problems, problems[1]]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([32],), {"rows": 8}, r"dims is \[32\]; accepted are two or more"),
        (([],), {"rows": 8}, r"dims is \[\]; accepted are two or more"),
        (([32, 0],), {"rows": 8}, "dims has 0"),
        (([32, 48],), {}, r"rows is missing \(None\): how many rows do the layers of dims \[32, 48\] work on"),
        (([32, 48], 0), {}, "rows has 0"),
        (([32, 48], 8), {"activation": "gelu", "output_activation": "relu"}, "'gelu' and output_activation 'relu'"),
        (([32, 48], 8), {"dropout": 0.1}, r"dropout is 0\.1, but of dims"),
        (([32, 48, 10], 8), {"dropout": 1.0}, r"dropout is 1\.0; it must be in"),
        (([32, 48, 10], 8), {"activation": "glu"}, "activation is 'glu'"),
        (([32, 48, 10], 8), {"output_activation": "glu"}, "output_activation is 'glu'"),
        (([32, 48, 10], 8), {"activation": ["gelu"]}, r"is \['gelu'\], of length 1; .* each of the 2 layers"),
        (([32, 48, 10], 8), {"dropout": [0.1, 2.0]}, r"dropout\[1\] is 2\.0"),
        (
            ([32, 48, 10], 8),
            {"activation": ["gelu", "none"], "output_activation": "relu"},
            "output_activation 'relu', but a sequence has the last layer's too",
        ),
        (([32, 48, 10], 8), {"compute": "fp16"}, "compute is 'fp16'"),
        ((parse_key(layer_key(64)), 8), {}, "rows is 8, but a problem says itself how many it has"),
        ((parse_key(layer_key(64)),), {"activation": "gelu"}, "activation is 'gelu', but a problem has its own"),
        ((lt.MLP([32, 48], device="cpu"), 8), {"dropout": 0.5}, r"dropout is 0\.5, but a model has its own"),
    ],
)
def test_what_tune_refuses(tuner: Tuner, arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        lt.tune(*arguments, **options)
    assert tuner.given == []


def test_types_and_devices_that_tune_refuses(tuner: Tuner) -> None:
    with pytest.raises(DTypeError, match="has type float64"):
        lt.tune([32, 48], 8, dtype="float64")
    for device in (2, -1, "cuda:2"):
        with pytest.raises(ArgumentError, match=f"device is {device!r}, but this machine has 2 usable GPUs"):
            lt.tune([32, 48], 8, device=device)
    with pytest.raises(DeviceError, match="device is 'cpu'; accepted are GPUs"):
        lt.tune([32, 48], 8, device="cpu")
    assert tuner.given == []


@pytest.mark.parametrize("request_something", [lt.tune, lt.explain])
def test_without_a_gpu_it_says_so(request_something: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match="there is no usable GPU here: see `python -m lt_runtime doctor`"):
        request_something([32, 48], 8)


def test_the_report(tuner: Tuner) -> None:
    report = lt.tune([32, 48, 10], 64, activation="gelu")
    text = str(report)
    for word in ("forward 64x48x32 float32 gelu", "100.00", "80.00", "1.25×", "12", "bias, keeps output"):
        assert word in text
    assert f"{len(report)} groups of problems decided" in text
    assert f"1.25× in the geometric mean; {len(report)} candidates rejected" in text
    assert report.gain == pytest.approx(1.25)
    assert repr(report).startswith("<TuningReport: ")


def test_reports_of_nothing_and_of_nothing_measured() -> None:
    assert TuningReport([]).gain == 1.0
    assert "0 groups" in str(TuningReport([]))
    refused = Tuned((parse_key(layer_key(64)),), 0.0, 0.0, "none", 0, ("refused",), 0.0)
    known = Tuned(refused.problems, 7.0, 7.0, "bias", 0, (), 0.0)
    halved = Tuned(refused.problems, 10.0, 5.0, "bias", 2, (), 0.0)
    fourfold = Tuned(refused.problems, 5.0, 20.0, "bias", 2, (), 0.0)
    assert TuningReport([halved, fourfold, refused, known]).gain == pytest.approx(0.5**0.5)
    assert "known" in str(TuningReport([known]))
    assert "×" not in str(TuningReport([refused, known])).partition("groups")[0]
    assert [each["gain"] for each in TuningReport([halved, known]).to_json()] == [2.0, None]


def test_warmup_of_layers_takes_each_alone(tuner: Tuner, tmp_path: Path) -> None:
    file = tmp_path / "shapes"
    file.write_text("64 48 32\n64 10 48\n")
    arguments = ("--shapes", str(file), "--dtype", "bfloat16,float32", "--activation", "gelu", "--activation", "relu")
    assert warmup(*arguments, "--compute", "tf32", "--device", "0") == 0
    expected = [
        problem
        for dtype, compute in ((BF16, Compute.FLOAT32), (FP32, Compute.TF32))
        for activation in (GELU, RELU)
        for dims in ((32, 48), (48, 10))
        for problem in LayerChain.of_mlp(
            64, dims, NONE, dtype, compute, output_activation=activation, input_gradient=True
        ).problems
    ]
    assert same(tuner.problems, expected)
    assert len(expected) == 2 * 2 * 2 * 2
    assert tuner.devices == {0}


def test_warmup_of_mlps_takes_them_as_a_training_step_does(tuner: Tuner, tmp_path: Path) -> None:
    file = tmp_path / "shapes.json"
    file.write_text('{"mlps": {"a": {"rows": 8, "dims": [3, 4, 5], "activation": "silu"}}}')
    assert warmup("--shapes", str(file), "--mlp", "768,3072,768", "--mlp", "6,7", "--rows", "16") == 0
    expected = [
        *LayerChain.of_mlp(8, (3, 4, 5), Activation("silu"), FP32, Compute.FLOAT32).problems,
        *LayerChain.of_mlp(16, (768, 3072, 768), RELU, FP32, Compute.FLOAT32).problems,
        *LayerChain.of_mlp(16, (6, 7), NONE, FP32, Compute.FLOAT32, input_gradient=True).problems,
    ]
    assert same(tuner.problems, expected)
    tuner.given.clear()
    assert warmup("--shapes", str(file), "--activation", "gelu,tanh") == 0
    forward = [each for each in tuner.problems if isinstance(each, ForwardProblem)]
    assert {each.activation.name for each in forward} == {"gelu", "tanh", "none"}


def test_warmup_and_tune_take_a_lone_layer_by_the_same_rule(tuner: Tuner, tmp_path: Path) -> None:
    file = tmp_path / "shapes"
    file.write_text("64 48 32\n")
    lt.tune([32, 48], 64)
    lt.tune([32, 48], 64, activation="gelu")
    expected = list(tuner.problems)
    for arguments in (("--shapes", str(file)), ("--mlp", "32,48", "--rows", "64")):
        tuner.given.clear()
        assert warmup(*arguments) == 0
        assert warmup(*arguments, "--activation", "gelu") == 0
        assert tuner.problems == expected


@pytest.mark.parametrize("dtype", ["float16", np.float16, np.dtype("float16"), DType.FLOAT16])
@pytest.mark.parametrize("device", [0, "cuda", "cuda:0", SimpleNamespace(type="cuda", index=0)])
def test_types_and_devices_have_many_spellings(tuner: Tuner, dtype: Any, device: Any) -> None:
    lt.tune([32, 48], 64, dtype=dtype, device=device)
    assert tuner.devices == {0}
    assert {each.dtype for each in tuner.problems} == {DType.FLOAT16}


def test_warmup_of_presets_and_recorded_problems(tuner: Tuner, tmp_path: Path) -> None:
    file = tmp_path / "met.jsonl"
    met = [parse_key(layer_key(64)), parse_key(product_key(64))]
    file.write_text("".join(json.dumps({"problem": problem_key(each)}) + "\n" for each in met))
    assert warmup("--preset", "mnist", "--preset", "tiny", "--recorded", str(file), "--dtype", "float16") == 0
    expected = [
        *LayerChain.of_mlp(256, (784, 512, 512, 10), RELU, DType.FLOAT16, Compute.FLOAT32).problems,
        *(
            problem
            for m, n, k in ((32, 16, 64), (64, 64, 64), (256, 256, 256))
            for problem in LayerChain.of_mlp(m, (k, n), NONE, FP16, Compute.FLOAT32, input_gradient=True).problems
        ),
        *met,
    ]
    assert same(tuner.problems, expected)


def test_warmup_ends_with_a_table(tuner: Tuner, capsys: pytest.CaptureFixture[str]) -> None:
    assert warmup("--mlp", "32,48", "--rows", "64") == 0
    captured = capsys.readouterr()
    for word in ("Before µs", "After µs", "Gain", "Strategy", "forward 64x48x32 float32 none", "1.25×"):
        assert word in captured.out
    assert captured.err == ""  # a progress bar is shown on terminals only
    found = as_json(capsys, "--mlp", "32,48", "--rows", "64")
    assert found["ok"] is True
    assert found["gain"] == pytest.approx(1.25)
    keys = [key for each in found["tuned"] for key in each["keys"]]
    assert same(
        map(parse_key, keys), LayerChain.of_mlp(64, (32, 48), NONE, FP32, Compute.FLOAT32, input_gradient=True).problems
    )
    assert {each["rejected"][0] for each in found["tuned"]} == {"wrong: 3 instead of 4"}


def test_interrupted_it_keeps_and_shows_what_is_decided(tuner: Tuner, capsys: pytest.CaptureFixture[str]) -> None:
    tuner.stops_at = 1
    assert warmup("--mlp", "32,48,24,10", "--rows", "64") == 130
    text = capsys.readouterr().out
    assert "1 group of problems decided" in text
    assert "Stopped: what is in the table is kept." in text
    assert describe(tuner.given[0][0]) in text
    tuner.given.clear()
    found = as_json(capsys, "--mlp", "32,48,24,10", "--rows", "64", status=130)
    assert (found["ok"], len(found["tuned"])) == (False, 1)


def test_a_failure_shows_what_was_decided_before(tuner: Tuner, capsys: pytest.CaptureFixture[str]) -> None:
    tuner.stops_with = PlanError("no algorithm")
    for stops_at, shown in ((0, ""), (1, "1 group of problems decided")):
        tuner.given.clear()
        tuner.stops_at = stops_at
        assert warmup("--mlp", "32,48,24,10", "--rows", "64") == 1
        captured = capsys.readouterr()
        assert captured.err == "lt_runtime warmup: no algorithm\n"
        assert shown in captured.out
        assert bool(captured.out) == bool(shown)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is nothing to tune: give --shapes, --mlp with --rows, --preset or --recorded"),
        (("--mlp", "32,48"), "--mlp needs --rows"),
        (("--preset", "tiny", "--rows", "8"), "--rows needs --mlp"),
        (("--preset", "gpt-5"), "--preset is 'gpt-5'; accepted are bert-large, "),
        (("--preset", "tiny", "--compute", "tf32", "--dtype", "bfloat16"), "--compute is tf32, which needs --dtype"),
        (("--shapes", "/missing"), "/missing cannot be read (No such file or directory)"),
        (("--recorded", "/missing"), "--recorded is /missing, which does not exist"),
        (("--preset", "tiny", "--device", "cpu"), "device is 'cpu'; accepted are GPUs"),
        (("--preset", "tiny", "--device", "tpu"), "device is 'tpu'; accepted are 'auto', 'cpu', 'cuda' and 'cuda:N'"),
        (("--preset", "tiny", "--device", "2"), "device is '2', but this machine has 2 usable GPUs"),
    ],
)
def test_what_warmup_refuses(
    tuner: Tuner, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert warmup(*arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"lt_runtime warmup: {message}")
    assert error.count("\n") == 1
    assert tuner.given == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mlp", "32"), "--mlp: 32 is one size; accepted are two or more"),
        (("--mlp", "32,x"), "--mlp: 'x' is no integer"),
        (("--mlp", "32,0"), "--mlp: 0 is not positive"),
        (("--rows", "0"), "--rows: 0 is not positive"),
        (("--dtype", "float64"), "--dtype: 'float64' is unknown; accepted are float32, float16, bfloat16"),
        (("--dtype", "float32,"), "--dtype: '' is unknown"),
        (("--activation", "gelu,glu"), "--activation: 'glu' is unknown; accepted are none, relu"),
    ],
)
def test_what_the_parser_refuses(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        warmup(*arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_bar_on_a_terminal(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # makes the package rich treat its output as a terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    lt.tune([32, 48, 10], 64)
    count = len(tuner.given)
    assert f"{count}/{count}" in capsys.readouterr().err
    lt.tune([32, 48, 10], 64, progress=False)
    assert capsys.readouterr().err == ""


def test_backward_problems_are_told_apart_by_name(tuner: Tuner) -> None:
    lt.tune([32, 48, 10], 64)
    names = {describe(each) for each in tuner.problems if isinstance(each, BackwardProblem)}
    assert names == {"backward 64x10x48 float32 none through relu", "backward 64x48x32 float32 none"}
