"""Kills training runs at random moments: each continues from its last checkpoint, and must end as if never killed.

Can be run as a program, with any number of kills::

    python -m tests.support.killed_training cpu DIRECTORY 100
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

import lt_runtime as lt

_EVERY: Final = 10
"""Number of steps from one checkpoint to the next."""
_MOST_STEPS: Final = 25
"""The most steps after which a run is killed."""
_LONGEST_S: Final = 0.01
"""The most seconds between a run's last step and its kill, which may be during the next save."""
_DIMS, _ROWS = [6, 12, 3], 16


def _steps(device: str, path: Path) -> Iterator[tuple[int, Any, Any]]:
    """Trains without end, from the last checkpoint if any; yields the number of steps, the model and the optimizer."""
    model = lt.MLP(_DIMS, dropout=0.3, dtype="bfloat16", seed=11, device=device)
    optimizer = lt.AdamW(model.parameters(), lr=1e-2, scaler=lt.GradScaler(1024.0, growth_interval=3))
    if path.exists():
        lt.load_checkpoint(path, model, optimizer)
    step = lt.TrainStep(model, optimizer, batch_size=_ROWS)
    for number in itertools.count(int(optimizer.steps[0]) + 1):
        generator = np.random.default_rng(number)
        x = generator.standard_normal((_ROWS, _DIMS[0])).astype(model.dtype.numpy)
        step(*map(model.device.asarray, (x, generator.integers(0, _DIMS[-1], _ROWS))))
        if number % _EVERY == 0:
            lt.save_checkpoint(path, model, optimizer)
        yield number, model, optimizer


def _digest(model: Any, optimizer: Any) -> str:
    """Returns a digest of everything that training changes."""
    arrays = [array for each in model.parameters() for array in (each.data, each.master) if array is not None]
    arrays += [moment for moments in optimizer.moments for moment in moments]
    arrays += [optimizer.steps, optimizer.scaler.scale, optimizer.scaler.growth_tracker]
    model.device.synchronize()
    return hashlib.sha256(b"".join(model.device.to_host(each).tobytes() for each in arrays)).hexdigest()


class _Trainee:
    """A process that trains; it reports each step by a byte, and in the end the number of steps and the digest.

    Args:
        least: the number of steps after which it ends; None for never. It saves a checkpoint once at least.
    """

    def __init__(self, device: str, path: Path, least: int | None) -> None:
        self.pipe, told = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(told)
            return
        try:
            for made, (number, *run) in enumerate(_steps(device, path)):
                os.write(told, b".")
                if least is not None and made >= _EVERY and number >= least:
                    os.write(told, f" {number} {_digest(*run)}".encode())
                    break
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)

    def kill(self, steps: int, seconds: float) -> None:
        """Kills the process so many steps and seconds after its start."""
        for _ in range(steps):
            assert os.read(self.pipe, 1) == b".", "the run has failed"
        time.sleep(seconds)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pipe)

    def end(self) -> tuple[int, str]:
        """Waits for the process; returns its number of steps and its digest."""
        with os.fdopen(self.pipe) as pipe:
            _, number, digest = pipe.read().split()
        os.waitpid(self.pid, 0)
        return int(number), digest


def kill_training(device: str, directory: Path, kills: int) -> None:
    """Kills a training run `kills` times, lets it end, and compares it with a run that was never killed."""
    path, moments = directory / "killed", random.Random(str(directory))
    for _ in range(kills):
        _Trainee(device, path, None).kill(moments.randint(1, _MOST_STEPS), moments.uniform(0, _LONGEST_S))
    steps, digest = _Trainee(device, path, 0).end()
    expected = _Trainee(device, directory / "whole", steps).end()
    assert (steps, digest) == expected, f"after {kills} kills and {steps} steps the run differs"
    assert sorted(each.name for each in directory.iterdir()) == ["killed", "whole"]
    print(f"{kills} kills in {steps} steps")


if __name__ == "__main__":
    warnings.simplefilter("error")
    kill_training(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
