"""`capture`: N calls are N steps, with a pretended CUDA graph that records and repeats PyTorch's operators."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import sys
import types
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

import lt_runtime.torch as ltt
from lt_runtime.errors import ArgumentError, CaptureError, KindError, LayoutError, OperandError

capture_module = importlib.import_module("lt_runtime.torch.capture")  # `ltt.capture` is the function


class Graph(TorchDispatchMode):
    """A pretended CUDA graph: a capture leaves no trace in tensors, and each replay runs the recorded operators."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[tuple[Any, ...]] = []
        self.before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for each in given if isinstance(given, (list, tuple)) else [given]:
                    self.before.setdefault(each.data_ptr(), (each, each.clone()))
        made = func(*args, **(kwargs or {}))
        self.recorded.append((func, args, kwargs or {}, made))
        return made

    def __enter__(self) -> Any:
        self.random = torch.get_rng_state()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_rng_state(self.random)
        with torch.no_grad():
            for tensor, values in self.before.values():
                tensor.copy_(values)
        if error[0] is not None:
            raise RuntimeError("operation failed due to a previous error during capture")

    def pool(self) -> str:
        return "the pool"

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, made in self.recorded:
            again = func(*args, **kwargs)
            pairs = zip(made, again, strict=True) if isinstance(made, (list, tuple)) else [(made, again)]
            for into, values in pairs:
                if isinstance(into, torch.Tensor) and into.data_ptr() != values.data_ptr():
                    into.copy_(values)


class Stream:
    cuda_stream, device_index = 7, 0

    def __init__(self, device: Any = None) -> None:
        self.waits: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waits.append(other)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Pretends a GPU; the list gets the pool of memory that each capture was given."""
    given: list[Any] = []

    def graph(made: Graph, pool: Any, stream: Any, mode: str) -> Graph:
        assert mode == "thread_local"
        given.append(pool)
        return made

    user = Stream()
    pretended: dict[str, Any] = {"CUDAGraph": Graph, "graph": graph, "Stream": Stream, "empty_cache": lambda: None}
    pretended |= dict.fromkeys(("device", "stream"), lambda _: contextlib.nullcontext())
    for name, value in (pretended | {"current_stream": lambda: user}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None, raising=False)
    monkeypatch.setattr(capture_module, "_gpu_of", lambda _: torch.device("cpu"))
    return given


class Descent(torch.optim.Optimizer):
    """Gradient descent with momentum, which reads its rate from memory as `lt_runtime.torch.AdamW` does on a GPU."""

    def __init__(self, params: Any, lr: Any, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.rate = torch.tensor(float(lr))

    def apply_settings(self) -> None:
        self.rate.fill_(self.param_groups[0]["lr"])

    @torch.no_grad()
    def step(self) -> None:
        if not torch.utils._python_dispatch._get_current_dispatch_mode():
            self.apply_settings()
        for group in self.param_groups:
            for each in (each for each in group["params"] if each.grad is not None):
                state = self.state[each]
                moment = state.setdefault("moment", torch.zeros_like(each))
                moment.mul_(group["momentum"]).add_(each.grad)
                each.sub_(moment * self.rate)


class Centred(torch.nn.Module):
    """Subtracts a running mean. (The schema of PyTorch's BatchNorm does not say that it writes its buffers.)"""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Any) -> Any:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


Step = Callable[..., Any]


def training(kind: Any = Descent, lr: Any = 0.1, schedule: bool = False, **options: Any) -> tuple[Any, Any, Step]:
    """A model with dropout and statistics, its optimizer, and a step of a batch {"x": ..., "more": (labels, None)}."""
    torch.manual_seed(0)
    layers = ltt.Linear(6, 8, activation="gelu"), Centred(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)
    model = torch.nn.Sequential(*layers)
    optimizer = kind(model.parameters(), lr, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count)) if schedule else None

    def step(batch: dict[str, Any]) -> Any:
        optimizer.zero_grad()
        assert batch["more"][1] is None
        loss = F.cross_entropy(model(batch["x"]), batch["more"][0])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return {"loss": loss, "nothing": None}

    return model, optimizer, step


def batch_of(seed: int, rows: int = 5) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (rows,), generator=generator)
    return {"x": torch.randn(rows, 6, generator=generator), "more": (labels, None)}


def assert_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found.state_dict(), wanted.state_dict(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("warm_up", [1, 2])
def test_as_many_calls_are_as_many_steps(pools: list[Any], schedule: bool, warm_up: int) -> None:
    results, models = [], []
    for captures in (False, True):
        model, optimizer, step = training(schedule=schedule)
        run = ltt.capture(step, batch_of(0), warm_up=warm_up) if captures else step
        torch.manual_seed(1)
        made = [run(batch_of(seed, 4 if seed == 5 else 5)) for seed in range(9)]
        results.append([each["loss"].item() for each in made])
        models.append((model, optimizer.param_groups[0]["lr"]))
        if captures:
            assert all(each["nothing"] is None and not each["loss"].requires_grad for each in made)
            assert repr(run).endswith("(training.<locals>.step, 1 graphs)")
    (wanted, rate), (found, captured_rate) = models
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert rate == captured_rate == pytest.approx(0.01 if schedule else 0.1)
    assert_same(found, wanted)
    assert len(pools) == 1


def test_the_least_recently_used_shape_is_dropped_and_graphs_share_their_memory(pools: list[Any]) -> None:
    runs: list[int] = []
    run = ltt.capture(lambda x: (runs.append(len(x)), x.sum())[1], keep=2, warm_up=1)
    # Two shapes are kept: the first batch of 5 rows drops the graph for 4 rows, the last batch of 4 rows that for 5.
    for rows in (3, 4, 3, 4, 3, 5, 3, 4):
        assert float(run(torch.full((rows,), 2.0))) == 2.0 * rows
    assert runs == [3, 4, 3, 4, 5, 4]
    assert pools == [None, "the pool"]
    run.forget()
    for _ in range(2):
        run(torch.ones(3))
    assert pools[2:] == [None], "the pool of graphs that are gone was used"


@pytest.mark.parametrize("change", ["load_state_dict", "state", "one state", "moved", "frozen", "forget"])
def test_graphs_are_captured_anew_after_a_change_that_they_do_not_follow(pools: list[Any], change: str) -> None:
    models = []
    for captures in (False, True):
        model, optimizer, step = training()
        run = ltt.capture(step) if captures else step
        torch.manual_seed(1)
        for seed in range(8):
            if seed == 4 and change == "load_state_dict":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif seed == 4 and change == "state":
                optimizer.state.clear()
            elif seed == 4 and change == "one state":
                optimizer.state[model[0].weight] = copy.deepcopy(optimizer.state[model[0].weight])
            elif seed == 4 and change == "frozen":
                model[0].weight.requires_grad_(False)
            elif seed == 4 and change == "moved":
                model[0].weight.data = model[0].weight.data.clone()
            elif seed == 4:
                model.eval()
                _ = captures and run.forget()
            run(batch_of(seed))
        models.append(model)
    assert_same(*models)
    assert len(pools) == 2


def test_results_belong_to_the_caller(pools: list[Any]) -> None:
    run, x = ltt.capture(lambda x: (x, x * 2)), torch.zeros(2)
    made = [run(x.fill_(i)) for i in range(5)]
    assert [[float(each[0]) for each in pair] for pair in made] == [[i, 2.0 * i] for i in range(5)]


def test_a_step_whose_layers_may_change_their_precision_is_measured_again(
    pools: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture waits until an eager call has measured nothing new."""
    measured: list[int] = []

    class Choices(capture_module.Met):
        def __enter__(self) -> Any:
            self.problems, self.choices = ["a problem"], [SimpleNamespace(is_open=True)]  # type: ignore[list-item]
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def measure(*_: Any) -> bool:
        measured.append(len(pools))
        return len(measured) < 3

    monkeypatch.setattr(capture_module, "Met", Choices)
    monkeypatch.setattr(Choices, "to_tune", lambda _: [])
    monkeypatch.setattr(capture_module, "before_first_step", measure)
    run = ltt.capture(lambda x: x * 2, warm_up=1, tune=True)
    for _ in range(6):
        run(torch.ones(2))
    assert (measured, len(pools)) == ([0, 0, 0], 1)


@pytest.mark.parametrize("wants", [True, False])
def test_layers_are_measured_once_before_a_shape_is_captured(
    pools: list[Any], monkeypatch: pytest.MonkeyPatch, wants: bool
) -> None:
    measured: list[Any] = []

    class Problems(capture_module.Met):
        def __enter__(self) -> Any:
            self.problems.append("a problem")
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def to_tune(self) -> Any:
            return self.problems

    monkeypatch.setattr(capture_module, "Met", Problems)
    monkeypatch.setattr(capture_module, "before_first_step", lambda *given: measured.append((given, len(pools))))
    run = ltt.capture(lambda x: x * 2, tune=wants)
    for rows in (2, 2, 2, 2, 3, 3, 3):
        run(torch.ones(rows))
    expected = [] if wants is False else [((["a problem"], None, 7), captures) for captures in (0, 1)]
    assert measured == expected


def test_options_that_a_graph_holds_as_numbers_must_stay(pools: list[Any]) -> None:
    _, optimizer, step = training()
    run = ltt.capture(step)
    for seed in range(4):
        run(batch_of(seed))
    optimizer.param_groups[0]["lr"] = 0.01  # the learning rate of this optimizer is written to the GPU
    run(batch_of(4))
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ArgumentError, match=r"momentum of param_groups\[0\] of Descent has changed from 0.5"):
        run(batch_of(5))
    run.forget()
    run(batch_of(6))


def test_the_options_of_an_optimizer_that_came_later_must_stay_too(pools: list[Any]) -> None:
    weights = [torch.ones(3, requires_grad=True) for _ in range(2)]
    optimizers = [Descent([each], 0.1) for each in weights]

    def step(x: Any) -> None:
        of_shape = len(x) - 3  # the second optimizer is for batches of 4 rows
        optimizers[of_shape].zero_grad(set_to_none=False)
        (weights[of_shape] * x.sum()).sum().backward()
        optimizers[of_shape].step()

    run = ltt.capture(step, warm_up=1)
    for rows in (3, 3, 4, 4):
        run(torch.ones(rows))
    optimizers[1].param_groups[0]["momentum"] = 0.9
    with pytest.raises(ArgumentError, match=r"momentum of param_groups\[0\] of Descent has changed from 0.5"):
        run(torch.ones(4))


def test_forget_forgets_optimizers(pools: list[Any]) -> None:
    weight = torch.ones(3, requires_grad=True)
    used = [Descent([weight], 0.1)]

    def step(x: Any) -> None:
        used[0].zero_grad(set_to_none=False)
        (weight * x).sum().backward()
        used[0].step()

    run = ltt.capture(step, warm_up=1)
    for _ in range(2):
        run(torch.ones(3))
    former, used[0] = weakref.ref(used[0]), Descent([weight], 0.2)
    run.forget()
    gc.collect()
    assert former() is None
    for _ in range(3):
        run(torch.ones(3))
    assert run.graphs == 1


def test_the_first_step_of_an_optimizer_is_not_captured(pools: list[Any]) -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer, calls = torch.optim.SGD([weight], 0.1, momentum=0.5), iter(range(9))

    def step(x: Any) -> None:
        (weight * x).sum().backward()
        if next(calls) == 2:
            optimizer.step()

    run = ltt.capture(step)
    for _ in range(2):
        run(torch.ones(3))
    with pytest.raises(CaptureError, match=r"optimizer.step\(\)\): SGD takes its first step in the capture"):
        run(torch.ones(3))


def test_a_captured_step_runs_as_a_part_of_the_step_that_calls_it(pools: list[Any]) -> None:
    weights = []
    for captures in (False, True):
        model, _, step = training()
        inner = ltt.capture(step, warm_up=1) if captures else step

        def outer(batch: Any, inner: Any = inner) -> Any:
            return inner(batch)["loss"] + inner(batch)["loss"]

        run = ltt.capture(outer) if captures else outer
        torch.manual_seed(1)
        for seed in range(5):
            run(batch_of(seed))
        weights.append(model)
    assert_same(*weights)
    assert (run.graphs, inner.graphs, len(pools)) == (1, 0, 1)


def test_after_an_error_in_a_step_its_graphs_can_be_launched(pools: list[Any]) -> None:
    models = []
    for captures in (False, True):
        model, _, step = training()
        run = ltt.capture(step, warm_up=1) if captures else step
        torch.manual_seed(1)
        for seed in range(6):
            if seed == 4:
                with pytest.raises(IndexError):
                    run({"x": torch.ones(4, 6), "more": (torch.full((4,), 3), None)})
            run(batch_of(seed))
        models.append(model)
    assert_same(*models)
    assert len(pools) == 1


def test_an_optimizer_that_cannot_be_captured_is_refused_before_it_writes(pools: list[Any]) -> None:
    model, _, step = training(torch.optim.AdamW)
    before, run = copy.deepcopy(model[0].weight), ltt.capture(step)
    with pytest.raises(ArgumentError, match=r"param_groups\[0\] of AdamW has capturable=False; make it with"):
        run(batch_of(0))
    assert torch.equal(model[0].weight, before)


def test_models_of_transformers_make_no_mask_that_they_were_not_given(
    pools: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All calls see the same replaced function: for another one torch.compile would compile anew in the capture."""
    masks = types.ModuleType("transformers.masking_utils")
    masks.is_tracing = original = lambda mask=None: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masks)
    seen = []

    def step(x: Any) -> Any:
        seen.append(masks.is_tracing)
        assert (masks.is_tracing(None), masks.is_tracing(x)) == (False, True)
        return x * 2

    run = ltt.capture(step)
    for _ in range(3):
        run(torch.ones(2))
    assert len(seen) == 3
    assert len({*seen}) == 1
    assert masks.is_tracing is original


def test_what_cannot_be_captured_is_told_with_its_line(pools: list[Any]) -> None:
    def reads(x: Any) -> Any:
        return x * (2 if x.sum().item() > 0 else 3)

    run = ltt.capture(reads)
    for _ in range(2):
        run(torch.ones(2))
    with pytest.raises(CaptureError, match=r"reads cannot be captured \(.*test_capture.py:\d+: ") as e:
        run(torch.ones(2))
    assert "not permitted when stream is capturing; a graph holds work on the GPU only" in str(e.value)


def test_a_step_is_captured_after_a_call_in_which_torch_compile_compiles_nothing(pools: list[Any]) -> None:
    scaled = torch.compile(lambda x, n: x * n, backend="eager", dynamic=False)
    others = torch.compile(lambda x, n: x + n, backend="eager", dynamic=False)
    captures, factors = [], [2, 3, 4, 4, 4, 4, 4]
    given, ones = iter(factors), torch.ones(2)
    run = ltt.capture(lambda x: scaled(x, next(given)), warm_up=1)
    for call, factor in enumerate(factors):
        if call == 4:
            others(ones, 1)  # a compilation elsewhere may change which compiled function the step finds
        assert run(ones)[0] == factor
        captures.append(len(pools))
    assert captures == [0, 0, 0, 0, 0, 1, 1]


def test_a_step_that_compiles_in_each_call_is_told_so(pools: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(capture_module, "_compilations", lambda: len(compiled))

    def step(x: Any) -> Any:
        compiled.append(x)
        if pools:
            raise RuntimeError("operation not permitted when stream is capturing")
        return x * 2

    run = ltt.capture(step)
    for _ in range(18):
        run(torch.ones(2))
    with pytest.raises(CaptureError, match=r"torch.compile compiled a function during the capture, .* or compiles in"):
        run(torch.ones(2))


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no function": (lambda: ltt.capture(3), KindError, "step is 3; it must be a function"),
    "keep": (lambda: ltt.capture(len, keep=0), ArgumentError, "keep is 0; it must be at least 1"),
    "tune": (lambda: ltt.capture(len, tune="off"), KindError, "tune is 'off'"),  # type: ignore[arg-type]
    "warm_up": (lambda: ltt.capture(len, warm_up=0), ArgumentError, "warm_up is 0"),
    "array": (lambda: ltt.capture(len, [np.ones(2)]), OperandError, r"batch\[0\]\[0\] is array"),
    "number": (lambda: ltt.capture(len)({"x": 1.5}), OperandError, r"batch\[0\]\['x'\] is 1.5; accepted are tensors"),
    "sparse": (lambda: ltt.capture(len)(torch.eye(2).to_sparse()), LayoutError, r"batch\[0\] is torch.sparse_coo"),
    "gradient": (lambda: ltt.capture(len)(torch.ones(2).requires_grad_()), OperandError, "requires a gradient"),
    "result": (lambda: ltt.capture(len)(torch.ones(2)), KindError, "len returned 2; accepted are tensors and None"),
}


@pytest.mark.parametrize(("run", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name(
    pools: list[Any], run: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_each_call_runs_eagerly() -> None:
    model, _, step = training(torch.optim.AdamW)
    twin, _, eager = training(torch.optim.AdamW)
    with pytest.warns(UserWarning, match="there is no GPU: capture runs each step eagerly on the CPU"):
        run = ltt.capture(step, batch_of(0))
    for each in (run, eager):
        torch.manual_seed(1)
        for seed in range(4):
            each(batch_of(seed))
    assert_same(model, twin)
