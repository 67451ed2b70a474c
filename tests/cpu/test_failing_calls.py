"""Calls of cuBLASLt, the driver and NVRTC fail in turn: the error names the call, and the next operation is right.

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

import pytest

from tests.host_kernels.harness import HostKernels
from tests.support.attempts import OPERATIONS, Attempt
from tests.support.fake_gpu import FakeGpu
from tests.support.forked import forked
from tests.support.hurry import hurry

_FAULTS: Final = os.environ.get("LT_TEST_FAULTS", "6")
_MANY: Final = 1000
# Number of failing calls that are tried for an operation with more than `_MANY` calls, which takes seconds.
_OF_A_SEARCH: Final = 3
_CALLS_AFTER: Final = 4  # the third call with the same buffers is captured, and the fourth launches the graph

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
"""Words of errors that stand for a call's name."""


_alive: Final[list[Attempt]] = []
"""Attempts that live until this process ends: freed earlier, they would not find their GPU."""


def _open(gpu: FakeGpu) -> Counter[str]:
    """The number of open objects by kind, after garbage collection."""
    gc.collect()
    return gpu.calls.open() + Counter({"arrays": gpu.memory.count})


def _repeat(gpu: FakeGpu, attempt: Attempt, times: int) -> Counter[str]:
    """The number of open objects after some more calls, whose results are checked."""
    for _ in range(times):
        attempt.call()
        attempt.check()
    gpu.settle()
    return _open(gpu)


def _chosen(name: str, count: int) -> list[int]:
    """Indices of the calls that are to fail."""
    wanted = count if _FAULTS == "all" else min(count, int(_FAULTS), _OF_A_SEARCH if count > _MANY else count)
    if wanted == count:
        return [*range(count)]
    return sorted({0, count - 1, *random.Random(name).sample(range(1, count - 1), wanted - 2)})


def _attempt(gpu: FakeGpu, attempt: Attempt, number: int) -> tuple[Any, str]:
    """Runs the operation while library call `number` fails; returns the error or None, and the texts of error and
    warnings.
    """
    gpu.calls.begin(number)
    gc.disable()  # garbage collection calls the libraries too
    error = None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            attempt.call()
        except gpu.lt.errors.LtError as raised:
            error = raised.with_traceback(None)
            error.__context__ = error.__cause__ = None  # tracebacks keep the frames, and so all local variables
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
    if is_search:  # another candidate may win in this attempt, with other descriptors: only growth counts as a leak
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
        gc.freeze()  # without this each forked process would collect all objects of the parent, which is slow

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
    """A pretended GPU that nothing has used; all modules of its package are imported, for forked processes."""
    gpu = FakeGpu(host, tmp_path_factory.mktemp("unused_gpu"))
    with gpu.active():
        for module in pkgutil.walk_packages(gpu.lt.__path__, "lt_runtime."):
            if module.name != "lt_runtime.__main__":
                importlib.import_module(module.name)
    return gpu


@pytest.mark.parametrize("name", OPERATIONS)
def test_calls_fail_in_turn(name: str, unused_gpu: FakeGpu, tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    assert forked(lambda: _fail_in_turn(unused_gpu, used, name), 900) > 0
