"""Training steps that measure the unmeasured problems of their layers, on the pretended GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.host_kernels.harness import HostKernels
from tests.support.fake_gpu import FakeGpu
from tests.support.fp8_layers import BF16
from tests.support.hurry import hurry
from tests.support.over_fake_gpu import call, own
from tests.support.placed import host_of

DIMS = (8, 16, 3)
ROWS = 8
VARIABLE = "LT_RUNTIME_TUNE"
TUNER = "lt_runtime.tuner.search"

Process = Callable[..., contextlib.AbstractContextManager[FakeGpu]]


@pytest.fixture
def process(host: HostKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    """Simulates a new process, with an empty or another plan cache, and without environment variables of the
    package.
    """
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("LT_RUNTIME_RECORD", str(tmp_path / "met.jsonl"))

    @contextlib.contextmanager
    def started(cache: str = "cache") -> Iterator[FakeGpu]:
        gpu = FakeGpu(host, tmp_path / cache)
        with gpu.active(), pytest.MonkeyPatch.context() as patch:
            hurry(gpu, patch)
            try:
                yield gpu
            finally:
                _end_steps()
            gpu.settle()

    return started


def _end_steps() -> None:
    """Frees the graphs of steps, which a test's variables would keep until there is no GPU."""
    for each in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        waiting = each.peek()
        if waiting is not None and str(waiting[1].__module__).endswith("training.captured"):
            each()


class Run:
    """A model that is trained from the same values on the same batches each time."""

    def __init__(
        self,
        gpu: FakeGpu,
        dims: Any = DIMS,
        dtype: str = "float32",
        activation: str = "gelu",
        precision: Any = None,
        **options: Any,
    ) -> None:
        self.gpu, lt = gpu, gpu.lt
        self.model = lt.MLP(dims, activation, dtype=dtype, seed=3, device="cuda", precision=precision)
        self.optimizer = lt.AdamW(self.model.parameters(), lr=1e-2)
        self.step = lt.TrainStep(self.model, self.optimizer, loss="mse", **options)
        gpu.streams.synchronize_all()

    def train(self, rows: int = ROWS, steps: int = 3) -> list[bytes]:
        """Trains for some steps; returns the bytes of the losses, and of the parameters at the end."""
        losses = []
        for i in range(steps):
            generator = np.random.default_rng(i)
            inputs, outputs = self.model.dims[0], self.model.dims[-1]
            batch = [generator.standard_normal((rows, n)).astype(self.model.dtype.numpy) for n in (inputs, outputs)]
            loss = self.step(*map(self.gpu.cp.asarray, batch), stream=self.gpu.stream)
            self.gpu.synchronize(self.gpu.stream.ptr)
            losses.append(host_of(self.gpu, loss).tobytes())
        return [*losses, *(host_of(self.gpu, each.data).tobytes() for each in self.model.parameters())]


def test_the_steps_stream_is_waited_for_before_a_measurement(process: Process) -> None:
    with process() as gpu, pytest.MonkeyPatch.context() as patch:
        run, waiting, array = Run(gpu), [], gpu.cp.zeros(8, np.uint8)

        def tune_chains(chains: Any, *_: Any, **__: Any) -> tuple[()]:
            added = [layer.backward.accumulate for chain in chains for layer in chain.layers]
            waiting.append((gpu.streams.left_undone(), any(added)))
            return ()

        patch.setattr(own("tuner.search"), "tune_chains", tune_chains)
        call("cuMemsetD8Async", array.data.ptr, 1, 8, gpu.stream.ptr)
        run.train(steps=1)
        assert waiting == [({}, False)]  # a batch of one micro-batch needs no step that adds to gradients


def measured(gpu: FakeGpu) -> int:
    """Counts the entries in the plan cache's files."""
    return len(entries(gpu))


def entries(gpu: FakeGpu) -> dict[str, Any]:
    """Reads the entries in all files of the plan cache."""
    found: dict[str, Any] = {}
    for file in (gpu.directory / "plans").glob("*.json"):
        found |= own("store.document").Document.read(file).raw
    return found


def choices(gpu: FakeGpu) -> dict[str, Any]:
    """Returns strategies and configurations of algorithms in the plan cache, by key."""
    return {key: {name: raw.get(name) for name in ("strategy", "config")} for key, raw in entries(gpu).items()}


def unmeasured(tmp_path: Path) -> list[Any]:
    """Lists the problems that have run and are not measured."""
    problems = own("store.recording").read_recorded(tmp_path / "met.jsonl")
    assert problems
    return [each for each in problems if not own("ops.first_use").is_measured(each, 0)]


@pytest.mark.parametrize(
    ("options", "rows"),
    [({"graph": False, "dims": (8, 3)}, ROWS), ({"accumulate": 2}, 2 * ROWS)],
    ids=str,
)
def test_a_step_measures_all_that_it_meets_and_later_ones_find_it(
    process: Process, tmp_path: Path, options: dict[str, Any], rows: int
) -> None:
    with process() as gpu:
        first = Run(gpu, **options).train(rows)
        assert unmeasured(tmp_path) == []
        gc.collect()  # garbage of a measurement would otherwise be freed at an arbitrary time
        count, memory = measured(gpu), gpu.memory_used()
        sys.modules[TUNER].tune_chains = None  # type: ignore[attr-defined]
        assert Run(gpu, **options).train(rows) == first
    for tune in (None, False):
        with process() as gpu:
            # Measuring at a first step changes no parameter or moment, and leaves no memory behind.
            assert Run(gpu, **options, tune=tune).train(rows) == first
            gc.collect()
            assert gpu.memory_used() == memory
            assert TUNER not in sys.modules
            assert measured(gpu) == count


@pytest.mark.parametrize(("activation", "dropout"), [("relu", 0.2), ("gelu", 0.0), ("tanh", 0.0), ("none", 0.2)])
def test_a_model_meets_its_chain_s_problems(process: Process, tmp_path: Path, activation: str, dropout: float) -> None:
    """`lt.tune` measures, for the sizes of an MLP, exactly the problems that the MLP runs."""
    dims = (24, 20, 16, 5)
    with process() as gpu:
        model = gpu.lt.MLP(dims, activation, dtype="float32", dropout=dropout, device="cuda")
        y, contexts = model.forward(gpu.cp.ones((ROWS, dims[0]), "float32"), 1)
        model.backward(gpu.cp.ones(y.shape, "float32"), contexts)
        gpu.synchronize_all()
        kinds, key, chains = own("problem"), own("store.keys").problem_key, own("tuner.chain")
        options = kinds.Activation(activation), kinds.DType.FLOAT32, kinds.Compute.FLOAT32
        chain = chains.LayerChain.of_mlp(ROWS, dims, *options, dropout=dropout > 0)
        expected = chain.keeping({index: ctx.layer.saved_as for index, ctx in enumerate(contexts)})
        met = own("store.recording").read_recorded(tmp_path / "met.jsonl")
        assert {*map(key, met)} == {*map(key, expected.problems)}


def test_a_graph_follows_the_plans_of_single_launches(process: Process) -> None:
    with process() as gpu:
        single = Run(gpu, graph=False).train()
        assert measured(gpu)
        assert Run(gpu).train() == single


def test_a_narrow_mlp_is_measured_as_a_whole_once_its_layers_are_known(process: Process) -> None:
    dims = (16, 16, 16)
    with process() as gpu:
        model = gpu.lt.MLP(dims, "gelu", dtype="bfloat16", device="cuda")
        (chain,) = model.rehearse(ROWS)
        is_measured = own("ops.first_use").is_measured
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(own("tuner.chain"), "supports", lambda *_: False)
            [*own("tuner.search").tune_chains([chain], 0)]
        assert is_measured(chain.forwards[0], 0)
        with_loss, without = chain.narrow(0)
        assert not is_measured(with_loss, 0)
        Run(gpu, dims, "bfloat16").train()
        assert is_measured(with_loss, 0)
        assert is_measured(without, 0)


def test_the_argument_decides_before_the_environment(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (
        (None, None, True, True),
        ("", None, False, True),
        ("off", None, True, False),
        ("off", None, False, False),
        ("first-use", None, False, True),
        (None, True, True, True),
        ("off", True, False, True),
        (None, False, True, False),
        ("first-use", False, False, False),
    )
    with process() as gpu:
        # Each case has its own number of rows, and so problems that are not measured yet.
        for rows, (variable, tune, graph, expected) in enumerate(cases, ROWS):
            with monkeypatch.context() as patch:
                if variable is not None:
                    patch.setenv(VARIABLE, variable)
                before = measured(gpu)
                Run(gpu, (8, 3), tune=tune, graph=graph).train(rows, steps=1)
                assert (measured(gpu) > before) is expected, (variable, tune, graph)


def test_a_block_decides_before_the_environment(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    with process() as gpu:
        with gpu.lt.tuning():
            Run(gpu, (8, 3), tune=False).train(steps=1)
            assert not measured(gpu)
            Run(gpu, (8, 3)).train(steps=1)
        assert measured(gpu)


def test_an_unknown_wish_is_refused(process: Process) -> None:
    with process() as gpu, pytest.raises(gpu.lt.errors.ArgumentError, match="tune"):
        Run(gpu, tune="yes")


def test_each_size_of_batch_is_measured(process: Process) -> None:
    with process() as gpu:
        run = Run(gpu, (8, 3))
        run.train(steps=2)
        before = measured(gpu)
        run.train(rows=5, steps=1)
        assert measured(gpu) == 2 * before


@pytest.mark.parametrize("failure", ["PlanError", "MemoryError"])
def test_what_cannot_be_measured_costs_a_warning(
    process: Process, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    with process() as gpu:
        untuned = Run(gpu, tune=False).train()
        kind = MemoryError if failure == "MemoryError" else own("errors").PlanError

        def tune_chains(*_: Any, **__: Any) -> Any:
            raise kind("no luck")

        monkeypatch.setattr(own("tuner.search"), "tune_chains", tune_chains)
        told = r"a training step on 8 rows could not be tuned and runs untuned \(no luck\)"
        with pytest.warns(UserWarning, match=told):
            assert Run(gpu).train() == untuned
        assert Run(gpu).train() == untuned  # the second run must cause no further warning
        assert not measured(gpu)


def test_a_measurement_that_is_interrupted_goes_on_at_the_next_step(
    process: Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with process() as gpu:
        run, search = Run(gpu), own("tuner.search")
        with monkeypatch.context() as patch:
            decide, calls = search.decide_part, list[None]()

            def interrupted(*arguments: Any) -> Any:
                calls.append(None)
                if len(calls) > 1:
                    raise KeyboardInterrupt
                return decide(*arguments)

            patch.setattr(search, "decide_part", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run.train()
        assert measured(gpu)
        before = [host_of(gpu, each.data).tobytes() for each in run.model.parameters()]
        assert before == [host_of(gpu, each.data).tobytes() for each in Run(gpu).model.parameters()]
        run.train()
        assert unmeasured(tmp_path) == []


def test_nothing_is_measured_while_the_stream_is_being_captured(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    with process() as gpu:
        run = Run(gpu, (8, 3), graph=False)
        batch = [gpu.cp.asarray(np.zeros((ROWS, n), np.float32)) for n in (8, 3)]
        Run(gpu, (8, 3), graph=False, tune=False).train(steps=2)
        stream = gpu.stream.ptr
        call(
            "cuStreamBeginCapture", stream, own("gpu.graphs").driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        )
        run.step(*batch, stream=stream)
        call("cuGraphDestroy", call("cuStreamEndCapture", stream))
        assert not measured(gpu)


def test_a_line_says_what_the_step_waits_for(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lt_runtime")
    with process() as gpu:
        for _ in range(2):
            Run(gpu).train(steps=2)
    (record,) = caplog.records
    assert record.getMessage() == (
        "measuring what is fastest for a training step on 8 rows; tune=False or LT_RUNTIME_TUNE=off leaves that out"
    )


def test_on_a_terminal_a_bar_says_so_within_that_of_the_caller(
    process: Process,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "lt_runtime")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    with process() as gpu:
        with own("tuner.report").progress_bar() as progress:
            progress(0, 2, "training")
            Run(gpu, (8, 3)).train(steps=1)
        shown = capsys.readouterr().err
    assert "forward 8x3x8" in shown
    assert "left:" not in shown[shown.rindex("training") :]  # at the end the tuner's progress line has disappeared
    assert caplog.records == []


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"accumulate": 2}, 2 * ROWS),
        ({"dims": (16, 16, 16), "dtype": "bfloat16"}, ROWS),
        ({"dims": (40, 32, 24), "activation": "relu"}, 16),
    ],
    ids=str,
)
def test_a_checkpoint_takes_the_plan_choices_to_an_empty_cache(
    process: Process, tmp_path: Path, options: dict[str, Any], rows: int
) -> None:
    path = tmp_path / "run"
    with process() as gpu:
        run = Run(gpu, **options)
        run.train(rows)
        gpu.lt.save_checkpoint(path, run.model, run.optimizer)
        expected, chosen = run.train(rows), choices(gpu)
    with process("elsewhere") as gpu:
        run = Run(gpu, **options)
        gpu.lt.load_checkpoint(path, run.model, run.optimizer)
        brought = entries(gpu)
        assert brought.keys() <= chosen.keys()
        # No plan of another machine is used before it is verified.
        assert {raw.get("algorithm") for raw in brought.values()} == {None, ""}
        assert run.train(rows) == expected
        assert TUNER not in sys.modules
        assert choices(gpu) == {key: chosen[key] for key in brought}
        again = tmp_path / "again"
        gpu.lt.save_checkpoint(again, run.model, run.optimizer)
    with process("a third") as gpu:
        run = Run(gpu, **options)
        gpu.lt.load_checkpoint(again, run.model, run.optimizer)
        assert entries(gpu).keys() == brought.keys()


def content(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a checkpoint's description and arrays."""
    with own("saving.checkpoint_file").reading(path) as file:
        return json.loads(file.text), file.load(file.kinds)


def test_what_is_measured_here_is_not_taken_from_a_checkpoint(process: Process, tmp_path: Path) -> None:
    with process() as gpu:
        run = Run(gpu, (8, 3))
        run.train()
        gpu.lt.save_checkpoint(tmp_path / "run", run.model, run.optimizer)
        described, values = content(tmp_path / "run")
        theirs = own("store.document").Document.parse(described["plans"].encode())
        for key in [*theirs.raw]:
            theirs.add(
                key, dataclasses.replace(theirs.get(key), when="2099-01-01T00:00:00Z")
            )  # an entry of the other cache that claims a better time than this cache's
        described["plans"] = theirs.render().decode()
        own("saving.checkpoint_file").write(tmp_path / "run", values, json.dumps(described))
    with process("elsewhere") as gpu:
        run = Run(gpu, (8, 3))
        run.train()
        store, key = own("store.plan_store").plan_store(0), min(entries(gpu))
        store.bar(key, store.choice(key), "wrong")
        ours = entries(gpu)
        gpu.lt.load_checkpoint(tmp_path / "run", run.model, run.optimizer)
        assert entries(gpu) == ours


def test_plan_choices_that_cannot_be_used_are_left_alone(
    process: Process, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lt_runtime")
    with process() as gpu:
        run = Run(gpu, (8, 3))
        run.train()
        gpu.lt.save_checkpoint(tmp_path / "run", run.model, run.optimizer)
        described, values = content(tmp_path / "run")
        assert "MatmulProblem" in described["plans"]
        of_another = described["plans"].replace('"gpu": "', '"gpu": "another ')
        assert of_another != described["plans"]
    with process("elsewhere") as gpu:
        run = Run(gpu, (8, 3), tune=False)
        for plans, messages in ((of_another, 1), ("[1, 2", 1), (7, 0)):
            path = tmp_path / "changed"
            own("saving.checkpoint_file").write(path, values, json.dumps(described | {"plans": plans}))
            caplog.clear()
            gpu.lt.load_checkpoint(path, run.model, run.optimizer)
            assert not measured(gpu)
            told = ["its plan choices are not used" in record.getMessage() for record in caplog.records]
            assert told == [True] * messages, plans


def test_plan_choices_of_other_models_stay_where_they_are(process: Process, tmp_path: Path) -> None:
    with process() as gpu:
        Run(gpu, (8, 3)).train()
        run = Run(gpu, tune=False)
        gpu.lt.save_checkpoint(tmp_path / "run", run.model, run.optimizer)
        assert "plans" not in content(tmp_path / "run")[0]


def test_a_file_of_any_model_takes_the_plan_choices_to_an_empty_cache(process: Process, tmp_path: Path) -> None:
    with process() as gpu:
        model = _own_block(gpu.lt)
        step, optimizer = _trained(gpu, model)
        gpu.lt.save(tmp_path / "run", step=step, opt=optimizer)
        chosen = choices(gpu)
    with process("elsewhere") as gpu:
        model = _own_block(gpu.lt)
        gpu.lt.load(tmp_path / "run", opt=gpu.lt.AdamW(model.parameters(), lr=1e-2), step=_step_of(gpu, model))
        brought = choices(gpu)
        _trained(gpu, model)
        assert TUNER not in sys.modules
        assert unmeasured(tmp_path) == []
        assert choices(gpu) == {key: chosen[key] for key in brought}


def test_of_many_sizes_of_batch_the_latest_are_taken_along(
    process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with process() as gpu:
        monkeypatch.setattr(own("nn.block"), "_MOST_SIZES", 2)
        run = Run(gpu, (8, 3))
        for rows in (5, 6, 7):
            run.train(rows, steps=1)
        gpu.lt.save_checkpoint(tmp_path / "run", run.model, run.optimizer)
        # Backslashes are removed, because keys are JSON strings within JSON.
        plans = content(tmp_path / "run")[0]["plans"].replace("\\", "")
        assert [f'"rows": {rows}, "cols": 8,' in plans for rows in (5, 6, 7)] == [False, True, True]


def test_plan_choices_that_are_too_long_are_left_out(
    process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with process() as gpu:
        run = Run(gpu, (8, 3))
        run.train()
        monkeypatch.setattr(own("saving.plan_choices"), "_LARGEST", 1000)
        with pytest.warns(UserWarning, match=r"the plan choices are \d+: too many for a checkpoint"):
            gpu.lt.save_checkpoint(tmp_path / "run", run.model, run.optimizer)
        assert "plans" not in content(tmp_path / "run")[0]


def _own_block(lt: Any) -> Any:
    class Own(lt.Block):  # type: ignore[misc]
        """A block with a linear layer with GELU, and a matrix product that the block calls itself."""

        def __init__(self) -> None:
            self.inputs = self.outputs = 8
            self.layer = lt.Linear(8, 8, seed=1, device="cuda")
            self.mix = lt.Linear(8, 8, bias=False, seed=2, device="cuda")

        def forward(self, x: Any, run: Any) -> Any:
            y, ctx = lt.linear_fwd(
                x, self.layer.weight.data, self.layer.bias.data, activation="gelu", stream=run.stream
            )
            run.keep(ctx, y)
            return lt.matmul(y, self.mix.weight.data, stream=run.stream)

        def backward(self, dy: Any, run: Any) -> Any:
            ctx, y = run.take()
            (dw, adds), (db, _) = run.grad(self.layer.weight), run.grad(self.layer.bias)
            lt.matmul(y.T, dy, out=run.grad(self.mix.weight)[0], stream=run.stream)
            dz = lt.matmul(dy, self.mix.weight.data.T, stream=run.stream)
            return lt.linear_bwd(dz, ctx, out_dw=dw, out_db=db, accumulate=adds, stream=run.stream)[0]

    first, last = lt.Linear(8, 8, activation="relu", seed=3, device="cuda"), lt.Linear(8, 3, seed=4, device="cuda")
    return lt.Chain(first, Own(), lt.Residual(lt.SwiGLU(8, 12, seed=5, device="cuda")), last)


def _step_of(gpu: FakeGpu, model: Any, **options: Any) -> Any:
    lt, factor = gpu.lt, gpu.cp.asarray(np.ones((3, 3), np.float32))

    def loss(outputs: Any, target: Any, gradient: Any, stream: Any) -> Any:
        return lt.mse_loss(lt.matmul(outputs, factor, stream=stream), target, out_gradient=gradient, stream=stream).loss

    step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=1e-2), loss=loss, **options)
    gpu.streams.synchronize_all()
    return step


def _trained(gpu: FakeGpu, model: Any, **options: Any) -> tuple[Any, Any]:
    step = _step_of(gpu, model, **options)
    for _ in range(2):
        step(*(gpu.cp.asarray(np.ones((ROWS, n), np.float32)) for n in (8, 3)))
        gpu.synchronize_all()
    return step, step.optimizer


@pytest.mark.parametrize(("variable", "options", "expected"), [(None, {}, True), ("first-use", {"tune": False}, False)])
def test_a_block_and_a_loss_of_the_caller_s_are_measured_with_the_step(
    process: Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: Any, options: Any, expected: bool
) -> None:
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    with process() as gpu:
        _trained(gpu, _own_block(gpu.lt), **options)
        assert (unmeasured(tmp_path) == []) is expected
        assert bool(measured(gpu)) is expected


def test_any_model_is_tuned_and_explained_before_its_first_step(process: Process, tmp_path: Path) -> None:
    with process() as gpu:
        model, lt = _own_block(gpu.lt), gpu.lt
        report = lt.tune(model, ROWS, progress=False)
        assert {"MatmulProblem", "ForwardProblem"} <= {type(each).__name__ for row in report for each in row.problems}
        assert all(each.us is not None for each in lt.explain(model, gpu.cp.zeros((ROWS, 8), np.float32)))
        count = measured(gpu)
        step = lt.TrainStep(model, lt.AdamW(model.parameters()), loss="mse")
        sys.modules[TUNER].tune_chains = None  # type: ignore[attr-defined]
        step(*(gpu.cp.zeros((ROWS, n), np.float32) for n in (8, 3)))
        assert measured(gpu) == count
        assert unmeasured(tmp_path) == []
        with pytest.raises(lt.errors.ArgumentError, match=r"rows is 0; accepted are positive numbers, and arrays"):
            lt.tune(model, 0)
        towers = lt.Parallel(model, lt.Linear(4, 3, device="cuda"))
        with pytest.raises(lt.errors.ArgumentError, match=r"rows is 8; .*; Parallel does not say how many columns"):
            lt.tune(towers, ROWS)


def test_a_model_is_tuned_as_its_sizes_are(process: Process) -> None:
    found = []
    for cache in ("model", "sizes"):
        with process(cache) as gpu:
            model = gpu.lt.MLP(DIMS, "gelu", device="cuda")
            gpu.lt.tune(*([model] if cache == "model" else [DIMS]), ROWS, progress=False, **(
                {} if cache == "model" else {"activation": "gelu"}))  # fmt: skip
            found.append(entries(gpu).keys())
    assert found[0] == found[1]


FP8_WINS = {"kernel": 10.0, "matmul": 2000.0, "float8 matmul": 500.0}
BF16_WINS = {"kernel": 10.0, "matmul": 500.0, "float8 matmul": 2000.0}
OF_FP8: dict[str, Any] = {"dims": (32, 144, 48), "dtype": "bfloat16", "precision": "fp8"}


@pytest.mark.parametrize("wins", [True, False])
def test_layers_are_in_fp8_where_that_was_measured_to_be_faster(process: Process, tmp_path: Path, wins: bool) -> None:
    """Measurements decide, even against the rule for unmeasured layers; later steps and processes measure nothing."""
    with process() as gpu:
        gpu.streams.costs_us.update(FP8_WINS if wins else BF16_WINS)
        own("plans.fp8_rule").expected_slower_in_fp8 = lambda *_: "slower by the rule" if wins else None
        run = Run(gpu, **OF_FP8)
        first, reasons = run.train(32), [layer.scales.fallback for layer in run.model.layers]
        assert unmeasured(tmp_path) == []
        sys.modules[TUNER].tune_chains = None  # type: ignore[attr-defined]
        assert Run(gpu, **OF_FP8).train(32) == first
        assert wins or Run(gpu, **OF_FP8 | {"precision": None}).train(32) == first
        assert own("saving.plan_choices").choices_of(run.model).count("Fp8ChainProblem") == 1
        found, *_ = gpu.lt.explain(run.model, 32)
    words = "precision 32x32-144-48 bfloat16 gelu, none without dx\n  strategy  "
    assert str(found).startswith(f"{words}{'products in FP8' if wins else 'own type'}\n")
    ((words, slower_us),) = found.alternatives
    assert words == ("own type" if wins else "products in FP8")
    assert slower_us > found.us
    (reason,) = {*reasons}
    expected = f"32 rows of 32-144-48: FP8 takes {slower_us:.1f} µs, and bfloat16 {found.us:.1f}"
    assert reason == (None if wins else expected)
    with process() as gpu:
        assert Run(gpu, **OF_FP8, tune=False).train(32) == first
        assert TUNER not in sys.modules


def test_the_cast_of_a_weight_that_the_optimizer_writes_is_not_counted(process: Process) -> None:
    """FP8 saves 398 of 1000 µs of products; its three casts and the update of the scales take 400."""
    with process() as gpu:
        gpu.streams.costs_us.update({"kernel": 100.0, "matmul": 500.0, "float8 matmul": 301.0})
        model, found = gpu.lt.MLP([256, 48], dtype="bfloat16", device="cuda", precision="fp8"), []
        for _ in range(2):
            gpu.lt.tune(model, 32, progress=False)
            found += str(gpu.lt.explain(model, 32)[0]).splitlines()[:2]
            gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()), loss="mse")
    problem = "precision 32x256-48 bfloat16 none without dx"
    written = f"{problem}, optimizer writes weights in FP8"
    assert found == [problem, "  strategy  own type", written, "  strategy  products in FP8"]


@pytest.mark.parametrize(("takes", "reason"), [(0, "refused: no algorithm"), (1, "wrong: dw is off by nan")])
def test_fp8_that_is_refused_or_wrong_is_not_chosen(process: Process, takes: int, reason: str) -> None:
    """The layer stays in its own type if its FP8 plans lack the backward pass (wrong results), or if there are no FP8
    plans (cuBLASLt has refused a product)."""
    with process() as gpu:
        gpu.streams.costs_us.update(FP8_WINS)
        plans_of, refused = own("tuner.fp8_search").fp8_plans, own("errors").PlanError("no algorithm")

        def plans(*arguments: Any) -> Any:
            if not takes:
                raise refused
            return plans_of(*arguments)[:takes]

        own("tuner.fp8_search").fp8_plans = own("tuner.search").fp8_plans = plans
        model = gpu.lt.MLP([32, 48], dtype="bfloat16", device="cuda", precision="fp8")
        gpu.lt.tune(model, 32, progress=False)
        found, *_ = gpu.lt.explain(model, 32)
        assert found.strategy == "own type"
        assert found.rejected[0].startswith(f"products in FP8: {reason}")


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_a_script_within_tuning_measures_whether_its_layer_is_faster_in_fp8(process: Process, recipe: Any) -> None:
    with process() as gpu:
        gpu.streams.costs_us.update(FP8_WINS)
        state, (x, w) = (
            gpu.lt.FP8State(gpu.lt.FP8(recipe, fallback=True)),
            (gpu.cp.ones((n, 32), BF16) for n in (32, 48)),
        )
        gpu.lt.linear_fwd(x, w, precision=state)
        assert "expected" in state.fallback
        with gpu.lt.tuning():
            gpu.lt.linear_fwd(x, w, precision=state)
        assert state.fallback is None
        gpu.streams.synchronize_all()
