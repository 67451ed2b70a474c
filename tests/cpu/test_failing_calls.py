"""Every call of cuBLASLt, the driver and NVRTC fails in turn: the error names it, and the next call is right.

`LT_TEST_FAULTS` is the number of calls of each operation that are made to fail, or `all`. A seed of the operation's own
chooses them; the first and the last are among them.
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
_OF_A_SEARCH: Final = 3  # of an operation that makes more than so many calls, and takes seconds
_CALLS_AFTER: Final = 4  # until a call that repeats is bound, and launched as a graph

_OTHERWISE: Final = {
    "cuCtxGetDevice": "the device's own context is made current",
    "cublasLtMatmul": "an algorithm that cannot be launched when a plan is made is not taken",
    "cuEventRecord": "the host waits where a later training step could not wait for an event",
    "cuGraphDestroy": "a graph that has been captured or instantiated is of no use any more",
    "cuPointerGetAttribute": "an array that may not be page-locked is copied as ordinary memory is",
}
"""Calls that may fail without a word, and what is done then."""
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
"""What errors may call a call, if not by its name."""


_alive: Final[list[Attempt]] = []
"""Attempts of this process, which ends before they do: what frees something at its end would not find its GPU."""


def _open(gpu: FakeGpu) -> Counter[str]:
    """What is open, by kind, once the garbage is gone."""
    gc.collect()
    return gpu.calls.open() + Counter({"arrays": gpu.memory.count})


def _repeat(gpu: FakeGpu, attempt: Attempt, times: int) -> Counter[str]:
    """What is open after some more calls, which do what they should."""
    for _ in range(times):
        attempt.call()
        attempt.check()
    gpu.settle()
    return _open(gpu)


def _chosen(name: str, count: int) -> list[int]:
    """Numbers of the calls that are to fail."""
    wanted = count if _FAULTS == "all" else min(count, int(_FAULTS), _OF_A_SEARCH if count > _MANY else count)
    if wanted == count:
        return [*range(count)]
    return sorted({0, count - 1, *random.Random(name).sample(range(1, count - 1), wanted - 2)})


def _attempt(gpu: FakeGpu, attempt: Attempt, number: int) -> tuple[Any, str]:
    """What comes of a call whose call `number` of a library fails: an error or None, and all that was said."""
    gpu.calls.begin(number)
    gc.disable()  # it would make calls of its own
    error = None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            attempt.call()
        except gpu.lt.errors.LtError as raised:
            error = raised.with_traceback(None)
            error.__context__ = error.__cause__ = None  # which hold the frames, and all that is in them
    gc.enable()
    return error, " ".join([str(error), *(str(each.message) for each in told)])


def _fail(gpu: FakeGpu, attempt: Attempt, number: int, usual: Counter[str], *, is_search: bool) -> None:
    """One call fails: somebody says so, nothing is half done, and the next calls do what they should."""
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
    if is_search:  # another candidate may have won, whose plan has descriptors of its own: only growth is a leak
        usual = _repeat(gpu, attempt, _CALLS_AFTER)
    leaked = _repeat(gpu, attempt, _CALLS_AFTER) - usual
    assert not leaked, f"{failed} failed, and is left open: {dict(leaked)}"


def _fail_in_turn(gpu: FakeGpu, directory: Path, name: str) -> int:
    """Prepares an operation and attempts it in copies of the process: one call fails in each. How many there were."""
    gpu.directory = directory
    with gpu.active(), pytest.MonkeyPatch.context() as monkeypatch:
        hurry(gpu, monkeypatch)
        attempt = OPERATIONS[name](gpu)
        _alive.append(attempt)
        gpu.streams.synchronize_all()
        kept = shutil.copytree(directory, directory.with_name("kept"))
        gc.freeze()  # a copy of the process would be slow to look through all that there is already

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
    """Nothing has been done on it; copies of the process find all of its package imported."""
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
