"""The suite `scaling`: training steps of a group of processes, each on a GPU of its own, against the step alone.

A group of one process sums its gradients through NCCL too. With two GPUs, the suite starts two processes by torchrun.
They time their steps alone, at the same time, and together, in turns; and the sums of the gradients without a step. The
result file also has predictions for more GPUs, see `scaling_cost`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar, Final

from benchmarks import report, steps
from benchmarks.report import Finding, Json, Row
from benchmarks.steps import Setup, StepCase, contender, graph_turn
from benchmarks.suite import CACHE_VARIABLE, Job, Suite, last_line, plan_cache, run_folder
from benchmarks.timing import Timing, take_turns

ALONE, PAIR, SUMS = "lt_one_of_two", "lt_two", "lt_sums"
_PRESETS: Final = ("gpt2-mlp-x2", "llama-width", "dlrm-top")


class GroupCase(StepCase):
    """A case of the suite `steps` on the GPU of this process; its plans are tuned at the first step."""

    tune: ClassVar[bool | None] = True

    def model(self, device: str = "auto") -> Any:
        """Makes a new model of the case."""
        return super().model(device)


_BF16: Final = {case.preset: case for case in steps.CASES if case.kind == "bf16"}
CASES: Final = {_BF16[preset].name: GroupCase(**vars(_BF16[preset])) for preset in _PRESETS}


def measure(case: StepCase, options: argparse.Namespace, plans: str, stream: Any) -> Row:
    """Times a step without a group and in a group of one process; with two GPUs also adds the times of `pairs`."""
    import cupy as cp

    import lt_runtime as lt

    left_out: dict[str, str] = {}
    with plan_cache(plans):
        turns = _turns(case, stream, lt.group(), {"lt": False, "lt_group_of_one": True})
        timings, setting = take_turns(turns, options.rounds), case.as_json() | {"rounds": options.rounds}
    if cp.cuda.runtime.getDeviceCount() < 2:
        left_out[PAIR] = "this machine has one GPU"
        return Row(case.name, timings, setting=setting, left_out=left_out)
    try:
        found = pairs(options.rounds, plans)[case.name]
    except Exception as error:
        left_out[PAIR] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    else:
        timings |= {name: Timing(*each) for name, each in found.items()}
        setting |= _facts(case, found)
    return Row(case.name, timings, setting=setting, left_out=left_out)


def _turns(case: StepCase, stream: Any, group: Any, which: Mapping[str, bool]) -> dict[str, Any]:
    """The function of each contender, by name, that runs and times its steps.

    Args:
        which: for each contender, whether the group sums the gradients of its steps.
    """
    # The group's step comes first, because its tuning serves the steps without a group in all processes.
    order = sorted(which, key=which.__getitem__, reverse=True)
    setups = {name: Setup(case, stream, group if which[name] else None) for name in order}
    made = {name: contender(setup) for name, setup in setups.items()}
    turns = {name: graph_turn(made[name], case.replays, stream) for name in which}
    if group.size > 1:
        from benchmarks.internals import sums_of

        turns[SUMS] = sums_of(setups[PAIR].made, stream)
    return turns


def _facts(case: StepCase, found: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """For two GPUs: samples a second over those of one, the share of the sums that backward hides, gradients' bytes."""
    alone, together, sums = (found[name][0] for name in (ALONE, PAIR, SUMS))
    hidden = round(1 - max(0.0, together - alone) / sums, 4)
    return {"samples_ratio": round(2 * alone / together, 4), "hidden": hidden, "gradient_bytes": 2 * case.parameters}


@cache
def pairs(rounds: int, plans: str) -> dict[str, Any]:
    """Starts two processes, which measure all cases; returns medians and spreads by case and contender."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command = [sys.executable, *launcher, "--master-port", port, "-m", "benchmarks.scaling", str(rounds)]
    return last_line(command, os.environ | {CACHE_VARIABLE: plans})


def member(rounds: int) -> None:
    """Measures all cases as one of two processes; the first one prints the times."""
    import cupy as cp

    import lt_runtime as lt

    group, found = lt.group(), {}
    cp.cuda.Device(group.local_rank).use()
    stream = cp.cuda.Stream(non_blocking=True)
    for name, case in CASES.items():
        turns = _turns(case, stream, group, {ALONE: False, PAIR: True})
        found[name] = take_turns(turns, rounds)
        group.barrier("the next case")
    if group.rank == 0:
        print(json.dumps(found), flush=True)
    group.barrier("the end")


def findings(rows: Sequence[Json]) -> list[Finding]:
    """A group of one against the step alone, and two GPUs against one."""
    alone = {case: ratio for case, ratio in report.speedups(rows, "lt_group_of_one").items() if "dlrm" not in case}
    two = {row["case"]: row["samples_ratio"] for row in rows if "samples_ratio" in row}
    wanted = {case: ratio for case, ratio in two.items() if "dlrm" not in case}
    hidden = {row["case"]: row["hidden"] for row in rows if "hidden" in row}
    return [
        report.worst("group of one / alone", alone, 1.03, at_most=True),
        report.worst("samples of two GPUs / of one", wanted, 1.9),
        report.worst("samples of two GPUs / of one, also of the smallest net", two),
        report.worst("share of the sums that backward hides", hidden),
    ]


def facts(rows: Sequence[Json]) -> Json:
    """Predictions for more GPUs."""
    from benchmarks.scaling_cost import predictions

    return predictions(rows)


def _jobs(options: argparse.Namespace) -> dict[str, Job]:
    plans = run_folder()
    return {name: partial(measure, case, options, plans) for name, case in CASES.items()}


SUITE: Final = Suite(rounds=9, order=[*CASES], jobs=_jobs, findings=findings, facts=facts)

if __name__ == "__main__":
    member(int(sys.argv[1]))
