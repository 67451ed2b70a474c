"""Training steps while the plan cache's disk is full, read-only or slow, on the pretended GPU."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest

from tests.host_kernels.harness import HostKernels
from tests.support.fake_gpu import FakeGpu
from tests.support.hurry import hurry
from tests.support.over_fake_gpu import own

_READS: Final = ("stat", "lstat", "scandir", "listdir")
_WRITES: Final = ("mkdir", "rename", "replace", "unlink", "fsync")
_SLOW_S: Final = 1.0


class _Disk:
    """Counts calls of `os` functions on a directory, and makes them fail, or slow by the clock that the store reads."""

    def __init__(self, kind: str, place: Path, patch: pytest.MonkeyPatch) -> None:
        self._kind, self._place, self.calls, self.seconds = kind, str(place), 0, 0.0
        self._handles = set[int]()
        for name in (*_READS, *_WRITES, "open"):
            patch.setattr(os, name, self._watched(name, getattr(os, name)))
        patch.setattr(own("store.plan_store"), "time", SimpleNamespace(monotonic=lambda: self.seconds))

    def _watched(self, name: str, run: Any) -> Any:
        def watched(path: Any, *arguments: Any, **options: Any) -> Any:
            is_plan = str(path).startswith(self._place) or path in self._handles
            if is_plan:
                self.calls += 1
                self.seconds += _SLOW_S if self._kind == "slow" else 0.0
                writes = name in _WRITES or (name == "open" and arguments[0] & (os.O_WRONLY | os.O_RDWR))
                if self._kind == "read-only" and writes:
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS))
                if self._kind == "full" and name == "fsync":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            made = run(path, *arguments, **options)
            if name == "open":
                (self._handles.add if is_plan else self._handles.discard)(made)
            return made

        return watched

    def calls_of(self, step: Any, batch: Any) -> int:
        """The number of calls of `os` functions on the watched directory that a training step makes."""
        before = self.calls
        step(*batch)
        return self.calls - before


@pytest.mark.parametrize("kind", ["full", "read-only", "slow"])
def test_a_bad_disk_costs_a_second_and_a_warning_at_the_first_step_and_nothing_later(
    kind: str, host: HostKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LT_RUNTIME_TUNE")
    gpu = FakeGpu(host, tmp_path)
    with gpu.active(), pytest.MonkeyPatch.context() as patch:
        hurry(gpu, patch)
        model = gpu.lt.MLP([8, 3], device="cuda")
        step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()), loss="mse")
        batches = [[gpu.cp.asarray(np.ones((rows, width), np.float32)) for width in (8, 3)] for rows in (4, 4, 4, 5, 5)]
        disk = _Disk(kind, tmp_path / "plans", patch)
        with pytest.warns(UserWarning, match="plans are kept in memory alone") as told:
            calls = [disk.calls_of(step, batch) for batch in batches]
        assert len(told) == 1
        assert [calls[index] for index in (1, 2, 4)] == [0, 0, 0], "only the first step of a batch size uses the disk"
        assert disk.seconds <= _SLOW_S
        del step
        gpu.streams.synchronize_all()
        gpu.settle()
