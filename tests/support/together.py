"""A process of a group on GPUs, which torchrun starts: `python -m tests.support.together CASE DIRECTORY`.

The cases are those of `tests/gpu/test_distributed.py`. Each process writes its results to DIRECTORY/RANK.npz.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import cupy as cp
import numpy as np

import lt_runtime as lt

ROWS: Final = 64
"""Rows of a process's batch."""
STEPS: Final = 12
_DIMS: Final = (48, 2048, 2048, 24)
DTYPES: Final = {"train": "float32"}
"""The types of cases whose model is not in BF16."""


def trained(group: Any, *, parts: int, dtype: str, bad_step: int | None = None) -> tuple[Any, Any]:
    """Trains a model on the batches of all parts, of which a process of a group runs its own.

    Args:
        parts: the number of batches of `ROWS` rows in a step.
        bad_step: the step in which the last batch has an infinite element.

    Returns:
        The step, and the last loss.
    """
    model = lt.MLP(_DIMS, "gelu", dropout=0.1, seed=3, dtype=dtype)
    scaler = lt.GradScaler(256.0, growth_interval=5) if bad_step is not None else None
    optimizer = lt.AdamW(model.parameters(), lr=1e-3, max_norm=0.5, scaler=scaler)
    size, accumulate = (parts, 1) if group is None else (1, parts // group.size)
    step = lt.TrainStep(
        model, optimizer, loss="mse", batch_size=ROWS * size * accumulate, accumulate=size * accumulate, group=group
    )
    first, count = (0, parts) if group is None else (group.rank * accumulate, accumulate)
    for number in range(STEPS):
        generator = np.random.default_rng(number)
        x, target = (generator.standard_normal((parts * ROWS, _DIMS[i])).astype(model.dtype.numpy) for i in (0, -1))
        if number == bad_step:
            x[-1, 0] = np.inf
        own = slice(first * ROWS, (first + count) * ROWS)
        loss = step(cp.asarray(x[own]), cp.asarray(target[own]))
    return step, float(loss)


def weights(step: Any) -> dict[str, Any]:
    """The parameters' exact values, the norm of the last gradients and the numbers of updates."""
    arrays = {each.name: each.data if each.master is None else each.master for each in step.model.parameters()}
    optimizer = step.optimizer
    arrays |= {"norm": optimizer.grad_norm, "steps": optimizer.steps, "skipped": optimizer.skipped_steps}
    cp.cuda.Device(step.model.device.ordinal).synchronize()
    return {name: cp.asnumpy(array) for name, array in arrays.items()}


def main(case: str, directory: str) -> None:
    """Runs a case."""
    group = lt.group(timeout=5.0)
    cp.cuda.Device(group.local_rank).use()
    if case == "one-gpu":
        model = lt.MLP(_DIMS, device=0)
        lt.TrainStep(model, lt.AdamW(model.parameters()), loss="mse", batch_size=ROWS, group=group)
    step, loss = trained(group, parts=2, dtype=DTYPES.get(case, "bfloat16"), bad_step=4 if case == "infinite" else None)
    np.savez(Path(directory) / f"{group.rank}.npz", loss=loss, **weights(step), metrics=step.metrics()[:2])
    if group.rank == 1 and case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 1 and case == "hangs":
        time.sleep(60)
    if case in ("killed", "hangs"):
        x, target = (cp.zeros((ROWS, _DIMS[i]), step.model.dtype.numpy) for i in (0, -1))
        float(step(x, target))
    group.close()


def run(case: str, directory: Path, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Starts a case's processes by torchrun, one for each GPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-addr", "127.0.0.1"]
    command = [sys.executable, *launcher, "--master-port", port, "-m", "tests.support.together", case, str(directory)]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
