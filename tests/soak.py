"""A soak test: random public calls from several threads and streams: `python -m tests.soak [--minutes N] [--threads
N]`.

Every result is compared with the reference. Operations are drawn with a limited number of seeds, so that after half of
the time all of them have run; from then on neither the GPU's memory nor the process's may grow. It needs CuPy, and uses
a plan cache of its own. A fault is printed with the command that repeats it: `python -m tests.soak --only OPERATION
--seed N --threads 1`.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.support import soak_operations
from tests.support.soak_operations import ALONE, OPERATIONS, WEIGHTS

_SEEDS: Final = 64  # number of seeds of each operation
_ROUNDS: Final = 40
_GPU_GROWTH: Final = 64 << 20
"""Bytes by which the GPU's memory may grow: the driver allocates blocks of several MiB."""
_HOST_GROWTH: Final = 256 << 20


@dataclass
class Report:
    """Results of a soak.

    Attributes:
        calls: number of runs of each operation.
        comparisons: number of results that were compared with the reference.
        faults: messages about failures, each with the operation and its seed.
        gpu_bytes, host_bytes: memory in use after each round.
    """

    calls: Counter[str] = field(default_factory=Counter)
    comparisons: int = 0
    faults: list[str] = field(default_factory=list)
    gpu_bytes: list[int] = field(default_factory=list)
    host_bytes: list[int] = field(default_factory=list)

    def check_growth(self) -> None:
        """Adds a fault if memory grew from the third quarter of the rounds to the last."""
        for name, values, most in (("GPU", self.gpu_bytes, _GPU_GROWTH), ("host", self.host_bytes, _HOST_GROWTH)):
            before, after = _quarter(values, 2), _quarter(values, 3)
            if after - before > most:
                self.faults.append(f"the {name}'s memory grew from {_mib(before)} to {_mib(after)}")

    def summary(self, seed: int, seconds: float) -> str:
        """The report in one line."""
        quarters = [
            [_mib(_quarter(values, number)) for number in (0, 2, 3)] for values in (self.gpu_bytes, self.host_bytes)
        ]
        gpu, host = (" -> ".join(each) for each in quarters)
        return (
            f"{'FAILED' if self.faults else 'passed'}: seed {seed}, {seconds:.0f} s, {self.calls.total()} operations, "
            f"{self.comparisons} comparisons, {len(self.faults)} faults; in the first, third and last quarter the GPU "
            f"had {gpu} in use, the process {host}"
        )


def _quarter(values: Sequence[int], number: int) -> int:
    """The minimum of one quarter of a series; the series is in the order of time."""
    size = max(1, len(values) // 4)
    return min(values[number * size : (number + 1) * size] or values[-1:] or [0])


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"


class Soak:
    """Threads that draw operations in rounds, each with streams of its own.

    Args:
        gpus: a `RealGpu` for each thread.
        names: operations to draw from.
        seed: seed of the draws, or of the operation itself with `only_seed`.
        only_seed: whether each draw is the same, to repeat a fault.
    """

    def __init__(self, gpus: Sequence[Any], names: Sequence[str], seed: int, *, only_seed: bool = False) -> None:
        self.report, self._gpus = Report(), gpus
        self._names = [name for name in names if name not in ALONE]
        self._alone = [name for name in names if name in ALONE]
        self._weights = [WEIGHTS.get(name, 1) for name in self._names]
        self._seed, self._only_seed = seed, only_seed
        self._random = [random.Random(f"{seed} {number}") for number in range(len(gpus))]
        self._lock = threading.Lock()

    def run(self, seconds: float) -> None:
        """Runs rounds for a number of seconds, or until there is a fault."""
        end = time.monotonic() + seconds
        while not self.report.faults and time.monotonic() < end:
            self._round(min(end, time.monotonic() + seconds / _ROUNDS))
        if not self._only_seed:
            self.report.check_growth()

    def _round(self, end: float) -> None:
        if self._names:
            self._work_together(end)
        for name in self._alone:
            self._make(name, 0)
        gc.collect()
        self._gpus[0].settle()
        _empty(self._gpus[0].directory)
        self.report.gpu_bytes.append(self._gpus[0].memory_used())
        self.report.host_bytes.append(_resident())

    def _work_together(self, end: float) -> None:
        threads = [threading.Thread(target=self._work, args=(number, end)) for number in range(1, len(self._gpus))]
        for thread in threads:
            thread.start()
        self._work(0, end)
        for thread in threads:
            thread.join()

    def _work(self, worker: int, end: float) -> None:
        while not self.report.faults:
            (name,) = self._random[worker].choices(self._names, self._weights)
            self._make(name, worker)
            if time.monotonic() > end:
                return

    def _make(self, name: str, worker: int) -> None:
        """Runs an operation with a drawn seed, and adds the outcome to the report."""
        drawn = self._seed * _SEEDS + self._random[worker].randrange(_SEEDS)
        seed = self._seed if self._only_seed else drawn
        try:
            compared = soak_operations.run(name, seed, self._gpus[worker])
        except Exception:
            fault = f"--only {name!r} --seed {seed} (worker {worker})\n{traceback.format_exc()}"
            with self._lock:
                self.report.faults.append(fault)
            return
        with self._lock:
            self.report.calls[name] += 1
            self.report.comparisons += compared


def _empty(directory: Path) -> None:
    for each in directory.iterdir():
        if each.name.startswith("tmp"):
            shutil.rmtree(each)


def _resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def soak(make_gpu: Callable[[], Any], options: argparse.Namespace) -> int:
    """Runs a soak and prints its report; returns the exit status.

    Args:
        make_gpu: makes a `RealGpu` for one thread.
        options: the command's options, as `parse` returns them.
    """
    names = [options.only] if options.only else [*OPERATIONS]
    program = Soak([make_gpu() for _ in range(options.threads)], names, options.seed, only_seed=bool(options.only))
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program.run(60 * options.minutes)
    for name, count in sorted(program.report.calls.items()):
        print(f"{name:16} {count:8}")
    for fault in program.report.faults:
        print(f"FAULT: {fault}")
    print(program.report.summary(options.seed, time.monotonic() - started))
    return 1 if program.report.faults else 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the program's options."""
    parser = argparse.ArgumentParser(prog="tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--only", choices=OPERATIONS, help="one operation, drawn with --seed each time")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a soak on the current GPU."""
    options = parse(argv)
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {"LT_RUNTIME_CACHE_DIR": str(Path(directory, "cache")), "LT_RUNTIME_TUNE": "off"}
        from tests.support.real_gpu import RealGpu

        return soak(lambda: RealGpu(Path(directory)), options)


if __name__ == "__main__":
    sys.exit(main())
