"""A soak: random public calls over threads and streams for minutes: `python -m tests.soak [--minutes N] [--threads N]`.

Every result is compared with the reference. Operations come from a limited number of seeds, so that all of them have
been met after the first half; from then on neither the GPU's nor the process's memory may grow. It needs CuPy, and
keeps its plans in a directory of its own. A fault is printed with what repeats it:
`python -m tests.soak --only OPERATION --seed N --threads 1`.
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

_SEEDS: Final = 64  # of each operation
_ROUNDS: Final = 40
_GPU_GROWTH: Final = 64 << 20
"""Bytes by which the GPU's memory may grow: the driver takes it by pieces of several MiB."""
_HOST_GROWTH: Final = 256 << 20


@dataclass
class Report:
    """What a soak did.

    Attributes:
        calls: of each operation, each drawn once.
        comparisons: of results with the reference.
        faults: what went wrong, with the operation and its seed.
        gpu_bytes, host_bytes: memory in use after each round.
    """

    calls: Counter[str] = field(default_factory=Counter)
    comparisons: int = 0
    faults: list[str] = field(default_factory=list)
    gpu_bytes: list[int] = field(default_factory=list)
    host_bytes: list[int] = field(default_factory=list)

    def check_growth(self) -> None:
        """Adds a fault for memory that grew from the third quarter of the rounds to the last."""
        for name, values, most in (("GPU", self.gpu_bytes, _GPU_GROWTH), ("host", self.host_bytes, _HOST_GROWTH)):
            before, after = _quarter(values, 2), _quarter(values, 3)
            if after - before > most:
                self.faults.append(f"the {name}'s memory grew from {_mib(before)} to {_mib(after)}")

    def summary(self, seed: int, seconds: float) -> str:
        """One line of figures."""
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
    """The least of a quarter of the values, which come in the order of time."""
    size = max(1, len(values) // 4)
    return min(values[number * size : (number + 1) * size] or values[-1:] or [0])


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"


class Soak:
    """Workers, one a thread and each with streams of its own, that draw operations in rounds.

    Args:
        gpus: a GPU's view for each worker; see `RealGpu`.
        names: of the operations to draw from.
        seeds: of the operations.
        only_seed: the one seed to draw operations with, if they are to be repeated.
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
        """Runs rounds for as long, or until there is a fault."""
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
        """Makes an operation from a seed that is drawn, and notes what came of it."""
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
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def soak(make_gpu: Callable[[], Any], options: argparse.Namespace) -> int:
    """Runs a soak and prints what came of it; returns the exit status.

    Args:
        make_gpu: a view of the GPU for one worker.
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
    """The program's options."""
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
