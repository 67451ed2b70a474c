"""The suite `steps`: whole training steps, each in one CUDA graph, against PyTorch's and JAX's.

Contenders are timed alternately, in rounds; a time is the median over the rounds of a step's time within many replays
in a row. Contenders with `_call` in their name are called as a script calls them: their times include the host's work
and the batch's copy.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from benchmarks import report
from benchmarks.buffers import labels, normal, repeated_values
from benchmarks.layers import BYTES_PER_US, FLOPS_PER_US, Typed, presets, tune
from benchmarks.peers import peer
from benchmarks.report import Finding, Json, Row
from benchmarks.suite import GRAPH, JAX, MAX_AUTOTUNE, TORCH_COMPILE, Job, Suite, modes, plan_cache
from benchmarks.timing import Timing, Turn, built, synchronize, take_turns, timed

LEARNING_RATE: Final = 1e-3
WEIGHT_DECAY: Final = 0.01
PREFETCH: Final = "prefetch gpt2-mlp-x2 BF16"

# Compiling takes a minute and more. Autocast is not compiled: it was 16 % to 27 % slower than BF16 parameters.
_COMPILED_WAYS: Final = (None, "bf16")

_TURN_US: Final = 10_000.0  # In a turn one contender repeats its step for about this long (µs) or longer.
_LEAST_REPLAYS: Final = 2
_MOST_REPLAYS: Final = 200
_LEAD: Final = 8  # A turn begins with an eighth as many untimed replays, in which the host gets ahead of the GPU.
_LAUNCHES_US: Final = 40.0  # Some dozens of kernels take at least this long (µs).
# Bytes that an update moves for a parameter: gradient and copy in BF16; master and moments in FP32, read and written.
_OPTIMIZER_BYTES: Final = 28
_BATCHES: Final = 4  # This many different batches are used in rotation.
_SEED: Final = 38
_DRAWN: Final = 8  # number of cases that are drawn at random
_LEAST_STEPS: Final = 50  # A turn of prefetched training has at least this many steps.


@dataclass(frozen=True)
class StepCase(Typed):
    """Forward, loss, backward and AdamW of an MLP.

    Attributes:
        preset: the row's name, with the type.
        kind: one of `layers.TYPES`.
        rows, dims, activation: of the MLP: rows of a batch, widths, hidden activation.
        loss: "cross_entropy" where the outputs are classes, or "mse".
        master: in BF16, whether our parameters have FP32 masters and moments. Otherwise parameters and moments are BF16
            and rounded stochastically; PyTorch is fastest with BF16 parameters and moments as well.
    """

    preset: str
    kind: str
    rows: int
    dims: tuple[int, ...]
    activation: str
    loss: str
    master: bool = True
    input_gradient = False
    tune: ClassVar[bool | None] = None
    """Whether training steps tune their layers before they are captured; None for the default of `lt.TrainStep`."""

    @property
    def name(self) -> str:
        """The row's name."""
        return f"{self.preset} {self.kind.upper()}"

    @property
    def parameters(self) -> int:
        """The number of weights and biases."""
        return sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(self.dims))

    @property
    def flops(self) -> int:
        """Floating-point operations of the products; the gradient of the first layer's inputs is not needed."""
        products = 6 * sum(inputs * outputs for inputs, outputs in itertools.pairwise(self.dims))
        return self.rows * (products - 2 * self.dims[0] * self.dims[1])

    @property
    def replays(self) -> int:
        """Number of steps in one turn."""
        expected = self.flops / FLOPS_PER_US[self.kind] + _OPTIMIZER_BYTES * self.parameters / BYTES_PER_US
        wanted = math.ceil(_TURN_US / max(expected, _LAUNCHES_US))
        return max(_LEAST_REPLAYS, min(wanted, _MOST_REPLAYS))

    @property
    def decay(self) -> float | None:
        """The decay of a moving average of the parameters, which the step updates; None if there is none."""
        return None

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The axes of a batch before its columns."""
        return (self.rows,)

    @property
    def objective(self) -> Any:
        """The option `loss` of the training steps."""
        return self.loss

    @property
    def ways(self) -> tuple[str | None, ...]:
        """PyTorch's ways to hold parameters. BF16 steps have two: FP32 under autocast, and BF16. Others have one."""
        return ("autocast", "bf16") if self.kind == "bf16" else (None,)

    def model(self, device: str = "cuda:0") -> Any:
        """Makes a new model of the case."""
        import lt_runtime as lt

        options: dict[str, Any] = {"dtype": self.dtype, "compute": self.compute, "master_weights": self.master}
        return lt.MLP(self.dims, self.activation, device=device, **options)

    def target(self) -> Any:
        """Random labels or targets of a batch, on the GPU."""
        if self.loss == "cross_entropy":
            return labels(self.rows, self.dims[-1])
        return normal((*self.batch_shape, self.dims[-1]), self.dtype)

    def as_json(self) -> dict[str, Any]:
        """The case's fields as entries of its row."""
        facts = {"rows": self.rows, "dims": list(self.dims), "type": self.kind, "activation": self.activation}
        return {**facts, "loss": self.loss, "parameters": self.parameters, "master": self.master}


def _case(preset: str, kind: str, loss: str, *, master: bool = True) -> StepCase:
    shape = presets()["mlps"][preset]
    return StepCase(preset, kind, shape["rows"], tuple(shape["dims"]), shape["activation"], loss, master)


def _small(kind: str, rows: int, *dims: int) -> StepCase:
    """A step of a small net: a classifier in TF32, a regression in BF16."""
    loss = "mse" if kind == "bf16" else "cross_entropy"
    return StepCase(f"{'-'.join(map(str, dims))} batch {rows}", kind, rows, dims, "relu", loss)


def _drawn() -> list[StepCase]:
    """Steps of 2 to 4 layers of any widths up to 640 and 128 to 4,096 rows, which the seed alone decides."""
    generator, found = random.Random(_SEED), list[StepCase]()
    for kind in ("bf16", "tf32") * (_DRAWN // 2):
        hidden = [generator.randint(129, 640) for _ in range(generator.randint(1, 3))]
        dims = generator.randint(16, 800), *hidden, generator.randint(1, 32)
        found.append(_small(kind, generator.randint(128, 4096), *dims))
    return found


CASES: Final = (
    _case("mnist", "tf32", "cross_entropy"),
    _case("mnist", "bf16", "cross_entropy"),
    _case("gpt2-mlp-x2", "bf16", "mse", master=False),
    _case("dlrm-top", "bf16", "mse", master=False),
    _case("llama-width", "bf16", "mse", master=False),
    _small("bf16", 4096, 376, 256, 256, 17),
    _small("tf32", 1000, 200, 512, 512, 512, 5),
    *_drawn(),
)


# Contenders of lt_runtime, and what all contenders share.


class StepContender(NamedTuple):
    """A contender: a training step, ready to be repeated.

    Attributes:
        replays: puts a number of steps on the stream by launches of the graph alone, on the batch in its buffers.
        calls: puts a number of steps on the stream as a script does, with the copy of a batch for each step.
        first_loss: the loss with the initial parameters.
        memory: the most bytes on the GPU that parameters, optimizer, batch and step take at a time; 0 if not known.
        turn: times the replays where events cannot.
    """

    replays: Callable[[int], object]
    calls: Callable[[int], object]
    first_loss: float
    memory: int = 0
    turn: Turn | None = None


Peer = tuple[str, Callable[[], StepContender]]
"""Type: a contender's name, and a function that builds it."""


class Setup:
    """The model, initial parameters, batches and stream that the contenders of a case share.

    Attributes:
        batches: the batches, on the GPU. Each call takes the next batch, and each turn copies the next one into the
            graphs' buffers.
        x, target: the first batch.
        stream: a CuPy stream that can be captured.
        group: the group of processes in which the steps run, if any.
    """

    def __init__(self, case: StepCase, stream: Any, group: Any = None) -> None:
        import lt_runtime as lt

        self.case, self.stream, self.group = case, stream, group
        with repeated_values():
            self.model = case.model()
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
        """The initial parameters, in FP32 if there are masters: weight and bias of the first layer, and so on."""
        initial = {id(array): values for array, values in self._initial}
        arrays = [each.data if each.master is None else each.master for each in self.model.parameters()]
        return [initial[id(array)] for array in arrays]

    def restore(self) -> None:
        """Gives our parameters their initial values; the optimizer keeps its moments."""
        for array, initial in self._initial:
            array.data.copy_from_device(initial.data, initial.nbytes)
        synchronize()

    def step(self) -> Any:
        """A step that is captured at its first call, with the plans that the plan cache holds by then."""
        import lt_runtime as lt

        case = self.case
        options: dict[str, Any] = {"loss": case.objective, "batch_size": case.batch_shape[0], "tune": case.tune}
        options |= {} if self.group is None else {"group": self.group}
        ema = None if case.decay is None else lt.EMA(self.model, case.decay)
        self.made = lt.TrainStep(self.model, self.optimizer, ema=ema, **options)
        return self.made

    def calls(self, step: Any) -> Callable[[int], None]:
        """A function that makes a number of steps over the batches, as a script does."""
        return _training(step, itertools.cycle(self.batches), self.stream)

    @property
    def extra_bytes(self) -> int:
        """Bytes of spare batches and initial parameters, which a real script does not hold."""
        held = itertools.chain((values for _, values in self._initial), *self.batches)
        return sum(array.nbytes for array in held)


def batch(case: StepCase) -> tuple[Any, Any]:
    """Random inputs of a batch, and their labels or targets."""
    return normal((*case.batch_shape, case.dims[0]), case.dtype), case.target()


def contender(setup: Setup) -> StepContender:
    """Contender of lt_runtime: a step that is captured."""
    from benchmarks.internals import launch_of

    setup.restore()
    step, stream = setup.step(), setup.stream
    with stream:
        first_loss = float(step(setup.x, setup.target))
    launch = launch_of(step)

    def replays(count: int) -> None:
        for _ in range(count):
            launch(stream.ptr)

    return StepContender(replays, setup.calls(step), first_loss)


def memory_of(case: StepCase, stream: Any) -> int:
    """Bytes on the GPU of a model, its optimizer and a step that is captured with the plan cache's present entries."""
    import cupy as cp

    from benchmarks.internals import own_training_stream

    gc.collect()  # frees arrays of earlier contenders, which would otherwise be freed during the measurement
    pool = cp.get_default_memory_pool()
    before = pool.used_bytes()
    with own_training_stream() as held:
        setup = Setup(case, stream)
        step = setup.step()
        setup.calls(step)(1)
        found = int(pool.used_bytes() - before - setup.extra_bytes) + held(step)
        del setup, step
    return found


# Functions that measure a case and return its row of the result file.


def measure_case(case: StepCase, options: argparse.Namespace, stream: Any) -> Row:
    """Tunes a step with an empty plan cache, and times all contenders alternately."""
    setup = Setup(case, stream)
    contenders, facts = _ours(setup, keep=options.keep_plans)
    theirs, left_out = built(dict(peers(setup, options, case.ways)))
    calls = "lt", *theirs
    row = timed_row(case, contenders | theirs, options, stream, left_out=left_out, calls=calls, **facts)
    timings = with_fastest(row.timings)
    return replace(row, timings=timings, left_out=left_out | without_any(left_out, timings))


def timed_row(
    case: StepCase,
    contenders: Mapping[str, StepContender],
    options: argparse.Namespace,
    stream: Any,
    *,
    left_out: Mapping[str, str],
    calls: Iterable[str] = (),
    **facts: Any,
) -> Row:
    """Lets contenders take turns by their graphs; returns the row, with their first losses and memory, and `facts`.

    Args:
        left_out: the reasons for contenders that could not be built.
        calls: the contenders that are timed as calls from a script too.
    """
    turns = {name: graph_turn(each, case.replays, stream) for name, each in contenders.items()}
    turns |= {_called(name): timed_calls(contenders[name].calls, case.replays, stream) for name in calls}
    timings = take_turns(turns, options.rounds)
    setting = case.as_json() | {"rounds": options.rounds, "replays": case.replays} | memory_facts(contenders) | facts
    setting |= {"first_loss": {name: round(each.first_loss, 6) for name, each in contenders.items()}}
    return Row(case.name, timings, setting=setting, left_out=left_out, flops=case.flops)


def _called(name: str) -> str:
    """Adds "_call" to a contender's name, before the suffix "_bf16" or "_autocast" if the name has one."""
    base = _base(name)
    return f"{base}_call{name.removeprefix(base)}"


def memory_facts(contenders: Mapping[str, StepContender]) -> dict[str, Any]:
    """The memory of each contender in bytes, and ours as a fraction of PyTorch's least; nothing if ours is unknown."""
    known = {name: each.memory for name, each in contenders.items() if each.memory}
    if "lt" not in known:
        return {}
    theirs = min((size for name, size in known.items() if name.startswith(GRAPH)), default=None)
    ratio = {} if theirs is None else {"memory_ratio": round(known["lt"] / theirs, 4)}
    return {"memory_bytes": known} | ratio


def measure_calls(case: StepCase, options: argparse.Namespace, stream: Any) -> Row:
    """Tunes a step and measures only our public calls."""
    setup = Setup(case, stream)
    with plan_cache(keep=options.keep_plans):
        tuned, step = tune(case), setup.step()
        with stream:
            first_loss = float(step(setup.x, setup.target))
        turns = {"lt_call": timed_calls(setup.calls(step), case.replays, stream)}
        timings = take_turns(turns, options.rounds)
    setting = case.as_json() | {"rounds": options.rounds, "replays": case.replays}
    setting |= tuned.as_json() | {"first_loss": {"lt_call": round(first_loss, 6)}}
    return Row(case.name, timings, "lt_call", setting=setting)


def _ours(setup: Setup, *, keep: bool) -> tuple[dict[str, StepContender], dict[str, Any]]:
    """lt_runtime's step before tuning and after it, as contenders, and facts about both."""
    from benchmarks.internals import forget_plans

    with plan_cache(keep=keep):
        forget_plans(setup.case)
        untuned = contender(setup)
        facts = tune(setup.case).as_json()
        forget_plans(setup.case)
        tuned = contender(setup)._replace(memory=memory_of(setup.case, setup.stream))
        made = {"lt": tuned, "lt_untuned": untuned}
        if not setup.case.master:
            made["lt_master"] = contender(Setup(replace(setup.case, master=True), setup.stream))
    return made, facts


def peers(setup: Setup, options: argparse.Namespace, ways: Sequence[Any], *, called: bool = True) -> Iterator[Peer]:
    """Yields the name of each contender of other libraries, with a function that builds it.

    PyTorch has contenders for each way to hold parameters, eager or by torch.compile. JAX has one.

    Args:
        called: whether the contenders are called as well; otherwise JAX compiles no call.
    """
    for way, (name, mode) in itertools.product(ways, modes(options).items()):
        if mode is None or way in _COMPILED_WAYS:
            suffix = f"_{way}" if len(ways) > 1 else ""
            yield name + suffix, peer("torch_steps", "contender", setup, way, compiled=mode)
    if options.jax:
        yield JAX, peer("jax", "step", setup, called=called)


def graph_turn(contender: StepContender, count: int, stream: Any) -> Turn:
    """Times launches of the graph without the host's other work; each turn reads another batch."""
    if contender.turn is not None:
        return contender.turn

    def lead() -> None:
        contender.calls(1)
        contender.replays(1 + count // _LEAD)

    return timed(partial(contender.replays, count), count, stream, lead)


def timed_calls(calls: Callable[[int], object], count: int, stream: Any) -> Turn:
    """Times one turn by the wall clock, which includes the host's work and the copy of the batch."""

    def turn() -> float:
        stream.synchronize()
        start = time.perf_counter()
        calls(count)
        stream.synchronize()
        return (time.perf_counter() - start) * 1e6 / count

    return turn


def with_fastest(timings: Mapping[str, Timing]) -> dict[str, Timing]:
    """Merges PyTorch's ways to hold the parameters: the faster way's time is kept under their common name."""
    made = dict(timings)
    for name, each in timings.items():
        base = _base(name)
        made[base] = min(made.get(base, each), each)
    return made


def without_any(left_out: Mapping[str, str], timings: Mapping[str, Timing]) -> dict[str, str]:
    """The reasons for contenders without a time.

    PyTorch's two ways to hold parameters count as one contender, which has a time if one of the ways has.
    """
    return {base: why for name, why in left_out.items() if (base := _base(name)) not in timings}


def _base(name: str) -> str:
    return name.removesuffix("_autocast").removesuffix("_bf16")


# Cases in which training reads each batch from the host's memory.


def measure_prefetch(case: StepCase, options: argparse.Namespace, stream: Any) -> Row:
    """Times a tuned step with batches from page-locked memory, through `lt.prefetch`, and with batches on the GPU."""
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
    setting = case.as_json() | {"rounds": options.rounds, "steps": count, "batch_bytes": size}
    return Row(PREFETCH, timings, "gpu_batches", setting=setting)


def pinned(array: Any) -> Any:
    """Copies a GPU array to page-locked memory of the host."""
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


_OTHERS: Final = ("lt_untuned", "lt_master", GRAPH, TORCH_COMPILE, MAX_AUTOTUNE, JAX)


def findings(rows: Sequence[Json]) -> list[Finding]:
    """The suite's summary: times against the tuned step, memory against PyTorch's, prefetched against GPU batches."""
    memory = {row["case"]: row["memory_ratio"] for row in rows if "memory_ratio" in row}
    prefetch = report.speedups(rows, "prefetch", "gpu_batches")
    made = report.against_ours(rows, _OTHERS)
    made += [report.worst("memory of a step / PyTorch's", memory, at_most=True)]
    return [*made, report.worst("prefetch / batches on the GPU", prefetch, at_most=True)]


def _jobs(options: argparse.Namespace) -> dict[str, Job]:
    by_name = {case.name: case for case in CASES}
    measure = measure_calls if options.ours else measure_case
    made: dict[str, Job] = {name: partial(measure, case, options) for name, case in by_name.items()}
    if options.prefetch:
        made[PREFETCH] = partial(measure_prefetch, by_name[PREFETCH.removeprefix("prefetch ")], options)
    return made


_NAMES: Final = [case.name for case in CASES]
SUITE: Final = Suite(rounds=15, order=[*_NAMES, PREFETCH], jobs=_jobs, findings=findings)
