"""Replaces the profiler's `Collector` by one that returns activities made by a test."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from lt_runtime.profiling.cupti.records import Activity

MODULE = "lt_runtime.profiling.collector"


def kernel(name: str, start_us: float, us: float, *path: str, kind: Any = "kernel", **more: Any) -> Activity:
    """Makes the record of a kernel on stream 7 of device 0; its times are in µs."""
    start = round(1e3 * start_us)
    return Activity(kind, name, start, start + round(1e3 * us), **{"device": 0, "stream": 7, "range": path, **more})


def install(
    monkeypatch: pytest.MonkeyPatch, activities: list[Activity], *, dropped: int = 0, why: str | None = None
) -> ModuleType:
    """Replaces the collector of GPU activities by one that returns `activities`, or fails with the error `why`."""
    from lt_runtime.errors import CuptiError  # the module in the copy of the package that the test uses

    module: Any = ModuleType(MODULE)

    class Collector:
        def __init__(self) -> None:
            self.activities: list[Activity] = []
            self.dropped = 0

        def __enter__(self) -> Collector:
            if why is not None:
                raise CuptiError(why)
            module.running += 1
            return self

        def __exit__(self, *_: object) -> None:
            module.running -= 1
            self.activities, self.dropped = activities, dropped

        def enter(self, name: str) -> None:
            module.entered.append(name)

        def exit(self, name: str) -> None:
            pass

    module.Collector, module.entered, module.running = Collector, [], 0
    monkeypatch.setitem(__import__("sys").modules, MODULE, module)
    return module
