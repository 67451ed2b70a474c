"""One training step: tuned anew, then measured side by side with everyone who does the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, Final, NamedTuple

import cupy as cp

from benchmarks import step_lt
from benchmarks.cases import Target
from benchmarks.fresh import fresh_plans
from benchmarks.report import Row
from benchmarks.step_cases import StepCase
from benchmarks.step_kernels import kernel_times
from benchmarks.step_lt import Contender, Setup
from benchmarks.step_summary import with_fastest, without_any
from benchmarks.timing import take_turns
from lt_runtime.store.entries import now

_MODES: Final = {"torch_compile": "default", "torch_max_autotune": "max-autotune-no-cudagraphs"}
# Compiling takes a minute and more. Autocast is left out of it: it was 16 % to 27 % slower than BF16 without it.
_COMPILED_WAYS: Final = (None, "bf16")
_GRAPH: Final = "torch_graph"
_PROFILED: Final = ("lt", _GRAPH, f"{_GRAPH}_bf16")
_LEAD: Final = 8  # a turn's replays come after an eighth as many, during which the host gets ahead

Turns = dict[str, Callable[[], float]]


class Built(NamedTuple):
    """Contenders by name, and why there are no others."""

    contenders: dict[str, Contender]
    left_out: dict[str, str]


def measure_case(
    case: StepCase, rounds: int, stream: Any, *, compiled: Sequence[str] = (), compile_s: float = 0.0
) -> Row:
    """Tunes a step in a fresh plan cache and lets all contenders take turns.

    Args:
        stream: a CuPy stream that can be captured.
        compiled: contenders by torch.compile, "torch_compile" and "torch_max_autotune".
        compile_s: seconds that each of them has.
    """
    setup = Setup(case, stream)
    ours, facts = _ours(setup)
    theirs = _build(_torch(setup, compiled, compile_s))
    contenders = ours | theirs.contenders
    timings = with_fastest(take_turns(_turns(contenders, case.replays, stream), rounds))
    setting = case.as_json() | {"when": now(), "rounds": rounds, "replays": case.replays} | facts
    setting |= {"nodes": {name: each.nodes for name, each in contenders.items()}}
    setting |= {"kernel_us": {name: _kernel_times(each) for name, each in contenders.items() if name in _PROFILED}}
    setting |= {"first_loss": {name: round(each.first_loss, 6) for name, each in contenders.items()}}
    target = Target(ratio={"torch_max_autotune": case.least})
    left_out = theirs.left_out | without_any(theirs.left_out, timings)
    return Row(case.name, timings, "lt", target=target, setting=setting, left_out=left_out)


def _kernel_times(contender: Contender) -> dict[str, Any]:
    """What its kernels take, or why that is not known: a profiler may be missing, or not allowed."""
    try:
        return kernel_times(contender.replays)
    except Exception as error:
        return {"left_out": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}


def _ours(setup: Setup) -> tuple[dict[str, Contender], dict[str, Any]]:
    """Before tuning and after."""
    with fresh_plans() as directory:
        step_lt.forget_plans(setup.case)
        untuned = step_lt.contender(setup)
        facts = step_lt.tune(setup.case)
        tuned, unmeasured = step_lt.tuned_contender(setup, directory)
        made = {"lt": tuned, "lt_untuned": untuned}
        if not setup.case.master:
            made["lt_master"] = step_lt.contender(Setup(replace(setup.case, master=True), setup.stream))
    return made, facts | {"unmeasured_problems": unmeasured}


def _torch(setup: Setup, compiled: Sequence[str], compile_s: float) -> Iterator[tuple[str, Callable[[], Contender]]]:
    """PyTorch's contenders by name; it is imported when they are built."""

    def build(*arguments: Any) -> Contender:
        made: Contender = import_module("benchmarks.step_torch").contender(setup, *arguments)
        return made

    for way in setup.case.ways:
        yield _named(_GRAPH, way), partial(build, way)
        for name in compiled if way in _COMPILED_WAYS else ():
            yield _named(name, way), partial(build, way, _MODES[name], compile_s)


def _named(name: str, way: str | None) -> str:
    return name if way is None else f"{name}_{way}"


def _build(builders: Iterator[tuple[str, Callable[[], Contender]]]) -> Built:
    """Those that can be built and captured; one that cannot costs no more than its figure."""
    built = Built({}, {})
    for name, build in builders:
        try:
            built.contenders[name] = build()
        except Exception as error:
            built.left_out[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return built


def _turns(contenders: Mapping[str, Contender], count: int, stream: Any) -> Turns:
    """Graphs alone, and of ours and PyTorch's own kernels also calls as a script makes them."""
    turns = {name: timed_replays(each, count, stream) for name, each in contenders.items()}
    for name, each in contenders.items():
        base = name if name == "lt" else _GRAPH if name.startswith(_GRAPH) else None
        if base is not None:
            turns[name.replace(base, f"{base}_call")] = timed_calls(each.calls, count, stream)
    return turns


def timed_replays(contender: Contender, count: int, stream: Any) -> Callable[[], float]:
    """A turn: microseconds of the GPU for a step, while the host is ahead of it."""
    start, end = cp.cuda.Event(), cp.cuda.Event()

    def turn() -> float:
        contender.replays(1 + count // _LEAD)
        start.record(stream)
        contender.replays(count)
        end.record(stream)
        end.synchronize()
        return float(cp.cuda.get_elapsed_time(start, end)) * 1e3 / count

    return turn


def timed_calls(calls: Callable[[int], object], count: int, stream: Any) -> Callable[[], float]:
    """A turn: microseconds of the clock on the wall for a step, the host's work and the batch's copy included."""

    def turn() -> float:
        stream.synchronize()
        start = time.perf_counter()
        calls(count)
        stream.synchronize()
        return (time.perf_counter() - start) * 1e6 / count

    return turn
