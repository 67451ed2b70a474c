"""How the benchmarks take times: turns, captures, buffer sets; and the bytes and operations of cases. Needs no GPU."""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import buffers, copies, distances, growth, host, kernels, models, narrow, steps, timing
from benchmarks.__main__ import options_of
from benchmarks.layers import Block, blocks, compared
from benchmarks.steps import StepCase
from benchmarks.timing import HostTurn, Timing, buffer_sets, repetitions, summarise, take_turns
from lt_runtime.gpu.compiler import compile_cubin
from tests.support.peers import NEEDS_TORCH

COMPILED = (b"-arch=sm_90", b"--std=c++17")


def test_a_figure_is_the_median_and_the_distance_of_the_quartiles() -> None:
    assert summarise([5.0]) == Timing(5.0, 0.0)
    assert summarise([1.0, 2.0, 3.0, 4.0, 100.0]) == Timing(3.0, 2.0)


def test_contenders_take_turns_in_alternating_order() -> None:
    order: list[str] = []

    def turn(name: str) -> float:
        order.append(name)
        return float(len(order))

    timings = take_turns({name: lambda name=name: turn(name) for name in "abc"}, rounds=3)
    assert "".join(order) == "abccbaabccbaabc"
    assert timings["b"] == summarise([8.0, 11.0, 14.0]), "rounds that warm up do not count"


class Machine:
    """Simulates a clock, and a GPU that works on a queue of tasks; times are in seconds."""

    def __init__(self, host: float, task: float, wait: float = 0.0) -> None:
        self.now = self.busy_until = 0.0
        self._host, self._task, self._wait = host, task, wait

    def queue(self) -> None:
        self.now += self._host
        self.busy_until = max(self.busy_until, self.now) + self._task

    def synchronize(self, _: Any = None) -> None:
        self.now = max(self.now, self.busy_until) + self._wait


def test_a_turn_by_the_wall_clock_takes_only_the_gpu_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(host=50e-6, task=600e-6, wait=300e-6)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: machine.now)
    assert timing.timed_by_host(machine.queue, 4, machine.synchronize)() == pytest.approx(150.0)


def test_a_turn_of_the_host_takes_only_the_host_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(host=2e-6, task=3e-6)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: machine.now)
    turn = HostTurn(machine.queue, 10, machine.synchronize)
    assert [turn(), turn()] == pytest.approx([2.0, 2.0])
    assert gc.isenabled()


def test_contenders_that_cannot_be_built_or_called_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ImportError("No module named 'peer'\nat all")

    monkeypatch.setattr(host, "synchronize", lambda: None)
    builders = {"lt": lambda: math.cos, "peer": missing, "broken": lambda: missing}
    case = host.HostCase("a case", lambda: {**builders, "lt": lambda: lambda: None}, 4)
    row = host.measure(case, options_of(["host", "--rounds", "3"]))
    assert {*row.timings} == {"lt"}
    assert row.left_out == dict.fromkeys(("peer", "broken"), "ImportError: No module named 'peer'")
    assert not host.measure(case, options_of(["host", "--rounds", "3", "--ours"])).left_out


class Stream(contextlib.nullcontext[None]):
    """Stands in for a CuPy stream that can be captured."""

    ptr = 7

    def __init__(self) -> None:
        super().__init__()
        self.is_capturing, self.launches = False, 0

    def begin_capture(self) -> None:
        self.is_capturing = True

    def end_capture(self) -> Any:
        self.is_capturing = False
        return self

    def launch(self, _: Any) -> None:
        self.launches += 1

    def upload(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...


def test_a_capture_goes_round_the_buffer_sets_and_keeps_the_last_results(monkeypatch: pytest.MonkeyPatch) -> None:
    class Result: ...

    monkeypatch.setattr(timing, "synchronize", lambda: None)
    stream, calls, results = Stream(), list[tuple[int, bool]](), list[weakref.ref[Any]]()

    def run(number: int, handle: int) -> object:
        calls.append((number, stream.is_capturing))
        result = Result()
        results.append(weakref.ref(result))
        return result

    replay = timing.capture(run, 4, 2, stream)
    assert calls == [(0, False), (1, False), (0, True), (1, True), (0, True), (1, True)]
    gc.collect()
    assert [each() is not None for each in results] == [False] * 4 + [True] * 2
    replay()
    assert stream.launches == 1
    with pytest.raises(ZeroDivisionError):
        timing.capture(lambda *_: 1 // (not stream.is_capturing), 1, 1, stream)
    assert not stream.is_capturing, "a capture that fails is ended"


@given(st.integers(1, 1 << 36), st.integers(1, 1 << 28))
def test_buffer_sets_exceed_the_cache_and_a_replay_is_long_enough(size: int, cache: int) -> None:
    sets = buffer_sets(size, cache)
    assert 2 <= sets <= 200
    assert sets * size >= 4 * cache or sets == 200
    assert sets == 2 or (sets - 1) * size < 4 * cache
    count = repetitions(size, sets)
    assert count % sets == 0
    assert count >= 200 or count * max(size / 4.8e6, 1.5) >= 2000


def test_bytes_and_operations_are_those_counted_by_hand() -> None:
    assert kernels.epilogue_backward(8192, 3072, 0.1).bytes == 6 * 8192 * 3072
    assert kernels.epilogue_forward(8192, 3072, 0.1).bytes == 4 * 8192 * 3072
    assert kernels.gated(8192, 4096, 0.1).bytes == 3 * 2 * 8192 * 4096
    assert kernels.gated(8192, 4096, backward=True).bytes == 5 * 2 * 8192 * 4096
    assert kernels.gated_fp8(8192, 4096).bytes == (4 + 2) * 8192 * 4096
    assert kernels.gated_fp8(8192, 4096, backward=True).bytes == (6 + 4) * 8192 * 4096
    assert kernels.norm("rms_norm", 8192, 4096, backward=True).bytes == 3 * 2 * 8192 * 4096
    assert kernels.norm("rms_norm", 8192, 4096, adds=True).bytes == 4 * 2 * 8192 * 4096
    assert kernels.dropout("bfloat16", 8192, 8192).bytes == 2 * 4 * 2**26
    assert kernels.cross_entropy(8192, 50304).bytes == 4 * 8192 * 50304
    assert kernels.adamw_step("three", ((3,),), "bfloat16", 1.0).bytes == 3 * 30
    assert kernels.adamw_step("GPT-2", kernels.GPT2, "float32").bytes == 28 * 124_439_808
    # Value and moments are read and written in BF16; then come the gradient, and two copies in FP8.
    assert kernels.adamw_fp8(16, 32).bytes == 16 * 32 * (3 * 2 * 2 + 2 + 2)
    assert kernels.adamw_fp8(16, 32, masters=True).bytes == 16 * 32 * (3 * 2 * 4 + 2 + 2 + 2)
    assert kernels.inference(2, 5, 3).bytes == 2 * (2 * 3 + 5 * 3 + 5 + 2 * 5)
    block = Block("test", 64, 32, 16, "bf16", "gelu")
    assert (block.bytes, block.flops) == (2 * (4 * 64 * 16 + 3 * 64 * 32 + 4 * 16 * 32), 2 * 6 * 64 * 32 * 16)
    step = StepCase("test", "bf16", 4, (3, 5, 2), "relu", "mse")
    assert (step.parameters, step.flops) == (3 * 5 + 5 + 5 * 2 + 2, 4 * (4 * 3 * 5 + 6 * 5 * 2))
    (named,) = (case for case in narrow.CASES if case.name == "64x3 2^18 BF16")
    # bytes of x and targets; then of each parameter's BF16 value, FP32 master and two FP32 moments, each read and
    # written
    assert narrow.least_bytes(named) == 2**18 * (64 + 3) * 2 + 12_675 * 2 * (2 + 4 + 4 + 4)


def test_growing_cases_have_the_sizes_that_their_names_tell() -> None:
    blocks_, steps_, networks = (growth.CASES[each] for each in (growth.ROWS, growth.PARAMETERS, growth.LAYERS))
    assert (blocks_[0].rows, blocks_[-1].rows) == (2**8, 2**20)
    assert [round(math.log10(case.parameters), 1) for case in steps_] == pytest.approx([4, 5, 6, 7, 8, 9], abs=0.11)
    assert [(len(case.dims) - 1, len(set(case.dims))) for case in networks[3::4]] == [(64, 1), (64, 65)]


def test_blocks_that_are_compared_with_every_peer_cover_all_presets_types_and_activations() -> None:
    some = compared()
    assert len(some) == len({*some} & {*blocks()}) == 24
    assert {block.group for block in some} == {block.group for block in blocks()}
    assert {(block.kind, block.activation) for block in some} == {(each.kind, each.activation) for each in blocks()}


def test_the_faster_of_pytorch_s_ways_counts() -> None:
    us = {"lt": 5.0, "torch_graph_autocast": 9.0, "torch_graph_bf16": 8.0, "torch_graph_call_bf16": 11.0}
    timings = {name: Timing(value, 0.1) for name, value in us.items()}
    made = steps.with_fastest(timings)
    assert {name: each.median for name, each in made.items()} == us | {"torch_graph": 8.0, "torch_graph_call": 11.0}
    left_out = {"torch_graph_bf16": "a", "torch_max_autotune_bf16": "b"}
    assert steps.without_any(left_out, made) == {"torch_max_autotune": "b"}


@pytest.mark.parametrize(
    ("options", "kernel", "step"),
    [
        ([], {"lt", "torch"}, {"torch_graph_autocast", "torch_graph_bf16"}),
        (["--torch-compile"], {"lt", "torch", "torch_compile"}, {"torch_graph_autocast", "torch_compile_bf16"}),
        (["--max-autotune"], {"lt", "torch"}, {"torch_max_autotune_bf16"}),
        (["--ours"], {"lt"}, set()),
    ],
)
def test_options_choose_the_contenders(
    options: list[str], kernel: set[str], step: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(builders: dict[str, Any], *_: Any) -> timing.Measured:
        return timing.Measured(dict.fromkeys(builders, Timing(1.0, 0.0)), {})

    monkeypatch.setattr(timing, "cache_size", lambda: 50 << 20)
    monkeypatch.setattr(timing, "measure", measure)
    case = replace(kernels.CASES[0], builders=lambda sets: dict.fromkeys(("lt", "torch", "torch_compile"), print))
    asked: argparse.Namespace = options_of(["kernels", "steps", "--rounds", "3", *options])
    monkeypatch.setattr(kernels, "measured_copies", lambda _: copies.Ceiling("fast", 4000.0, {}))
    row = kernels.measure_case(case, asked, None)
    assert {*row.timings} == kernel
    setup: Any = argparse.Namespace(case=steps.CASES[1])
    names = {name for name, _ in steps.peers(setup, asked, setup.case.ways)}
    assert names == step | ({"torch_graph_autocast", "torch_graph_bf16"})
    assert "torch_graph" in {name for name, _ in steps.peers(setup, asked, ("bf16",), called=False)}


def test_the_kernels_of_the_benchmarks_compile() -> None:
    names = copies.NAMES.values()
    instances = [f"template __global__ void {name}(const uint4*, uint4*, long long);" for name in names]
    cubin = compile_cubin("copy", "\n".join([copies.SOURCE, *instances]).encode(), COMPILED)
    assert all(b"_Z4copyILi%dELb%dEE" % name in cubin for name in copies.NAMES)
    head = 'extern "C" __global__ void draw(unsigned long long seed, long long i, float* out)'
    assert compile_cubin("draw", f"{head} {{{buffers.DRAW} *out = value;}}".encode(), COMPILED)


@pytest.mark.parametrize(
    ("case", "multiplied", "unneeded"),
    [
        (models.case("stack", 8, 16, 24, layers=2), 2 * 3 * 16 * 24, 0),
        (models.case("towers", 8, 16, 24, 4), 2 * (16 * 24 + 24 * 24 + 24 * 4), 2 * 16 * 24),
        (models.case("autoencoder", 8, 16, 24), 2 * 16 * 24, 16 * 24),
        (models.case("feed_forward", 8, 16, 24, layers=2, tokens=4), 2 * 3 * 16 * 24 + 16 * 16, 0),
        (models.case("mixture", 8, 16, 24, 4), 2 * (16 + 16 * 24 + 24 * 4), 2 * (16 + 16 * 24)),
        (models.case("dqn", 8, 16, 24, 4), 16 * 24 + 24 * 24 + 24 * 4, 16 * 24),
    ],
    ids=lambda each: getattr(each, "form", None),
)
def test_models_have_the_sizes_that_their_rows_tell(case: models.ModelCase, multiplied: int, unneeded: int) -> None:
    import lt_runtime as lt

    model = case.model("cpu")
    assert case.parameters == sum(each.data.size for each in model.parameters())
    assert all(each.master is None for each in model.parameters())
    assert case.flops == 8 * (6 * multiplied - 2 * unneeded)
    optimizer = lt.AdamW(model.parameters(), moments="bfloat16", stochastic_rounding=True)
    x, target = next(distances.batches(case, 0, 1))
    x, target = x.astype(model.dtype.numpy), target if case.decay else target.astype(model.dtype.numpy)
    step = lt.TrainStep(model, optimizer, loss=case.objective, batch_size=case.batch_shape[0], tune=case.tune)
    assert x.size == case.rows * case.dims[0]
    assert float(step(x, target)) > float(step(x, target))


@NEEDS_TORCH
@pytest.mark.parametrize("case", distances.CASES, ids=lambda case: case.form)
def test_models_train_as_pytorch_s(case: models.ModelCase) -> None:
    run = distances.losses(case, 0, 12, "cpu")
    assert run["float64"][-1] < run["float64"][0]
    found = distances.distances([run])
    assert found["lt"] < 1e-6
    assert found["torch"] < 1e-5


def test_distances_are_means_over_the_last_steps_of_all_runs() -> None:
    exact = [0.0] * distances.STEPS
    far = [9.0] * (distances.STEPS - distances.LAST) + [1.0] * distances.LAST
    runs = [{"lt": far, "torch": exact, "float64": exact}, {"lt": exact, "torch": far, "float64": exact}]
    assert distances.distances([*runs, runs[0]])["ratio"] == pytest.approx(2.0)
