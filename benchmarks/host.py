"""The suite `host`: the host's time for one call.

It is the wall clock over calls made back to back, none of which waits for the GPU. The calls are few enough, and their
operands small enough, that the driver's queue does not fill and only the host's own work counts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from benchmarks.buffers import itemsize, labels, normal
from benchmarks.kernels import GPT2, GPT2_NAME, adamw_step, optimizer_step
from benchmarks.layers import presets
from benchmarks.peers import peer
from benchmarks.report import NO_TARGET, Row, Target
from benchmarks.suite import Job, Suite, matches
from benchmarks.timing import WARM_UP, Call, HostTurn, built, profile, release, repeat, synchronize, take_turns

_QUEUE: Final = 1000  # launches, about, that the driver queues before the host has to wait for the GPU
_PROFILED: Final = 2000  # calls
_ALIGNED: Final = 256  # bytes, the alignment of memory that comes from an allocator
_PLACES: Final = 20_000  # more than there are calls

Builders = Mapping[str, Callable[[], Call]]


@dataclass(frozen=True)
class HostCase:
    """One row.

    Attributes:
        builders: what builds the contenders' calls, by name; all work on the same operands.
        launches: the most that one call of any contender puts on the stream.
        target: what has to be reached.
        most: calls in a turn, at most: fewer where the GPU needs long for each.
    """

    name: str
    builders: Callable[[], Builders]
    launches: int
    target: Target = NO_TARGET
    most: int = 200

    @property
    def calls(self) -> int:
        """How many calls a turn makes without filling the driver's queue."""
        return min(self.most, _QUEUE // self.launches)


# A matrix product, in FP32.


def _matmul(m: int, n: int, k: int) -> Builders:
    import cupy as cp

    import lt_runtime as lt

    a, b, d = at = [normal(shape, "float32") for shape in ((m, k), (k, n), (m, n))]
    return {
        "lt": lambda: partial(lt.matmul, a, b, out=d),
        "lt_bound": lambda: lt.bind(lt.matmul, a, b, out=d),
        "lt_plan": _internal("matmul_plan", *at),
        "cupy": lambda: partial(cp.matmul, a, b, out=d),
        "torch_eager": peer("torch_host", "matmul", *at),
        "torch_linear": peer("torch_host", "matmul_linear", *at),
        "nvmath": peer("nvmath", "matmul", *at),
    }


def _internal(name: str, *arguments: Any) -> Callable[[], Call]:
    """A call of a plan that is made beforehand."""

    def build() -> Call:
        from benchmarks import internals

        call: Call = getattr(internals, name)(*arguments)
        return call

    return build


# A linear layer with GELU, in BF16.


class Layer(NamedTuple):
    """Operands and results of a layer, forward and backward; `z` is its pre-activation."""

    x: Any
    w: Any
    bias: Any
    dy: Any
    y: Any
    z: Any
    dx: Any
    dw: Any
    db: Any


def layer(m: int, n: int, k: int) -> Layer:
    """Random numbers, also in what is to be written."""
    shapes = ((m, k), (n, k), (n,), (m, n), (m, n), (m, n), (m, k), (n, k), (n,))
    return Layer(*(normal(shape, "bfloat16") for shape in shapes))


def linear_forward(at: Layer, *, keeps: bool = True) -> Call:
    """`linear_fwd` with a buffer for y; what it keeps for backward is given a buffer too, or is allocated."""
    import lt_runtime as lt

    buffers = {"out": at.y, "out_z": at.z} if keeps else {"out": at.y}
    return partial(lt.linear_fwd, at.x, at.w, at.bias, activation="gelu", **buffers)


def linear_elsewhere(at: Layer) -> Call:
    """`linear_fwd` with all buffers, and with x at an address that no call has had before."""
    import lt_runtime as lt

    step = _ALIGNED // itemsize("bfloat16")
    memory = normal((at.x.size + _PLACES * step,), "bfloat16")
    places = itertools.cycle([memory[i * step : i * step + at.x.size].reshape(at.x.shape) for i in range(_PLACES)])
    return lambda: lt.linear_fwd(next(places), at.w, at.bias, activation="gelu", out=at.y, out_z=at.z)


def linear_new(at: Layer) -> Call:
    """`linear_fwd` that makes both of its results anew."""
    import lt_runtime as lt

    return partial(lt.linear_fwd, at.x, at.w, at.bias, activation="gelu")


def linear_bound(at: Layer) -> Call:
    """`lt.bind` of `linear_fwd` with all buffers."""
    import lt_runtime as lt

    return lt.bind(lt.linear_fwd, at.x, at.w, at.bias, activation="gelu", out=at.y, out_z=at.z)


def linear_inference(at: Layer) -> Call:
    """`linear`, which keeps nothing."""
    import lt_runtime as lt

    return partial(lt.linear, at.x, at.w, at.bias, activation="gelu", out=at.y)


def linear_both(at: Layer) -> Call:
    """Forward and all gradients, each into a given buffer."""
    import lt_runtime as lt

    def call() -> object:
        _, ctx = lt.linear_fwd(at.x, at.w, at.bias, activation="gelu", out=at.y, out_z=at.z)
        return lt.linear_bwd(at.dy, ctx, out_dx=at.dx, out_dw=at.dw, out_db=at.db)

    return call


def linear_both_new(at: Layer) -> Call:
    """Forward and all gradients, each made anew."""
    import lt_runtime as lt

    def call() -> object:
        _, ctx = lt.linear_fwd(at.x, at.w, at.bias, activation="gelu")
        return lt.linear_bwd(at.dy, ctx)

    return call


def _linear_forward(m: int, n: int, k: int) -> Builders:
    at = layer(m, n, k)
    return {
        "lt": partial(linear_forward, at, keeps=False),
        "lt_out_z": partial(linear_forward, at),
        "lt_elsewhere": partial(linear_elsewhere, at),
        "lt_new": partial(linear_new, at),
        "lt_inference": partial(linear_inference, at),
        "lt_bound": partial(linear_bound, at),
        "lt_plan": _internal("linear_plan", at.x, at.w, at.bias, at.y, at.z),
        "graph_launch": lambda: _internal("bound_launch", linear_bound(at))(),
        "torch_eager": peer("torch_host", "linear_forward", at),
        "torch_eager_recording": peer("torch_host", "linear_forward", at, gradients=True),
        "torch_graph": peer("torch_host", "linear_replay", at),
        "nvmath": peer("nvmath", "linear_forward", at),
    }


def _linear(m: int, n: int, k: int) -> Builders:
    at = layer(m, n, k)
    return {
        "lt": partial(linear_both, at),
        "lt_new": partial(linear_both_new, at),
        "torch_eager": peer("torch_host", "linear_both", at),
        "torch_eager_one_thread": peer("torch_host", "linear_both_one_thread", at),
    }


# An optimizer's step, and a training step.


def _adamw() -> Builders:
    return {"lt": partial(optimizer_step, GPT2), "torch_eager": peer("torch_host", "adamw", GPT2)}


_BATCHES: Final = 4  # that a loop's batches go round in, as those of `lt.prefetch` do


def _train_step() -> Builders:
    preset = presets()["mlps"]["mnist"]
    rows, dims = preset["rows"], tuple(preset["dims"])
    batches = [(normal((rows, dims[0]), "bfloat16"), labels(rows, dims[-1])) for _ in range(_BATCHES)]
    return {
        "lt": partial(_our_train_step, dims, batches[:1]),
        "lt_elsewhere": partial(_our_train_step, dims, batches),
        "graph_launch": lambda: _internal("step_launch", *_step_of(dims, *batches[0]))(),
        "torch_graph": peer("torch_host", "train_step", dims, *batches[0]),
    }


def _our_train_step(dims: tuple[int, ...], batches: list[tuple[Any, Any]]) -> Call:
    """The launch of a graph that copies the batch into its buffers; where the batch lies elsewhere, it is told so."""
    step, *_ = _step_of(dims, *batches[0])
    if len(batches) == 1:
        return partial(step, *batches[0])
    turns = itertools.cycle(batches)
    return lambda: step(*next(turns))


def _step_of(dims: tuple[int, ...], x: Any, targets: Any) -> tuple[Any, Any, Any]:
    """A training step, and a batch for it."""
    import lt_runtime as lt

    model = lt.MLP(dims, activation="relu", dtype="bfloat16", device="cuda")
    optimizer = lt.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    return lt.TrainStep(model, optimizer, loss="cross_entropy", batch_size=len(x)), x, targets


def _ranges() -> Builders:
    """A thousand ranges that nobody hears: one that is there, and one that is asked for by name each time.

    The peer is a context of Python's that does nothing.
    """
    import lt_runtime as lt

    made, nothing = lt.range("benchmark"), contextlib.nullcontext()

    def silent() -> None:
        for _ in itertools.repeat(None, _RANGES):
            with made:
                pass

    def by_name() -> None:
        for name in itertools.repeat("benchmark", _RANGES):
            with lt.range(name):
                pass

    def null() -> None:
        for _ in itertools.repeat(None, _RANGES):
            with nothing:
                pass

    return {"lt": lambda: silent, "lt_by_name": lambda: by_name, "nullcontext": lambda: null}


_RANGES: Final = 1000
_SMALL: Final = (64, 64, 64)
_MNIST: Final = (256, 512, 784)
_FORWARD: Final = Target(ratio={"torch_eager": 1.4, "nvmath": 3.5})
_AUTOGRAD: Final = Target(ratio={"torch_eager": 3.0})
_ADAMW: Final = adamw_step(GPT2_NAME, GPT2, "float32").name

CASES: Final = (
    HostCase("matmul FP32 64×64×64, out=", partial(_matmul, *_SMALL), 2),
    HostCase("linear_fwd GELU BF16 64×64×64, out=", partial(_linear_forward, *_SMALL), 4, _FORWARD),
    HostCase("linear_fwd GELU BF16 256×512×784, out=", partial(_linear_forward, *_MNIST), 4, _FORWARD),
    HostCase("linear_fwd + linear_bwd GELU BF16 64×64×64, eager", partial(_linear, *_SMALL), 12, _AUTOGRAD),
    HostCase("linear_fwd + linear_bwd GELU BF16 256×512×784, eager", partial(_linear, *_MNIST), 12, _AUTOGRAD),
    HostCase(_ADAMW, _adamw, 40, Target(ratio={"torch_eager": 20.0}), most=10),
    HostCase("a thousand ranges that nobody hears", _ranges, 1),
    HostCase("TrainStep call, mnist MLP BF16, batch 256", _train_step, 50, most=20),
)


def called(build: Callable[[], Call]) -> Callable[[], Call]:
    """Builds a call and makes it once, so that one that fails is left out before it is measured."""

    def made() -> Call:
        call = build()
        call()
        synchronize()
        return call

    return made


def measure(case: HostCase, options: argparse.Namespace, _: Any = None) -> Row:
    """One row."""
    builders = case.builders()  # Kept until the end: plans know only the addresses of their operands.
    wanted = {name: each for name, each in builders.items() if not options.ours or is_public(name)}
    calls, left_out = built({name: called(build) for name, build in wanted.items()})
    turns = {name: HostTurn(call, case.calls, synchronize) for name, call in calls.items()}
    timings = take_turns(turns, options.rounds)
    until_done = {name: round(statistics.median(turn.until_done[WARM_UP:]), 4) for name, turn in turns.items()}
    setting = {"calls": case.calls, "rounds": options.rounds, "until_done_us": until_done}
    return Row(case.name, timings, target=case.target, setting=setting, left_out=left_out)


def is_public(name: str) -> bool:
    """Whether a contender is a public call of ours."""
    return name.startswith("lt") and name != "lt_plan"


def print_profiles(pattern: str | None) -> None:
    """Prints where Python spends the time of our calls."""
    for case in CASES:
        if matches(pattern, case.name):
            call = case.builders()["lt"]()
            repeat(call, case.calls)
            print(f"{case.name}: {profile(call, case.calls, -(-_PROFILED // case.calls), synchronize)}\n")
            release()


def _jobs(options: argparse.Namespace) -> dict[str, Job]:
    return {case.name: partial(measure, case, options) for case in CASES}


SUITE: Final = Suite(rounds=41, order=[case.name for case in CASES], jobs=_jobs)
