"""Calls everything that a training script may call, in a new process: prints the seconds of the first step, and fails
if CuPy compiles a kernel.

`python -m tests.support.first_step DIRECTORY` keeps CuPy's cache and the package's cache in this directory; both are
empty at the beginning.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path


def main(directory: Path) -> None:
    """Runs steps, losses, metrics, evaluation, averages, state and checkpoints, the caller's own losses, and the
    demo.
    """
    kernels = directory / "cupy"
    os.environ |= {"CUPY_CACHE_DIR": str(kernels), "LT_RUNTIME_CACHE_DIR": str(directory / "lt_runtime")}
    os.environ.pop("LT_RUNTIME_TUNE", None)

    import cupy as cp
    import numpy as np

    import lt_runtime as lt

    def check(what: str) -> None:
        cp.cuda.runtime.deviceSynchronize()
        compiled = [path.name for path in kernels.rglob("*") if path.is_file()] if kernels.exists() else []
        assert not compiled, f"{what}: CuPy has compiled {len(compiled)} kernels"

    generator = np.random.default_rng(0)
    model = lt.MLP([512, 1024, 1024, 1024, 10], dtype="bfloat16", seed=0)
    optimizer, average = lt.AdamW(model.parameters()), lt.EMA(model)
    x = model.device.asarray(generator.standard_normal((256, 512)).astype(model.dtype.numpy))
    labels = model.device.asarray(generator.integers(0, 10, 256).astype(np.int32))
    step = lt.TrainStep(model, optimizer, batch_size=256)
    cp.cuda.runtime.deviceSynchronize()
    begun = time.perf_counter()
    first = float(step(x, labels))
    print(f"first step: {time.perf_counter() - begun:.2f} s", flush=True)
    assert np.isfinite(first)
    check("a step")
    average.update()
    average.copy_to(model)
    step.metrics()
    lt.evaluate(model, [(x, labels)])
    check("metrics, evaluation and averages")
    lt.save_checkpoint(directory / "checkpoint", model, optimizer)
    lt.load_checkpoint(directory / "checkpoint", model, optimizer)
    model.load_state_dict(model.state_dict())
    check("checkpoints and states")
    number = model.device.asarray(np.zeros((), np.float32))
    for dtype in ("float16", "bfloat16", "float32"):
        small = lt.MLP([64, 32, 16], dtype=dtype, seed=0)
        scaled = lt.AdamW(small.parameters(), scaler=lt.GradScaler())
        target = small.device.asarray(generator.standard_normal((32, 16)).astype(small.dtype.numpy))
        inputs = small.device.asarray(generator.standard_normal((32, 64)).astype(small.dtype.numpy))
        for loss in ("mse", "huber", "bce_with_logits", lambda *_: number):
            lt.TrainStep(small, scaled, loss=loss, batch_size=32)(inputs, target)
        check(f"losses in {dtype}")
    values = model.device.asarray(np.zeros(64, np.float16))
    lt.AdamW([lt.Parameter(values, model.device.asarray(np.zeros(64, np.float16)))]).step()
    check("a master copy")

    from lt_runtime.cli.demo import train

    train(argparse.Namespace(device="cuda", dtype="bfloat16", epochs=2, dropout=0.1, seed=0), None, None)
    check("the demo")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
