"""Leaves out GPU tests where there is no GPU; with LT_REQUIRE_GPU=1 they fail, with 2 also tests of two GPUs."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import Phase, settings

# The reference computes small products, which BLAS threads only slow down on a machine with many cores. NumPy reads the
# variable when the imports below load it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Training steps are not tuned, unless a test asks for it.
os.environ["LT_RUNTIME_TUNE"] = "off"

from lt_runtime.gpu.devices import device_count
from tests.host_kernels.build import BUILD_DIRECTORY, Builder
from tests.host_kernels.harness import HostKernels
from tests.support.machine import has_gpus as has_gpus  # a fixture

# Files of tests need not survive a power failure, and flushing each of them takes long on a busy disk.
os.fsync = lambda _: None

EXAMPLES: Counter[str] = Counter()
"""Number of examples that property tests have run, by subject; printed in pytest's summary."""


# Hypothesis profile for runs with planted faults: always the same examples, and no shrinking of failing ones.
settings.register_profile("mutants", derandomize=True, deadline=None, phases=(Phase.explicit, Phase.generate))
# No deadline: other work on the machine may slow an example down.
settings.register_profile("lt_runtime", deadline=None)
settings.load_profile("lt_runtime")

_PROCESSES_OF_A_GPU: Final = 6
"""Largest number of test processes that share a GPU; more would only wait for each other, and need more memory."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """The number of test processes: one for each core, or fewer if they share a GPU."""
    cores = len(os.sched_getaffinity(0))
    return min(cores, _PROCESSES_OF_A_GPU) if device_count() > 0 else cores


@pytest.fixture(scope="session")
def examples() -> Counter[str]:
    return EXAMPLES


_FIRST = {"gpu/test_collector.py": 0, "gpu/test_profile.py": 0, "host_kernels/test_sanitizers.py": 1}
"""Test files that run first.

CUPTI can have only one user in a process, and some libraries in the benchmarks keep it until the process ends; so tests
that use CUPTI come first. Tests under sanitizers take long, and would keep one process busy at the end while the others
are idle.
"""


_GPU_TESTS: Final = Path(__file__).parent / "gpu"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out `tests/gpu`, unless the command names it, where there is no GPU and none is required.

    To collect and skip the thousands of tests in `tests/gpu` took each process several seconds.
    """
    is_of_use = collection_path != _GPU_TESTS or "LT_REQUIRE_GPU" in os.environ or device_count() > 0
    return None if is_of_use else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _FIRST.get(f"{item.path.parent.name}/{item.path.name}", 2))
    for item in items:
        if _GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if "LT_TEST_EXAMPLES" in os.environ:
            _limit_examples(item, int(os.environ["LT_TEST_EXAMPLES"]))


def pytest_collection_finish() -> None:
    """Excludes the collected tests from garbage collection, and makes garbage collection less frequent.

    Full garbage collections took a tenth of the tests' time for visiting the collected tests, which live as long as the
    process, and another tenth for visiting the packages that the pretended GPUs import.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000)


_full_collections = 0


def _limit_examples(item: pytest.Item, count: int) -> None:
    """Limits the number of examples of a property test. Needed because a test's own settings override any profile."""
    test = getattr(item, "obj", None)
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if own is not None:
        test._hypothesis_internal_use_settings = settings(own, max_examples=min(count, own.max_examples))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After a file's last test, freezes the objects that are still alive, if full collections have run in the file.

    Python's garbage collector no longer visits frozen objects, so that later full collections take less time.
    """
    global _full_collections
    if nextitem is not None and nextitem.path == item.path:
        return
    if gc.get_stats()[2]["collections"] > _full_collections:
        gc.collect()
        gc.freeze()
    _full_collections = gc.get_stats()[2]["collections"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = 2 if item.get_closest_marker("two_gpus") else 1 if item.get_closest_marker("gpu") else 0
    usable = device_count() if needed else 0
    if usable >= needed:
        return
    if int(os.environ.get("LT_REQUIRE_GPU", "0")) >= needed:
        pytest.fail(f"{usable} GPUs are usable, and LT_REQUIRE_GPU asks for {needed}: `python -m lt_runtime doctor`")
    pytest.skip("needs an NVIDIA GPU" if needed == 1 else "needs two NVIDIA GPUs")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Sends a worker's counts of examples to the main process, which prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["examples"] = dict(EXAMPLES)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    EXAMPLES.update(getattr(node, "workeroutput", {}).get("examples", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if pytest_ignore_collect(_GPU_TESTS):
        terminalreporter.write_line("no NVIDIA GPU is usable: tests/gpu is left out unless the command names it")
    _summarise_registers(terminalreporter)
    for subject, count in sorted(EXAMPLES.items()):
        terminalreporter.write_line(f"hypothesis examples over {subject}: {count}")


def _summarise_registers(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the register counts that the tests of the compile matrix have found, if these tests have run."""
    from tests.support.kernel_usage import Usage
    from tests.support.register_table import USAGE_PROPERTY, summary

    reports = (report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, []))
    found = [Usage(*value) for report in reports for name, value in report.user_properties if name == USAGE_PROPERTY]
    if found:
        terminalreporter.write_line("registers a thread, the most of any variant (in bold where something spills):")
        terminalreporter.write(summary(found))


@pytest.fixture(scope="session")
def build_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get(BUILD_DIRECTORY)
    if given:
        Path(given).mkdir(parents=True, exist_ok=True)
        return Path(given)
    cache: pytest.Cache | None = getattr(request.config, "cache", None)
    if cache:
        return cache.mkdir("host_kernels")
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    (shared / "host_kernels").mkdir(exist_ok=True)
    return shared / "host_kernels"


@pytest.fixture(scope="session")
def host(build_directory: Path) -> HostKernels:
    return HostKernels(Builder(build_directory))
