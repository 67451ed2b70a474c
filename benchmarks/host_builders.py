"""Who takes part in each case of the host's suite; and the row that comes of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import cupy as cp

from benchmarks import host_lt
from benchmarks.host_cases import ADAMW, HostCase, train_step_sizes
from benchmarks.host_timing import Call, HostTurn
from benchmarks.report import Row
from benchmarks.timing import WARM_UP, take_turns

Builders = Mapping[str, Callable[[], Call]]


def _peer(library: str, name: str, *arguments: Any, **more: Any) -> Callable[[], Call]:
    """A call of another library's, which is imported when the call is built."""
    return lambda: getattr(import_module(f"benchmarks.host_{library}"), name)(*arguments, **more)


def _matmul(case: HostCase) -> Builders:
    a, b, d = at = host_lt.product(*case.shape)
    return {
        "lt": partial(host_lt.matmul, *at),
        "lt_bound": partial(host_lt.matmul_bound, *at),
        "lt_plan": partial(host_lt.matmul_plan, *at),
        "cupy": lambda: partial(cp.matmul, a, b, out=d),
        "torch_eager": _peer("torch", "matmul", *at),
        "torch_linear": _peer("torch", "matmul_linear", *at),
        "nvmath": _peer("nvmath", "matmul", *at),
    }


def _linear_forward(case: HostCase) -> Builders:
    at = host_lt.layer(*case.shape)
    return {
        "lt": partial(host_lt.linear_forward, at),
        "lt_out_z": partial(host_lt.linear_forward_buffers, at),
        "lt_elsewhere": partial(host_lt.linear_forward_elsewhere, at),
        "lt_inference": partial(host_lt.linear_inference, at),
        "lt_bound": partial(host_lt.linear_bound, at),
        "lt_plan": partial(host_lt.linear_plan, at),
        "torch_eager": _peer("torch", "linear_forward", at),
        "torch_eager_recording": _peer("torch", "linear_forward", at, gradients=True),
        "nvmath": _peer("nvmath", "linear_forward", at),
    }


def _linear(case: HostCase) -> Builders:
    at = host_lt.layer(*case.shape)
    return {
        "lt": partial(host_lt.linear_both, at),
        "torch_eager": _peer("torch", "linear_both", at),
        "torch_eager_one_thread": _peer("torch", "linear_both_one_thread", at),
    }


def _adamw(_: HostCase) -> Builders:
    return {"lt": partial(host_lt.adamw, ADAMW), "torch_eager": _peer("torch", "adamw", ADAMW)}


def _train_step(_: HostCase) -> Builders:
    sizes = train_step_sizes()
    at = host_lt.batch(sizes)
    return {
        "lt": partial(host_lt.train_step, sizes, *at),
        "torch_graph": _peer("torch", "train_step", sizes, *at),
    }


_KINDS: Mapping[str, Callable[[HostCase], Builders]] = {
    "matmul": _matmul,
    "linear_fwd": _linear_forward,
    "linear": _linear,
    "adamw": _adamw,
    "train_step": _train_step,
}


def builders(case: HostCase) -> Builders:
    """What builds the contenders' calls, by name; all work on the same operands."""
    return _KINDS[case.kind](case)


def synchronize() -> None:
    """Waits for the GPU, whoever gave it work."""
    cp.cuda.Device().synchronize()


def build(made: Builders) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls, each done once; those that cannot be built or called are left out, and it is told why."""
    calls, left_out = {}, {}
    for name, builder in made.items():
        try:
            call = builder()
            call()
            synchronize()
        except Exception as error:
            left_out[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            continue
        calls[name] = call
    return calls, left_out


def measure(case: HostCase, rounds: int) -> Row:
    """One row."""
    made = builders(case)  # kept until the end: plans know no more than their operands' addresses
    calls, left_out = build(made)
    turns = {name: HostTurn(call, case.calls, synchronize) for name, call in calls.items()}
    timings = take_turns(turns, rounds)
    until_done = {name: round(statistics.median(turn.until_done[WARM_UP:]), 4) for name, turn in turns.items()}
    setting = {"calls": case.calls, "rounds": rounds, "until_done_us": until_done}
    return Row(case.name, timings, "lt", target=case.target, setting=setting, left_out=left_out)
