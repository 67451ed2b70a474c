"""The suite `steps`: whole training steps, each in one CUDA graph, against PyTorch's.

Contenders take turns; a figure is the median over the rounds of a step's time within many replays in a row. Names that
end in `_call` are of calls as a script makes them: they include the host's time and the copy of the batch.
"""

from __future__ import annotations

import argparse
import itertools
import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks import report
from benchmarks.buffers import labels, normal
from benchmarks.layers import BYTES_PER_US, FLOPS_PER_US, TYPES, presets, tune
from benchmarks.peers import peer
from benchmarks.report import Finding, Json, Row, Target, speedups
from benchmarks.suite import JAX, MAX_AUTOTUNE, TORCH_COMPILE, Job, Suite, plan_cache, variable
from benchmarks.timing import LONG_US, Timing, Turn, built, reason, sustained, synchronize, take_turns, timed

LEARNING_RATE: Final = 1e-3
WEIGHT_DECAY: Final = 0.01
PREFETCH: Final = "prefetch gpt2-mlp-x2 BF16"
SOAK: Final = "soak mnist BF16"

_GRAPH: Final = "torch_graph"
MODES: Final = {TORCH_COMPILE: "default", MAX_AUTOTUNE: "max-autotune-no-cudagraphs"}
# Compiling takes a minute and more. Autocast is not compiled: it was 16 % to 27 % slower than BF16 parameters.
_COMPILED_WAYS: Final = (None, "bf16")
_PROFILED: Final = ("lt", _GRAPH, f"{_GRAPH}_bf16")

_TURN_US: Final = 10_000.0  # A turn takes at least about this long.
_LEAST_REPLAYS: Final = 8
_MOST_REPLAYS: Final = 200
_LEAD: Final = 8  # An eighth as many replays go before those of a turn; meanwhile the host gets ahead of the GPU.
_LAUNCHES_US: Final = 40.0  # Some dozens of kernels do not take less.
_OPTIMIZER_BYTES: Final = 28  # of a parameter: gradient and copy in BF16; master and moments, read and written
_BATCHES: Final = 4  # different batches, which come again and again
_LEAST_STEPS: Final = 50  # of the prefetched training in a turn
_SOAK_WARM_UP: Final = 100


@dataclass(frozen=True)
class StepCase:
    """Forward, loss, backward and AdamW of an MLP.

    Attributes:
        preset: what the row is called, with the type.
        kind: one of `layers.TYPES`.
        rows, dims, activation: of the MLP.
        loss: "cross_entropy" where the outputs are classes, or "mse".
        least: the multiple of our time that torch.compile at its greatest effort has to take.
        master: in BF16, whether our parameters have FP32 masters and moments. If not, parameters and moments are only
            BF16, as PyTorch's are where it is fastest; ours are rounded stochastically.
    """

    preset: str
    kind: str
    rows: int
    dims: tuple[int, ...]
    activation: str
    loss: str
    least: float
    master: bool = True
    input_gradient = False

    @property
    def name(self) -> str:
        """What the row is called."""
        return f"{self.preset} {self.kind.upper()}"

    @property
    def dtype(self) -> str:
        """Of the batch, of the parameters that products read, and of their gradients."""
        return TYPES[self.kind][0]

    @property
    def compute(self) -> str:
        """How products are formed."""
        return TYPES[self.kind][1]

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(self.dims))

    @property
    def flops(self) -> int:
        """Of the products; the first layer's inputs need no gradient."""
        products = 6 * sum(inputs * outputs for inputs, outputs in itertools.pairwise(self.dims))
        return self.rows * (products - 2 * self.dims[0] * self.dims[1])

    @property
    def replays(self) -> int:
        """Steps in one turn."""
        expected = self.flops / FLOPS_PER_US[self.kind] + _OPTIMIZER_BYTES * self.parameters / BYTES_PER_US
        wanted = math.ceil(_TURN_US / max(expected, _LAUNCHES_US))
        return max(_LEAST_REPLAYS, min(wanted, _MOST_REPLAYS))

    @property
    def ways(self) -> tuple[str | None, ...]:
        """How PyTorch may hold the parameters of a BF16 step: FP32 under autocast, or BF16. Else there is one way."""
        return ("autocast", "bf16") if self.kind == "bf16" else (None,)

    def as_json(self) -> dict[str, Any]:
        """What the case is, for its row."""
        facts = {"rows": self.rows, "dims": list(self.dims), "type": self.kind, "activation": self.activation}
        return {**facts, "loss": self.loss, "parameters": self.parameters, "master": self.master}


def _case(preset: str, kind: str, loss: str, least: float, *, master: bool = True) -> StepCase:
    shape = presets()["mlps"][preset]
    return StepCase(preset, kind, shape["rows"], tuple(shape["dims"]), shape["activation"], loss, least, master)


CASES: Final = (
    _case("mnist", "tf32", "cross_entropy", 1.6),
    _case("mnist", "bf16", "cross_entropy", 1.6),
    _case("gpt2-mlp-x2", "bf16", "mse", 1.15, master=False),
    _case("dlrm-top", "bf16", "mse", 1.5, master=False),
    _case("llama-width", "bf16", "mse", 1.02, master=False),
)


# Our side of a step.


class StepContender(NamedTuple):
    """A training step, ready to be repeated.

    Attributes:
        replays: puts so many steps on the stream, by the graph alone: its inputs are in its buffers already.
        calls: the same as a script does it, which copies a batch into those buffers for each step.
        first_loss: with the initial parameters.
        nodes: of the graph, by kind.
        memory: the most bytes on the GPU that parameters, optimizer, batch and step take at a time; 0 if not known.
        turn: how its replays are timed, if not by events.
    """

    replays: Callable[[int], object]
    calls: Callable[[int], object]
    first_loss: float
    nodes: Mapping[str, int]
    memory: int = 0
    turn: Turn | None = None


class Setup:
    """What the contenders of a case share: our model, its initial parameters, batches, and the stream.

    Attributes:
        batches: on the GPU. Calls take them in turn, and so do the graphs' buffers from turn to turn.
        x, target: the first.
        stream: a CuPy stream that can be captured.
    """

    def __init__(self, case: StepCase, stream: Any) -> None:
        import lt_runtime as lt

        self.case, self.stream = case, stream
        self.model = lt.MLP(
            case.dims,
            case.activation,
            dtype=case.dtype,
            compute=case.compute,
            device="cuda:0",
            master_weights=case.master,
        )
        parameters = self.model.parameters()
        kept = {} if case.master else {"moments": "bfloat16", "stochastic_rounding": True}
        self.optimizer = lt.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **kept)
        arrays = [array for each in parameters for array in (each.data, each.master) if array is not None]
        self._initial = [(array, array.copy()) for array in arrays]
        self.batches = [batch(case) for _ in range(_BATCHES)]
        self.x, self.target = self.batches[0]
        synchronize()

    @property
    def values(self) -> list[Any]:
        """The initial parameters, weight and bias of each layer in turn, in FP32 if there are masters."""
        initial = {id(array): values for array, values in self._initial}
        arrays = [each.data if each.master is None else each.master for each in self.model.parameters()]
        return [initial[id(array)] for array in arrays]

    def restore(self) -> None:
        """Gives our parameters their initial values; the optimizer keeps its moments."""
        for array, initial in self._initial:
            array.data.copy_from_device(initial.data, initial.nbytes)
        synchronize()

    def step(self) -> Any:
        """A step that is captured at its first call, by what is known of its problems by then."""
        import lt_runtime as lt

        return lt.TrainStep(self.model, self.optimizer, loss=self.case.loss, batch_size=self.case.rows)

    def calls(self, step: Any) -> Callable[[int], None]:
        """Makes so many steps over the batches, as a script does."""
        return _training(step, itertools.cycle(self.batches), self.stream)

    @property
    def extra_bytes(self) -> int:
        """Of what a script would not hold: all batches but that in the graph's buffers, and the initial parameters."""
        held = itertools.chain((values for _, values in self._initial), *self.batches)
        return sum(array.nbytes for array in held)


def batch(case: StepCase) -> tuple[Any, Any]:
    """Random inputs with labels or targets."""
    x, outputs = normal((case.rows, case.dims[0]), case.dtype), (case.rows, case.dims[-1])
    return x, labels(*outputs) if case.loss == "cross_entropy" else normal(outputs, case.dtype)


def contender(setup: Setup) -> StepContender:
    """Our step, captured."""
    from benchmarks.internals import launch_of, nodes_of

    setup.restore()
    step, stream = setup.step(), setup.stream
    with stream:
        first_loss = float(step(setup.x, setup.target))
    launch = launch_of(step)

    def replays(count: int) -> None:
        for _ in range(count):
            launch(stream.ptr)

    return StepContender(replays, setup.calls(step), first_loss, nodes_of(step))


def memory_of(case: StepCase, stream: Any) -> int:
    """Bytes on the GPU that a model, its optimizer and a captured step take, from the plans that are known by now."""
    import cupy as cp

    from benchmarks.internals import memory_of_step

    pool = cp.get_default_memory_pool()
    before = pool.used_bytes()
    setup = Setup(case, stream)
    step = setup.step()
    setup.calls(step)(1)
    return int(pool.used_bytes() - before - setup.extra_bytes) + memory_of_step(step)


def tuned_contender(setup: Setup, directory: Path) -> tuple[StepContender, int]:
    """Our step by what the tuner has found, and how many of the problems that it meets have not been measured.

    Args:
        directory: for the record of the problems.
    """
    from benchmarks.internals import forget_plans, unmeasured

    forget_plans(setup.case)
    with variable("LT_RUNTIME_RECORD", str(directory / "met")):
        made = contender(setup)
    return made, unmeasured(directory / "met")


# Rows.


def measure_case(case: StepCase, options: argparse.Namespace, stream: Any) -> Row:
    """Tunes a step in a fresh plan cache and lets all contenders take turns."""
    setup = Setup(case, stream)
    contenders, facts = _ours(setup, keep=options.keep_plans)
    theirs, left_out = built(dict(_peers(setup, options)))
    contenders |= theirs
    timings = with_fastest(take_turns(_turns(contenders, case.replays, stream), options.rounds))
    setting = case.as_json() | {"when": report.now(), "rounds": options.rounds, "replays": case.replays} | facts
    setting |= {"nodes": {name: each.nodes for name, each in contenders.items()}}
    setting |= {"kernel_us": {name: _kernel_times(each) for name, each in contenders.items() if name in _PROFILED}}
    setting |= {"first_loss": {name: round(each.first_loss, 6) for name, each in contenders.items()}}
    long = {name: each for name, each in contenders.items() if name in _PROFILED and timings[name].median >= LONG_US}
    took = {name: sustained(each.replays, timings[name].median, stream) for name, each in long.items()}
    setting |= {"sustained": took} if took else {}
    setting |= memory_facts(contenders)
    target = Target(ratio={MAX_AUTOTUNE: case.least})
    left_out |= without_any(left_out, timings)
    return Row(case.name, timings, target=target, setting=setting, left_out=left_out)


def memory_facts(contenders: Mapping[str, StepContender]) -> dict[str, Any]:
    """The contenders' memory, and ours as a fraction of the least that PyTorch takes."""
    known = {name: each.memory for name, each in contenders.items() if each.memory}
    theirs = min((size for name, size in known.items() if name.startswith(_GRAPH)), default=None)
    ratio = {} if theirs is None or "lt" not in known else {"memory_ratio": round(known["lt"] / theirs, 4)}
    return {"memory_bytes": known} | ratio


def measure_calls(case: StepCase, options: argparse.Namespace, stream: Any) -> Row:
    """Tunes a step and measures nothing but our public calls."""
    setup = Setup(case, stream)
    with plan_cache(keep=options.keep_plans):
        tuned, step = tune(case), setup.step()
        with stream:
            first_loss = float(step(setup.x, setup.target))
        turns = {"lt_call": timed_calls(setup.calls(step), case.replays, stream)}
        timings = take_turns(turns, options.rounds)
    setting = case.as_json() | {"when": report.now(), "rounds": options.rounds, "replays": case.replays}
    setting |= tuned.as_json() | {"first_loss": {"lt_call": round(first_loss, 6)}}
    return Row(case.name, timings, "lt_call", setting=setting)


def _kernel_times(contender: StepContender) -> dict[str, Any]:
    """What the kernels of a step take, or why that is not known: PyTorch's profiler may be missing, or not allowed."""
    try:
        times: dict[str, Any] = peer("torch_steps", "kernel_times", contender.replays)()
        return times
    except Exception as error:
        return {"left_out": reason(error)}


def _ours(setup: Setup, *, keep: bool) -> tuple[dict[str, StepContender], dict[str, Any]]:
    """Before tuning and after."""
    from benchmarks.internals import forget_plans

    with plan_cache(keep=keep) as directory:
        forget_plans(setup.case)
        untuned = contender(setup)
        facts = tune(setup.case).as_json()
        tuned, unmeasured = tuned_contender(setup, directory)
        tuned = tuned._replace(memory=memory_of(setup.case, setup.stream))
        made = {"lt": tuned, "lt_untuned": untuned}
        if not setup.case.master:
            made["lt_master"] = contender(Setup(replace(setup.case, master=True), setup.stream))
    return made, facts | {"unmeasured_problems": unmeasured}


def _peers(setup: Setup, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], StepContender]]]:
    """The contenders of PyTorch and JAX by name, each to be built."""
    asked = {TORCH_COMPILE: options.torch_compile, MAX_AUTOTUNE: options.max_autotune}
    for way in setup.case.ways:
        suffix = "" if way is None else f"_{way}"
        yield _GRAPH + suffix, peer("torch_steps", "contender", setup, way)
        for name, is_asked in asked.items():
            if is_asked and way in _COMPILED_WAYS:
                seconds = options.compile_seconds
                yield name + suffix, peer("torch_steps", "contender", setup, way, MODES[name], seconds)
    if options.jax:
        yield JAX, peer("jax", "step", setup)


def _turns(contenders: Mapping[str, StepContender], count: int, stream: Any) -> dict[str, Turn]:
    """Graphs alone; and for ours, PyTorch's own kernels and JAX also calls as a script makes them."""
    turns = {name: graph_turn(each, count, stream) for name, each in contenders.items()}
    for name, each in contenders.items():
        base = name if name in ("lt", JAX) else _GRAPH if name.startswith(_GRAPH) else None
        if base is not None:
            turns[name.replace(base, f"{base}_call")] = timed_calls(each.calls, count, stream)
    return turns


def graph_turn(contender: StepContender, count: int, stream: Any) -> Turn:
    """A turn of the graph alone, on another batch than the turn before."""
    if contender.turn is not None:
        return contender.turn

    def lead() -> None:
        contender.calls(1)
        contender.replays(1 + count // _LEAD)

    return timed(partial(contender.replays, count), count, stream, lead)


def timed_calls(calls: Callable[[int], object], count: int, stream: Any) -> Turn:
    """A turn: wall-clock microseconds of a step, the host's work and the copy of the batch included."""

    def turn() -> float:
        stream.synchronize()
        start = time.perf_counter()
        calls(count)
        stream.synchronize()
        return (time.perf_counter() - start) * 1e6 / count

    return turn


def with_fastest(timings: Mapping[str, Timing]) -> dict[str, Timing]:
    """The times; and for the ways in which PyTorch may hold parameters, the faster one's under their common name."""
    made = dict(timings)
    for name, each in timings.items():
        base = _base(name)
        made[base] = min(made.get(base, each), each)
    return made


def without_any(left_out: Mapping[str, str], timings: Mapping[str, Timing]) -> dict[str, str]:
    """Why there is no time under the common name of two ways, if neither was measured."""
    return {base: why for name, why in left_out.items() if (base := _base(name)) not in timings}


def _base(name: str) -> str:
    return name.removesuffix("_autocast").removesuffix("_bf16")


# Training that goes on for a while.


def measure_prefetch(case: StepCase, options: argparse.Namespace, stream: Any) -> Row:
    """A tuned step over batches in page-locked memory through `lt.prefetch`, and over batches on the GPU."""
    import lt_runtime as lt

    setup, count = Setup(case, stream), max(case.replays, _LEAST_STEPS)
    with plan_cache():
        tune(case)
        step = setup.step()
        setup.calls(step)(1)
    on_gpu = [batch(case) for _ in range(_BATCHES)]
    on_host = [tuple(map(pinned, pair)) for pair in on_gpu]
    with lt.prefetch(itertools.cycle(on_host), device=setup.model.device, stream=stream) as ahead:
        sources = {"gpu_batches": itertools.cycle(on_gpu), "prefetch": ahead}
        turns = {each: timed_calls(_training(step, source, stream), count, stream) for each, source in sources.items()}
        timings = take_turns(turns, options.rounds)
    size = sum(array.nbytes for array in on_host[0])
    setting = case.as_json() | {"when": report.now(), "rounds": options.rounds, "steps": count, "batch_bytes": size}
    return Row(PREFETCH, timings, "gpu_batches", setting=setting)


def pinned(array: Any) -> Any:
    """A copy of a GPU's array in page-locked memory of the host."""
    import cupy as cp
    import cupyx

    host = cupyx.empty_pinned((array.nbytes,), np.uint8).view(array.dtype).reshape(array.shape)
    host[...] = cp.asnumpy(array)
    return host


def _training(step: Any, source: Iterator[tuple[Any, Any]], stream: Any) -> Callable[[int], None]:
    def train(count: int) -> None:
        with stream:
            for x, target in itertools.islice(source, count):
                step(x, target)

    return train


def measure_soak(case: StepCase, options: argparse.Namespace, stream: Any) -> Row:
    """Many steps, as a script makes them: what they add to the memory in use, and the mean of their losses."""
    setup, count = Setup(case, stream), options.soak
    with plan_cache():
        step = setup.step()
        train = setup.calls(step)
        train(_SOAK_WARM_UP)
        with stream:
            step.metrics()
            before, start = memory(), time.perf_counter()
            train(count)
            metrics = step.metrics()
            seconds, after = time.perf_counter() - start, memory()
    facts = {"when": report.now(), "replays": metrics.steps, "mean_loss": metrics.loss, "memory": before}
    facts |= {"gained": {kind: after[kind] - before[kind] for kind in before}}
    timing = Timing(seconds * 1e6 / count, 0.0)
    return Row(SOAK, {"lt_call": timing}, "lt_call", setting=case.as_json() | facts)


def memory() -> dict[str, int]:
    """Bytes: in use on the GPU by any process, held by CuPy's pool, and the most that this process had on the host."""
    import cupy as cp

    free, total = cp.cuda.runtime.memGetInfo()
    host = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"gpu": total - free, "pool": cp.get_default_memory_pool().total_bytes(), "host": host}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals, which are given by ascending start."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


# The figures over all rows.

_MNIST: Final = ("mnist TF32", "mnist BF16")
_MEMORY: Final = "gpt2-mlp-x2 BF16"
_FORBIDDEN: Final = ("memcpy", "mem_alloc", "mem_free", "host")
_COLUMNS: Final = ("lt_untuned", "lt_master", _GRAPH, TORCH_COMPILE, MAX_AUTOTUNE, JAX, "lt_call", f"{_GRAPH}_call")


def findings(rows: Sequence[Json]) -> list[Finding]:
    """All that the suite has to show."""
    by_name = {row["case"]: row for row in rows}
    return [
        *_against_torch(rows),
        *(finding for name in _MNIST for finding in _kernels(name, by_name.get(name, {}))),
        _most("nodes in a step that copy, allocate, free or call the host", _forbidden(rows)),
        _most("problems in a step without a measured plan", _counts(rows, "unmeasured_problems")),
        _memory(by_name.get(_MEMORY, {})),
        *_soak(by_name.get(SOAK, {})),
        _prefetch(by_name.get(PREFETCH, {})),
    ]


def _against_torch(rows: Sequence[Json]) -> Iterator[Finding]:
    """Each case against torch.compile, which the target is about, against PyTorch's own kernels, and against JAX."""
    for name, is_judged in ((MAX_AUTOTUNE, True), (_GRAPH, False), (JAX, False)):
        found = speedups(rows, name)
        for case in CASES:
            target = case.least if is_judged else None
            yield Finding(f"{name} / lt, {case.name}", found.get(case.name), target, int(case.name in found))


def _kernels(name: str, row: Json) -> Iterator[Finding]:
    count = row.get("nodes", {}).get("lt", {}).get("kernel")
    yield Finding(f"kernels in a step of {name}", count, None, int(count is not None))
    times = row.get("kernel_us", {}).get("lt", {})
    for part, what in (("sum", "sum of kernel times"), ("busy", "time in which any runs")):
        us = times.get(part)
        yield Finding(f"{what} of {name}, µs of {times.get('step', '?')} profiled", us, None, int(us is not None))


def _forbidden(rows: Iterable[Json]) -> dict[str, float]:
    nodes = {row["case"]: row["nodes"]["lt"] for row in rows if "nodes" in row}
    return {case: float(sum(each.get(kind, 0) for kind in _FORBIDDEN)) for case, each in nodes.items()}


def _counts(rows: Iterable[Json], name: str) -> dict[str, float]:
    return {row["case"]: float(row[name]) for row in rows if name in row}


def _most(what: str, counts: Mapping[str, float]) -> Finding:
    """The greatest count, which has to be 0."""
    if not counts:
        return Finding(f"{what}, most", None, 0, 0, at_most=True)
    where = max(counts, key=counts.__getitem__)
    return Finding(f"{what}, most", counts[where], 0, len(counts), where if counts[where] else None, at_most=True)


def _memory(row: Json) -> Finding:
    ratio = row.get("memory_ratio")
    return Finding(f"memory of a step / PyTorch's, {_MEMORY}", ratio, 0.9, int(ratio is not None), at_most=True)


def _soak(row: Json) -> Iterator[Finding]:
    gained, count = row.get("gained", {}), row.get("replays", "many")
    for kind in ("gpu", "pool"):
        what = f"bytes of memory ({kind}) gained in {count} replays"
        yield Finding(what, gained.get(kind), 0, int(kind in gained), at_most=True)
    finite = float(math.isfinite(row["mean_loss"])) if "mean_loss" in row else None
    yield Finding("their mean loss is finite", finite, 1, int(finite is not None))


def _prefetch(row: Json) -> Finding:
    us = row.get("us", {})
    ratio = us["prefetch"] / us["gpu_batches"] if "prefetch" in us else None
    return Finding("prefetch / batches on the GPU, gpt2-mlp-x2", ratio, 1.03, int(ratio is not None), at_most=True)


def _lines(rows: Sequence[Json]) -> report.Table:
    def kernels(row: Json) -> str:
        return str(row.get("nodes", {}).get("lt", {}).get("kernel", ""))

    return report.compact_table(rows, _COLUMNS, {"kernels": kernels})


def _jobs(options: argparse.Namespace) -> dict[str, Job]:
    by_name = {case.name: case for case in CASES}
    measure = measure_calls if options.ours else measure_case
    made: dict[str, Job] = {name: partial(measure, case, options) for name, case in by_name.items()}
    if options.prefetch:
        made[PREFETCH] = partial(measure_prefetch, by_name[PREFETCH.removeprefix("prefetch ")], options)
    if options.soak:
        made[SOAK] = partial(measure_soak, by_name[SOAK.removeprefix("soak ")], options)
    return made


_NAMES: Final = [case.name for case in CASES]
_OPTIONAL: Final = dict.fromkeys((MAX_AUTOTUNE, TORCH_COMPILE, JAX), _NAMES)
SUITE: Final = Suite(
    rounds=15, order=[*_NAMES, PREFETCH, SOAK], jobs=_jobs, findings=findings, lines=_lines, optional=_OPTIONAL
)
