"""`check_capture` on a fake GPU: the faults that it reports, with the ranges and source lines where they occur."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from tests.support.fake_gpu import FakeGpu
from tests.support.fake_streams import KERNEL
from tests.support.over_fake_gpu import call, current, own, within

SUPPORT = Path(__file__).parents[2] / "support"


@pytest.fixture
def check(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    watch = own("profiling.capture.watch")
    libraries = watch._LIBRARIES
    monkeypatch.setattr(watch, "_LIBRARIES", (*libraries, f"{SUPPORT}{os.sep}"))
    watch._is_library.cache_clear()
    yield gpu.lt.check_capture
    watch._is_library.cache_clear()
    assert not gpu.streams.captures


def line_of(function: Callable[[], Any], text: str) -> str:
    """Finds the line of a function that contains a text, and returns it in the form in which reports name lines."""
    lines, first = inspect.getsourcelines(function)
    index = next(i for i, line in enumerate(lines) if text in line)
    return f"{__file__}:{first + index}: {lines[index].strip()}"


def test_a_layer_has_no_faults(gpu: FakeGpu, check: Any) -> None:
    x, w, out = (gpu.cp.ones((16, 16), np.float32) for _ in range(3))
    report = check(lambda: {"y": gpu.lt.linear_fwd(x, w, out=out)[0]})
    assert (report.ok, report.faults, report.compared) == (True, (), ("y",))
    assert report.nodes > 0
    assert str(report).startswith("no faults; ")


def plant(gpu: FakeGpu, fault: str) -> Callable[[], Any]:
    """Builds a function with a fault in the range "layer", and work in other ranges."""
    target, host, count = gpu.cp.zeros((8,), np.uint8), np.zeros(8, np.uint8), iter(range(1, 99))
    # No other test may have planned the layer of 8 rows, whose sizes are therefore unusual.
    x, w, rows = gpu.cp.ones((16, 23), np.float32), gpu.cp.ones((29, 23), np.float32), iter([16, 16, 8, 8])

    def run() -> Any:
        stream = current(gpu)
        is_capturing = own("gpu.streams").is_captured(stream)
        with within("before"):
            call("cuMemsetD8Async", target.data.ptr, 1, 8, stream)
        with within("block"), within("layer"):
            if fault == "allocation":
                call("cuMemFree", call("cuMemAlloc", 64))
            elif fault == "synchronise":
                call("cuStreamSynchronize", stream)
            elif fault == "legacy":
                call("cuMemsetD8Async", w.data.ptr, 1, 8, 0)
            elif fault == "exception":
                raise OSError("of the function")
            elif fault == "exception in a capture" and is_capturing:
                raise OSError("not while capturing\nas the second line says")
            elif fault == "unplanned":
                gpu.lt.linear_fwd(x[: next(rows)], w)
            elif fault == "pageable":
                call("cuMemcpyHtoDAsync", target.data.ptr, host.ctypes.data, 8, stream)
            elif fault == "host":
                gpu.streams.put(stream, driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_HOST, "host", lambda: None)
            elif fault == "baked":
                call("cuMemsetD8Async", target.data.ptr, next(count), 8, stream)
        with within("after"):
            call("cuMemsetD8Async", target.data.ptr + 4, 3, 2, stream)
        return {"target": target, "on the host": host}

    return run


@pytest.mark.parametrize(
    ("fault", "line", "said"),
    [
        ("allocation", "cuMemAlloc", "DriverError: cuMemAlloc failed with CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
        ("synchronise", "cuStreamSynchronize", "DriverError: cuStreamSynchronize failed with CUDA_ERROR_STREAM"),
        ("legacy", "8, 0)", "DriverError: cuMemsetD8Async failed with CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"),
        ("pageable", "cuMemcpyHtoDAsync", "a copy from pageable memory of the host is part of the graph"),
        ("host", "gpu.streams.put", "a call of a host function is part of the graph"),
        ("exception in a capture", 'raise OSError("not', "OSError: not while capturing"),
        ("unplanned", "linear_fwd", "CaptureError: "),
        ("baked", "next(count)", "a value of the host is baked into the graph: target changes from run to run, but"),
    ],
)
def test_a_planted_fault_is_named(gpu: FakeGpu, check: Any, fault: str, line: str, said: str) -> None:
    run = plant(gpu, fault)
    report = check(run)
    assert not report.ok
    (found,) = report.faults
    assert found.range[:2] == ("block", "layer")
    assert found.what.startswith(said)
    assert "\n" not in found.what
    assert found.where == line_of(run, line)
    assert f"{found.range[-1]}: {said}" in str(report)
    assert bool(report.nodes) == (fault in ("pageable", "host", "baked"))


def test_a_check_leaves_nothing_behind(gpu: FakeGpu, check: Any) -> None:
    for fault in ("none", "synchronise", "baked"):
        before = gpu.calls.open()
        check(plant(gpu, fault))
        after = gpu.calls.open()
        after["cuStreamCreate"] = before["cuStreamCreate"]
        assert after == before
    assert check(plant(gpu, "none")).ok


def test_an_exception_of_the_function_passes_on(gpu: FakeGpu, check: Any) -> None:
    with pytest.raises(OSError, match="of the function"):
        check(plant(gpu, "exception"))
    gpu.synchronize_all()


def test_a_fault_that_the_function_swallows_is_named(gpu: FakeGpu, check: Any) -> None:
    def run() -> None:
        with within("layer"):
            with contextlib.suppress(gpu.lt.errors.DriverError):
                call("cuStreamSynchronize", current(gpu))
            call("cuStreamGetCaptureInfo", current(gpu))

    (found,) = check(run).faults
    assert found.what.startswith("the capture is invalid: ")
    assert found.range == ("layer",)
    assert found.where == line_of(run, "cuStreamSynchronize")


def test_lines_of_called_functions_are_reported(gpu: FakeGpu, check: Any) -> None:
    host, target = np.zeros(8, np.uint8), gpu.cp.zeros((8,), np.uint8)

    def copy() -> int:
        call("cuMemcpyHtoDAsync", target.data.ptr, host.ctypes.data, 8, current(gpu))
        return 0

    def run() -> None:
        zero = copy()
        call("cuMemcpyHtoDAsync", target.data.ptr, host.ctypes.data, 8 - zero, current(gpu))
        copy() or call("cuMemcpyHtoDAsync", target.data.ptr, host.ctypes.data, 4, current(gpu))

    copied = line_of(copy, "cuMemcpy")
    lines = [copied, line_of(run, "8 - zero"), copied, line_of(run, "copy() or")]
    assert [fault.where for fault in check(run).faults] == lines


def test_values_of_the_device_are_no_fault(gpu: FakeGpu, check: Any) -> None:
    """A counter on the device changes the results of replays and of eager runs alike, which is no fault."""
    counter, result = gpu.cp.zeros((1,), np.uint8), gpu.cp.zeros((1,), np.uint8)

    def add() -> None:
        gpu.host_of(counter)[...] += 1

    def run() -> Any:
        gpu.streams.put(current(gpu), KERNEL, "kernel", add)
        call("cuMemcpyDtoDAsync", result.data.ptr, counter.data.ptr, 1, current(gpu))
        return result

    for returned, names in ((run, ("result",)), (lambda: (run(), counter), ("result[0]", "result[1]"))):
        report = check(returned)
        assert report.ok, str(report)
        assert report.compared == names


@pytest.mark.parametrize(
    ("counts", "said"),
    [(True, "changes from replay to replay, but not from run to run"), (False, "is not what the fun")],
)
def test_results_that_differ_only_in_replays(gpu: FakeGpu, check: Any, *, counts: bool, said: str) -> None:
    result, replays = gpu.cp.zeros((1,), np.uint8), iter(range(1, 99))

    def run() -> Any:
        is_capturing = own("gpu.streams").is_captured(current(gpu))

        def work() -> None:
            gpu.host_of(result)[...] = (next(replays) if counts else 1) if is_capturing else 0

        gpu.streams.put(current(gpu), KERNEL, "kernel", work)
        return result

    (found,) = check(run).faults
    assert found.what.startswith(f"result {said}")


def test_state_begins_each_run_from_the_same_contents(gpu: FakeGpu, check: Any) -> None:
    state = gpu.cp.zeros((1,), np.uint8)
    seen = []

    def run() -> Any:
        def add() -> None:
            seen.append(int(gpu.host_of(state)[0]))
            gpu.host_of(state)[...] += 1

        gpu.streams.put(current(gpu), KERNEL, "kernel", add)
        return state

    assert check(run).ok
    assert seen == [0, 1, 2, 2, 2, 2]
    assert int(gpu.host_of(state)[0]) == 2


def test_arguments_of_our_kernels_are_compared_and_other_addresses_are_not_baked(gpu: FakeGpu, check: Any) -> None:
    x, out = gpu.cp.ones((8, 64), np.float32), gpu.cp.zeros((8, 64), np.float32)
    others = [gpu.cp.zeros((8, 64), np.float32) for _ in range(9)]
    targets, seeds = iter(others), iter(range(99))

    def run() -> Any:
        with within("elsewhere"):
            gpu.lt.dropout(x, 0.5, gpu.lt.Philox(1), out=next(targets))
        with within("mask"):
            gpu.lt.dropout(x, 0.5, gpu.lt.Philox(next(seeds)), out=out)
        return out

    (found,) = check(run).faults
    assert found.range == ("mask", "lt.dropout")
    assert found.where == line_of(run, "Philox(next(seeds))")


def test_all_values_that_change_results_are_named_and_no_others(gpu: FakeGpu, check: Any) -> None:
    """CuPy's kernel arguments contain uninitialised words, which no kernel reads."""
    unread, out = gpu.cp.zeros((8,), np.uint8), gpu.cp.zeros((8, 64), np.float32)
    values = iter(range(99))

    def run() -> Any:
        value = next(values)
        with within("unread"):
            call("cuMemsetD8Async", unread.data.ptr, value, 8, current(gpu))
            gpu.lt.dropout(out, 0.5, gpu.lt.Philox(value), out=gpu.cp.zeros((8, 64), np.float32))
        for row, name in enumerate(("first", "second")):
            with within(name):
                call("cuMemsetD8Async", out[row].data.ptr, value, 8, current(gpu))
        with within("unread, too"):
            call("cuMemsetD8Async", unread.data.ptr, value + 1, 8, current(gpu))
        return out

    found = check(run).faults
    assert [fault.range for fault in found] == [("first",), ("second",)]
    assert {fault.where for fault in found} == {line_of(run, "out[row].data.ptr")}


def test_without_results_nothing_is_replayed(gpu: FakeGpu, check: Any) -> None:
    run = plant(gpu, "baked")
    report = check(lambda: run() and None)
    assert report.ok
    assert "values baked into the graph were not looked for" in str(report)


UNSAFE = {
    "cudaMalloc_v3020": "allocates memory", "cuMemAllocPitch_v2": "allocates memory",
    "cudaHostAlloc_v3020": "allocates memory", "cuMemFree_v2": "frees memory",
    "cudaMemcpy_v3020": "copies synchronously", "cuMemcpyDtoH_v2": "copies synchronously",
    "cudaMemset_v3020": "fills memory synchronously", "cudaStreamSynchronize_ptsz_v7000": "synchronises",
    "cuCtxSynchronize": "synchronises",
}  # fmt: skip
SAFE = (
    "cudaMallocAsync_ptsz_v11020", "cudaFreeAsync_v11020", "cuMemcpyDtoHAsync_v2_ptsz", "cuMemsetD32Async",
    "cuLaunchKernel", "cuMemGetInfo_v2",
)  # fmt: skip


def test_a_run_under_cupti_finds_the_unsafe_calls_after_the_first(gpu: FakeGpu, check: Any) -> None:
    def run() -> None:
        with within("first"):
            gpu.cupti.tell("cuMemAlloc_v2")
            call("cuMemFree", call("cuMemAlloc", 64))
        for name in (*UNSAFE, *SAFE):
            with within(name):
                gpu.cupti.tell(name)

    first, *others = check(run).faults
    assert first.what.startswith("cuMemAlloc_v2 allocates memory: DriverError: cuMemAlloc failed")
    assert [(*each.range, each.what) for each in others] == [(name, f"{name} {does}") for name, does in UNSAFE.items()]


def test_a_function_may_import_cupy_itself(gpu: FakeGpu, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy")
    target = gpu.cp.zeros((8,), np.uint8)

    def run() -> Any:
        sys.modules["cupy"] = gpu.cp
        call("cuMemsetD8Async", target.data.ptr, 1, 8, current(gpu))
        return target

    report = check(run)
    assert report.ok, str(report)
    assert report.nodes == 1


def test_another_stream_and_another_trace_function(gpu: FakeGpu, check: Any) -> None:
    places, previous = set(), sys.gettrace()

    def trace(*_: Any) -> None:
        return None

    sys.settrace(trace)
    try:
        check(lambda: places.add((current(gpu), threading.get_ident())), stream=gpu.other_stream)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(previous)
    assert places == {(gpu.other_stream.ptr, threading.get_ident())}


@pytest.mark.parametrize("wrong", [None, 3, "step", np.zeros(2)])
def test_other_objects_than_functions_are_refused(gpu: FakeGpu, wrong: Any) -> None:
    with pytest.raises(own("errors").KindError, match=r"fn is .*; it must be a function"):
        gpu.lt.check_capture(wrong)
    with pytest.raises(own("errors").LtError, match="stream is 'none'"):
        gpu.lt.check_capture(list, stream="none")
