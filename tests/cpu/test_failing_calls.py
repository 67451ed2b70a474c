"""Calls of cuBLASLt, the driver and NVRTC fail in turn: the error names the call, and the next operation is right.

Allocations of GPU memory fail in turn too: the next training step is as if nothing had failed.

`LT_TEST_FAULTS` is the number of calls of each operation that fail one after the other, or `all`. They are drawn with
the operation's name as the seed; the first and the last call are always among them.
"""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import random
import shutil
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.host_kernels.harness import HostKernels
from tests.support.attempts import OPERATIONS, Attempt
from tests.support.fake_gpu import FakeGpu
from tests.support.fake_streams import DriverStatusError, Observer, Status
from tests.support.forked import forked
from tests.support.hurry import hurry
from tests.support.placed import host_of

_FAULTS: Final = os.environ.get("LT_TEST_FAULTS", "4")
_MANY: Final = 1000
# Number of failing calls that are tried for an operation with more than `_MANY` calls, which takes seconds.
_OF_A_SEARCH: Final = 3
_ALLOCATIONS: Final = 18
"""A training step makes at least this many allocations, each of which is made to fail."""
_CALLS_AFTER: Final = 4
"""Calls after a failed one: the third call with the same buffers is captured, and the fourth launches the graph."""

_OTHERWISE: Final = {
    "cuCtxGetDevice": "the device's own context is made current",
    "cublasLtMatmul": "an algorithm that cannot be launched when a plan is made is not taken",
    "cuEventRecord": "the host waits where a later training step could not wait for an event",
    "cuGraphDestroy": "a graph that has been captured or instantiated is of no use any more",
    "cuPointerGetAttribute": "an array that may not be page-locked is copied as ordinary memory is",
}
"""Calls whose failure need not be reported, with the package's reaction."""
_SEARCHES: Final = ("tune", "tuning", "a tuned layer")
_IN_A_SEARCH: Final = {
    "cublasLtMatmulAlgoInit": "a kind of algorithm that the library does not have is no candidate",
    "cublasLtMatmulDescDestroy": "a candidate in whose making a call fails is left out",
    "cublasLtMatrixLayoutDestroy": "a candidate in whose making a call fails is left out",
}
_NAMES: Final = {
    "cuDeviceGetCount": "usable GPU",
    "cuInit": "usable GPU",
    "cuMemcpyHtoDAsync_v2": "cuMemcpyHtoDAsync",
    "nvrtcCompileProgram": "NVRTC could not compile",
}
"""For calls that errors do not name: the words of the error by which the call is recognised."""


_alive: Final[list[Attempt]] = []
"""Attempts kept until this process ends: to free what they hold, their pretended GPU would have to be active."""


def _open(gpu: FakeGpu) -> Counter[str]:
    """The number of open library objects (streams, graphs, handles) by kind, after garbage collection."""
    gc.collect()
    return gpu.calls.open() + Counter({"arrays": gpu.memory.count})


def _repeat(gpu: FakeGpu, attempt: Attempt, times: int) -> Counter[str]:
    """Repeats the operation some times, with checks of the results; returns the number of open library objects."""
    for _ in range(times):
        attempt.call()
        attempt.check()
    gpu.settle()
    return _open(gpu)


def _chosen(name: str, count: int) -> list[int]:
    """Chooses the indices of the library calls that are made to fail."""
    wanted = count if _FAULTS == "all" else min(count, int(_FAULTS), _OF_A_SEARCH if count > _MANY else count)
    if wanted == count:
        return [*range(count)]
    return sorted({0, count - 1, *random.Random(name).sample(range(1, count - 1), wanted - 2)})


def _attempt(gpu: FakeGpu, attempt: Attempt, number: int) -> tuple[Any, str]:
    """Runs the operation while library call `number` fails; returns the error or None, and the texts of error and
    warnings.
    """
    gpu.calls.begin(number)
    gc.disable()  # garbage collection makes calls of the libraries too
    error = None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            attempt.call()
        except gpu.lt.errors.LtError as raised:
            error = raised.with_traceback(None)
            # Tracebacks keep frames alive, and so all of their local variables.
            error.__context__ = error.__cause__ = None
    gc.enable()
    return error, " ".join([str(error), *(str(each.message) for each in told)])


def _fail(gpu: FakeGpu, attempt: Attempt, number: int, usual: Counter[str], *, is_search: bool) -> None:
    """One call fails: an error or a warning names it, the state is as before, and the next operations are right."""
    before = [each.tobytes() for each in attempt.kept()]
    otherwise = _OTHERWISE | (_IN_A_SEARCH if is_search else {})
    error, words = _attempt(gpu, attempt, number)
    failed = gpu.calls.failed
    assert failed is not None, f"there is no call {number}"
    assert not gpu.streams.captures, f"after {failed} a capture was left open"
    is_told = failed in words or _NAMES.get(failed, failed) in words
    if error is None:
        assert is_told or failed in otherwise, f"{failed} failed, and nobody was told"
        attempt.check()
    else:
        assert is_told, f"{failed} failed, and the error says: {words}"
        gpu.streams.synchronize_all()
        assert [each.tobytes() for each in attempt.kept()] == before, f"{failed} failed, and something is half done"
    # In tuning another candidate may win, with other descriptors, so that only repeated growth counts as a leak.
    if is_search:
        usual = _repeat(gpu, attempt, _CALLS_AFTER)
    leaked = _repeat(gpu, attempt, _CALLS_AFTER) - usual
    assert not leaked, f"{failed} failed, and is left open: {dict(leaked)}"


def _fail_in_turn(gpu: FakeGpu, directory: Path, name: str) -> int:
    """Prepares an operation and runs it in forked processes, in each of which another call fails; returns the number of
    calls.
    """
    gpu.directory = directory
    with gpu.active(), pytest.MonkeyPatch.context() as monkeypatch:
        hurry(gpu, monkeypatch)
        attempt = OPERATIONS[name](gpu)
        _alive.append(attempt)
        gpu.streams.synchronize_all()
        kept = shutil.copytree(directory, directory.with_name("kept"))
        gc.freeze()  # without gc.freeze() each forked process would collect all objects of the parent, which is slow

        def succeed() -> tuple[int, Counter[str]]:
            gpu.calls.begin()
            gc.disable()
            attempt.call()
            count = len(gpu.calls.names)
            gc.enable()
            attempt.check()
            return count, _repeat(gpu, attempt, _CALLS_AFTER)

        count, usual = forked(succeed)
        failures = []
        for number in _chosen(name, count):
            shutil.rmtree(directory)
            shutil.copytree(kept, directory)
            try:
                forked(lambda number=number: _fail(gpu, attempt, number, usual, is_search=name in _SEARCHES))
            except AssertionError as error:
                failures.append(f"call {number} of {count}: {error}")
        assert not failures, "\n".join(failures)
        return count


@pytest.fixture(scope="module")
def unused_gpu(host: HostKernels, tmp_path_factory: pytest.TempPathFactory) -> FakeGpu:
    """Yields a pretended GPU that nothing has used; all modules of its package are imported, for forked processes."""
    gpu = FakeGpu(host, tmp_path_factory.mktemp("unused_gpu"))
    with gpu.active():
        # PyTorch is pretended as well, and the pretended PyTorch lacks functions that lt_runtime.torch needs.
        for module in pkgutil.walk_packages(gpu.lt.__path__, "lt_runtime.", onerror=lambda _: None):
            if module.name != "lt_runtime.__main__" and not module.name.startswith("lt_runtime.torch"):
                importlib.import_module(module.name)
    return gpu


@pytest.mark.parametrize("name", OPERATIONS)
def test_calls_fail_in_turn(name: str, unused_gpu: FakeGpu, tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    assert forked(lambda: _fail_in_turn(unused_gpu, used, name), 900) > 0


class _Run:
    """A training run; only the first step of a batch size allocates memory."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._model = gpu.lt.MLP([12, 16, 16, 16, 5], dropout=0.25, seed=3, device="cuda")
        self._optimizer = gpu.lt.AdamW(self._model.parameters(), lr=1e-2)
        self._step = gpu.lt.TrainStep(self._model, self._optimizer, ema=gpu.lt.EMA(self._model, 0.5))
        self.state()

    def train(self, rows: int, fail_at: int = 0) -> None:
        """Makes a step on a batch of so many rows, in which an allocation fails unless `fail_at` is 0."""
        generator = np.random.default_rng(rows)
        x, labels = generator.standard_normal((rows, 12)).astype(np.float32), generator.integers(0, 5, rows)
        batch = [self._gpu.cp.asarray(each) for each in (x, labels)]
        self._gpu.memory.allocations, self._gpu.memory.fail_at = 0, fail_at
        self._step(*batch, stream=self._gpu.stream)

    def state(self) -> list[bytes]:
        """The bytes of all arrays that a training step changes."""
        self._gpu.streams.synchronize_all()
        arrays = [each.data for each in self._model.parameters()] + [*self._step.ema.averages.values()]
        arrays += [moment for moments in self._optimizer.moments for moment in moments] + [self._optimizer.steps]
        return [host_of(self._gpu, each).tobytes() for each in arrays]

    def end(self) -> Any:
        """Returns the metrics, the final state, and the number of allocated bytes."""
        gc.collect()
        return tuple(self._step.metrics(stream=self._gpu.stream)), self.state(), self._gpu.memory_used()


def _lose_memory_in_turn(gpu: FakeGpu, sizes: list[int]) -> None:
    """Trains on batches of the given sizes. Each allocation of the last batch's step fails in a forked process of its
    own, which then repeats the step: the repeated step must end as a step without a failure does.
    """
    with gpu.active():
        run, rows = _Run(gpu), sizes[-1]
        for each in sizes[:-1]:
            run.train(each)
        before = run.state()
        gc.freeze()

        def succeed() -> Any:
            run.train(rows)
            return gpu.memory.allocations, run.end()

        def fail(number: int) -> Any:
            with pytest.raises((gpu.lt.errors.LtError, MemoryError), match=r"(?i)memory"):
                run.train(rows, fail_at=number)
            assert run.state() == before
            assert not gpu.streams.captures
            gc.collect()  # frames of the error's traceback keep arrays alive
            run.train(rows)
            return run.end()

        count, expected = forked(succeed)
        assert count >= _ALLOCATIONS
        for number in range(1, count + 1):
            assert forked(lambda number=number: fail(number)) == expected, f"allocation {number} of {count} failed"


@pytest.mark.parametrize("sizes", [[8], [8, 5]], ids=["first call", "second batch size"])
def test_allocations_of_a_step_fail_in_turn(sizes: list[int], unused_gpu: FakeGpu) -> None:
    forked(lambda: _lose_memory_in_turn(unused_gpu, sizes))


class _IllegalAccess(Observer):
    """Makes the third kernel of every graph access an illegal address."""

    def within_graph(self, token: Any, executable: int, index: int) -> Any:
        if index == 2:
            raise DriverStatusError(Status.CUDA_ERROR_ILLEGAL_ADDRESS)
        return super().within_graph(token, executable, index)


def _lose_the_context(gpu: FakeGpu, *, by_metrics: bool) -> None:
    with gpu.active():
        run, lost = _Run(gpu), "the CUDA context is lost since cu.* reported CUDA_ERROR_ILLEGAL_ADDRESS: start a new"
        run.train(8)
        run.state()
        gpu.streams.observer = _IllegalAccess()
        run.train(8)  # The host does not wait for the GPU, so that only a later call reports the failure.
        # A real GPU runs work at once; the pretended GPU runs it in the next call that waits.
        gpu.driver.is_lost = not by_metrics
        with pytest.raises(gpu.lt.errors.DriverError, match=rf"^TrainStep\(.* failed with .*_ADDRESS \(700\).*{lost}"):
            run.end() if by_metrics else run.train(8)
        x, rng = gpu.cp.ndarray((8, 12)), gpu.lt.Philox(7)
        for later in (lambda: run.train(8), lambda: run.train(5), run.end, lambda: gpu.lt.dropout(x, 0.5, rng=rng)):
            with pytest.raises(gpu.lt.errors.GpuError, match=lost):
                later()


@pytest.mark.parametrize("by_metrics", [True, False])
def test_an_error_of_a_replay_names_the_step_and_later_ones_the_loss(by_metrics: bool, unused_gpu: FakeGpu) -> None:
    forked(lambda: _lose_the_context(unused_gpu, by_metrics=by_metrics))
