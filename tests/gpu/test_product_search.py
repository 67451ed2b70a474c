"""The tuner of matrix products on a GPU: it finds right algorithms, rejects planted faults and frees its memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import cupy as cp
import numpy as np
import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import CaptureError, PlanError
from lt_runtime.gpu.driver import call
from lt_runtime.kernels.call import Call
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.products.methods import NARROW_MATMUL, plan_from_blob
from lt_runtime.products.plan import AlgorithmPlan
from lt_runtime.store.entries import ProductEntry
from lt_runtime.tuner import product_search
from lt_runtime.tuner.product_search import find_algorithm
from lt_runtime.tuner.timing import Launch, workbench
from tests.host_kernels.arrays import assert_close
from tests.support.gpu_arrays import EPSILON, to_host
from tests.support.gpu_memory import memory_taken

FP32, BF16, FP16 = DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16
_MIB = 1 << 20


def a_problem(
    m: int,
    n: int,
    k: int,
    dtype: DType = BF16,
    epilogue: Epilogue = Epilogue.NONE,
    compute: Compute = Compute.FLOAT32,
    *,
    w_transposed: bool = True,
    **changes: Any,
) -> MatmulProblem:
    """Makes the problem of a product: x·wᵀ as in a layer, or a product of two row-major matrices."""
    b = Layout(k, n, Order.COLUMN, k) if w_transposed else packed(k, n)
    aux = None
    if epilogue.has_aux_output or epilogue.is_derivative:
        unit = 128 if epilogue.activation == "relu" else 8
        aux = Spec(Layout(m, n, Order.ROW, -(-n // unit) * unit))
    specs = Spec(packed(m, k)), Spec(b), Spec(packed(m, n))
    return MatmulProblem(dtype, dtype, compute, *specs, epilogue, aux=aux, **changes)


def tune(problem: MatmulProblem) -> ProductEntry:
    with workbench(0) as bench:
        return find_algorithm(bench, problem)


PROBLEMS = {
    "fp32": a_problem(256, 512, 784, FP32),
    "fp32 bias": a_problem(256, 512, 784, FP32, Epilogue.BIAS),
    "tf32": a_problem(1024, 1024, 1024, FP32, compute=Compute.TF32),
    "tf32 gelu aux": a_problem(256, 512, 784, FP32, Epilogue.GELU_AUX_BIAS, Compute.TF32),
    "bf16": a_problem(2048, 2048, 2048),
    "bf16 gelu bias": a_problem(1600, 1024, 256, BF16, Epilogue.GELU_BIAS),
    "bf16 relu aux": a_problem(4096, 1024, 256, BF16, Epilogue.RELU_AUX_BIAS),
    "bf16 gelu aux": a_problem(4096, 1024, 256, BF16, Epilogue.GELU_AUX_BIAS),
    "bf16 dgelu": a_problem(4096, 1024, 256, BF16, Epilogue.DGELU, w_transposed=False),
    "bf16 batch": MatmulProblem(
        *(BF16, FP32, Compute.FLOAT32, Spec(packed(128, 256), batch_stride=128 * 256), Spec(packed(256, 192))),
        *(Spec(packed(128, 192), batch_stride=128 * 192), Epilogue.NONE),
        batch=6,
    ),
    "fp16 c": a_problem(512, 768, 768, FP16, c=Spec(packed(512, 768))),
    "bf16 wgrad bgradb": MatmulProblem(
        *(BF16, BF16, Compute.FLOAT32, Spec(packed(4096, 512).transposed), Spec(packed(4096, 256))),
        *(Spec(packed(512, 256)), Epilogue.BGRADB),
    ),
    "bf16 few rows": a_problem(16, 4096, 4096, BF16, Epilogue.BIAS),
    "bf16 odd": a_problem(77, 104, 129, FP32, Epilogue.RELU_BIAS),
    "fp16, more tiles of columns than a grid has blocks in y": a_problem(2, 1 << 22 | 1, 8, FP16, w_transposed=False),
}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Tunes a few problems first, so that later memory growth is a leak.

    The libraries allocate memory that they keep, and CuPy compiles kernels.
    """
    for name in ("fp32 bias", "bf16 gelu aux", "bf16 dgelu"):
        tune(PROBLEMS[name])


def test_problems_of_all_kinds() -> None:
    """Each entry of the plan cache can rebuild its plan.

    The tuner itself has compared every element of the winner's result.
    """
    found = 0
    for problem in PROBLEMS.values():
        try:
            entry = tune(problem)
        except PlanError:  # this version of cuBLASLt lacks the fused epilogue for these types
            assert problem.epilogue is not Epilogue.NONE
            continue
        found += 1
        plan = plan_from_blob(problem, 0, entry.algorithm)
        assert plan.blob == entry.algorithm
        assert plan.launches_at_most_two_kernels
        assert entry.us <= entry.first_us
        assert not any(each.reason.startswith(("wrong", "two runs")) for each in entry.rejected), entry.rejected
    assert found >= 8


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("n", [512, 509])
@pytest.mark.parametrize("epilogue", [Epilogue.DRELU_BGRAD, Epilogue.DGELU_BGRAD])
def test_our_kernel_makes_what_the_library_may_refuse(dtype: DType, n: int, epilogue: Epilogue) -> None:
    problem = a_problem(256, n, 10, dtype, epilogue, w_transposed=False)
    verdict = tune(problem)
    assert plan_from_blob(problem, 0, verdict.algorithm).blob == verdict.algorithm
    ours = [each.reason for each in verdict.rejected if each.algorithm == NARROW_MATMUL.blob]
    assert not any(each.startswith(("wrong", "two runs")) for each in ours)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_tuned_plan_computes_the_product(dtype: DType) -> None:
    m, n, k = 300, 136, 520
    problem = a_problem(m, n, k, dtype, Epilogue.BIAS)
    generator = np.random.default_rng(0)
    x, w, bias = (generator.standard_normal(shape).astype(dtype.numpy) for shape in ((m, k), (n, k), (n,)))
    gpu = [cp.asarray(each) for each in (x, w, bias)]
    plan = MatmulPlan(problem, 0, algorithm=tune(problem).algorithm)
    results = []
    for _ in range(2):
        d = cp.full((m, n), cp.nan, dtype.numpy)
        plan.run(Call((gpu[0].data.ptr, gpu[1].data.ptr, 0, gpu[2].data.ptr, 0, d.data.ptr), 0))
        results.append(to_host(d))
    expected = x.astype(np.float64) @ w.astype(np.float64).T + bias.astype(np.float64)
    assert_close("d", results[0], expected, 2 * EPSILON[dtype] * np.abs(expected) + 1e-4)
    np.testing.assert_array_equal(results[0], results[1])


Planted = Callable[[Launch, Sequence[Call]], Launch]


def plant(monkeypatch: pytest.MonkeyPatch, planted: Planted, only: int) -> list[bytes]:
    """Replaces the launches of one candidate; returns a list to which each tried candidate's algorithm is added."""
    launcher, blobs = product_search.launcher, []

    def wrapped(plan: AlgorithmPlan, calls: Sequence[Call]) -> Launch:
        launch, number = launcher(plan, calls), len(blobs)
        blobs.append(plan.blob)
        return planted(launch, calls) if number == only else launch

    monkeypatch.setattr(product_search, "launcher", wrapped)
    return blobs


def idle(_: Launch, calls: Sequence[Call]) -> Launch:
    return lambda number, stream: call("cuMemsetD8Async", calls[number].addresses[-1], 0, 2, stream)


def fifty_times(launch: Launch, _: Sequence[Call]) -> Launch:
    def run(number: int, stream: int) -> None:
        for _ in range(50):
            launch(number, stream)

    return run


@pytest.mark.parametrize(("planted", "reason"), [(idle, "wrong: d[0, 0, "), (fifty_times, "far behind: ")])
@pytest.mark.parametrize("number", [0, 1])
def test_a_planted_fault_is_rejected(
    number: int, planted: Planted, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = plant(monkeypatch, planted, only=number)
    # the product takes so long that an empty launch is faster even on a busy GPU
    verdict = tune(a_problem(4096, 4096, 1024))
    assert len(blobs) > number, "the heuristic offers too few candidates for this test"
    found = {each.algorithm: each.reason for each in verdict.rejected}
    assert found[blobs[number]].startswith(reason)
    assert verdict.algorithm != blobs[number]


def test_nothing_is_left_behind() -> None:
    pooled = cp.get_default_memory_pool().total_bytes()

    def tune_some() -> None:
        for name in ("fp32 bias", "bf16 gelu aux", "bf16 dgelu"):
            tune(PROBLEMS[name])

    assert memory_taken(tune_some, times=6) < 8 * _MIB
    assert cp.get_default_memory_pool().total_bytes() == pooled


def test_a_capture_in_another_thread_stays_whole() -> None:
    stream = cp.cuda.Stream(non_blocking=True)
    x = cp.zeros(1000, cp.float32)
    cp.cuda.Device().synchronize()
    errors: list[BaseException] = []
    tuned, captured = threading.Event(), threading.Event()

    def elsewhere() -> None:
        try:
            tune(PROBLEMS["fp32 bias"])
        except BaseException as error:
            errors.append(error)
        tuned.set()
        captured.wait()  # the thread's end destroys CuPy's handles, which waits for the device

    thread = threading.Thread(target=elsewhere)
    with stream:
        x += 1  # The first sum loads CuPy's kernel, which is forbidden during a capture.
        # In this strictest mode of capture no thread of the process may allocate memory.
        stream.begin_capture(cp.cuda.runtime.streamCaptureModeGlobal)
        x += 1
        thread.start()
        tuned.wait()
        x += 1
        graph = stream.end_capture()
        captured.set()
        graph.launch(stream)
    thread.join()
    stream.synchronize()
    assert not errors, errors
    assert (x == 3).all()


@pytest.mark.parametrize(("non_blocking", "is_current"), [(False, True), (True, True), (False, False)])
def test_no_tuning_while_the_current_stream_or_a_blocking_one_is_captured(non_blocking: bool, is_current: bool) -> None:
    stream = cp.cuda.Stream(non_blocking=non_blocking)
    x = cp.zeros(1000, cp.float32)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        x += 1
    with stream if is_current else contextlib.nullcontext(), pytest.raises(CaptureError, match="is being captured"):
        tune(PROBLEMS["fp32"])
    with stream:
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert (x == 1).all()
