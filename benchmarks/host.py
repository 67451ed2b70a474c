"""The suite `host`: how long one call occupies the host (Python and driver), without waiting for the GPU.

The time is taken by the wall clock over calls made back to back, none of which waits for the GPU. The calls are few
enough, and their operands small enough, that the driver's queue does not fill and only the host's own work counts.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from benchmarks.buffers import itemsize, labels, normal
from benchmarks.kernels import GPT2, GPT2_NAME, adamw_step, optimizer_step
from benchmarks.layers import presets
from benchmarks.peers import peer
from benchmarks.report import Row
from benchmarks.suite import Suite
from benchmarks.timing import Call, HostTurn, built, synchronize, take_turns

_QUEUE: Final = 1000  # The driver queues about this many launches before the host has to wait for the GPU.
_ALIGNED: Final = 256  # Memory that comes from an allocator begins at a multiple of this many bytes.
_PLACES: Final = 20_000  # An operand has this many addresses in turn, more than timed calls, so that none is repeated.
_BATCHES: Final = 4  # the number of buffers through which `lt.prefetch` rotates

Builders = Mapping[str, Callable[[], Call]]


@contextlib.contextmanager
def _another_thread() -> Iterator[None]:
    """Keeps a second Python thread alive, so that the package captures no repeated call."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@dataclass(frozen=True)
class HostCase:
    """One row of the suite: a call, as the package and other libraries make it.

    Attributes:
        builders: function that makes operands; returns, by contender, a function that builds a call on these operands.
        launches: the most launches that one call of any contender puts on the stream.
        most: the most calls in a turn; small where the GPU needs long for each call.
        context: a context manager that is entered while the row is measured.
    """

    name: str
    builders: Callable[[], Builders]
    launches: int
    most: int = 200
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    @property
    def calls(self) -> int:
        """The number of calls in a turn: so few that they do not fill the driver's queue."""
        return min(self.most, _QUEUE // self.launches)


# Contenders for a matrix product, in FP32: functions that build the calls to be timed.


def _matmul(m: int, n: int, k: int) -> Builders:
    import cupy as cp

    import lt_runtime as lt

    a, b, d = at = [normal(shape, "float32") for shape in ((m, k), (k, n), (m, n))]
    return {
        "lt": lambda: partial(lt.matmul, a, b, out=d),
        "lt_bound": lambda: lt.bind(lt.matmul, a, b, out=d),
        "cupy": lambda: partial(cp.matmul, a, b, out=d),
        "torch_eager": peer("torch_host", "matmul", *at),
        "torch_linear": peer("torch_host", "matmul_linear", *at),
        "torch_graph": peer("torch_host", "replayed", "matmul", *at),
    }


# Contenders for a linear layer with GELU, in BF16: functions that build the calls to be timed.


Layer = collections.namedtuple("Layer", "x w bias dy y z dx dw db")
"""Operands and results of a layer, forward and backward; `z` is its pre-activation."""


def layer(m: int, n: int, k: int) -> Layer:
    """Fills operands and results with random numbers."""
    shapes = ((m, k), (n, k), (n,), (m, n), (m, n), (m, n), (m, k), (n, k), (n,))
    return Layer(*(normal(shape, "bfloat16") for shape in shapes))


def forward(at: Layer, *results: str, operation: str = "linear_fwd") -> Call:
    """Builds a call of `operation`, which writes the named results ("y", "z") into the layer's buffers."""
    import lt_runtime as lt

    buffers = {name: getattr(at, result) for result, name in (("y", "out"), ("z", "out_z")) if result in results}
    return partial(getattr(lt, operation), at.x, at.w, at.bias, activation="gelu", **buffers)


def bound(at: Layer) -> Call:
    """A call that was bound by `lt.bind`: `linear_fwd` with a buffer for every result."""
    import lt_runtime as lt

    call: Any = forward(at, "y", "z")
    return lt.bind(call.func, *call.args, **call.keywords)


def forward_elsewhere(at: Layer) -> Call:
    """A call of `linear_fwd` with a buffer for every result, and with x at a new address each time."""
    import lt_runtime as lt

    step = _ALIGNED // itemsize("bfloat16")
    memory = normal((at.x.size + _PLACES * step,), "bfloat16")
    places = itertools.cycle([memory[i * step : i * step + at.x.size].reshape(at.x.shape) for i in range(_PLACES)])
    return lambda: lt.linear_fwd(next(places), at.w, at.bias, activation="gelu", out=at.y, out_z=at.z)


def both(at: Layer, *, into_buffers: bool = True) -> Call:
    """A call of forward and of backward with all gradients, into the layer's buffers or into new arrays."""
    import lt_runtime as lt

    call = forward(at, "y", "z") if into_buffers else forward(at)
    buffers = {"out_dx": at.dx, "out_dw": at.dw, "out_db": at.db} if into_buffers else {}

    def forward_and_backward() -> object:
        _, ctx = call()  # type: ignore[misc]
        return lt.linear_bwd(at.dy, ctx, **buffers)

    return forward_and_backward


def _forward(m: int, n: int, k: int) -> Builders:
    at = layer(m, n, k)
    return {
        "lt": partial(forward, at, "y"),
        "lt_out_z": partial(forward, at, "y", "z"),
        "lt_elsewhere": partial(forward_elsewhere, at),
        "lt_new": partial(forward, at),
        "lt_inference": partial(forward, at, "y", operation="linear"),
        "lt_bound": partial(bound, at),
        "torch_eager": peer("torch_host", "linear_forward", at),
        "torch_eager_recording": peer("torch_host", "linear_forward", at, gradients=True),
        "torch_graph": peer("torch_host", "replayed", "linear_forward", at),
    }


def _uncaptured(m: int, n: int, k: int) -> Builders:
    every = _forward(m, n, k)
    return {"lt": every["lt_out_z"], "torch_eager_recording": every["torch_eager_recording"]}


def _both(m: int, n: int, k: int) -> Builders:
    at = layer(m, n, k)
    return {
        "lt": partial(both, at),
        "lt_new": partial(both, at, into_buffers=False),
        "torch_eager": peer("torch_host", "linear_both", at),
        "torch_eager_one_thread": peer("torch_host", "linear_both_one_thread", at),
    }


# Contenders for an optimizer's step and a training step: functions that build the calls to be timed.


def _adamw() -> Builders:
    return {"lt": partial(optimizer_step, GPT2), "torch_eager": peer("torch_host", "adamw", GPT2)}


def _train_step() -> Builders:
    preset = presets()["mlps"]["mnist"]
    rows, dims = preset["rows"], tuple(preset["dims"])
    batches = [(normal((rows, dims[0]), "bfloat16"), labels(rows, dims[-1])) for _ in range(_BATCHES)]
    return {
        "lt": partial(_our_train_step, dims, batches[:1]),
        "lt_elsewhere": partial(_our_train_step, dims, batches),
        "torch_graph": peer("torch_host", "train_step", dims, *batches[0]),
    }


def _our_train_step(dims: tuple[int, ...], batches: list[tuple[Any, Any]]) -> Call:
    """Launches a graph that copies the batch into its buffers; a batch at another address is announced first."""
    import lt_runtime as lt

    model = lt.MLP(dims, activation="relu", dtype="bfloat16", device="cuda")
    optimizer = lt.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    step = lt.TrainStep(model, optimizer, loss="cross_entropy", batch_size=len(batches[0][0]))
    if len(batches) == 1:
        return partial(step, *batches[0])
    turns = itertools.cycle(batches)
    return lambda: step(*next(turns))


_SMALL: Final = (64, 64, 64)
_MNIST: Final = (256, 512, 784)
_ADAMW: Final = adamw_step(GPT2_NAME, GPT2, "float32").name

CASES: Final = (
    HostCase("matmul FP32 64×64×64, out=", partial(_matmul, *_SMALL), 2),
    HostCase("linear_fwd GELU BF16 64×64×64, out=", partial(_forward, *_SMALL), 4),
    HostCase("linear_fwd GELU BF16 256×512×784, out=", partial(_forward, *_MNIST), 4),
    HostCase(
        "linear_fwd GELU BF16 256×512×784, out= out_z=, beside another thread",
        partial(_uncaptured, *_MNIST),
        4,
        context=_another_thread,
    ),
    HostCase("linear_fwd + linear_bwd GELU BF16 64×64×64, eager", partial(_both, *_SMALL), 12),
    HostCase("linear_fwd + linear_bwd GELU BF16 256×512×784, eager", partial(_both, *_MNIST), 12),
    HostCase(_ADAMW, _adamw, 40, most=10),
    HostCase("TrainStep call, mnist MLP BF16, batch 256", _train_step, 50, most=20),
)


def called(build: Callable[[], Call]) -> Callable[[], Call]:
    """Builds a call and makes it once, so that a call that fails is left out before it is measured."""

    def made() -> Call:
        call = build()
        call()
        synchronize()
        return call

    return made


def measure(case: HostCase, options: argparse.Namespace, _: Any = None) -> Row:
    """Measures one row of the suite `host`."""
    builders = case.builders()  # Kept until the end, because bound calls hold only the addresses of their operands.
    wanted = {name: each for name, each in builders.items() if not options.ours or name.startswith("lt")}
    with case.context():
        calls, left_out = built({name: called(build) for name, build in wanted.items()})
        turns = {name: HostTurn(call, case.calls, synchronize) for name, call in calls.items()}
        timings = take_turns(turns, options.rounds)
    setting = {"calls": case.calls, "rounds": options.rounds}
    return Row(case.name, timings, setting=setting, left_out=left_out)


SUITE: Final = Suite.of(measure, CASES, rounds=41)
