"""Every call of cuBLASLt made to fail in turn: the error names it, nothing leaks, and the next call works."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lt_runtime import cublaslt
from lt_runtime.cublaslt import abi
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import CublasLtError, MissingLibraryError
from lt_runtime.gpu.devices import DeviceInfo
from lt_runtime.kernels.call import Call
from lt_runtime.layout import Layout, Order
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec
from lt_runtime.products.matmul import MatmulPlan
from tests.support.cublaslt_product import HANDLE, Product
from tests.support.cublaslt_recorder import FAILURE, Recorder, creates, offers, succeeds

HANDLES = range(0x7000, 0x8000)
STAND_INS: dict[str, Callable[..., int]] = {
    "cublasLtDestroy": succeeds,
    "cublasLtMatmulAlgoGetHeuristic": offers(4),
    "cublasLtMatmulAlgoGetHeuristicForStream": offers(4),
    "cublasLtMatmulAlgoCheck": succeeds,
    "cublasLtMatmulAlgoCheckForStream": succeeds,
    "cublasLtMatmulAlgoGetIds": succeeds,
    "cublasLtMatmulAlgoInit": succeeds,
    "cublasLtMatmulAlgoCapGetAttribute": succeeds,
    "cublasLtMatmul": succeeds,
    "cublasLtMatrixTransform": succeeds,
    "cublasLtLoggerForceDisable": succeeds,
}
M, L = cublaslt.MatmulDescAttribute, cublaslt.MatrixLayoutAttribute
TYPES = (cublaslt.ComputeType.COMPUTE_32F, *(cublaslt.DataType.R_32F,) * 5)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder.install(monkeypatch, {"cublasLtCreate": creates(HANDLES.start), **STAND_INS})


def error_of(action: Callable[[], Any]) -> CublasLtError | None:
    """What an action raises, cut loose from the frames that it went through and all that they hold."""
    try:
        action()
    except CublasLtError as error:
        return error.with_traceback(None)
    return None


def fail_at(recorder: Recorder, index: int, action: Callable[[], Any]) -> None:
    """Runs an action whose call number `index` fails: the error says so, and nothing is left, not even as garbage."""
    recorder.forget()
    recorder.fail_at = index
    error = error_of(action)
    assert error is not None, f"{recorder.calls[index]} failed, and nobody was told"
    assert (error.call, error.status) == (recorder.calls[index], FAILURE)
    assert str(error).startswith(f"{error.call} returned CUBLAS_STATUS_INTERNAL_ERROR (14): ")
    assert_nothing_is_left(recorder)


def assert_nothing_is_left(recorder: Recorder) -> None:
    """Each descriptor is destroyed once; a device's handle is kept for good, and is the only one."""
    kept = {address: count for address, count in recorder.created.items() if address in HANDLES}
    assert sum(kept.values()) <= 1
    assert recorder.destroyed == recorder.created - Counter(kept) or recorder.destroyed == recorder.created


def count_calls(recorder: Recorder, action: Callable[[], Any]) -> int:
    """How many calls an action makes when all goes well."""
    recorder.forget()
    action()
    calls = len(recorder.calls)
    assert_nothing_is_left(recorder)
    return calls


def use_descriptors() -> None:
    """Makes one of every kind, sets and reads attributes, and closes it."""
    desc = cublaslt.MatmulDesc(cublaslt.ComputeType.COMPUTE_32F, cublaslt.DataType.R_32F)
    layout = cublaslt.MatrixLayout(
        cublaslt.DataType.R_32F, 4, 5, 5, order=cublaslt.Order.ROW, batch_count=3, batch_stride=20
    )
    preference, transform = cublaslt.MatmulPreference(), cublaslt.MatrixTransformDesc(cublaslt.DataType.R_32F)
    with desc, layout, preference, transform:
        desc.set(M.EPILOGUE, cublaslt.Epilogue.BIAS)
        desc.get(M.BIAS_POINTER)
        layout.set(L.BATCH_COUNT, 2)
        layout.get(L.LD)
        preference.set(cublaslt.PreferenceAttribute.MAX_WORKSPACE_BYTES, 1024)
        transform.set(cublaslt.MatrixTransformDescAttribute.TRANSA, cublaslt.Operation.T)
        if cublaslt.get_version() >= 130200:
            use_newer_descriptors(desc)


def use_newer_descriptors(desc: cublaslt.MatmulDesc) -> None:
    with (
        cublaslt.EmulationDesc() as emulation,
        cublaslt.MatrixLayout.grouped(cublaslt.DataType.R_32F, 3, 256, 512, 768) as layout,
    ):
        emulation.set(cublaslt.EmulationDescAttribute.STRATEGY, cublaslt.EmulationStrategy.EAGER)
        emulation.get(cublaslt.EmulationDescAttribute.STRATEGY)
        desc.set_emulation(emulation)
        layout.get(L.BATCH_MODE)


def test_descriptors(recorder: Recorder) -> None:
    calls = count_calls(recorder, use_descriptors)
    assert calls > 15
    for index in range(calls):
        fail_at(recorder, index, use_descriptors)
        assert count_calls(recorder, use_descriptors) == calls


def test_a_descriptor_that_cannot_be_freed_is_not_freed_again(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda problem: told.append(problem.exc_value))
    preference = cublaslt.MatmulPreference()
    recorder.fail_at = 1
    with pytest.raises(CublasLtError, match="cublasLtMatmulPreferenceDestroy returned"):
        preference.close()
    preference.close()
    del preference
    gc.collect()
    assert_nothing_is_left(recorder)
    assert told == []
    recorder.forget()
    preference = cublaslt.MatmulPreference()
    recorder.fail_at = 1
    del preference
    gc.collect()
    assert_nothing_is_left(recorder)
    assert [str(error).split(":")[0] for error in told] == [
        "cublasLtMatmulPreferenceDestroy returned CUBLAS_STATUS_INTERNAL_ERROR (14)"
    ]


def with_product(use: Callable[..., Any]) -> Callable[[], Any]:
    product = Product()
    return lambda: use(HANDLE, product.desc(), *product.layouts())


def transform() -> None:
    desc = cublaslt.MatrixTransformDesc(cublaslt.DataType.R_32F)
    a, c = (cublaslt.MatrixLayout(cublaslt.DataType.R_32F, 4, 5, 4) for _ in range(2))
    cublaslt.matrix_transform(HANDLE, desc, 1.0, 0x100, a, 0.0, 0, None, 0x200, c, 0)


def heuristics(**options: Any) -> Callable[[], Any]:
    return with_product(lambda *product: cublaslt.get_heuristics(*product, cublaslt.MatmulPreference(), 4, **options))


def descriptor(make: Callable[[], Any], attribute: Any, value: int) -> dict[str, Callable[[], Any]]:
    kind = type(attribute).__name__.removesuffix("Attribute")
    name = {"Preference": "MatmulPreference"}.get(kind, kind)
    return {
        f"cublasLt{name}Create": make,
        f"cublasLt{name}Destroy": lambda: make().close(),
        f"cublasLt{name}SetAttribute": lambda: make().set(attribute, value),
        f"cublasLt{name}GetAttribute": lambda: make().get(attribute),
    }


ALGORITHM = cublaslt.Algorithm(bytes(64))
EVERY_CALL: dict[str, Callable[[], Any]] = {
    "cublasLtCreate": lambda: cublaslt.handle(0),
    "cublasLtDestroy": lambda: cublaslt.Handle().close(),
    "cublasLtHeuristicsCacheGetCapacity": cublaslt.heuristics_cache_get_capacity,
    "cublasLtHeuristicsCacheSetCapacity": lambda: cublaslt.heuristics_cache_set_capacity(8192),
    **descriptor(lambda: Product().desc(), M.TRANSA, 0),
    **descriptor(lambda: cublaslt.MatrixLayout(cublaslt.DataType.R_32F, 4, 5, 4), L.LD, 64),
    **descriptor(cublaslt.MatmulPreference, cublaslt.PreferenceAttribute.SEARCH_MODE, 0),
    **descriptor(
        lambda: cublaslt.MatrixTransformDesc(cublaslt.DataType.R_32F), cublaslt.MatrixTransformDescAttribute.TRANSA, 0
    ),
    **descriptor(cublaslt.EmulationDesc, cublaslt.EmulationDescAttribute.STRATEGY, 0),
    "cublasLtGroupedMatrixLayoutCreate": lambda: cublaslt.MatrixLayout.grouped(TYPES[1], 3, 256, 512, 768),
    "cublasLtMatmulAlgoGetHeuristic": heuristics(),
    "cublasLtMatmulAlgoGetHeuristicForStream": heuristics(stream=0),
    "cublasLtMatmulAlgoGetIds": lambda: cublaslt.algo_get_ids(HANDLE, TYPES),
    "cublasLtMatmulAlgoInit": lambda: cublaslt.algo_init(HANDLE, TYPES, 66),
    "cublasLtMatmulAlgoCheck": with_product(lambda *product: cublaslt.algo_check(*product, ALGORITHM)),
    "cublasLtMatmulAlgoCheckForStream": with_product(
        lambda *product: cublaslt.algo_check(*product, ALGORITHM, stream=0)
    ),
    "cublasLtMatmulAlgoCapGetAttribute": lambda: ALGORITHM.capabilities(cublaslt.AlgoCapAttribute.TILE_IDS),
    "cublasLtMatmulAlgoConfigSetAttribute": lambda: ALGORITHM.set(cublaslt.AlgoConfigAttribute.SPLITK_NUM, 2),
    "cublasLtMatmulAlgoConfigGetAttribute": lambda: ALGORITHM.get(cublaslt.AlgoConfigAttribute.SPLITK_NUM),
    "cublasLtMatmul": lambda: Product().launch(),
    "cublasLtMatrixTransform": transform,
    "cublasLtLoggerSetCallback": lambda: cublaslt.logger_set_callback(None),
    "cublasLtLoggerOpenFile": lambda: cublaslt.logger_open_file(Path("/dev/null")),
    "cublasLtLoggerSetLevel": lambda: cublaslt.logger_set_level(0),
    "cublasLtLoggerSetMask": lambda: cublaslt.logger_set_mask(0),
    "cublasLtLoggerForceDisable": cublaslt.logger_force_disable,
}


def test_the_table_is_complete() -> None:
    assert set(EVERY_CALL) == set(abi.ARGUMENTS) - set(abi.RESULTS)


@pytest.mark.parametrize("name", EVERY_CALL)
def test_every_call(name: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        EVERY_CALL[name]()
    except MissingLibraryError as error:
        pytest.skip(str(error))
    index = recorder.calls.index(name)
    monkeypatch.setattr("lt_runtime.cublaslt.handles._handles", {})
    fail_at(recorder, index, EVERY_CALL[name])
    recorder.forget()
    EVERY_CALL[name]()
    assert name in recorder.calls


def row_major(rows: int, cols: int) -> Spec:
    return Spec(Layout(rows, cols, Order.ROW, cols))


def a_problem(epilogue: Epilogue = Epilogue.NONE, **changes: Any) -> MatmulProblem:
    a, b, d = row_major(16, 32), row_major(32, 64), row_major(16, 64)
    return MatmulProblem(DType.FLOAT32, DType.FLOAT32, Compute.FLOAT32, a, b, d, epilogue, **changes)


PROBLEMS = {
    "plain": a_problem(),
    "bias": a_problem(Epilogue.BIAS),
    "aux": a_problem(Epilogue.RELU_AUX_BIAS, aux=Spec(Layout(16, 128, Order.ROW, 128))),
    "c": a_problem(c=row_major(16, 64)),
}
MEMORY: Any = SimpleNamespace(stream=7, workspace=0x100000, workspace_size=1 << 20)
CALL = Call((0x10000, 0x20000, 0x40000, 0x50000, 0x60000, 0x30000), 7)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    info = DeviceInfo(0, "pretended", 90, 132, 1 << 36)
    monkeypatch.setattr("lt_runtime.products.matmul.device_info", lambda _: info)
    monkeypatch.setattr("lt_runtime.products.matmul.workspace_size", lambda _: 1 << 20)
    monkeypatch.setattr("lt_runtime.products.matmul.rehearse", lambda run, device: ["KERNEL"])


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_plans(problem: MatmulProblem, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_and_launch() -> None:
        monkeypatch.setattr("lt_runtime.cublaslt.handles._handles", {})
        MatmulPlan(problem, 0).put(CALL, MEMORY)

    calls = count_calls(recorder, build_and_launch)
    assert {"cublasLtCreate", "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"} <= set(recorder.calls)
    for index in range(last_launch(recorder) + 1):
        fail_at(recorder, index, build_and_launch)
        assert count_calls(recorder, build_and_launch) == calls


def last_launch(recorder: Recorder) -> int:
    """Index of the launch; what is called later is the garbage collector's, which can tell nobody."""
    return len(recorder.calls) - 1 - recorder.calls[::-1].index("cublasLtMatmul")


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_plan_outlives_a_launch_that_fails(problem: MatmulProblem, recorder: Recorder) -> None:
    plan = MatmulPlan(problem, 0)
    plan.put(CALL, MEMORY)  # the first launch looks the descriptors over
    calls = count_calls(recorder, lambda: plan.put(CALL, MEMORY))
    for index in range(calls):
        fail_at(recorder, index, lambda: plan.put(CALL, MEMORY))
        assert count_calls(recorder, lambda: plan.put(CALL, MEMORY)) == calls
