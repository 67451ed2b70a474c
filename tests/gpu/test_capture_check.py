"""`check_capture` on a GPU names the line of faults planted in calls of CuPy, PyTorch and the package."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.ranges import range_of
from tests.support.peers import NEEDS_TORCH

Run = Callable[[], Any]


def line_of(run: Run, text: str) -> str:
    lines, first = inspect.getsourcelines(run)
    index = next(i for i, line in enumerate(lines) if text in line)
    return f"{__file__}:{first + index}: {lines[index].strip()}"


def device_allocation() -> Run:
    def run() -> None:
        with range_of("outer"), range_of("faulty"):
            cp.cuda.runtime.free(cp.cuda.runtime.malloc(1 << 20))  # fault

    return run


def pageable_copy() -> Run:
    x = cp.ones(1 << 16, np.float32)

    def run() -> None:
        with range_of("outer"), range_of("faulty"):
            x.get()  # fault

    return run


def torch_item() -> Run:
    import torch

    x = torch.ones(1 << 16, device="cuda")

    def run() -> None:
        with range_of("outer"), range_of("faulty"):
            x.sum().item()  # fault

    return run


@pytest.mark.parametrize("plant", [device_allocation, pageable_copy, pytest.param(torch_item, marks=NEEDS_TORCH)])
def test_calls_that_no_capture_allows(plant: Callable[[], Run]) -> None:
    run = plant()
    report = lt.check_capture(run)
    assert not report.ok
    assert report.faults[0].range == ("outer", "faulty"), str(report)
    assert report.faults[0].where == line_of(run, "# fault"), str(report)
    assert lt.check_capture(clean(), stream=cp.cuda.Stream(non_blocking=True)).ok
    assert lt.check_capture(clean()).ok


def clean() -> Run:
    x = cp.ones(1 << 16, np.float32)

    def run() -> Any:
        with range_of("add"):
            cp.add(x, 1, out=x)
        return {"x": x}

    return run


def baked_by_cupy() -> Run:
    x, rates = cp.ones(1 << 16, np.float32), iter(np.linspace(0.1, 0.9, 99))

    def run() -> Any:
        with range_of("scale"):
            cp.multiply(x, 1, out=x)
        with range_of("update"):
            cp.multiply(x, float(next(rates)), out=x)  # fault
        return x

    return run


def test_a_host_scalar_is_found() -> None:
    run = baked_by_cupy()
    report = lt.check_capture(run)
    (fault,) = report.faults
    assert fault.what.startswith("a value of the host is baked into the graph: result changes"), str(report)
    assert (fault.range, fault.where) == (("update",), line_of(run, "# fault")), str(report)


def test_a_word_that_no_kernel_reads_is_not_named() -> None:
    """CuPy's kernel arguments contain uninitialised words: they differ from launch to launch and change no result."""
    source = """struct Scale { float factor; int unread; };
    extern "C" __global__ void scale(float* x, Scale by) { x[threadIdx.x] *= by.factor; }"""
    kernel, kind = cp.RawKernel(source, "scale"), np.dtype([("factor", np.float32), ("unread", np.int32)])
    x, values = cp.ones(256, np.float32), iter(range(2, 99))

    def run() -> Any:
        value = next(values)
        with range_of("scale"):
            kernel((1,), (256,), (x, np.array((1, value), kind)[()]))
        with range_of("update"):
            kernel((1,), (256,), (x, np.array((value, 0), kind)[()]))  # fault
        return x

    (fault,) = lt.check_capture(run).faults
    assert (fault.range, fault.where) == (("update",), line_of(run, "# fault"))


def test_a_copy_to_pageable_memory_within_the_graph() -> None:
    x, host = cp.ones(1 << 10, np.float32), np.empty(1 << 10, np.float32)

    def run() -> None:
        with range_of("faulty"):
            stream = cp.cuda.get_current_stream().ptr
            cp.cuda.runtime.memcpyAsync(host.ctypes.data, x.data.ptr, 4096, 2, stream)  # fault

    report = lt.check_capture(run)
    assert not report.ok
    assert (report.faults[0].range, report.faults[0].where) == (("faulty",), line_of(run, "# fault")), str(report)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_training_step_has_no_faults(dropout: float) -> None:
    model = lt.MLP([64, 128, 32], activation="gelu", dtype="float32", dropout=dropout, seed=0, device="cuda")
    optimizer = lt.AdamW(model.parameters(), lr=1e-3, schedule=lt.schedules.warmup_cosine(3, 40))
    step = lt.TrainStep(model, optimizer, loss="cross_entropy", batch_size=64, graph=False)
    x, labels = cp.ones((64, 64), model.dtype.numpy), cp.arange(64, dtype=np.int32) % 32

    def run() -> Any:
        step(x, labels)
        return {f"parameter{i}": each.data for i, each in enumerate(model.parameters())}

    report = lt.check_capture(run)
    assert report.ok, str(report)
    assert len(report.compared) == len(model.parameters())
