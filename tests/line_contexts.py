"""Runs pytest in this process and records which tests cover each line of the package.

`python line_contexts.py OUT ARGUMENTS…` passes the arguments to pytest and writes JSON to OUT: the processor seconds of
each test that passed, and for each file and line the tests that ran it. It needs the package `coverage`. It imports
nothing from the checkout, which may be of another commit.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import coverage
import pytest


class Recorder:
    """A pytest plugin that tells the coverage measurement which test is running."""

    def __init__(self, tracer: coverage.Coverage) -> None:
        self._tracer = tracer
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._tracer.switch_context(item.nodeid)
        begun = time.process_time()
        try:
            return (yield)
        finally:
            self._tracer.switch_context("")
            if item.nodeid in self.seconds:
                self.seconds[item.nodeid] = round(time.process_time() - begun, 3)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.seconds[report.nodeid] = 0.0
        elif report.failed:
            self.seconds.pop(report.nodeid, None)


def main(out: Path, arguments: list[str]) -> int:
    tracer = coverage.Coverage(data_file=None, source_pkgs=["lt_runtime"], config_file=False, messages=False)
    recorder = Recorder(tracer)
    tracer.start()
    status = pytest.main(arguments, plugins=[recorder])
    tracer.stop()
    data, numbers = tracer.get_data(), {test: number for number, test in enumerate(recorder.seconds)}
    lines = {
        str(Path(file).relative_to(Path.cwd())): {
            line: [numbers[test] for test in tests if test in numbers]
            for line, tests in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    out.write_text(json.dumps({"seconds": recorder.seconds, "lines": lines}))
    return int(status)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
